import copy

import pytest
import torch
from avalanche.models import SimpleMLP
from avalanche.training.plugins import LwFPlugin
from torch import nn
from torch.nn import functional as F

from became_avalanche import BecameMergePlugin, ConnectorPlugin, EqualTrainingPlugin, GPMPlugin, NSCLPlugin
from tests.helpers import (
    CONV_SHAPE,
    Network,
    Spy,
    Stages,
    assert_same_weights,
    blobs,
    blobs_without_task_labels,
    convnet,
    mlp,
    naive,
    weights,
)


def trained(model, plugins, benchmark=None, **kwargs):
    torch.manual_seed(0)
    strategy = naive(model, plugins, **kwargs)
    for experience in (benchmark or blobs(shape=CONV_SHAPE)).train_stream:
        strategy.train(experience)
    return strategy


def test_two_branches_from_the_same_weights_are_merged_with_one_over_t():
    stages = Stages()
    trained(convnet(), [NSCLPlugin(100), ConnectorPlugin(), stages.plugin()])
    assert [(task, stage) for task, stage, _ in stages.starts] == [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)]
    for t, first in ((2, 1), (3, 3)):
        p, q = stages.ends[first], stages.ends[first + 1]
        assert_same_weights(stages.starts[first][2], stages.starts[first + 1][2])
        for name, tensor in stages.merged[t - 1].items():
            if tensor.is_floating_point():
                expected = (1 - 1 / t) * p[name].double() + q[name].double() / t
                torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(tensor, q[name])
        assert not torch.equal(p["features.0.weight"], q["features.0.weight"])


def test_second_branch_is_free_and_stays_near_the_old_features():
    seen, stages, old = [], [], {}

    def start(strategy, stage):
        stages.append(stage)
        if stage == 1:
            old.clear()
            old.update(weights(strategy.model))

    def features(model, x):
        model.eval()
        with torch.no_grad():
            result = model.features(x)
        model.train()
        return result

    def compare(strategy):
        distance = (strategy.loss - strategy.criterion()).item()
        frozen = mlp()
        frozen.load_state_dict({k: v for k, v in old.items() if "classifier" not in k}, strict=False)
        x = strategy.mb_x
        expected = F.mse_loss(features(strategy.model, x), features(frozen, x)).item()
        seen.append((stages[-1], distance, expected))

    plugins = [NSCLPlugin(100), ConnectorPlugin(distillation=3), Spy(on_stage_start=start, before_backward=compare)]
    trained(mlp(), plugins, blobs(n_tasks=2))
    assert [stage for stage, _, _ in seen] == [1] * 4 + [1] * 4 + [2] * 4
    assert all(distance == 0 for stage, distance, _ in seen if stage == 1)
    free = [(distance, expected) for stage, distance, expected in seen if stage == 2]
    assert free[-1][1] > 0
    for distance, expected in free:
        assert distance == pytest.approx(3 * expected, rel=1e-3, abs=1e-6)


def test_second_branch_is_not_projected():
    stages = Stages()
    plugins = [GPMPlugin(threshold=1, n_samples=None), ConnectorPlugin(), stages.plugin()]
    trained(mlp(), plugins, blobs(n_tasks=2, samples=200))  # all directions of the first layer are protected
    start, name = stages.starts[1][2], "features.0.weight"
    torch.testing.assert_close(stages.ends[1][name], start[name])
    assert (stages.ends[2][name] - start[name]).norm() > 0.01


def test_old_features_are_those_of_evaluation():
    """Without dropout, and with the statistics of old tasks."""
    old, seen, now = {}, [], []
    model = Network(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)), 8)
    connector = ConnectorPlugin()

    def compare(strategy):
        if now:
            frozen = copy.deepcopy(strategy.model)
            frozen.load_state_dict(old)
            features = frozen.eval().features(strategy.mb_x)
            distance = (strategy.loss - strategy.criterion()).item()
            seen.append((distance, F.mse_loss(now[-1], features).item()))

    def start(strategy, stage):
        if stage == 1:
            old.update(weights(strategy.model))
        else:
            strategy.model.classifier.register_forward_pre_hook(lambda m, args: m.training and now.append(args[0].data))

    trained(model, [connector, Spy(on_stage_start=start, before_backward=compare)], blobs(n_tasks=2))
    assert len(seen) == 4
    for distance, expected in seen:
        assert distance == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("second", [[], [BecameMergePlugin]])
def test_others_may_copy_the_model(second):
    plugins = [LwFPlugin(alpha=1, temperature=2), NSCLPlugin(), ConnectorPlugin(), *(make() for make in second)]
    model = trained(mlp(), plugins, blobs()).model
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_distillation_holds_the_features():
    moved = []
    for weight in (0, 3):
        stages = Stages()
        trained(mlp(), [ConnectorPlugin(weight), stages.plugin()], blobs(n_tasks=2), train_epochs=4)
        start, end = stages.starts[2][2], stages.ends[2]
        moved.append(float((end["features.0.weight"] - start["features.0.weight"]).norm()))
    assert moved[1] < moved[0]


def test_with_became_the_branches_are_merged_by_its_coefficient():
    stages, merge = Stages(), BecameMergePlugin()
    trained(convnet(), [NSCLPlugin(100), ConnectorPlugin(), merge, stages.plugin()])
    assert [record.t for record in merge.merges] == [2, 3]
    for record, first in zip(merge.merges, (1, 3), strict=True):
        p, q = stages.ends[first], stages.ends[first + 1]
        assert_same_weights(stages.starts[first][2], stages.starts[first + 1][2])
        for name, tensor in stages.merged[record.t - 1].items():
            if tensor.is_floating_point():
                assert torch.equal(tensor, torch.lerp(p[name], q[name], record.coefficient))


def test_evaluation_at_the_start_of_the_second_branch_is_of_its_weights():
    """The initial evaluation of stage 2 uses the weights that the branch starts from, not the end of stage 1."""
    evaluated, starts = [], []
    spy = Spy(
        on_stage_start=lambda s, stage: starts.append(stage),
        before_eval=lambda s: evaluated.append((list(starts), weights(s.model)["features.0.weight"])),
    )
    start = Spy(before_training_exp=lambda s: first.append(weights(s.model)["features.0.weight"]))
    first = []
    strategy = naive(mlp(), [ConnectorPlugin(), spy, start], eval_every=1, train_epochs=1)
    for experience in blobs(n_tasks=2).train_stream:
        strategy.train(experience, eval_streams=[blobs().valid_stream[:2]])
    at_stage_two = [weight for stages, weight in evaluated if stages[-1:] == [2]]
    assert torch.equal(at_stage_two[0], first[1])


def test_single_head_is_the_last_linear():
    model = SimpleMLP(num_classes=2, input_size=6, hidden_size=12, drop_rate=0)
    assert ConnectorPlugin()._find_head(model) == "classifier"
    trained(model, [NSCLPlugin(), ConnectorPlugin()], blobs_without_task_labels())
    assert not any(module._forward_pre_hooks for module in model.modules())


class TwoHeads(Network):
    def __init__(self):
        super().__init__(nn.Linear(6, 5), 5)
        self.second = type(self.classifier)(5)


def test_unclear_features_are_refused():
    with pytest.raises(ValueError, match=r"the model has 2 heads: classifier, second; choose the module"):
        ConnectorPlugin()._find_head(TwoHeads())
    with pytest.raises(ValueError, match="the model has 0 heads"):
        ConnectorPlugin()._find_head(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match=r"no module 'clasifier', which head=\.\.\. names; choose one of: features"):
        ConnectorPlugin(head="clasifier")._find_head(mlp())
    assert ConnectorPlugin(head="second")._find_head(TwoHeads()) == "second"
    with pytest.raises(ValueError, match=r"distillation.*-1"):
        ConnectorPlugin(-1)


def test_one_plugin_stages():
    with pytest.raises(ValueError, match="in stages; got ConnectorPlugin and EqualTrainingPlugin"):
        trained(mlp(), [ConnectorPlugin(), EqualTrainingPlugin()], blobs())
