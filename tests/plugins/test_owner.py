"""A memory belongs to one model, and each of its tasks is counted once."""

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from became_avalanche import (
    BecameMergePlugin,
    ConnectorPlugin,
    DivergenceError,
    EqualTrainingPlugin,
    GPCNSPlugin,
    GPMPlugin,
    LaterTaskLR,
    NSCLPlugin,
    OWMPlugin,
    SGPPlugin,
    TRGPPlugin,
    measure_drift,
)
from tests.helpers import (
    CONV_SHAPE,
    Network,
    Spy,
    assert_same_weights,
    blobs,
    blobs_without_task_labels,
    convnet,
    mlp,
    naive,
    stream_of,
    weights,
)

PLUGINS = {
    "gpm": GPMPlugin,
    "sgp": SGPPlugin,
    "trgp": lambda: TRGPPlugin(trust_threshold=0.1),
    "gpcns": GPCNSPlugin,
    "nscl": lambda: NSCLPlugin(100),
    "owm": OWMPlugin,
    "became": lambda: BecameMergePlugin(rule="cofima"),
    "connector": ConnectorPlugin,
    "control": EqualTrainingPlugin,
    "later rate": LaterTaskLR,
}
IMAGES = blobs(n_tasks=3, shape=CONV_SHAPE, samples=20)


def single_head(width=24):
    """A model that needs no task labels, with an input space too large to be protected as a whole."""
    return nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Linear(width, 2))


WIDE = blobs(n_tasks=3, samples=8, shape=(30,), task_labels=False)


# -------------------------------------------------------------------------------------------------- one model


@pytest.mark.parametrize("name", PLUGINS)
def test_another_model_is_refused_until_the_plugin_is_reset(name):
    plugin = PLUGINS[name]()
    first = stream_of([plugin], convnet, IMAGES, train_epochs=1)
    second = naive(convnet(), [plugin], train_epochs=1)
    with pytest.raises(ValueError, match=r"memory of this \w+ belongs to another model.*reset\(\)"):
        second.train(IMAGES.train_stream[0])
    del first  # a model that no longer exists is another model, too
    with pytest.raises(ValueError, match="belongs to another model"):
        naive(convnet(), [plugin], train_epochs=1).eval(IMAGES.test_stream[0])
    plugin.reset()
    assert plugin.memory_bytes() == 0
    assert plugin.is_new()
    once_more = stream_of([plugin], convnet, IMAGES, seed=3, train_epochs=1)
    fresh = stream_of([PLUGINS[name]()], convnet, IMAGES, seed=3, train_epochs=1)
    assert_same_weights(weights(once_more.model), weights(fresh.model))


def test_another_width_is_refused_in_the_same_words():
    plugin = GPMPlugin()
    stream_of([plugin], single_head, WIDE, train_epochs=1)
    with pytest.raises(ValueError, match="belongs to another model"):
        stream_of([plugin], lambda: single_head(7), WIDE, train_epochs=1)


@pytest.mark.parametrize("name", PLUGINS)
def test_copies_and_pickles_of_a_strategy_continue(name):
    torch.manual_seed(0)
    strategy = naive(convnet(), [PLUGINS[name]()], train_epochs=1)
    strategy.evaluator.loggers.clear()
    strategy.train(IMAGES.train_stream[:2])
    copied, unpickled = deepcopy(strategy), pickle.loads(pickle.dumps(strategy))
    states = []
    for each in (strategy, copied, unpickled):
        torch.manual_seed(1)
        each.train(IMAGES.train_stream[2])
        states.append(weights(each.model))
    assert_same_weights(*states[:2])
    assert_same_weights(*states[::2])


def test_a_state_without_the_weights_of_its_model_is_noticed():
    plugin, again = GPMPlugin(), GPMPlugin()
    strategy = stream_of([plugin], single_head, WIDE, train_epochs=1)
    again.load_state_dict(plugin.state_dict())
    with pytest.warns(UserWarning, match="not those that the state of GPMPlugin was saved with: load"):
        naive(single_head(), [again], train_epochs=1).train(WIDE.train_stream[0])
    again.load_state_dict(plugin.state_dict())
    model = single_head()
    model.load_state_dict(strategy.model.state_dict())
    naive(model, [again], train_epochs=1).eval(WIDE.test_stream[0])


def test_weights_that_somebody_has_changed_are_noticed():
    strategy = stream_of([GPMPlugin()], single_head, blobs(n_tasks=1, shape=(30,), task_labels=False))
    strategy.model[0].reset_parameters()
    with pytest.warns(UserWarning, match="have changed since the last training with GPMPlugin"):
        strategy.train(WIDE.train_stream[1])


# -------------------------------------------------------------------------------------------------- names


def wrap_all(model):
    return nn.DataParallel(model)


def wrap_part(model):
    model[0] = nn.DataParallel(model[0])
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        *(("gpm", wrap) for wrap in (wrap_all, wrap_part, compiled)),
        *((name, wrap_part) for name in ("sgp", "gpcns", "nscl", "owm")),
    ],
)
def test_wrapped_models_stay_protected(name, wrap):
    """Wrapped after the first task, and unwrapped after the second."""
    plugin, merge = PLUGINS[name](), BecameMergePlugin()
    torch.manual_seed(0)
    model = single_head()
    strategy = naive(model, [plugin, merge], train_epochs=1)
    strategy.train(WIDE.train_stream[0])
    ranks = list(plugin.ranks().values())
    strategy = naive(wrap(model), [plugin, merge], train_epochs=1)
    strategy.train(WIDE.train_stream[1])
    names = [name for name, _ in strategy.model.named_parameters()]
    assert set(plugin.memory) | set(merge.precision) <= set(names)
    assert len(plugin.memory) == len(ranks)
    assert all(now >= before for now, before in zip(plugin.ranks().values(), ranks, strict=True))
    plain = naive(single_head(), [])  # the same training without a wrapper
    assert [n for n, _ in plain.model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert merge.merges[0].coefficient < 1


def test_wrapping_changes_no_number():
    results = []
    for wrap in (lambda model: model, wrap_all):
        torch.manual_seed(0)
        model, plugins = single_head(), [GPMPlugin(), BecameMergePlugin()]
        for t, experience in enumerate(WIDE.train_stream):
            strategy = naive(wrap(model) if t else model, plugins, train_epochs=1)
            strategy.train(experience)
        results.append((weights(model), [record.coefficient for record in plugins[1].merges]))
    assert_same_weights(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("name", ["gpm", "nscl", "became"])
def test_names_that_the_model_lacks_are_named(name):
    plugin, again = PLUGINS[name](), PLUGINS[name]()
    stream_of([plugin], single_head, WIDE, train_epochs=1)
    again.load_state_dict(plugin.state_dict())
    other = nn.Sequential(nn.Flatten(), *single_head())
    with pytest.raises(ValueError, match=r"remembers 0\.weight, .*2\.weight.*, which the model lacks"):
        naive(other, [again]).train(WIDE.train_stream[0])


def test_trgp_serves_the_scales_of_a_wrapped_model():
    """Names are followed before an evaluation, too."""
    plugin = TRGPPlugin(trust_threshold=0.01)
    benchmark = blobs(n_tasks=2, samples=8, shape=(30,))
    strategy = stream_of([plugin], lambda: single_head(), benchmark)
    assert any(plugin.scales[1].values())
    outputs = []
    for model in (strategy.model, nn.DataParallel(strategy.model)):
        spy = Spy(after_eval_forward=lambda s: outputs.append(s.mb_output.clone()))
        naive(model, [plugin, spy]).eval(benchmark.test_stream[1])
    assert torch.equal(*outputs)


# -------------------------------------------------------------------------------------------------- one task


STREAMS = {"classic": blobs, "from datasets": blobs_without_task_labels}


@pytest.mark.parametrize("stream", STREAMS)
def test_an_experience_that_is_trained_again_is_noticed(stream):
    benchmark = STREAMS[stream](
        n_tasks=2, samples=8, shape=(30,), **({"task_labels": False} if stream == "classic" else {})
    )
    strategy = naive(single_head(), [GPMPlugin(), BecameMergePlugin()], train_epochs=1)
    strategy.train(benchmark.train_stream[0])
    with pytest.warns(
        UserWarning, match="experience 0 of the train stream is trained again and counts as a new task"
    ) as w:
        strategy.train(benchmark.train_stream[0])
    assert len(w) == 1
    strategy.train(benchmark.train_stream[1])


def test_other_benchmarks_are_other_experiences():
    """Domains as benchmarks of one experience each."""
    strategy = naive(single_head(), [GPMPlugin()], train_epochs=1)
    for seed in range(2):
        strategy.train(blobs(n_tasks=1, samples=8, shape=(30,), task_labels=False, seed=seed).train_stream)


@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "trgp"])
def test_a_task_in_several_calls_counts_once(name):
    plugin, log = PLUGINS[name](), []
    spy = Spy(on_stage_start=lambda s, stage: log.append(stage))
    strategy = naive(convnet(), [plugin, spy], train_epochs=1)
    for experience in IMAGES.train_stream[:2]:
        strategy.train(experience, task_continues=True)
        strategy.train(experience, task_continues=True)
        strategy.train(experience)
    assert getattr(plugin, "experiences", getattr(plugin, "t", None)) == 2
    assert log in ([], [1] * 6, [1] * 6 + [2])


def test_a_task_in_several_calls_leaves_the_memory_of_its_last_weights():
    plugin, reference = GPMPlugin(), GPMPlugin()
    torch.manual_seed(0)
    strategy = naive(single_head(), [plugin], train_epochs=1)
    strategy.train(WIDE.train_stream[0], task_continues=True)
    assert plugin.memory == {}
    strategy.train(WIDE.train_stream[0])
    before = deepcopy(strategy.model)
    strategy.train(WIDE.train_stream[1], task_continues=True)
    strategy.train(WIDE.train_stream[1])
    assert max(measure_drift(before, strategy.model, WIDE.train_stream[0]).values()) < 0.2
    reference.load_state_dict(plugin.state_dict())
    assert reference.experiences == 2


def test_a_merge_of_a_task_in_several_calls_starts_where_the_task_did():
    plugin = BecameMergePlugin(keep_last_merge=True)
    strategy = naive(single_head(), [GPMPlugin(), plugin], train_epochs=1)
    strategy.train(WIDE.train_stream[0])
    start = weights(strategy.model)
    strategy.train(WIDE.train_stream[1], task_continues=True)
    strategy.train(WIDE.train_stream[1])
    assert len(plugin.merges) == 1
    assert_same_weights({name: plugin.last_merge.anchor[name] for name in start}, start)


def test_trgp_wants_its_task_in_one_call():
    with pytest.raises(ValueError, match="TRGPPlugin cannot train one task in several calls"):
        naive(mlp(), [TRGPPlugin()]).train(blobs().train_stream[0], task_continues=True)


def test_a_plugin_that_joins_late_is_noticed():
    strategy = naive(single_head(), [GPMPlugin()], train_epochs=1)
    strategy.train(WIDE.train_stream[0])
    strategy.plugins.insert(1, BecameMergePlugin())
    with pytest.warns(UserWarning, match="BecameMergePlugin was added after 1 experiences.*not protected"):
        strategy.train(WIDE.train_stream[1])
    strategy.train(WIDE.train_stream[2])


# -------------------------------------------------------------------------------------------------- broken off


@pytest.mark.parametrize(
    "plugins", [lambda: [GPMPlugin(), BecameMergePlugin()], lambda: [GPMPlugin(), ConnectorPlugin()]]
)
def test_an_interruption_in_the_free_stage_leaves_the_weights_of_the_first(plugins):
    """As when a notebook is interrupted; the task can then be trained again, or left out with a warning."""
    seen = {"stage": 0, "interrupts": False}

    def interrupt(strategy):
        if seen["stage"] == 2 and seen["interrupts"]:
            raise KeyboardInterrupt

    def note(strategy):
        if seen["stage"] == 1:
            seen["end"] = weights(strategy.model)

    spy = Spy(
        on_stage_start=lambda s, stage: seen.update(stage=stage), after_update=interrupt, after_training_epoch=note
    )
    strategy = naive(mlp(), [*plugins(), spy])
    first, second, third = blobs().train_stream
    strategy.train(first)
    seen["interrupts"] = True
    for experience, interrupts in ((second, True), (second, False), (third, True)):
        seen["interrupts"] = interrupts
        if interrupts:
            with pytest.raises(KeyboardInterrupt):
                strategy.train(experience)
            assert_same_weights(weights(strategy.model), seen["end"])
        else:
            strategy.train(experience)
    seen["interrupts"] = False
    with pytest.warns(UserWarning, match=r"experience 2 of the train stream was interrupted.*not in the memory"):
        strategy.train(blobs(n_tasks=1, seed=1).train_stream)
    assert strategy.plugins[0].experiences == 3


def test_an_interrupted_training_is_not_taken_for_weights_that_somebody_has_changed():
    def interrupt(strategy):
        if strategy.clock.train_exp_counter == 1 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt

    interrupted = []
    strategy = naive(single_head(), [GPMPlugin(), Spy(after_training_epoch=interrupt)])
    first, second, third = WIDE.train_stream
    strategy.train(first)
    before = strategy.model[0].weight.norm()
    with pytest.raises(KeyboardInterrupt):
        strategy.train(second)
    assert abs(strategy.model[0].weight.norm() / before - 1) > 1e-3  # moved, in directions that are free
    strategy.train(second)  # a warning would be an error
    strategy.model[0].reset_parameters()
    with pytest.warns(UserWarning, match="have changed since the last training with GPMPlugin"):
        strategy.train(third)


@pytest.mark.parametrize("poison", ["loss", "weight"])
def test_a_network_of_one_layer_that_diverges_is_an_error(poison):
    """The inputs of its layer are finite."""

    def spoil(strategy):
        if poison == "loss":
            strategy.loss = strategy.loss * torch.nan
        else:
            strategy.model.features[0].weight.data[0, 0] = torch.nan

    plugin = GPMPlugin()
    spy = Spy(**{"before_backward" if poison == "loss" else "after_update": spoil})
    with pytest.raises(DivergenceError, match=r"is not finite: the training has diverged"):
        naive(Network(nn.Sequential(nn.Linear(6, 10)), 10), [plugin, spy]).train(blobs().train_stream[0])
    assert plugin.memory == {}


# -------------------------------------------------------------------------------------------------- states


def test_the_state_of_another_kind_is_refused():
    states = {name: PLUGINS[name]().state_dict() for name in PLUGINS}
    for name, state in states.items():
        for other, make in PLUGINS.items():
            if other != name:
                with pytest.raises(ValueError, match=r"this is the state of a \w+, not of a \w+"):
                    make().load_state_dict(state)
        with pytest.raises(ValueError, match=r"has version 2, and this version.*upgrade"):
            PLUGINS[name]().load_state_dict({**state, "version": 2})
        old = {key: value for key, value in state.items() if key not in ("kind", "version", "weights")}
        PLUGINS[name]().load_state_dict(old)  # as written before states had a kind
