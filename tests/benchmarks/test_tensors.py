import pytest
import torch
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from avalanche.benchmarks.utils.data_loader import ReplayDataLoader, TaskBalancedDataLoader
from avalanche.training.determinism.rng_manager import RNGManager
from avalanche.training.plugins import AGEMPlugin, EWCPlugin, LwFPlugin, ReplayPlugin
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from became_avalanche import BecameMergePlugin, GPMPlugin, PlateauPlugin
from became_avalanche.benchmarks import tensors
from became_avalanche.benchmarks.tensors import (
    Row,
    benchmark_of,
    collate,
    crop_and_flip,
    image_stream,
    normalise,
    split_off_validation,
)
from became_avalanche.strategy.passes import data_pass
from tests.helpers import Network, Spy, assert_same_weights, naive, weights

TRANSFORM = normalise((0.5, 0.4), (0.2, 0.3))


def images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (n, 2, 4, 4), generator=generator, dtype=torch.uint8)
    return x, torch.arange(n) % 3


TASKS = [images(24, 0), images(30, 1)]
TEST = [images(9, 2), images(9, 3)]


def fast(augment=None):
    return benchmark_of(TASKS, TEST, TEST, [TRANSFORM] * 2, augment)


def slow():
    """The same data as an ordinary benchmark of Avalanche."""

    def floats(tasks):
        return [(TRANSFORM(x), y) for x, y in tasks]

    return create_generic_benchmark_from_tensor_lists(
        floats(TASKS), floats(TEST), other_streams_tensors={"valid": floats(TEST)}, task_labels=[0, 1]
    )


def same(first, second):
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(first, second, strict=True))


def test_a_sample_reads_like_any_other():
    for ours, theirs in zip(fast().train_stream, slow().train_stream, strict=True):
        assert ours.task_label == theirs.task_label
        assert ours.classes_in_this_experience == theirs.classes_in_this_experience
        assert list(ours.dataset.targets) == list(theirs.dataset.targets)
        row, sample = ours.dataset[5], theirs.dataset[5]
        x, y, t = row
        assert isinstance(row, Row)
        assert (y, t) == (int(sample[1]), int(sample[2])) == (row[1], row[-1])
        assert torch.equal(x, sample[0])
        assert len(row) == 3


LOADERS = {
    "training": lambda data: TaskBalancedDataLoader(data[1], batch_size=7, shuffle=True),
    "plain": lambda data: DataLoader(data[1].eval(), batch_size=7, collate_fn=data[1].collate_fn),
    "replay": lambda data: ReplayDataLoader(data[1], data[0].subset([3, 1, 20]), batch_size=8, shuffle=True),
    "mixed": lambda data: DataLoader(
        data[0].concat(data[1]), batch_size=11, shuffle=True, collate_fn=data[0].collate_fn
    ),
    "workers": lambda data: DataLoader(data[1], batch_size=7, collate_fn=data[1].collate_fn, num_workers=1),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_batches_are_those_of_an_ordinary_benchmark(loader):
    batches = []
    for benchmark in (fast(), slow()):
        torch.manual_seed(0)
        batches.append(list(LOADERS[loader]([e.dataset for e in benchmark.train_stream])))
    assert len(batches[0]) == len(batches[1])
    assert all(same(*pair) for pair in zip(*batches, strict=True))


@given(st.data())
def test_subsets_of_joined_data_are_found(data):
    ours, theirs = ([e.dataset for e in benchmark.train_stream] for benchmark in (fast(), slow()))
    for _ in range(data.draw(st.integers(0, 3))):
        if data.draw(st.booleans()):
            ours, theirs = ([d[0].concat(d[1]), d[1]] for d in (ours, theirs))
        else:
            chosen = data.draw(st.lists(st.integers(0, len(ours[0]) - 1), min_size=1, max_size=9))
            ours, theirs = ([d[0].subset(chosen), d[1]] for d in (ours, theirs))
    numbers = data.draw(st.lists(st.integers(0, len(ours[0]) - 1), min_size=1, max_size=9))
    assert same(collate([ours[0][i] for i in numbers]), theirs[0].collate_fn([theirs[0][i] for i in numbers]))


def test_augmentation_is_for_training_only():
    benchmark = fast(augment=lambda x: 255 - x)
    x = TASKS[0][0][:4]
    data = benchmark.train_stream[0].dataset
    for dataset, expected in ((data, 255 - x), (data.eval(), x), (data.eval().train(), 255 - x)):
        part = dataset.subset([0, 1, 2, 3])
        assert torch.equal(collate([part[i] for i in range(4)])[0], TRANSFORM(expected))
    valid = benchmark.valid_stream[0].dataset
    assert torch.equal(valid.train()[0][0], TRANSFORM(TEST[0][0][:1])[0])


def test_transforms_of_the_user_are_applied_to_each_sample():
    data = fast().train_stream[0].dataset
    assert isinstance(data[2], Row)
    data = data.replace_current_transform_group((lambda x: x + 1, None))
    x, y, t = data[2]
    assert torch.equal(x, TRANSFORM(TASKS[0][0][2:3])[0] + 1)
    assert (int(y), t) == (2, 0)
    batch = next(iter(DataLoader(data, batch_size=3, collate_fn=data.collate_fn)))
    assert torch.equal(batch[0], TRANSFORM(TASKS[0][0][:3]) + 1)


def test_values_that_a_plugin_adds_come_with_the_sample():
    data = fast().train_stream[0].dataset
    attribute = type(data.targets_task_labels)([float(i) for i in range(24)], "weight", use_in_getitem=True)
    data = data.update_data_attribute("weight", attribute)
    assert collate([data[3], data[7]])[3].tolist() == [3, 7]
    assert data[3][3] == 3


def network():
    return Network(nn.Sequential(nn.Flatten(), nn.Linear(32, 8, bias=False), nn.ReLU()), 8)


@pytest.mark.filterwarnings("ignore:Call to deprecated function update:DeprecationWarning")
@pytest.mark.parametrize(
    "plugins",
    [
        lambda: [GPMPlugin(), BecameMergePlugin(), PlateauPlugin(patience=1, lr_min=0.05)],
        lambda: [BecameMergePlugin(fisher="exact")],
        lambda: [ReplayPlugin(mem_size=10)],
        lambda: [AGEMPlugin(patterns_per_experience=10, sample_size=6)],
        lambda: [EWCPlugin(ewc_lambda=1.0)],
        lambda: [LwFPlugin(alpha=1.0, temperature=2.0)],
    ],
    ids=["GPM and BECAME", "exact Fisher", "replay", "A-GEM", "EWC", "LwF"],
)
def test_every_plugin_ends_with_the_weights_of_an_ordinary_benchmark(plugins):
    results = []
    for benchmark in (fast(), slow()):
        RNGManager.set_random_seeds(0)
        model = network()
        strategy = naive(model, plugins(), train_epochs=2, train_mb_size=8)
        for experience in benchmark.train_stream:
            strategy.train(experience)
        strategy.eval(benchmark.test_stream)
        results.append(weights(model))
    assert_same_weights(*results)


def test_validation_is_split_off_by_the_seed():
    train, valid = split_off_validation([images(40, 0), images(60, 1)], seed=0, part=0.1)
    assert [len(y) for _, y in train] == [36, 54]
    assert [len(y) for _, y in valid] == [4, 6]
    for (x, _), (kept, _), (left_out, _) in zip([images(40, 0), images(60, 1)], train, valid, strict=True):
        rows = {tuple(image.flatten().tolist()) for image in x}
        assert rows == {tuple(image.flatten().tolist()) for image in torch.cat([kept, left_out])}
    assert not torch.equal(split_off_validation([images(40, 0)], seed=1, part=0.1)[1][0][0], valid[0][0])


def test_there_is_no_validation_stream_without_data():
    assert set(benchmark_of(TASKS, [], TEST, [TRANSFORM] * 2).streams) == {"train", "test"}


def test_crops_are_parts_of_the_padded_image_or_of_its_mirror():
    torch.manual_seed(0)
    x, _ = images(200, 0)
    moved = crop_and_flip(x, padding=1)
    padded = torch.nn.functional.pad(x, [1] * 4)
    seen = set()
    for image, result in zip(padded, moved, strict=True):
        crops = {
            (down, right, flip): part.flip(2) if flip else part
            for down in range(3)
            for right in range(3)
            for flip in (False, True)
            for part in [image[:, down : down + 4, right : right + 4]]
        }
        found = [key for key, crop in crops.items() if torch.equal(crop, result)]
        assert found
        seen.update(found)
    assert len(seen) == 18  # all possible crops occur


def test_tasks_come_in_the_order_asked_for():
    transforms = [normalise((0, 0), (1, 1)), normalise((0, 0), (2, 2))]
    benchmark = image_stream(TASKS, TEST, transforms, task_order=[1, 0])
    assert [len(e.dataset) for e in benchmark.train_stream] == [29, 23]
    alone = image_stream(TASKS, TEST, transforms, task_order=[1])
    assert list(alone.valid_stream[0].dataset.targets) == list(benchmark.valid_stream[0].dataset.targets)
    assert torch.equal(alone.test_stream[0].dataset[4][0], TEST[1][0][4] / 255 / 2)  # the transform goes with its task
    for order in ([0, 0], [2], []):
        with pytest.raises(ValueError, match="task_order must name tasks from 0 to 1"):
            image_stream(TASKS, TEST, transforms, task_order=order)
    with pytest.raises(ValueError, match="'gpm' or 'nscl'; got 'other'"):
        image_stream(TASKS, TEST, transforms, protocol="other")


def test_a_pass_copies_and_searches_only_data_that_is_not_in_evaluation(monkeypatch):
    searched, inputs = [], []
    index = tensors._SampleIndex
    locate = index._locate
    monkeypatch.setattr(index, "_locate", lambda *args: (searched.append(len(inputs)), locate(*args))[1])
    benchmark = fast(augment=lambda x: 255 - x)
    valid, train = benchmark.valid_stream[0].dataset, benchmark.train_stream[0].dataset
    with_transform = valid.replace_current_transform_group((lambda x: x + 1, None))  # uses its eval transforms, too

    def passes(strategy):
        searched.clear()
        for dataset in (valid, valid, train, with_transform):
            with data_pass(strategy, dataset, 100) as batches:
                next(batches)
                inputs.append(strategy.mbatch[0].flatten(1).sum(1).sort()[0])

    model = Network(nn.Sequential(nn.Flatten(), nn.Linear(32, 5)), 5)
    naive(model, [Spy(after_training_exp=passes)]).train(benchmark.train_stream[0])
    assert set(searched) == {0, 2, 3}  # the second pass over the same data uses the index of the first
    expected = TRANSFORM(TEST[0][0]).flatten(1).sum(1)
    torch.testing.assert_close(inputs[0], expected.sort()[0])
    torch.testing.assert_close(inputs[1], inputs[0])
    torch.testing.assert_close(inputs[2], TRANSFORM(TASKS[0][0]).flatten(1).sum(1).sort()[0])
    torch.testing.assert_close(inputs[3], expected.sort()[0] + 32)
