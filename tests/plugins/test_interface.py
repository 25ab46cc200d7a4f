"""The interface for extensions: base classes of plugins and rules, hooks of the merge, and reports."""

from contextlib import nullcontext

import pytest
import torch
from avalanche.training.plugins import SupervisedPlugin

from became_avalanche import (
    BecameMergePlugin,
    ConnectorPlugin,
    GPCNSPlugin,
    GPMPlugin,
    GradientProjectionPlugin,
    NSCLPlugin,
    OWMPlugin,
    OwnsParameters,
    PlateauPlugin,
    PreviousFisherRule,
    SGPPlugin,
    StageAware,
    StatefulPlugin,
    Suspendable,
    TrainingPlateauPlugin,
    TRGPPlugin,
)
from became_avalanche.strategy.weights import interpolate, snapshot, trainable
from tests.helpers import CONV_SHAPE, Spy, assert_same_weights, blobs, convnet, stream_of, weights

METHODS = [GPMPlugin, SGPPlugin, TRGPPlugin, GPCNSPlugin, NSCLPlugin, OWMPlugin]


@pytest.mark.parametrize(
    ("base", "misspelt"),
    [
        (StageAware, "on_stage_begin"),
        (OwnsParameters, "own_parameter"),
        (Suspendable, "suspend"),
        (PreviousFisherRule, "call"),
    ],
)
def test_a_misspelt_method_is_an_error(base, misspelt):
    plugin = type("Mine", (SupervisedPlugin, base), {misspelt: lambda self: None})
    with pytest.raises(TypeError, match="abstract"):
        plugin()


def test_a_plugin_that_can_be_suspended_gets_a_free_stage():
    log = []

    class Mine(SupervisedPlugin, Suspendable):
        def suspended(self):
            log.append("suspended")
            return nullcontext()

    stream_of([Mine(), BecameMergePlugin(), Spy(on_stage_start=lambda s, stage: log.append(stage))])
    assert log == [1, 1, "suspended", 2, 1, "suspended", 2]


def test_a_projection_method_needs_two_methods_only():
    """A projection method that freezes all layers, written with the public interface."""

    class Freeze(GradientProjectionPlugin):
        def update_memory(self, name, observed):
            self.memory[name] = {"basis": torch.eye(observed.empty_basis().shape[-2]).expand(self.groups(name), -1, -1)}

        def protected(self, name):
            return self.memory[name]["basis"], None

    seen = []
    plugin = Freeze()
    spy = Spy(after_training_exp=lambda s: seen.append(weights(s.model)))
    stream_of([plugin, spy], convnet, blobs(shape=CONV_SHAPE))
    first, last = seen[0], seen[-1]
    for name in plugin.memory:
        torch.testing.assert_close(last[name], first[name], rtol=0, atol=1e-6)
    assert plugin.ranks() == {"features.0.weight": 18, "features.3.weight": 2 * 18, "features.6.weight": 32}


@pytest.mark.parametrize("method", METHODS)
def test_ranks_are_those_of_what_the_projector_removes(method):
    """The network has a grouped convolution, and samples are few, so that no layer is protected in all directions."""
    plugin = method(n_samples=2)
    stream_of([plugin], convnet, blobs(shape=CONV_SHAPE, n_tasks=2))
    ranks = plugin.ranks()
    assert ranks.keys() == {"features.0.weight", "features.3.weight", "features.6.weight"}
    for name, rank in ranks.items():
        groups, dimension = (2, 18) if name == "features.3.weight" else (1, 32 if "6" in name else 18)
        eye = torch.eye(dimension).expand(groups, -1, -1)
        removed = (eye - plugin.projector(name)(eye)).double()
        assert rank == int(torch.linalg.matrix_rank(removed, atol=1e-5).sum()), name
    assert 0 < ranks["features.6.weight"] < 32


def test_plugins_report_how_long_their_work_took():
    nscl, connector = NSCLPlugin(), ConnectorPlugin()
    stream_of([nscl, connector], convnet, blobs(shape=CONV_SHAPE))
    assert set(nscl.seconds) == {"memory"}
    assert set(connector.seconds) == {"merge"}
    gpm, merge = GPMPlugin(), BecameMergePlugin()
    stream_of([gpm, merge])
    assert gpm.seconds["memory"] > 0
    assert set(merge.seconds) == {"fisher", "merge"}
    assert merge.seconds["merge"] > 0
    recorded = sum(record.seconds for record in merge.merges)  # the first task has a Fisher information and no merge
    assert merge.seconds["merge"] < recorded < merge.seconds["merge"] + merge.seconds["fisher"]
    assert "seconds" not in merge.state_dict()


def test_a_state_may_hold_containers_of_every_kind():
    class Mine(StatefulPlugin):
        STATE = ("kept",)

    plugin, twin = Mine(), Mine()
    plugin.kept = [torch.zeros(2), (torch.zeros(3), {"a": [torch.zeros(4)]}), 1]
    assert plugin.memory_bytes() == 4 * (2 + 3 + 4)
    twin.load_state_dict(plugin.state_dict())
    plugin.kept[1][1]["a"].append(2)
    assert len(twin.kept[1][1]["a"]) == 1
    assert isinstance(twin.kept[1], tuple)
    with pytest.raises(ValueError, match=r"not the state of a Mine: it has the keys \['a'\] instead of \['kept'\]"):
        twin.load_state_dict({"a": 1})


@pytest.mark.parametrize("plateau", [PlateauPlugin(), TrainingPlateauPlugin()])
def test_the_loss_of_an_epoch_can_be_read_by_later_plugins(plateau):
    before, after = [], []
    spy = Spy(
        before_training_epoch=lambda s: before.append(plateau.last_loss),
        after_training_epoch=lambda s: after.append((plateau.last_loss, plateau.loss(s))),
    )
    stream_of([plateau, spy], benchmark=blobs(n_tasks=2))
    assert before[::2] == [None, None]
    assert before[1] == after[0][0]
    assert all(last == pytest.approx(loss, rel=1e-6) for last, loss in after)
    assert len(after) == 4


# ------------------------------------------------------------------------------------------- variants of the merge


def test_the_candidate_can_be_chosen():
    class Halfway(BecameMergePlugin):
        def choose_candidate(self, strategy, base):
            self.ends.append(snapshot(strategy))
            return interpolate(base, super().choose_candidate(strategy, base), 0.5, 0.5)

        def estimate_fisher(self, strategy, names, num_workers):
            self.points.append(snapshot(strategy))
            return super().estimate_fisher(strategy, names, num_workers)

    plugin = Halfway(rule=lambda inputs: 1.0, keep_last_merge=True)
    plugin.ends, plugin.points = [], []
    strategy = stream_of([GPMPlugin(), plugin])
    merge = plugin.last_merge
    halfway = interpolate(merge.base, plugin.ends[-1], 0.5, 0.5)
    assert_same_weights(merge.candidate, halfway)
    assert_same_weights(plugin.points[-2], halfway)
    assert_same_weights(snapshot(strategy), halfway)


def test_fisher_information_can_be_estimated_otherwise():
    points = []

    class Ones(BecameMergePlugin):
        def estimate_fisher(self, strategy, names, num_workers):
            points.append(weights(strategy.model))
            return {name: torch.ones_like(p) for name, p in trainable(strategy).items() if name in names}

    plugin = Ones(keep_last_merge=True)
    strategy = stream_of([GPMPlugin(), plugin])
    assert len(points) == 1 + 2 * 2
    assert_same_weights(points[-1], weights(strategy.model))
    assert torch.equal(plugin.last_merge.candidate["features.0.weight"], points[-2]["features.0.weight"])
    assert torch.equal(plugin.precision["features.0.weight"], torch.full((12, 6), 3.0))


def test_stages_can_follow_the_merge():
    """The current head is trained once more, with all else frozen."""
    stages, epochs, merged = [], [], []

    class Refit(BecameMergePlugin):
        def on_merged(self, strategy, inputs, run):
            merged.append(weights(strategy.model))
            known = {name for name, diagonal in inputs.precision.items() if diagonal.any()}
            others = [p for name, p in trainable(strategy).items() if name in known]
            with self.free_training(strategy, epochs=5):
                for parameter in others:
                    parameter.requires_grad_(False)
                run(3)
                for parameter in others:
                    parameter.requires_grad_(True)

    spy = Spy(
        on_stage_start=lambda s, stage: stages.append(stage),
        before_training_epoch=lambda s: epochs.append(stages[-1]),
    )
    strategy = stream_of([GPMPlugin(), Refit(), spy], benchmark=blobs(n_tasks=2))
    assert stages == [1, 1, 2, 3]
    assert epochs == [1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert strategy.train_epochs == 2
    changed = {name for name, tensor in weights(strategy.model).items() if not torch.equal(tensor, merged[0][name])}
    assert changed == {f"classifier.classifiers.1.classifier.{kind}" for kind in ("weight", "bias")}
