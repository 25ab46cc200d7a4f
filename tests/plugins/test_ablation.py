"""Merging without projection."""

import pytest
import torch
from avalanche.models import IncrementalClassifier
from torch import nn

from became_avalanche import BecameMergePlugin, DivergenceError
from became_avalanche.merging.rules import RULES
from tests.helpers import Stages, assert_same_weights, blobs, mlp, naive, stream_of, weights


def ablation(rule, make_model=mlp, benchmark=None, **options):
    """Train without projection, and return the inputs of the rule, the weights after each stage, and merged weights."""
    merges, stages = [], Stages()

    def watched(merge):
        merges.append(merge)
        return rule(merge)

    plugin = BecameMergePlugin(rule=watched, **options)
    strategy = stream_of([plugin, stages.plugin()], make_model, benchmark, train_epochs=2)
    assert [record.drift for record in plugin.merges] == [0] * len(merges)
    return merges, stages, strategy


@pytest.mark.parametrize("new_head", ["candidate", "merged", "apart"])
def test_without_projection_one_free_stage_is_merged_with_the_weights_before(new_head):
    merges, stages, _ = ablation(lambda merge: 0.25, new_head=new_head)
    assert [stage for _, stage, _ in stages.starts] == [1, 1, 1]
    for t, merge in enumerate(merges, start=1):
        assert not merge.projected
        before, hat, merged = stages.merged[t - 1], stages.ends[t], stages.merged[t]
        new = {name for name in hat if name.startswith(f"classifier.classifiers.{t}.")}
        assert len(new) == 3  # weights, biases, active units
        start = stages.starts[t][2]
        for name, weight in merged.items():
            if name in new and new_head != "merged":
                assert torch.equal(weight, hat[name])
            elif weight.is_floating_point():
                assert torch.equal(weight, torch.lerp(start[name], hat[name], 0.25)), name
                assert name in new or torch.equal(start[name], before[name])
        counted = [bool(merge.delta[name].any()) for name in new & merge.delta.keys()]
        assert counted == [new_head != "apart"] * 2


def test_without_projection_a_head_that_an_evaluation_has_made_is_new_too():
    torch.manual_seed(0)
    stages, benchmark = Stages(), blobs(n_tasks=2)
    strategy = naive(mlp(), [BecameMergePlugin(rule=lambda merge: 0.5), stages.plugin()])
    strategy.eval(benchmark.test_stream)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    head = "classifier.classifiers.1.classifier.weight"
    assert torch.equal(strategy.model.state_dict()[head], stages.ends[1][head])
    assert not torch.equal(stages.ends[0][head], stages.ends[1][head])


def test_without_projection_one_over_t_is_the_mean_of_all_models():
    _, stages, strategy = ablation(RULES["one-over-t"])
    for name in ("features.0.weight", "features.2.weight"):
        mean = torch.stack([hat[name] for hat in stages.ends]).mean(0)
        torch.testing.assert_close(strategy.model.state_dict()[name], mean)


def test_without_projection_and_merge_nothing_changes():
    plain = stream_of([])
    assert_same_weights(weights(plain.model), weights(stream_of([BecameMergePlugin(rule="none")]).model))


def test_without_projection_new_units_of_a_growing_head_are_those_of_the_task():
    def growing():
        return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), IncrementalClassifier(10))

    torch.manual_seed(0)
    stages = Stages()
    strategy = naive(growing(), [BecameMergePlugin(rule=lambda merge: 0.5), stages.plugin()])
    for classes in (2, 4):
        strategy.train(blobs(n_tasks=1, classes=classes, task_labels=False, seed=classes).train_stream)
    before, hat = (ends["2.classifier.weight"] for ends in (stages.merged[0], stages.ends[1]))
    merged = strategy.model.state_dict()["2.classifier.weight"]
    assert torch.equal(merged[2:], hat[2:])
    torch.testing.assert_close(merged[:2], (before[:2] + hat[:2]) / 2)


def test_without_projection_a_diverged_training_leaves_the_weights_before():
    merge = BecameMergePlugin()
    model = mlp()
    strategy = naive(model, [merge])
    first, second = blobs(n_tasks=2).train_stream
    strategy.train(first)
    before = weights(model)
    strategy.optimizer.param_groups[0]["lr"] = 1e30
    with pytest.raises(DivergenceError, match="not finite"):
        strategy.train(second)
    assert_same_weights(before, {name: weights(model)[name] for name in before})
    assert all(weight.isfinite().all() for weight in weights(model).values())
    assert merge.merges == []
