"""Engines give the same numbers, share data, and lose at most the run whose process is killed."""

import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from avalanche.training.plugins import SupervisedPlugin

from became_avalanche import Inline, Method, Processes, Store, find_benchmark
from became_avalanche.benchmarks import files
from became_avalanche.cli import main
from became_avalanche.results.record import read_records
from became_avalanche.runs.engines import ENGINES, _save_record
from became_avalanche.runs.progress import Progress, ignore
from became_avalanche.runs.run import Local, run
from became_avalanche.runs.spec import RunSpec, SpecError, Stream

from .conftest import contents, final_state, forked, how_it_ended, numbers, same, tiny

BECAME = [sys.executable, "-c", "from became_avalanche.cli import main; main()"]


def outcomes(engine, specs, store, **local):
    """How each run ended, in the order of the specifications."""
    ended = {outcome.spec.key(): outcome for outcome in engine.run(specs, store, Local(**local), ignore)}
    assert len(ended) == len(specs)
    return [ended[spec.key()] for spec in specs]


def specs_of(*methods, **fields):
    return [tiny(method, n_tasks=2, **fields) for method in methods]


class Suicidal(SupervisedPlugin):
    """A plugin that kills its process once, in the second task, as the system does when memory runs out."""

    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def before_training_exp(self, strategy, **kwargs):
        if strategy.experience.current_experience == 1 and not os.path.exists(self.flag):
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.fixture
def suicidal(tmp_path):
    method = Method(base=Suicidal, options={"flag": str(tmp_path / "killed")})
    return find_benchmark("split-digits").spec(method, n_tasks=2, max_epochs=1)


# --------------------------------------------------------------------------------------------------- local processes


def test_processes_give_the_records_of_the_inline_engine(tmp_path):
    specs = specs_of("gpm", "gpm+became", "finetune")
    inline, processes = Store(tmp_path / "inline"), Store(tmp_path / "processes")
    both = zip(outcomes(Inline(), specs, inline), outcomes(Processes(2), specs, processes), strict=True)
    for spec, (one, other) in zip(specs, both, strict=True):
        assert numbers(one.record) == numbers(other.record) == numbers(processes.find(spec))
        assert one.record.environment == other.record.environment
        assert same(final_state(inline, spec), final_state(processes, spec))


def test_a_killed_worker_fails_one_run_which_resumes(store, suicidal):
    specs = [suicidal, *specs_of("finetune", "gpm", max_epochs=1)]
    killed, plain, other = outcomes(Processes(1), specs, store)
    assert killed.record is None
    assert killed.problem.startswith("its process was killed")
    assert plain.record.status == other.record.status == "done"
    (again,) = outcomes(Processes(1), [suicidal], store)
    assert (again.record.status, again.record.resumed) == ("done", [1])
    assert again.record.accuracy == plain.record.accuracy  # the plugin does nothing else


class Faulty:
    """A folder of runs with a bug: it raises an unexpected error."""

    root = Path("nowhere")

    def open(self, spec):
        raise RuntimeError("a fault of ours")


def test_an_unexpected_error_is_a_problem_of_one_run():
    (outcome,) = outcomes(Inline(), [tiny()], Faulty())
    assert (outcome.record, outcome.problem) == (None, "RuntimeError: a fault of ours")


def test_more_threads_than_processors_are_noticed(store, monkeypatch):
    monkeypatch.setattr("became_avalanche.runs.engines._processors", lambda: 1)
    specs = specs_of("finetune", "gpm", max_epochs=1)
    with pytest.warns(UserWarning, match=r"2 threads \(2 workers x 1\) would share 1 processor"):
        assert len(outcomes(Processes(2), specs, store)) == 2


def test_workers_are_at_least_one():
    with pytest.raises(ValueError, match="workers must be at least 1; got 0"):
        Processes(0)


def test_lines_of_several_workers_do_not_mix(store, capfd):
    specs = specs_of("finetune", "gpm", "gpm-2x", max_epochs=1)
    with Progress({spec.key(): spec for spec in specs}) as progress:
        for outcome in Processes(2).run(specs, store, Local(), progress):
            progress.finished(outcome.spec.key(), outcome.record, outcome.problem)
    first, *lines = capfd.readouterr().err.splitlines()
    assert first == "3 of 3 runs to train"
    stage = r"task \d of 2, stage \d: 1 epoch(, accuracy [\d.]+ %)?, [\d.]+ s \(about .* left\)"
    end = r"done, ACC [\d.]+ %, BWT -?[\d.]+ % \(\d of 3 runs\)"
    for line in lines:
        assert re.fullmatch(rf"(finetune|gpm|gpm-2x), seed 0(, {stage}|: {end})", line), line
    assert len(lines) == 2 + 2 + 3 + 3


def test_all_engines_are_known_by_name():
    assert list(ENGINES) == ["inline", "processes", "ray"]


# -------------------------------------------------------------------------------------------------------------- data


@files.cached(1)
def load_images(folder):
    """Images from a file; notes which process has read it."""
    with open(folder / "readers", "a") as readers:
        readers.write(f"{os.getpid()}\n")
    return torch.load(folder / "images.pt")


def stream_of_files(seed, dataset_root, device):
    """A stream that reads files."""
    from tests.helpers import blobs

    images = load_images(Path(dataset_root))
    assert images.is_shared() or os.environ["TEST_PROCESS"] == str(os.getpid())
    return blobs(seed=int(images.sum()))


@pytest.fixture
def from_files():
    benchmark = find_benchmark("split-digits").spec("finetune", n_tasks=2, max_epochs=1).model_dump()
    network = {"name": "mlp", "options": {"input_size": 6}}
    stream = Stream(name=stream_of_files, n_tasks=3)
    return RunSpec.model_validate({**benchmark, "stream": stream, "network": network})


def test_data_are_read_once_and_shared(store, tmp_path, monkeypatch, from_files):
    torch.save(torch.arange(6), tmp_path / "images.pt")
    monkeypatch.setenv("TEST_PROCESS", str(os.getpid()))
    specs = [from_files.model_copy(update={"seed": seed}) for seed in range(3)]
    ended = outcomes(Processes(2), specs, store, data=tmp_path)
    assert [outcome.record and outcome.record.status for outcome in ended] == ["done"] * 3, ended
    assert (tmp_path / "readers").read_text().split() == [str(os.getpid())]
    files.forget_loaded()


def test_missing_data_are_a_problem_of_the_runs_that_need_them(store):
    missing = find_benchmark("20-split-miniimagenet").spec("finetune")
    here = tiny("finetune", n_tasks=2, max_epochs=1)
    refused, done = outcomes(Processes(1), [missing, here], store, data="nowhere")
    assert "miniImageNet is missing" in refused.problem
    assert done.record.status == "done"


# ------------------------------------------------------------------------------------------------------------ Ctrl-C


def children_of(group):
    """The processes of a process group that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def command(root, *options):
    return ["compare", "--methods", "gpm,gpm+became", "--seeds", "1", "--epochs", "5", "--out", str(root), *options]


def study(root, *options):
    """The study in another interpreter."""
    return subprocess.Popen(
        [*BECAME, *command(root, *options)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs are started without it
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class ForkedStudy:
    """The study in a forked process, which has all imports already, with what the tests need of ``Popen``."""

    def __init__(self, root, *options):
        read, write = os.pipe()

        def child():
            os.setsid()
            forkserver._forkserver.__init__()  # that of the tests is no child of this process
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = ["became", *command(root, *options)]
            with open(os.devnull, "w") as out, open(write, "w", buffering=1) as err:
                sys.stdout, sys.stderr = out, err
                try:
                    main()
                except SystemExit as end:
                    err.flush()
                    os._exit(end.code)

        self.pid = forked(child)
        os.close(write)
        self.stderr = os.fdopen(read)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout=None):
        with self.stderr:
            errors = self.stderr.read()
        self.returncode = how_it_ended(self.pid)
        return None, errors


def read_until(process, text):
    """Read lines of the progress until one has this text, and return them."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return "".join(lines)
    return pytest.fail(f"the study ended before {text!r}: {lines}")


def wait_until_alone(group, seconds=60):
    end = time.monotonic() + seconds
    while (left := children_of(group)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The runs of ``study``."""
    store = Store(tmp_path_factory.mktemp("whole"))
    for method in ("gpm", "gpm+became"):
        run(find_benchmark("split-digits").spec(method, max_epochs=5), store)
    return store


@pytest.mark.parametrize(
    ("start", "options"),
    [
        pytest.param(ForkedStudy, ("--engine", "inline"), id="inline"),
        pytest.param(ForkedStudy, ("--engine", "processes", "--workers", "2"), id="processes"),
        pytest.param(
            study, ("--engine", "processes", "--workers", "2"), id="fresh interpreter", marks=pytest.mark.long
        ),
    ],
)
def test_interrupting_stops_all_workers_and_the_rerun_is_bitwise_the_same(start, options, tmp_path, uninterrupted):
    root = tmp_path / "runs"
    process = start(root, *options)
    before = read_until(process, "task 2 of 5, stage 1")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not re.search(r"Warning: (?!\d+ threads)", before + errors)  # on one processor, two workers get a warning
    assert f"became: interrupted; 0 of 2 runs are finished in {root}. Rerun the same command to resume." in errors
    assert "Traceback" not in errors
    assert wait_until_alone(process.pid) == []

    specs = [find_benchmark("split-digits").spec(method, max_epochs=5) for method in ("gpm", "gpm+became")]
    store = Store(root)
    ended = outcomes(Inline(), specs, store)
    assert any(outcome.record.resumed for outcome in ended)
    for outcome in ended:
        assert numbers(outcome.record) == numbers(uninterrupted.find(outcome.spec))
        assert same(final_state(store, outcome.spec), final_state(uninterrupted, outcome.spec))


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    process = ForkedStudy(tmp_path / "runs", "--engine", "processes", "--workers", "2")
    read_until(process, "task 2 of 5, stage 1")  # the record of the first task is saved
    process.kill()
    assert wait_until_alone(process.pid) == []
    process.communicate()
    assert {record.status for record in read_records(tmp_path / "runs")} == {"running"}  # none has failed


# --------------------------------------------------------------------------------------------------------------- Ray


def test_without_ray_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SpecError, match=r"pip install 'became-avalanche\[ray\]'"):
        ENGINES["ray"]()


def test_records_are_brought_back_from_a_folder_that_is_not_shared(store, tmp_path):
    spec = tiny("finetune", n_tasks=2, max_epochs=1)
    record = run(spec, Store(tmp_path / "node"))
    _save_record(spec, record, store)
    assert store.find(spec) == record
    before = contents(store.root)
    _save_record(spec, record, store)
    assert contents(store.root) == before
    failed = record.model_copy(update={"status": "failed", "error": "earlier"})
    store.folder(spec).record_path.write_text(failed.to_json())
    _save_record(spec, record, store)
    assert store.find(spec) == record


# ------------------------------------------------------------------------------------------------- Ray, for real


def marked_processes(mark):
    """The other processes that have inherited this text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture
def ray(monkeypatch):
    """Ray without usage reports, and a check that no process of it is left."""
    module = pytest.importorskip("ray", reason="Ray is not installed: pip install 'became-avalanche[ray]'")
    mark = f"RAY_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(*mark.split("="))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    yield module
    module.shutdown()
    end = time.monotonic() + 30
    while (left := marked_processes(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    assert left == []


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray leaves sockets and files to the garbage collector
def test_ray_on_one_machine_gives_the_records_of_the_inline_engine(ray, tmp_path):
    specs = specs_of("finetune", "gpm+became")
    inline, cluster = Store(tmp_path / "inline"), Store(tmp_path / "ray")
    events = []
    ended = {outcome.spec.key(): outcome for outcome in ENGINES["ray"]().run(specs, cluster, Local(), events.append)}
    assert not ray.is_initialized()
    for outcome in outcomes(Inline(), specs, inline):
        there = ended[outcome.spec.key()]
        assert there.problem is None
        assert numbers(there.record) == numbers(outcome.record) == numbers(cluster.find(outcome.spec))
    assert {event.key for event in events if event.kind == "stage"} == {spec.key() for spec in specs}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_that_loses_a_node_finishes_every_run_with_the_same_numbers(ray, tmp_path):
    from ray.cluster_utils import Cluster

    benchmark = find_benchmark("permuted-digits")
    methods, budget = ("gpm", "finetune+became"), {"n_tasks": 4, "max_epochs": 25}
    specs = [benchmark.spec(method, seed, **budget) for seed in (0, 1) for method in methods]
    store = Store(tmp_path / "ray")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    under_way = set()

    def lose_a_node(event):
        """As soon as each node has finished a task of its run."""
        nonlocal second
        if event.task >= 2:
            under_way.add(event.key)
        if len(under_way) == 2 and second is not None:
            cluster.remove_node(second, allow_graceful=False)
            second = None

    try:
        ended = {}
        for outcome in ENGINES["ray"](cluster.address).run(specs, store, Local(), lose_a_node):
            ended[outcome.spec.key()] = outcome
            assert second is None, "a run was finished before the node was lost"
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert [outcome.problem for outcome in ended.values()] == [None] * len(specs)
    assert any(outcome.record.resumed for outcome in ended.values())
    for outcome in outcomes(Inline(), specs, Store(tmp_path / "inline")):
        assert numbers(ended[outcome.spec.key()].record) == numbers(outcome.record) == numbers(store.find(outcome.spec))
