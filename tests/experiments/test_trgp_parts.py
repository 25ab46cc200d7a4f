import pytest
import torch

from became_avalanche import BecameMergePlugin, TRGPPlugin
from experiments.trgp_parts import Repaired, SharedAlone, Slip, SlowFreeStage, Unscaled
from tests.helpers import Spy, assert_same_weights, blobs, stream_of, weights


class Reference(Slip, Repaired):
    """The published TRGP with its slip."""


@pytest.mark.parametrize("trust", [0.0, 0.6])
def test_the_parts_together_are_the_published_trgp(trust):
    plugins = [Reference(trust, threshold=0.8), TRGPPlugin(trust, threshold=0.8, reference=True)]
    models = [stream_of([plugin, BecameMergePlugin()], benchmark=blobs(n_tasks=4)).model for plugin in plugins]
    assert_same_weights(*map(weights, models))
    for part in (Slip, Unscaled):
        other = stream_of([part(trust, threshold=0.8), BecameMergePlugin()], benchmark=blobs(n_tasks=4)).model
        assert not torch.equal(other.features[0].weight, models[0].features[0].weight)


def test_without_scales_the_coefficient_is_that_of_the_models_own_parameters():
    merges = []
    for kind in (SharedAlone, BecameMergePlugin):
        merge = kind(keep_last_merge=True)
        stream_of([TRGPPlugin(0.0), merge], benchmark=blobs(n_tasks=2))
        merges.append(merge)
    alone, counted = merges
    inputs = alone.last_merge
    names = [name for name in inputs.fisher if not name.startswith("TRGP:")]
    assert len(names) < len(inputs.fisher)
    plasticity = sum(float((inputs.fisher[name] * inputs.delta[name] ** 2).sum()) for name in names)
    stability = sum(float((inputs.precision[name] * inputs.delta[name] ** 2).sum()) for name in names)
    assert alone.merges[0].coefficient == pytest.approx(plasticity / (plasticity + stability), rel=1e-6)
    assert alone.merges[0].coefficient < counted.merges[0].coefficient


def test_a_slow_free_stage_starts_at_a_fraction_of_the_rate():
    rates = []
    watch = Spy(before_training_epoch=lambda s: rates.append({group["lr"] for group in s.optimizer.param_groups}))
    stream_of([TRGPPlugin(0.0), SlowFreeStage(0.5), watch], benchmark=blobs(n_tasks=2), train_epochs=1)
    (full,) = rates[0]
    assert rates == [{full}, {full}, {full / 2}]
