"""What loggers show of a training in two stages."""

import csv

import pytest
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import InteractiveLogger, TensorboardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from became_avalanche import BecameMergePlugin, GPMPlugin, StageCSVLogger
from tests.helpers import blobs, mlp, naive

STAGES = [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)]
"""Experience and stage, in the order of training."""


def trained(loggers, eval_every):
    """Train a stream, two epochs per stage; returns its merges."""
    merge = BecameMergePlugin()
    metrics = [accuracy_metrics(epoch=True, experience=True), loss_metrics(epoch=True, experience=True)]
    strategy = naive(mlp(), [GPMPlugin(), merge], metrics=metrics, loggers=loggers, eval_every=eval_every)
    benchmark = blobs(samples=40)
    for i, experience in enumerate(benchmark.train_stream):
        strategy.train(experience, eval_streams=[benchmark.test_stream[i : i + 1]])
        strategy.eval(benchmark.test_stream)
    return merge.merges


@pytest.mark.parametrize("eval_every", [-1, 1])
def test_csv_has_the_stage_of_each_epoch_and_a_row_for_the_merged_model(tmp_path, eval_every):
    logger = StageCSVLogger(str(tmp_path))
    trained([logger], eval_every)
    logger.close()
    with open(tmp_path / "training_results.csv") as file:
        rows = list(csv.DictReader(file))
    epochs = [row for row in rows if row["stage"] != "merged"]
    assert [(int(row["training_exp"]), int(row["stage"]), int(row["epoch"])) for row in epochs] == [
        (t, stage, epoch) for t, stage in STAGES for epoch in range(2)
    ]
    assert all(0 < float(row["training_loss"]) < 2 for row in epochs)
    merged = [row for row in rows if row["stage"] == "merged"]
    if eval_every == -1:
        assert merged == []
        return
    assert [row["training_exp"] for row in merged] == ["1", "2"]
    with open(tmp_path / "eval_results.csv") as file:
        after = {(row["training_exp"], row["eval_exp"]): row for row in csv.DictReader(file)}
    for row in merged:  # the evaluation after training sees the same model
        same = after[row["training_exp"], row["training_exp"]]
        assert (row["val_accuracy"], row["val_loss"]) == (same["eval_accuracy"], same["eval_loss"])
        assert (row["epoch"], row["training_loss"]) == ("", "")


def test_interactive_and_tensorboard_tell_the_stages_apart(tmp_path, capfd):
    tensorboard = TensorboardLogger(str(tmp_path))
    merges = trained([InteractiveLogger(), tensorboard], -1)
    tensorboard.writer.close()
    printed = capfd.readouterr().out
    lines = [line.strip() for line in printed.splitlines()]
    assert [line for line in lines if line.startswith("Stage/")] == [
        f"Stage/train_phase/train_stream/Exp00{t} = {stage}" for t, stage in STAGES for _ in range(2)
    ]
    curves = EventAccumulator(str(tmp_path)).Reload()

    def points(name):
        return [(event.step, event.value) for event in curves.Scalars(name)]

    assert points("Stage/train_phase/train_stream/Exp001") == [(12, 1), (16, 1), (20, 2), (24, 2)]
    assert [step for step, _ in points("Loss_Epoch/train_phase/train_stream/Task001")] == [12, 16, 20, 24]
    for t, merge in enumerate(merges, start=1):
        ((_, value),) = points(f"Lambda/train_phase/train_stream/Exp00{t}")
        assert value == pytest.approx(merge.coefficient)
