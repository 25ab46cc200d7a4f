import io
import json
import struct
from contextlib import nullcontext

import dill
import numpy as np
import pytest
import torch
import wandb
from avalanche.evaluation.metric_results import AlternativeValues, MetricValue, TensorImage
from avalanche.evaluation.metrics import loss_metrics
from matplotlib.figure import Figure
from PIL import Image
from wandb.proto import wandb_internal_pb2

from became_avalanche.logging.wandb import WandBLogger
from became_avalanche.metrics.accuracy import AccuracyMatrix
from became_avalanche.plugins.gpm import GPMPlugin
from became_avalanche.plugins.merge import BecameMergePlugin
from became_avalanche.results.figures import FIGURES
from became_avalanche.results.metrics import METRICS
from became_avalanche.runs.run import Local, run
from became_avalanche.runs.session import Session
from became_avalanche.runs.store import Store
from tests.helpers import blobs, mlp, naive
from tests.results.records import made_up
from tests.runs.components import BLOBS


class Run:
    """Keeps what is logged and drops values of earlier steps, as a run of wandb does."""

    def __init__(self, step=0, **arguments):
        self.arguments, self.step = arguments, step
        self.id = arguments.get("id") or f"run{np.random.default_rng().integers(10**9)}"
        self.rows, self.summary, self.exit_codes = {}, {}, []

    def log(self, data, step):
        if step >= self.step:
            self.step = step
            self.rows.setdefault(step, {}).update(data)

    def finish(self, exit_code):
        self.exit_codes.append(exit_code)


@pytest.fixture
def runs(monkeypatch):
    """The runs that were started. A resumed run begins at the last step of the run before."""
    started = []

    def init(**arguments):
        started.append(Run(started[-1].step if started and arguments.get("resume") else 0, **arguments))
        return started[-1]

    monkeypatch.setattr(wandb, "init", init)
    return started


def pixels(image):
    return np.asarray(Image.open(image._path))


# ------------------------------------------------------------------------------------------------------------- values


SCALARS = [
    1.5,
    2,
    True,
    np.float32(0.25),
    np.int64(3),
    np.array(1.5),
    torch.tensor(4),
    torch.ones((), requires_grad=True),
]


@pytest.mark.parametrize("value", SCALARS)
def test_scalars_are_logged_as_plain_numbers(runs, value):
    WandBLogger().log_single_metric("Loss", value, 7)
    (logged,) = runs[0].rows[7].values()
    assert logged == value
    assert type(logged) in (bool, int, float)


def test_nan_is_a_value(runs):
    WandBLogger().log_single_metric("BWT/eval_phase/test_stream", np.nan, 7)
    assert np.isnan(runs[0].rows[7]["BWT/eval_phase/test_stream"])


@pytest.mark.parametrize("value", ["text", None, [1, 2], torch.ones(3), np.ones((2, 2, 2)), np.str_("x"), 1j, object()])
def test_what_has_no_form_is_ignored(runs, value):
    logger = WandBLogger()
    logger.log_single_metric("Other", value, 7)
    logger.log_single_metric("Other", AlternativeValues(value, "text"), 7)
    assert runs[0].rows == {}
    logger.log_single_metric("Other", AlternativeValues(value, 0.5, 0.6), 7)
    assert runs[0].rows == {7: {"Other": 0.5}}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("fractions", [True, False])
def test_tensor_images_keep_their_pixels(runs, channels, fractions):
    bytes_ = torch.randint(256, (channels, 4, 6), dtype=torch.uint8)
    WandBLogger().log_single_metric("Images", TensorImage(bytes_ / 255 if fractions else bytes_), 1)
    expected = bytes_.permute(1, 2, 0).squeeze(-1).numpy()
    assert np.array_equal(pixels(runs[0].rows[1]["Images"]), expected)


def test_pictures(runs):
    logger = WandBLogger()
    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    logger.log_single_metric("Picture", AlternativeValues(picture, torch.ones(2, 2)), 1)
    logger.log_single_metric("Figure", Figure(figsize=(2, 1), dpi=50), 1)
    assert np.array_equal(pixels(runs[0].rows[1]["Picture"]), np.asarray(picture))
    assert pixels(runs[0].rows[1]["Figure"]).shape[:2] == (50, 100)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_matrices_become_tables(runs, kind):
    logger = WandBLogger()
    matrix = kind([[0.5, np.nan], [0.25, 0.75]])
    logger.log_single_metric("EvalStream/Acc_Matrix", matrix, 1)
    logger.log_single_metric("ConfusionMatrix_Stream/eval_phase/test_stream", matrix, 1)
    tasks, other = runs[0].rows[1].values()
    assert tasks.columns == ["after task", "task 1", "task 2"]
    assert other.columns == ["row", "column 1", "column 2"]
    assert tasks.data == other.data == [[1, 0.5, None], [2, 0.25, 0.75]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Stage/train_phase/train_stream/Exp001", "Stage"),
        ("Lambda/train_phase/train_stream/Exp012", "Lambda"),
        ("Plasticity/train_phase/train_stream/Exp001", "Plasticity"),
        ("Stability/train_phase/train_stream/Exp1000", "Stability"),
        *(2 * (name,) for name in ("ACC/eval_phase/test_stream", "Stage/train_phase", "Staged/train_phase/Exp001")),
        *(2 * (name,) for name in ("Loss_Exp/eval_phase/test_stream/Task000/Exp000", "Lambda")),
    ],
)
def test_values_per_experience_are_one_curve(runs, name, expected):
    WandBLogger().log_single_metric(name, 1, 0)
    assert runs[0].rows == {0: {expected: 1}}


# -------------------------------------------------------------------------------------------------------------- steps


def test_values_of_an_earlier_step_go_to_the_last_one(runs):
    logger = WandBLogger()
    values = [MetricValue(None, name, i, x) for i, (name, x) in enumerate([("a", 3), ("b", 3), ("c", 2), ("a", 5)])]
    logger.log_metrics(values)
    assert runs[0].rows == {3: {"a": 0, "b": 1, "c": 2}, 5: {"a": 3}}


def test_result_goes_to_the_last_step_and_the_summary(runs, tmp_path):
    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    picture.save(tmp_path / "picture.png")
    logger = WandBLogger()
    logger.log_single_metric("Loss", 1, 9)
    logger.log_result()
    assert list(runs[0].rows[9]) == ["Loss"]
    logger.log_result(accuracy=np.eye(2), figures={"some": tmp_path / "picture.png"}, summary={"ACC": np.float32(0.5)})
    assert runs[0].rows[9]["accuracy"].data == [[1, 1, 0], [2, 0, 1]]
    assert np.array_equal(pixels(runs[0].rows[9]["figures/some"]), np.asarray(picture))
    assert runs[0].summary == {"ACC": 0.5}
    assert type(runs[0].summary["ACC"]) is float
    with pytest.raises(ValueError, match=r"expected a matrix, but got an array of shape \(0,\)"):
        logger.log_result(accuracy=AccuracyMatrix().result())


# --------------------------------------------------------------------------------------------------------------- runs


def test_settings_of_the_run(runs, tmp_path):
    WandBLogger("mine", name="a", group="g", job_type="j", config={"lr": 0.1}, directory=tmp_path, mode="offline")
    arguments = runs[0].arguments
    settings = arguments.pop("settings")
    assert arguments == {
        **{"project": "mine", "name": "a", "group": "g", "job_type": "j", "config": {"lr": 0.1}, "dir": str(tmp_path)},
        **{"mode": "offline", "reinit": "create_new"},
    }
    assert (settings.console, settings.save_code, settings.disable_git) == ("off", False, True)


def test_runs_side_by_side(runs):
    first, second = WandBLogger(), WandBLogger()
    first.log_single_metric("Loss", 1, 5)
    second.log_single_metric("Loss", 2, 3)
    assert [run.rows for run in runs] == [{5: {"Loss": 1}}, {3: {"Loss": 2}}]


@pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt])
def test_leaving_the_block_finishes_the_run(runs, error):
    with pytest.raises(error) if error else nullcontext(), WandBLogger() as logger:
        assert isinstance(logger, WandBLogger)
        if error:
            raise error
    assert runs[0].exit_codes == [1 if error else 0]


def test_pickled_logger_resumes_its_run_when_it_logs(runs):
    logger = WandBLogger("mine", config={"lr": 0.1})
    logger.log_single_metric("Loss", 1, 5)
    file = dill.dumps(logger)
    logger.log_single_metric("Loss", 2, 8)  # logged after the checkpoint
    logger = dill.loads(file)
    logger.log_single_metric("Other", "text", 6)
    logger.finish()
    assert len(runs) == 1
    assert runs[0].exit_codes == []
    for x in (6, 9):
        logger.log_single_metric("Loss", 3, x)
    first, second = runs
    assert second.id == first.id
    assert second.arguments["resume"] == "allow"
    assert [second.arguments[key] for key in ("project", "config")] == ["mine", {"lr": 0.1}]
    assert second.rows == {8: {"Loss": 3}, 9: {"Loss": 3}}


def test_a_run_can_be_started_later_and_continued_by_its_id(runs):
    logger = WandBLogger(start=False)
    assert runs == []
    logger.finish()
    logger.start("known")
    assert logger.run is runs[0]
    assert [runs[0].arguments[key] for key in ("id", "resume")] == ["known", "allow"]
    assert [WandBLogger(run_id="other").run.arguments[key] for key in ("id", "resume")] == ["other", "allow"]


def test_a_record_is_logged_with_all_metrics_figures_and_tables(runs):
    logger, record = WandBLogger(), made_up("gpm+became", 0)
    logger.log_single_metric("Loss", 1, 9)
    logger.log_record(record)
    values = {f"final/{name}": metric.of(record) for name, metric in METRICS.items()}
    assert {**runs[0].summary} == {"status": "done", **{name: v for name, v in values.items() if v is not None}}
    assert {"final/acc", "final/bwt", "final/aaa"} <= runs[0].summary.keys()
    row = runs[0].rows[9]
    assert row["accuracy"].data == [[t + 1, *values] for t, values in enumerate(record.accuracy["test"])]
    assert row["merges"].columns[:4] == ["t", "coefficient", "plasticity", "stability"]
    assert [merge[:2] for merge in row["merges"].data] == [[2, 1 / 2], [3, 1 / 3]]
    figures = {name.removeprefix("figures/") for name in row if name.startswith("figures/")}
    assert {"training", "matrix", "coefficients"} <= figures < FIGURES.keys()  # there are no ranks to draw


def test_of_a_run_that_is_not_done_the_status_is_logged(runs):
    WandBLogger().log_record(made_up("gpm", 0, status="diverged", error="DivergenceError"))
    assert (runs[0].summary, runs[0].rows) == ({"status": "diverged"}, {})


def test_metrics_of_both_stages_arrive(runs):
    merge = BecameMergePlugin()
    strategy = naive(mlp(), [GPMPlugin(), merge], metrics=[AccuracyMatrix()], loggers=[WandBLogger()])
    strategy.train(blobs(samples=40).train_stream)
    strategy.eval(blobs().test_stream)
    assert_stages_and_coefficients(runs[0].rows, merge)
    assert "ACC/eval_phase/test_stream" in runs[0].rows[strategy.clock.train_iterations]


def assert_stages_and_coefficients(rows, merge, iterations=8):
    """Stages of 8 iterations: 2 epochs of 4 batches."""
    stages = {step: row["Stage"] for step, row in rows.items() if "Stage" in row}
    ends = range(iterations // 2, 5 * iterations + 1, iterations // 2)
    assert stages == dict(zip(ends, [1, 1, 1, 1, 2, 2, 1, 1, 2, 2], strict=True))
    coefficients = {step: row["Lambda"] for step, row in rows.items() if "Lambda" in row}
    assert coefficients == {iterations * i: record.coefficient for i, record in zip((3, 5), merge.merges, strict=True)}


def test_disabled_run_takes_everything(fresh_wandb, tmp_path):
    with WandBLogger(directory=tmp_path / "here", mode="disabled", config={"lr": 0.1}) as logger:
        for value in (1, torch.eye(2), Figure(figsize=(1, 1)), TensorImage(torch.rand(3, 4, 4))):
            logger.log_single_metric("Some", value, 1)
        logger.log_result(accuracy=np.eye(2), figures={"some": Figure(figsize=(1, 1))}, summary={"ACC": 1})
    assert not list(tmp_path.rglob("*.*"))


# ------------------------------------------------------------------------------------------------------------- errors


def test_unknown_mode_is_refused(runs):
    with pytest.raises(ValueError, match="mode must be 'online', 'offline', 'disabled' or None; got 'dryrun'"):
        WandBLogger(mode="dryrun")
    assert runs == []


@pytest.mark.parametrize("kind", ["UsageError", "CommError", "AuthenticationError"])
def test_failure_to_start_says_what_to_do(monkeypatch, kind):
    def fail(**arguments):
        raise getattr(wandb.errors, kind)("no\nkey")

    monkeypatch.setattr(wandb, "init", fail)
    for mode in ("online", None):
        with pytest.raises(
            RuntimeError, match=r"online \(no key\): log in with `wandb login`, or .*WANDB_MODE=offline$"
        ):
            WandBLogger(mode=mode)
    with pytest.raises(wandb.errors.Error, match="no\nkey"):  # offline and disabled need no login
        WandBLogger(mode="offline")


def test_online_without_login_neither_asks_nor_hangs(fresh_wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:1")  # nobody is logged in there
    monkeypatch.setattr("sys.stdin", io.StringIO())
    message = r"online \(.*(API key|api_key).*\): log in with `wandb login`, or .* WANDB_MODE=offline$"
    with pytest.raises(RuntimeError, match=message):
        WandBLogger(directory=tmp_path / "here", mode="online")
    assert not (tmp_path / "here").exists()


# -------------------------------------------------------------------------------------------------- a real run, offline


def records(file):
    """The records of a .wandb file: a header of 7 bytes, then chunks as in the log format of LevelDB."""
    data, position, record = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # padding at the end of a block
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""
    assert record == b""


def values(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def contents(file):
    """Rows by step, the run with its settings, and the summary."""
    everything = list(records(file))
    rows = {record.history.step.num: values(record.history.item) for record in everything if record.HasField("history")}
    (run,) = (record.run for record in everything if record.HasField("run"))
    summary = {}
    for record in everything:
        summary |= values(record.summary.update)
    return rows, run, summary


def test_offline_run_in_its_folder_is_read_back_and_resumed(fresh_wandb, tmp_path, monkeypatch, capfd):
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("WANDB_MODE", "offline")
    step, steps = Session.step, []

    def interrupted(session):
        steps.append(len(session.tasks))
        if steps == [0, 1, 2]:
            raise KeyboardInterrupt
        step(session)

    monkeypatch.setattr(Session, "step", interrupted)
    spec, store, local = BLOBS.spec("gpm+became", 0), Store(tmp_path), Local(wandb="mine", group="my-study")
    with pytest.raises(KeyboardInterrupt):
        run(spec, store, local)
    record = run(spec, store, local)
    wandb.teardown()  # or the files may not be written yet
    assert steps == [0, 1, 2, 2]
    assert record.resumed == [2]

    folder = store.folder(spec).path
    run_id = (folder / "wandb-id.txt").read_text().strip()
    files = sorted(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
    (before, first, _), (after, second, summary) = map(contents, files)
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2
    for header in (first, second):
        assert header.run_id == run_id
        names = (header.project, header.run_group, header.job_type, header.display_name)
        assert names == ("mine", "my-study", "gpm+became", "gpm+became-0")
        assert json.loads(spec.completed().model_dump_json()).items() <= values(header.config.update).items()

    assert max(before) < min(after)
    rows = {step: {**before.get(step, {}), **after.get(step, {})} for step in {**before, **after}}
    stages = [row["Stage"] for _, row in sorted(rows.items()) if "Stage" in row]
    assert stages == [
        k + 1 for task in record.tasks for k, stage in enumerate(task.stages) for _ in range(stage.epochs)
    ]
    for name, field in (("Lambda", "coefficient"), ("Plasticity", "plasticity"), ("Stability", "stability")):
        logged = [row[name] for _, row in sorted(rows.items()) if name in row]
        assert logged == [getattr(merge, field) for merge in record.merges]
    epochs = sum(stage.epochs for task in record.tasks for stage in task.stages)
    assert sum(any(name.startswith("Loss_Epoch/train_phase") for name in row) for row in rows.values()) == epochs
    for name in ("acc", "bwt", "aaa"):
        assert summary[f"final/{name}"] == METRICS[name].of(record)
    assert summary["status"] == "done"

    last = after[max(after)]
    table = json.loads((files[1].parent / "files" / last["accuracy/path"]).read_text())
    assert [row[1:] for row in table["data"]] == record.accuracy["test"]
    table = json.loads((files[1].parent / "files" / last["merges/path"]).read_text())
    assert [row[1] for row in table["data"]] == [merge.coefficient for merge in record.merges]
    for name in ("training", "matrix", "coefficients", "ranks", "losses"):
        with Image.open(files[1].parent / "files" / last[f"figures/{name}/path"]) as image:
            assert min(image.size) > 100

    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 20
    assert not [path for path in written if secret.encode() in path.read_bytes()]
    assert secret not in "".join(capfd.readouterr())


@pytest.mark.long
def test_offline_run_holds_everything_but_secrets(fresh_wandb, tmp_path, monkeypatch):
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    figure = Figure(figsize=(2, 1), dpi=50)
    figure.savefig(tmp_path / "small.png")

    config = {"lr": 0.1, "method": "gpm", "schedule": {"gamma": 0.5}}
    logger = WandBLogger(name="long", group="tests", config=config, directory=tmp_path, mode="offline")
    assert wandb.setup().settings.api_key == secret
    matrix, merge = AccuracyMatrix(), BecameMergePlugin()
    metrics = [matrix, loss_metrics(epoch=True)]
    strategy = naive(mlp(), [GPMPlugin(), merge], metrics=metrics, loggers=[logger])
    benchmark = blobs(samples=40)
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    logger.log_result(
        accuracy=matrix.result(), figures={"small": tmp_path / "small.png"}, summary={"final ACC": matrix.acc}
    )
    folder, run_id = tmp_path / "wandb", logger.run.id
    logger.finish()
    wandb.teardown()  # or the file may not be written yet

    (file,) = folder.glob(f"offline-run-*/run-{run_id}.wandb")
    rows, run, summary = contents(file)
    assert list(rows) == sorted(rows)
    assert all(row["_step"] == step for step, row in rows.items())
    assert_stages_and_coefficients(rows, merge)
    losses = [step for step, row in rows.items() if any(name.startswith("Loss_Epoch/train_phase") for name in row)]
    assert losses == list(range(4, 41, 4))  # each epoch of each stage
    last = rows[strategy.clock.train_iterations]
    assert last["ACC/eval_phase/test_stream"] == matrix.acc
    assert last["BWT/eval_phase/test_stream"] == matrix.bwt
    assert np.isnan(rows[8]["BWT/eval_phase/test_stream"])

    assert (run.project, run.display_name, run.run_group) == ("became-avalanche", "long", "tests")
    assert config.items() <= values(run.config.update).items()
    assert summary["final ACC"] == matrix.acc

    files = file.parent / "files"
    assert (files / last["figures/small/path"]).read_bytes() == (tmp_path / "small.png").read_bytes()
    table = json.loads((files / last["accuracy/path"]).read_text())
    assert table["columns"] == ["after task", "task 1", "task 2", "task 3"]
    assert np.array_equal(np.array(table["data"])[:, 1:], matrix.result())
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file in written
    assert not [path for path in written if secret.encode() in path.read_bytes()]
