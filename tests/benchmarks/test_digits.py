import numpy as np
import pytest
import torch
from avalanche.training.plugins import LwFPlugin
from sklearn.datasets import load_digits

from became_avalanche import (
    MultiHeadMLP,
    SingleHeadMLP,
    class_digits,
    domain_digits,
    permuted_digits,
    split_digits,
)
from tests.helpers import naive


def arrays(experience):
    data = [experience.dataset[i] for i in range(len(experience.dataset))]
    x, y, t = zip(*data, strict=True)
    return torch.stack(x), torch.tensor(y), set(t)


def pixels(x):
    return {tuple(image.flatten().tolist()) for image in x}


@pytest.mark.parametrize(("make", "tasks", "classes"), [(split_digits, 5, 2), (permuted_digits, 10, 10)])
def test_streams_of_tasks(make, tasks, classes):
    benchmark = make(seed=3)
    streams = (benchmark.train_stream, benchmark.valid_stream, benchmark.test_stream)
    assert [len(stream) for stream in streams] == [tasks] * 3
    for t in range(tasks):
        for stream in streams:
            experience = stream[t]
            x, y, labels = arrays(experience)
            assert x.shape[1:] == (1, 8, 8)
            assert 0 <= x.min() < x.max() <= 1
            assert labels == {t} == {experience.task_label}
            assert set(y.tolist()) == set(range(classes)) == set(experience.classes_in_this_experience)


def test_split_digits_holds_every_image_once():
    benchmark = split_digits()
    images = [
        tuple(image.flatten().tolist())
        for stream in (benchmark.train_stream, benchmark.valid_stream, benchmark.test_stream)
        for experience in stream
        for image in arrays(experience)[0]
    ]
    original, _ = load_digits(return_X_y=True)
    assert sorted(images) == sorted(map(tuple, (original / 16).astype(np.float32).tolist()))


def test_parts_are_disjoint_and_the_same_for_all_seeds():
    tests = []
    for seed in (0, 1):
        benchmark = split_digits(seed)
        train, test = (
            set().union(*(pixels(arrays(e)[0]) for e in stream))
            for stream in (benchmark.train_stream, benchmark.test_stream)
        )
        assert len(train & test) == 0
        tests.append(test)
    assert tests[0] == tests[1]


def test_tasks_of_permuted_digits_are_permutations_of_one_another():
    first, second = permuted_digits(n_tasks=2).train_stream
    (x, y, _), (x2, y2, _) = arrays(first), arrays(second)
    assert torch.equal(y, y2)
    assert torch.equal(x.flatten(1).sort()[0], x2.flatten(1).sort()[0])
    assert not torch.equal(x, x2)


@pytest.mark.parametrize("make", [split_digits, permuted_digits])
def test_seeds_decide_the_tasks(make):
    first, again, other = (arrays(make(seed=seed).train_stream[0])[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert first.shape != other.shape or not torch.equal(first, other)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="n_tasks must be at least 1; got 0"):
        permuted_digits(n_tasks=0)


def test_multi_head_mlp_learns_and_built_in_plugins_accept_the_stream():
    benchmark, model = split_digits(), MultiHeadMLP(hidden_size=30)
    strategy = naive(model, [LwFPlugin(alpha=1, temperature=2)], train_epochs=5, train_mb_size=16)
    strategy.train(benchmark.train_stream[:2])
    x, y, _ = arrays(benchmark.test_stream[1])
    model.eval()
    accuracy = (model(x, torch.ones(len(x), dtype=torch.long)).argmax(1) == y).float().mean()
    assert accuracy > 0.9


def test_class_incremental_digits_have_new_classes_and_one_task_label():
    benchmark, split = class_digits(seed=3), split_digits(seed=3)
    for t in range(5):
        for stream, same in ((benchmark.train_stream, split.train_stream), (benchmark.test_stream, split.test_stream)):
            x, y, labels = arrays(stream[t])
            assert labels == {0} == {stream[t].task_label}
            assert set(y.tolist()) == {2 * t, 2 * t + 1} == set(stream[t].classes_in_this_experience)
            other, classes, _ = arrays(same[t])
            assert torch.equal(x, other)
            assert torch.equal(y, classes + 2 * t)


def test_domain_incremental_digits_are_the_permuted_ones_with_one_task_label():
    benchmark, permuted = domain_digits(seed=3, n_tasks=2), permuted_digits(seed=3, n_tasks=2)
    for experience, same in zip(benchmark.train_stream, permuted.train_stream, strict=True):
        x, y, labels = arrays(experience)
        other, classes, _ = arrays(same)
        assert labels == {0}
        assert torch.equal(x, other)
        assert torch.equal(y, classes)


@pytest.mark.parametrize(("n_classes", "outputs"), [(None, 4), (10, 10)])
def test_a_single_head_grows_or_is_fixed(n_classes, outputs):
    model, benchmark = SingleHeadMLP(n_classes), class_digits()
    strategy = naive(model, train_epochs=1, train_mb_size=64)
    strategy.train(benchmark.train_stream[:2])
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, outputs)
