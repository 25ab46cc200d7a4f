import pytest
import torch
from avalanche.logging import BaseLogger
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin

from became_avalanche import GPMPlugin, MultiHeadMLP, PlateauPlugin, split_digits
from experiments.merges import FIRST, EveryMerge, table


@pytest.mark.parametrize("projection", [[GPMPlugin], []], ids=["gpm", "finetune"])
def test_the_first_way_is_the_merge_of_the_training(projection):
    """All training data fit into one batch, so every pass over them gives the same Fisher information."""
    benchmark, model, merge = split_digits(seed=0), MultiHeadMLP(), EveryMerge()
    strategy = Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_mb_size=512,
        train_epochs=3,
        plugins=[*(plugin() for plugin in projection), merge, PlateauPlugin()],
        evaluator=EvaluationPlugin(loggers=[BaseLogger()]),
    )
    for experience in benchmark.train_stream[:3]:
        strategy.train(experience)
    by_way = {(e["t"], e["labels"], e["mode"], e["weights"]): e for e in merge.measured}
    assert len(by_way) == len(merge.measured) == 2 * 12
    for record in merge.merges:
        assert by_way[(record.t, *FIRST)]["coefficient"] == pytest.approx(record.coefficient, rel=1e-4)
    assert by_way[3, "argmax", "eval", "best"]["coefficient"] != by_way[(3, *FIRST)]["coefficient"]
    assert all(0 <= e["valid_accuracy"] <= 1 and 0 <= e["least_loss"] <= 1 for e in merge.measured)


def test_the_table_pairs_ways_by_seed():
    def run(**gains):
        ways = [
            (labels, mode, which)
            for labels in ("true", "argmax", "drawn")
            for mode in ("eval", "train")
            for which in ("best", "last")
        ]
        return {
            "merges": [
                dict(
                    zip(("labels", "mode", "weights"), way, strict=True),
                    coefficient=0.5,
                    least_loss=0.25,
                    valid_accuracy=0.5 + gains.get(way[0], 0),
                )
                for way in ways
            ]
        }

    lines = table([run(argmax=0.01), run(argmax=0.03)]).splitlines()
    assert len(lines) == 13
    assert lines[1].split() == ["true", "eval", "best", "0.50", "0.25", "50.00"]
    assert lines[3].split() == ["argmax", "eval", "best", "0.50", "0.25", "52.00", "+2.00", "-10.71", "to", "+14.71"]
