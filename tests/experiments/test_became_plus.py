"""Each variant of the merge against the merge itself, on two tasks with few epochs."""

from functools import cache

import pytest
import torch

from became_avalanche.runs.catalogue import find_benchmark
from became_avalanche.runs.method import MergeSettings, Method
from became_avalanche.runs.session import Session
from became_avalanche.strategy.weights import interpolate, restore, snapshot
from experiments import became_plus

PLAIN = "became_avalanche.plugins.merge:BecameMergePlugin"


def trained(plugin, max_epochs=2, **options):
    """A session after two tasks."""
    path = plugin if ":" in plugin else f"experiments.became_plus:{plugin}"
    method = Method.parse("gpm+became", merge=MergeSettings(plugin=path, options=options))
    spec = find_benchmark("split-digits").spec(method, n_tasks=2, max_epochs=max_epochs)
    session = Session(spec, keep="endpoints")
    while not session.finished:
        session.step()
    return session


@cache
def plain():
    return trained(PLAIN)


def merge_of(session):
    return session.method_plugins[-1].last_merge


def merged(session):
    """The weights right after the merge."""
    inputs, coefficient = merge_of(session), session.method_plugins[-1].merges[-1].coefficient
    return interpolate(inputs.base, inputs.candidate, coefficient, coefficient)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def stages(session):
    return [[stage.epochs for stage in task.stages] for task in session.record().tasks]


def moved(session):
    """The parameters that were trained after the merge."""
    now, before = snapshot(session.strategy), merged(session)
    return {name for name in now if not torch.equal(now[name], before[name])}


def test_the_paper_s_merge_trains_nothing_afterwards():
    assert stages(plain()) == [[2], [2, 2]]
    assert moved(plain()) == set()


def test_refit_trains_the_current_head_only():
    session = trained("Refit")
    assert same(merge_of(session).candidate, merge_of(plain()).candidate)
    assert stages(session) == [[2], [2, 2, 2]]  # five epochs, but not more than the budget
    assert moved(session) == {"classifier.classifiers.1.classifier.weight", "classifier.classifiers.1.classifier.bias"}
    assert all(parameter.requires_grad for parameter in session.strategy.model.parameters())


def test_refit_takes_five_epochs():
    assert stages(trained("Refit", max_epochs=7))[1][-1] == 5


def test_a_projected_stage_follows_the_merge():
    session = trained("ProjectedAfter")
    assert same(merge_of(session).candidate, merge_of(plain()).candidate)
    assert stages(session) == [[2], [2, 2, 2]]
    assert "features.1.weight" in moved(session)


def test_average_is_over_the_epochs_of_the_free_stage_but_the_last():
    """Of three epochs that is the mean of where free stages of one and of two epochs end."""
    average = merge_of(trained("Average", max_epochs=3))
    one, two = (merge_of(trained(PLAIN, max_epochs=3, epochs=epochs)) for epochs in (1, 2))
    assert same(average.base, one.base)
    assert same(average.candidate, {name: (one.candidate[name] + two.candidate[name]) / 2 for name in one.candidate})


def test_average_of_one_epoch_is_its_end():
    assert same(merge_of(trained("Average", epochs=1)).candidate, merge_of(trained(PLAIN, epochs=1)).candidate)


@pytest.mark.parametrize("variant", ["ValidationFisher", "SmoothedFisher", "MiddleFisher"])
def test_only_the_fisher_information_is_another(variant):
    ours, theirs = merge_of(trained(variant)), merge_of(plain())
    assert same(ours.base, theirs.base)
    assert same(ours.candidate, theirs.candidate)
    assert not same(ours.fisher, theirs.fisher)


def test_fisher_on_validation_data_is_that_of_an_experience_of_the_validation_stream():
    session = trained("ValidationFisher")
    strategy, plugin = session.strategy, session.method_plugins[-1]
    names, seen = dict(strategy.model.named_parameters()), []
    experience = strategy.experience = session.stream.train_stream[1]
    plugin.fisher = lambda passes, model, parameters: seen.extend(len(batch.labels) for batch in passes)
    vars(plugin.fisher).update(n_samples=None, mode="eval", shuffle=True)
    plugin.estimate_fisher(strategy, names, 0)
    assert sum(seen) == len(session.stream.streams["valid"][1].dataset)
    assert strategy.experience is experience


def test_labels_without_smoothing_give_the_merge_itself(monkeypatch):
    monkeypatch.setattr(became_plus, "SMOOTHING", 0.0)
    assert same(merge_of(trained("SmoothedFisher")).fisher, merge_of(plain()).fisher)


def test_fisher_at_the_middle_is_taken_between_both_weights_and_the_weights_are_put_back():
    session = trained("MiddleFisher")
    strategy, plugin, inputs = session.strategy, session.method_plugins[-1], merge_of(session)
    strategy.experience = session.stream.train_stream[1]
    seen = []
    plugin.fisher = lambda passes, model, parameters: seen.append(snapshot(strategy)) or {}
    vars(plugin.fisher).update(n_samples=None, mode="eval", shuffle=True)
    restore(strategy, inputs.candidate)
    plugin.choose_candidate(strategy, inputs.base)
    plugin.estimate_fisher(strategy, inputs.fisher, 0)
    plugin.estimate_fisher(strategy, inputs.fisher, 0)
    middle = interpolate(inputs.base, inputs.candidate, 0.5, 0.5)
    assert all(torch.equal(seen[0][name], middle[name]) for name in middle)
    assert all(torch.equal(seen[1][name], inputs.candidate[name]) for name in middle)


def test_the_head_of_the_task_does_not_count_in_the_coefficient():
    session = trained("HeadApart")
    inputs, coefficient = merge_of(session), session.method_plugins[-1].merges[-1].coefficient
    names = [name for name in inputs.fisher if "classifiers.1." not in name]
    forms = [
        sum(float((diagonal[name].double() * inputs.delta[name] ** 2).sum()) for name in names)
        for diagonal in (inputs.fisher, inputs.precision)
    ]
    assert 0 < len(names) < len(inputs.fisher)
    assert coefficient == pytest.approx(forms[0] / sum(forms), rel=1e-9)
    assert same(inputs.candidate, merge_of(plain()).candidate)
    assert coefficient < plain().method_plugins[-1].merges[-1].coefficient
    assert moved(session) == set()  # the head is merged with the same coefficient
