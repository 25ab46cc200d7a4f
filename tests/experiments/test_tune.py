import pytest

from became_avalanche.results.record import Record
from became_avalanche.runs.engines import Outcome
from became_avalanche.runs.run import Local
from became_avalanche.runs.store import Store
from experiments import tune
from experiments.tune import Tuning
from tests.results.records import made_up


@pytest.fixture
def tuning(tmp_path):
    return Tuning("split-digits", Store(tmp_path), Local(), workers=1)


def finish(tuning, specs, valid, status="done"):
    """Write the records of runs as if they had been trained."""
    for spec in specs:
        folder = tuning.store.open(spec)
        folder.keep_spec(spec)
        folder.save_record(
            Record(
                key=spec.key(),
                spec=spec.completed().model_dump(mode="json"),
                method=spec.method.name,
                label=spec.method.name,
                status=status,
                accuracy={"valid": [[valid]]},
            )
        )


def test_a_candidate_is_a_run_per_seed_with_its_learning_rate_and_option_only(tuning):
    specs = tuning.specs("ewc", 0.3, {"ewc_lambda": 7})
    assert [spec.seed for spec in specs] == [100, 101, 102]
    for spec in specs:
        assert (spec.recipe.learning_rate, spec.recipe.lr_min) == pytest.approx((0.3, 0.015))
        assert spec.method.options == {"ewc_lambda": 7}
    assert tuning.specs("si", 0.1)[0].method.options == {}


def test_the_first_of_the_best_is_chosen_and_a_diverged_candidate_never(tuning):
    candidates = {value: tuning.specs("ewc", 0.1, {"ewc_lambda": value}) for value in (1, 2, 3, 4)}
    finish(tuning, candidates[1], 0.8)
    finish(tuning, candidates[2], 0.9)
    finish(tuning, candidates[3], 0.9)
    finish(tuning, candidates[4][:2], 1.0)
    finish(tuning, candidates[4][2:], 1.0, status="diverged")
    assert tuning.choose(candidates) == {"chosen": 2, "tried": {"1": 0.8, "2": 0.9, "3": 0.9, "4": None}}
    with pytest.raises(SystemExit, match="split-digits: all of 4 diverged"):
        tuning.choose({4: candidates[4]})


@pytest.mark.parametrize("failed", [True, False])
def test_a_run_that_fails_or_cannot_start_ends_the_tuning_with_its_message(tuning, failed, monkeypatch):
    specs = tuning.specs("ewc", 0.1)

    class Engine:
        def __init__(self, workers):
            pass

        def run(self, wanted, store, local, report):
            assert wanted == specs
            record = made_up("ewc", 0, status="failed", error="Traceback\nno data")
            yield Outcome(wanted[0], record) if failed else Outcome(wanted[0], problem="no data")

    monkeypatch.setattr(tune, "Processes", Engine)
    with pytest.raises(SystemExit) as error:
        tuning.choose({1: specs})
    assert str(error.value) == f"{specs[0].key()}: " + ("Traceback\nno data" if failed else "no data")


def test_unknown_names_are_refused_with_what_there_is(monkeypatch, capsys):
    for arguments, message in (
        (["split-digit"], "unknown benchmark 'split-digit'; did you mean 'split-digits'"),
        (["split-digits", "--methods", "ewcc"], "no grid of values for 'ewcc' on split-digits; did you mean 'ewc'"),
    ):
        monkeypatch.setattr("sys.argv", ["tune.py", *arguments])
        with pytest.raises(SystemExit):
            tune.main()
        assert message in capsys.readouterr().err
