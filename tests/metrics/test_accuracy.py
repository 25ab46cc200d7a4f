import copy
import io
import math

import numpy as np
import pytest
import torch
from avalanche.logging import TextLogger
from avalanche.models import SimpleMLP
from avalanche.training.supervised import Naive
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from became_avalanche import AccuracyMatrix
from tests import oracles
from tests.helpers import blobs, blobs_without_task_labels, mlp, naive


def filled(matrix):
    """A metric that has seen the accuracies ``matrix``."""
    metric = AccuracyMatrix()
    metric._seen = list(range(len(matrix)))
    metric._values = {(t, i): float(matrix[t, i]) for t in range(len(matrix)) for i in range(matrix.shape[1])}
    return metric


square = st.integers(1, 6).flatmap(lambda n: arrays(float, (n, n), elements=st.floats(0, 1)))


@given(square)
def test_acc_and_bwt_are_the_definitions(matrix):
    metric = filled(matrix)
    assert metric.acc == pytest.approx(oracles.acc(matrix))
    if len(matrix) == 1:
        assert math.isnan(metric.bwt)
    else:
        assert metric.bwt == pytest.approx(oracles.bwt(matrix))
    np.testing.assert_array_equal(metric.result(), matrix)


@given(square)
def test_aaa_and_forgetting_are_the_definitions(matrix):
    tasks, metric = len(matrix), filled(matrix)
    assert metric.value("aaa") == pytest.approx(np.mean([matrix[t, : t + 1].mean() for t in range(tasks)]))
    drops = [max(matrix[i:-1, i]) - matrix[-1, i] for i in range(tasks - 1)]
    assert metric.value("forgetting") == pytest.approx(np.mean(drops) if drops else math.nan, nan_ok=True)


def test_a_metric_that_needs_more_than_the_matrix_is_an_error():
    with pytest.raises(ValueError, match="unknown metric of the accuracy matrix 'aoa'; did you mean"):
        AccuracyMatrix(metrics=["acc", "aoa"])


@given(square)
def test_identity_of_acc_learning_accuracy_and_bwt(matrix):
    tasks = len(matrix)
    metric = filled(matrix)
    backward = 0 if tasks == 1 else (tasks - 1) / tasks * metric.bwt
    assert metric.acc == pytest.approx(np.mean(np.diag(matrix)) + backward)


def test_no_forgetting_is_zero():
    matrix = np.tile(np.linspace(0.1, 0.9, 4), (4, 1))
    assert filled(matrix).bwt == 0


def manual_accuracy(model, experience):
    data = [experience.dataset.eval()[i] for i in range(len(experience.dataset))]
    x, y = torch.stack([d[0] for d in data]), torch.tensor([d[1] for d in data])
    model.eval()
    with torch.no_grad():
        return float((model(x, torch.full((len(x),), data[0][2])).argmax(1) == y).double().mean())


@pytest.mark.parametrize("eval_every", [-1, 0, 1])
def test_matrix_of_a_stream_equals_accuracies_by_hand(eval_every):
    benchmark, metric, text = blobs(n_tasks=3), AccuracyMatrix(), io.StringIO()
    model = mlp()
    strategy = naive(model, metrics=[metric], loggers=[TextLogger(text)], eval_every=eval_every, eval_mb_size=7)
    assert math.isnan(metric.acc)
    rows = []
    for experience in benchmark.train_stream:
        strategy.train(experience, eval_streams=[benchmark.test_stream, benchmark.valid_stream])
        strategy.eval(benchmark.test_stream)
        last = strategy.eval(benchmark.valid_stream)  # another stream changes nothing
        seen = len(rows) + 1
        rows.append([manual_accuracy(model, e) for e in benchmark.test_stream[:seen]] + [math.nan] * (3 - seen))
        np.testing.assert_allclose(metric.result()[seen - 1, :seen], rows[-1][:seen])
        assert last["ACC/eval_phase/test_stream"] == metric.acc == pytest.approx(np.mean(rows[-1][:seen]))
    assert metric.bwt == pytest.approx(oracles.bwt(np.array(rows)))
    assert f"ACC/eval_phase/test_stream = {metric.acc:.4f}" in text.getvalue()
    assert f"BWT/eval_phase/test_stream = {metric.bwt:.4f}" in text.getvalue()
    assert f"AAA/eval_phase/test_stream = {metric.value('aaa'):.4f}" in text.getvalue()
    assert f"forgetting/eval_phase/test_stream = {metric.value('forgetting'):.4f}" in text.getvalue()


def test_stream_without_task_labels():
    benchmark, metric = blobs_without_task_labels(), AccuracyMatrix()
    strategy = naive(SimpleMLP(num_classes=2, input_size=6), metrics=[metric])
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    assert metric.result().shape == (3, 3)
    assert -1 < metric.bwt < 1


def test_tasks_weigh_the_same_and_unseen_ones_nothing():
    metric = filled(np.array([[0.9, 0.1, 0.1], [0.8, 0.6, 0.1]]))
    assert metric.acc == pytest.approx(0.7)


def test_partial_evaluation_publishes_nothing():
    benchmark, metric = blobs(n_tasks=2), AccuracyMatrix()
    strategy = naive(mlp(), metrics=[metric])
    strategy.train(benchmark.train_stream)
    results = strategy.eval(benchmark.test_stream[:1])
    assert "ACC/eval_phase/test_stream" not in results
    assert math.isnan(metric.acc)
    results = strategy.eval(benchmark.test_stream)
    assert results["ACC/eval_phase/test_stream"] == metric.acc
    assert math.isnan(metric.bwt)  # the first task was never evaluated right after its training


def test_evaluation_before_training_is_ignored():
    benchmark, metric = blobs(n_tasks=1), AccuracyMatrix()
    strategy = naive(mlp(), metrics=[metric])
    assert isinstance(strategy, Naive)
    strategy.eval(benchmark.test_stream)
    assert metric.result().size == 0
    strategy.train(benchmark.train_stream)
    strategy.eval(benchmark.test_stream)
    metric.reset()
    assert math.isnan(metric.acc)


def test_a_second_run_starts_anew():
    """One metric object for two runs, the second of them shorter; a wrapper of the model is the same model."""
    matrix, benchmark = AccuracyMatrix(), blobs(task_labels=False, shape=(6,))
    for n_tasks in (3, 2):
        model = SimpleMLP(num_classes=2, input_size=6, hidden_size=12)
        strategy = naive(model, metrics=[matrix], train_epochs=1)
        for t, experience in enumerate(benchmark.train_stream[:n_tasks]):
            if t == 1:  # a new strategy for the same model
                strategy = naive(torch.nn.DataParallel(model), metrics=[matrix], train_epochs=1)
            strategy.train(experience)
            strategy.eval(benchmark.test_stream[:n_tasks])
        assert matrix.result().shape == (n_tasks, n_tasks)
    twin = copy.deepcopy(matrix)
    np.testing.assert_array_equal(twin.result(), matrix.result())
    naive(SimpleMLP(num_classes=2, input_size=6), metrics=[matrix]).eval(benchmark.test_stream)
    assert matrix.result().size == 0
