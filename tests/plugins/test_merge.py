import copy
import io
import itertools

import pytest
import torch
from avalanche.benchmarks.scenarios.online import split_online_stream
from avalanche.models import IncrementalClassifier, SimpleMLP
from avalanche.training.plugins import (
    AGEMPlugin,
    EWCPlugin,
    LwFPlugin,
    ReplayPlugin,
    SynapticIntelligencePlugin,
)
from avalanche.training.supervised import Naive
from torch import nn
from torch.nn import functional as F

from became_avalanche import (
    BecameMergePlugin,
    DivergenceError,
    Fisher,
    GPMPlugin,
    MergeRecord,
    MultiHeadMLP,
    TRGPPlugin,
    permuted_digits,
)
from became_avalanche.merging.rules import RULES, CoFiMA
from tests.helpers import (
    CONV_SHAPE,
    Network,
    Spy,
    Stages,
    assert_same_weights,
    batch_of,
    blobs,
    blobs_without_task_labels,
    convnet,
    mlp,
    naive,
    stream_of,
    weights,
)

# ------------------------------------------------------------------------------------ the plugin works in a strategy


@pytest.mark.parametrize(
    ("make_model", "make_benchmark"),
    [
        (MultiHeadMLP, lambda: permuted_digits(n_tasks=2)),
        (convnet, lambda: blobs(shape=CONV_SHAPE)),
        (lambda: SimpleMLP(num_classes=2, input_size=6), lambda: blobs(task_labels=False)),
        (lambda: SimpleMLP(num_classes=2, input_size=6), blobs_without_task_labels),
        (
            lambda: nn.Sequential(nn.Linear(6, 10), nn.ReLU(), IncrementalClassifier(10)),
            lambda: blobs(task_labels=False),
        ),
    ],
    ids=["permuted digits", "convolutions", "single head", "no task labels", "growing head"],
)
def test_any_order_gives_the_same_weights(make_model, make_benchmark):
    results = []
    for order in ([GPMPlugin, BecameMergePlugin], [BecameMergePlugin, GPMPlugin]):
        plugins = [plugin() for plugin in order]
        strategy = stream_of(plugins, make_model, make_benchmark(), train_epochs=1, train_mb_size=20)
        results.append(weights(strategy.model))
        merge = plugins[order.index(BecameMergePlugin)]
        assert [record.t for record in merge.merges] == list(range(2, strategy.clock.train_exp_counter + 1))
    assert_same_weights(*results)


def test_the_line_of_the_title_with_positions_and_with_keywords():
    results = []
    for keywords in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if keywords:
            strategy = Naive(model=model, optimizer=optimizer, plugins=[GPMPlugin(), BecameMergePlugin()])
        else:
            with pytest.warns(Warning, match="positional arguments"):
                strategy = Naive(model, optimizer, plugins=[GPMPlugin(), BecameMergePlugin()])
        for experience in blobs(n_tasks=2, samples=6).train_stream:
            strategy.train(experience)
        results.append(weights(model))
    assert_same_weights(*results)


def test_list_of_experiences_is_the_same_as_one_by_one():
    one_by_one = stream_of([GPMPlugin(), BecameMergePlugin()])
    torch.manual_seed(0)
    model = mlp()
    naive(model, [GPMPlugin(), BecameMergePlugin()]).train(blobs().train_stream)
    assert_same_weights(weights(one_by_one.model), weights(model))


def test_several_projection_plugins_are_all_suspended():
    frozen = []
    first = GPMPlugin(threshold=1, n_samples=None, exclude=["features.2"])
    second = GPMPlugin(threshold=1, n_samples=None, exclude=["features.0"])
    spy = Spy(on_stage_start=lambda s, stage: frozen.append((stage, weights(s.model))))
    strategy = stream_of([first, BecameMergePlugin(), second, spy], benchmark=blobs(samples=200))
    (_, _), (_, before), (_, gp), *_ = frozen
    assert torch.equal(before["features.0.weight"], gp["features.0.weight"])
    assert not torch.equal(gp["features.0.weight"], strategy.model.state_dict()["features.0.weight"])


@pytest.mark.parametrize(
    "other",
    [
        lambda: EWCPlugin(ewc_lambda=1.0),
        lambda: LwFPlugin(alpha=1.0, temperature=2.0),
        lambda: AGEMPlugin(patterns_per_experience=10, sample_size=10),
        pytest.param(
            lambda: SynapticIntelligencePlugin(si_lambda=0.1),
            marks=pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
        ),
        lambda: ReplayPlugin(mem_size=10),
    ],
    ids=["EWC", "LwF", "A-GEM", "SI", "replay"],
)
@pytest.mark.parametrize("position", [0, 2])
def test_built_in_plugins_see_one_experience_and_the_merged_weights(other, position):
    plugins = [GPMPlugin(), BecameMergePlugin()]
    plugins.insert(position, other())
    seen = []
    plugins.insert(0, Spy(after_training_exp=lambda s: seen.append(weights(s.model))))
    strategy = stream_of(plugins, convnet, blobs(samples=20, shape=CONV_SHAPE))
    assert len(seen) == strategy.clock.train_exp_counter == 3
    assert_same_weights(seen[-1], weights(strategy.model))


# ---------------------------------------------------------------------------------------------- what a merge computes


def fisher_oracle(make_model, state, experience, permutation_free_batch):
    """Return the mean of B g² with all data in one batch, which does not depend on the order of the data."""
    model = make_model()
    for task in range(experience.task_label + 1):
        model.classifier.adaptation(next(e for e in blobs().train_stream if e.task_label == task))
    model.load_state_dict({name: tensor for name, tensor in state.items() if name in model.state_dict()})
    model.eval()
    x, y = permutation_free_batch
    F.cross_entropy(model(x, torch.full((len(x),), experience.task_label)), y).backward()
    return {
        name: len(y) * p.grad.double() ** 2 if p.grad is not None else torch.zeros_like(p).double()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("projected", [True, False])
def test_merge_follows_the_algorithm(projected):
    """λ, θ* and Λ of each task, recomputed from the weights at the ends of the stages."""
    stages, merge = Stages(), BecameMergePlugin(new_head="candidate")
    plugins = [stages.plugin(), merge] + ([GPMPlugin(0.9)] if projected else [])
    precisions = []
    plugins.append(Spy(after_training_exp=lambda s: precisions.append(copy.deepcopy(merge.precision))))
    stream_of(plugins, train_mb_size=1000, train_epochs=5, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))

    seen = [(exp, stage) for exp, stage, _ in stages.starts]
    if projected:
        assert seen == [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)]
        anchors = {1: stages.starts[1][2], 2: stages.starts[3][2]}
        gps, hats = {1: stages.ends[1], 2: stages.ends[3]}, {1: stages.ends[2], 2: stages.ends[4]}
    else:
        assert seen == [(0, 1), (1, 1), (2, 1)]
        hats = {1: stages.ends[1], 2: stages.ends[2]}
        anchors = gps = {t: stages.starts[t][2] for t in hats}
    precision = {}
    for t, experience in enumerate(blobs().train_stream):
        data = batch_of(experience)
        theta = stages.merged[t]
        if t > 0:
            gp, hat = gps[t], hats[t]
            fisher = fisher_oracle(mlp, hat, experience, data)
            delta = {name: hat[name].double() - gp[name].double() for name in fisher}
            drift = {name: gp[name].double() - anchors[t][name].double() for name in fisher}
            plasticity = sum((fisher[n] * delta[n] ** 2).sum() for n in fisher)
            zero = torch.zeros(())
            stability = sum((precision.get(n, zero) * delta[n] ** 2).sum() for n in fisher)
            expected = float(plasticity / (plasticity + stability))
            record = merge.merges[t - 1]
            assert record.t == t + 1
            assert record.coefficient == pytest.approx(expected, rel=1e-3)
            assert 0.01 < record.coefficient < 0.99
            assert record.plasticity == pytest.approx(float(plasticity), rel=1e-3)
            assert record.stability == pytest.approx(float(stability), rel=1e-3)
            assert record.drift == pytest.approx(
                float(sum((precision.get(n, zero) * drift[n] ** 2).sum() for n in fisher)), rel=1e-3
            )
            assert record.drift_along_delta == pytest.approx(
                float(sum((precision.get(n, zero) * drift[n] * delta[n]).sum() for n in fisher)), rel=1e-3, abs=1e-9
            )
            assert record.delta_norm == pytest.approx(float(sum((d**2).sum() for d in delta.values())) ** 0.5, rel=1e-4)
            assert record.drift_norm == pytest.approx(float(sum((d**2).sum() for d in drift.values())) ** 0.5, rel=1e-4)
            for name in fisher:  # the current head included; without projection it is that of θ̂
                taken = not projected and name.startswith(f"classifier.classifiers.{t}.")
                expected = hat[name] if taken else torch.lerp(gp[name], hat[name], record.coefficient)
                torch.testing.assert_close(theta[name], expected)
        at_merged = fisher_oracle(mlp, theta, experience, data)
        for name, value in at_merged.items():
            precision[name] = precision.get(name, 0) + value
            torch.testing.assert_close(precisions[t][name].double(), precision[name], rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("estimator", ["empirical", "sampled", "exact", Fisher("empirical", n_samples=10)])
def test_fisher_information_by_other_estimators(estimator):
    """On networks with several heads, groups and running statistics; the random state is that of another estimator."""
    plugin, batched = BecameMergePlugin(fisher=estimator), BecameMergePlugin()
    stages, others = Stages(), Stages()
    stream_of([GPMPlugin(0.9), plugin, stages.plugin()], convnet, blobs(shape=CONV_SHAPE, n_tasks=2))
    stream_of([GPMPlugin(0.9), batched, others.plugin()], convnet, blobs(shape=CONV_SHAPE, n_tasks=2))
    assert_same_weights(stages.ends[-1], others.ends[-1])
    assert 0 < plugin.merges[0].coefficient < 1
    assert plugin.merges[0].coefficient != batched.merges[0].coefficient
    assert plugin.precision.keys() == batched.precision.keys()


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_merges_what_it_says(rule):
    plugin, stages = BecameMergePlugin(rule=rule), Stages()
    stream_of([GPMPlugin(0.9), plugin, stages.plugin()], convnet, blobs(samples=20, shape=CONV_SHAPE))
    for record, first in zip(plugin.merges, (1, 3), strict=True):
        gp, hat, merged = stages.ends[first], stages.ends[first + 1], stages.merged[record.t - 1]
        if rule == "none":
            assert_same_weights({k: v for k, v in gp.items() if v.is_floating_point()}, floats(merged))
        elif rule in ("became", "became-exact", "one-over-t", "constant"):
            expected = {"one-over-t": 1 / record.t, "constant": 0.4}.get(rule, record.coefficient)
            assert record.coefficient == expected
            for name, tensor in floats(merged).items():
                assert torch.equal(tensor, torch.lerp(gp[name], hat[name], expected)), name
        else:  # between the two, further in some places than in others
            name = "features.6.weight"
            step = (merged[name] - gp[name]) / (hat[name] - gp[name])
            step = step[(hat[name] - gp[name]).abs() > 1e-4]
            assert -1e-3 < step.min() <= step.max() < 1 + 1e-3
            assert (step.max() - step.min() > 0.1) == (rule != "became-tensor")
            name = "features.1.running_mean"
            torch.testing.assert_close(merged[name], torch.lerp(gp[name], hat[name], record.coefficient))


def floats(state):
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def test_cofima_alone_holds_the_previous_fisher_information():
    for rule, times in (("became", 1), ("cofima", 2)):
        plugin = BecameMergePlugin(rule=rule)
        model = stream_of([plugin]).model
        sizes = [parameter.numel() for parameter in model.parameters()]
        assert bool(plugin.previous_fisher) == (rule == "cofima")
        assert plugin.memory_bytes() <= 4 * times * sum(sizes)
        assert plugin.memory_bytes() > 4 * (times - 1) * sum(sizes)


def test_the_previous_fisher_information_is_that_before_the_merge():
    seen = []

    class Watched(CoFiMA):
        def __call__(self, merge):
            seen.append((merge.fisher, merge.previous_fisher))
            return super().__call__(merge)

    plugin = BecameMergePlugin(rule=Watched())
    stream_of([GPMPlugin(0.9), plugin])
    assert_same_weights(seen[0][0], {name: seen[1][1][name] for name in seen[0][0]})
    assert_same_weights(seen[1][0], {name: plugin.previous_fisher[name] for name in seen[1][0]})


def test_fewer_samples_make_another_fisher_information():
    coefficients = set()
    for n_samples in (None, 5, 10):
        plugin = BecameMergePlugin(fisher=Fisher("empirical", n_samples))
        stream_of([GPMPlugin(0.9), plugin], benchmark=blobs(n_tasks=2))
        coefficients.add(plugin.merges[0].coefficient)
    assert len(coefficients) == 3


def test_a_rule_may_be_a_function():
    seen = []
    plugin = BecameMergePlugin(rule=lambda merge: seen.append(merge.t) or 0.125)
    stream_of([GPMPlugin(), plugin])
    assert seen == [2, 3]
    assert [record.coefficient for record in plugin.merges] == [0.125, 0.125]
    with pytest.raises(ValueError, match="returned a coefficient that is not finite for task 2"):
        stream_of([BecameMergePlugin(rule=lambda merge: float("nan"))])
    with pytest.raises(ValueError, match="unknown rule 'becam'; did you mean 'became'"):
        BecameMergePlugin(rule="becam")


def test_weights_beside_the_model_need_the_batched_estimator():
    plugins = [TRGPPlugin(0.0), BecameMergePlugin(fisher="exact")]
    with pytest.raises(ValueError, match=r"TRGP:.* is used outside the module that owns it.*'batched'"):
        stream_of(plugins)


def test_heads_of_other_tasks_stay_as_they_are():
    stages = Stages()
    stream_of([GPMPlugin(), BecameMergePlugin(), stages.plugin()])
    for t, later in itertools.combinations(range(3), 2):
        for part in ("weight", "bias"):
            name = f"classifier.classifiers.{t}.classifier.{part}"
            assert torch.equal(stages.merged[t][name], stages.merged[later][name])
    new = "classifier.classifiers.2.classifier.weight"
    assert not torch.equal(stages.merged[2][new], stages.ends[-1][new])  # merged, not taken from stage 2


def test_statistics_are_merged_and_counters_kept():
    stages, merge = Stages(), BecameMergePlugin()
    stream_of([GPMPlugin(), merge, stages.plugin()], convnet, blobs(shape=CONV_SHAPE))
    gp, hat, merged = stages.ends[3], stages.ends[4], stages.merged[2]
    weight = merge.merges[-1].coefficient
    assert 0 < weight < 1
    name = "features.1.running_mean"
    assert not torch.equal(gp[name], hat[name])
    torch.testing.assert_close(merged[name], torch.lerp(gp[name], hat[name], weight), rtol=0, atol=0)
    for name in ("features.1.num_batches_tracked", "classifier.active_units_T2"):
        assert torch.equal(merged[name], hat[name])
        assert merged[name].dtype == hat[name].dtype


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_memory_is_built_on_the_merged_weights(order):
    """The second layer's inputs depend on the first layer's weights, so its basis tells which weights were used."""
    plugins = [GPMPlugin(threshold=1, n_samples=None, exclude=["features.0"]), BecameMergePlugin()]
    benchmark, stages = blobs(n_tasks=2, samples=4), Stages()
    stream_of([stages.plugin(), *(plugins[i] for i in order)], benchmark=benchmark, train_epochs=20)
    basis = plugins[0].memory["features.2.weight"]["basis"][0]
    x, _ = batch_of(benchmark.train_stream[1])

    def outside(state):
        inputs = F.relu(x @ state["features.0.weight"].T).T
        return (inputs - basis @ (basis.T @ inputs)).norm()

    assert outside(stages.merged[1]) < 1e-5
    assert outside(stages.ends[1]) > 1e-3  # θ_GP
    assert outside(stages.ends[2]) > 1e-3  # θ̂


def test_no_movement_leaves_the_model_bitwise_unchanged():
    stages, merge = Stages(), BecameMergePlugin()

    def stand_still(strategy, stage):
        for group in strategy.optimizer.param_groups:
            group["lr"] = 0.0 if stage == 2 else 0.1

    stream_of([GPMPlugin(), merge, stages.plugin(), Spy(on_stage_start=stand_still)])
    assert [record.coefficient for record in merge.merges] == [0, 0]
    assert_same_weights(stages.ends[3], stages.merged[2])


def test_divergence_is_an_error_that_keeps_the_sound_weights():
    starts = []

    def diverge(strategy, stage):
        starts.append(weights(strategy.model))
        if stage == 2:
            for group in strategy.optimizer.param_groups:
                group["lr"] = float("inf")

    merge = BecameMergePlugin()
    with pytest.raises(DivergenceError, match=r"task 2 is not finite, first in features\.0\.weight.*learning rate"):
        stream_of([GPMPlugin(), merge, Spy(on_stage_start=diverge)], make_model=lambda: made.append(mlp()) or made[-1])
    assert_same_weights(starts[-1], weights(made[-1]))
    assert merge.t == 1
    assert not merge.merges


made = []


def test_state_goes_through_a_file_and_continues_to_the_same_weights():
    benchmark, results = blobs(), []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model, merge, memory = mlp(), BecameMergePlugin(), GPMPlugin()
        strategy = naive(model, [merge, memory])
        for t, experience in enumerate(benchmark.train_stream):
            torch.manual_seed(t)
            strategy.train(experience)
            if interrupted:
                file = io.BytesIO()
                torch.save([merge.state_dict(), memory.state_dict()], file)
                file.seek(0)
                merge, memory = BecameMergePlugin(), GPMPlugin()
                for plugin, state in zip((merge, memory), torch.load(file, weights_only=True), strict=True):
                    plugin.load_state_dict(state)
                strategy = naive(model, [merge, memory])
        results.append((weights(model), [record.coefficient for record in merge.merges]))
    assert_same_weights(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert isinstance(merge.merges[0], MergeRecord)


def test_growing_head_keeps_its_precision():
    merge = BecameMergePlugin()

    def make():
        return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), IncrementalClassifier(10))

    torch.manual_seed(0)
    model = make()
    strategy = naive(model, [GPMPlugin(), merge])
    for classes in (2, 4, 6):
        strategy.train(blobs(n_tasks=1, classes=classes, task_labels=False, seed=classes).train_stream)
        assert merge.precision["2.classifier.weight"].shape == (classes, 10)
    assert (merge.precision["2.classifier.weight"] >= 0).all()
    assert [0 <= record.coefficient <= 1 for record in merge.merges] == [True, True]


def test_heads_made_by_evaluations_in_between_are_left_alone():
    heads = []
    spy = Spy(
        after_training_epoch=lambda s: heads.append(weights(s.model.classifier.classifiers["2"])),
        after_training_exp=lambda s: heads.append(weights(s.model.classifier.classifiers["2"])),
    )
    torch.manual_seed(0)
    strategy = naive(mlp(), [GPMPlugin(), BecameMergePlugin(), spy], eval_every=1)
    for experience in blobs().train_stream[:2]:
        strategy.train(experience, eval_streams=[blobs().test_stream])
    for head in heads:
        assert_same_weights(heads[0], head)


# ------------------------------------------------------------------------------------------------------------ errors


def test_what_cannot_work_is_refused_at_once():
    with pytest.raises(ValueError, match=r"epochs of stage 2.*got 0"):
        BecameMergePlugin(epochs=0)
    with pytest.raises(ValueError, match="in stages; got BecameMergePlugin and BecameMergePlugin"):
        stream_of([BecameMergePlugin(), BecameMergePlugin()])
    with pytest.raises(ValueError, match="not the state of a BecameMergePlugin"):
        BecameMergePlugin().load_state_dict({"t": 1})
    model = Network(nn.Linear(6, 10), 10)
    before = weights(model)
    stream = split_online_stream(blobs().train_stream, experience_size=10)
    with pytest.raises(ValueError, match="BecameMergePlugin works on whole tasks, but got an online stream"):
        naive(model, [BecameMergePlugin()]).train(next(iter(stream)))
    assert_same_weights(before, weights(model))
