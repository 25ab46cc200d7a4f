from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from became_avalanche import BecameMergePlugin, GPMPlugin, TRGPPlugin, path_figure, scan_path
from tests.helpers import (
    CONV_SHAPE,
    assert_same_weights,
    batch_of,
    blobs,
    blobs_without_task_labels,
    convnet,
    mlp,
    naive,
    weights,
)


def trained(make_model=mlp, benchmark=None, plugins=(GPMPlugin,), tasks=3, **kwargs):
    torch.manual_seed(0)
    merge = BecameMergePlugin(keep_last_merge=True, **kwargs)
    strategy = naive(make_model(), [*(plugin() for plugin in plugins), merge], train_epochs=2)
    benchmark = benchmark or blobs()
    for experience in benchmark.train_stream[:tasks]:
        strategy.train(experience)
    return strategy, merge, benchmark.train_stream[:tasks]


@pytest.mark.parametrize(
    ("make_model", "benchmark", "plugins"),
    [
        (mlp, blobs, [GPMPlugin]),
        (mlp, blobs, []),
        (convnet, lambda: blobs(shape=CONV_SHAPE), [GPMPlugin]),
    ],
    ids=["mlp", "without projection", "running statistics"],
)
def test_scan_measures_each_task_at_points_of_the_path(make_model, benchmark, plugins):
    strategy, merge, stream = trained(make_model, benchmark(), plugins)
    before, state = weights(strategy.model), torch.get_rng_state()
    experience = strategy.experience
    scan = scan_path(strategy, merge, stream, n_samples=None, step=0.25)
    assert_same_weights(before, weights(strategy.model))
    assert torch.equal(state, torch.get_rng_state())
    assert strategy.model.training
    assert strategy.experience is experience
    assert scan.coefficients == [0, 0.25, 0.5, 0.75, 1]
    assert (scan.t, scan.chosen) == (3, merge.merges[-1].coefficient)

    model, path = strategy.model.eval(), merge.last_merge
    for k, coefficient in enumerate(scan.coefficients):
        point = {
            name: torch.lerp(start, path.candidate[name], coefficient) if start.is_floating_point() else start
            for name, start in path.base.items()
        }
        model.load_state_dict(point)
        for i, experience in enumerate(stream):
            x, y = batch_of(experience)
            logits = model(x, torch.full((len(x),), experience.task_label)).detach()
            assert scan.loss[i][k] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-4)
            assert scan.accuracy[i][k] == pytest.approx(float((logits.argmax(-1) == y).float().mean()))
    totals = [sum(scan.loss[i][k] for i in range(3)) for k in range(5)]
    assert scan.cumulative_loss == totals
    assert scan.best == scan.coefficients[totals.index(min(totals))]


def test_models_without_task_labels_are_scanned_too():
    stream = blobs_without_task_labels().train_stream
    torch.manual_seed(0)
    merge = BecameMergePlugin(keep_last_merge=True)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    strategy = naive(model, [merge])
    for experience in stream[:2]:
        strategy.train(experience)
    scan = scan_path(strategy, merge, stream[:2], step=0.5)
    assert scan.curvature > 0
    assert len(scan.loss) == 2


def test_each_point_sees_the_same_samples():
    strategy, merge, stream = trained(rule=lambda merge: 0.5)
    merge.last_merge = replace(merge.last_merge, candidate=merge.last_merge.base)  # all points of the path are the same
    scan = scan_path(strategy, merge, stream, n_samples=7, step=0.2)
    assert all(len(set(losses)) == 1 for losses in scan.loss)
    assert scan.curvature == 0


def test_losses_are_means_even_if_the_criterion_is_a_sum():
    strategy, merge, stream = trained()
    means = scan_path(strategy, merge, stream, n_samples=None, step=0.5).loss
    strategy._criterion = torch.nn.CrossEntropyLoss(reduction="sum")
    sums = scan_path(strategy, merge, stream, n_samples=None, step=0.5).loss
    assert torch.allclose(torch.tensor(sums), torch.tensor(means), rtol=1e-5)


def test_curvature_of_a_linear_softmax_model_is_the_second_derivative_of_its_loss():
    """With logits linear in the weights, the Fisher information is the Hessian of the loss."""
    torch.manual_seed(0)
    merge = BecameMergePlugin(keep_last_merge=True)
    stream = blobs_without_task_labels().train_stream
    strategy = naive(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 2)), [merge])
    for experience in stream[:2]:
        strategy.train(experience)
    scan = scan_path(strategy, merge, stream[:2], n_samples=None, step=0.01)
    last = scan.loss[-1]
    second = (last[-1] - 2 * last[-2] + last[-3]) / 0.01**2
    assert scan.curvature == pytest.approx(second, rel=0.05)


def test_picture_shows_every_path():
    strategy, merge, stream = trained()
    scan = scan_path(strategy, merge, stream, step=0.5)
    figure = path_figure([scan, scan], [{"batched": 0.1, "exact": 0.9}, {"batched": 0.2}])
    assert len(figure.axes) == 2
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()][-2:] == ["batched", "exact"]
    figure.draw_without_rendering()
    path_figure([scan]).draw_without_rendering()


def test_what_cannot_be_scanned_is_refused():
    strategy, merge, stream = trained()
    for options, message in (({"step": 0}, "step must be above 0"), ({"step": 2}, "got 2")):
        with pytest.raises(ValueError, match=message):
            scan_path(strategy, merge, stream, **options)
    with pytest.raises(ValueError, match="nothing to measure"):
        scan_path(strategy, merge, [])
    with pytest.raises(ValueError, match=r"keep_last_merge=True.*second task"):
        scan_path(strategy, BecameMergePlugin(), stream)
    strategy, merge, stream = trained(tasks=1)
    with pytest.raises(ValueError, match="no path to scan"):
        scan_path(strategy, merge, stream)


def test_scales_of_trgp_are_not_on_the_path_of_the_model():
    strategy, merge, stream = trained(plugins=[lambda: TRGPPlugin(trust_threshold=0)], tasks=2)
    with pytest.raises(ValueError, match="not part of it"):
        scan_path(strategy, merge, stream)


def test_nothing_is_kept_unless_asked_for():
    merge = BecameMergePlugin()
    strategy = naive(mlp(), [GPMPlugin(), merge])
    for experience in blobs().train_stream[:2]:
        strategy.train(experience)
    assert merge.last_merge is None
