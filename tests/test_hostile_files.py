"""Files that somebody has damaged, or made on purpose: run folders, checkpoints, studies, records and data sets.

Whatever is in them, reading them gives a value or one of our own errors. It runs no code, writes nothing, and needs no
more memory than the file justifies. ``make test-long`` tries 12,000 damaged files, ``make test`` some hundred.
"""

import errno
import gzip
import io
import json
import os
import pickle
import random
import re
import resource
import signal
import struct
import sys
import zlib
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from became_avalanche import METRICS, Store, Study, find_benchmark, load_strategy, read_record, save_strategy
from became_avalanche.benchmarks import files, five
from became_avalanche.files import sealed_json
from became_avalanche.results.record import RecordError
from became_avalanche.results.scans import PathScan, read_scans
from became_avalanche.results.tables import gains, table
from became_avalanche.runs.run import run
from became_avalanche.runs.spec import SpecError, read_spec
from became_avalanche.runs.store import StoreError
from became_avalanche.runs.study import status_of
from became_avalanche.strategy import statefile
from became_avalanche.strategy.statefile import StateFileError, read_state, write_state
from tests.helpers import mlp, naive
from tests.runs.conftest import forked, how_it_ended

SPEC = find_benchmark("split-digits").spec("gpm+became", 0, n_tasks=2, max_epochs=1)

STUDY = """
name = "mine"
benchmarks = ["split-digits", "permuted-digits"]
seeds = [0, 3]
n_tasks = 2
max_epochs = 1
methods = ["gpm", "gpm-2x", { name = "gpm+became", label = "ours", options = { threshold = 0.9 } }]
"""


# ------------------------------------------------------------------------------------------------------- the readers


def read_whole_record(path):
    record = read_record(path)
    for metric in METRICS.values():
        metric.of(record)
    table([record]).csv()
    gains([record])


def read_svhn(path):
    path.with_name("train_32x32.mat").write_bytes(path.read_bytes())
    five._svhn.__wrapped__(path.parent)


READERS = {
    "checkpoint": (lambda path: read_state(path, kind="checkpoint"), StateFileError),
    "record.json": (read_whole_record, RecordError),
    "spec.json": (read_spec, SpecError),
    "study.toml": (lambda path: Study.read(path).specs(), SpecError),
    "batch": (lambda path: files.pickled_images(path, ("data", "labels")), ValueError),
    "images-ubyte": (lambda path: files.load_idx(path.parent, path.name), ValueError),
    "images-ubyte.gz": (lambda path: files.load_idx(path.parent, path.stem), ValueError),
    "test_32x32.mat": (read_svhn, ValueError),
    "image.png": (lambda path: files.decode([path], 4, "RGB", "images"), ValueError),
    "image.jpeg": (lambda path: files.decode([path], 4, "RGB", "images"), ValueError),
}
"""Name of a file -> what reads it, and the only error that this may raise."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A sound file of each kind."""
    folder = tmp_path_factory.mktemp("sound")
    store = Store(tmp_path_factory.mktemp("runs"))
    run(SPEC, store)
    done = store.folder(SPEC)
    state = {
        "key": done.path.name,
        "list": [1, 2.5, None, "text"],
        "tensor": torch.arange(6.0).reshape(2, 3).T,
        3: (1,),
    }
    write_state(folder / "checkpoint", state, kind="checkpoint")
    for name in ("record.json", "spec.json"):
        (folder / name).write_bytes((done.path / name).read_bytes())
    (folder / "study.toml").write_text(STUDY)
    pixels = np.arange(24, dtype=np.uint8)
    labels = {"data": pixels.reshape(2, 12), "labels": [0, 1], "filenames": ["a.png", "b.png"]}
    (folder / "batch").write_bytes(pickle.dumps(labels, protocol=2))
    idx = struct.pack(">HBBII", 0, 8, 2, 4, 6) + pixels.tobytes()
    (folder / "images-ubyte").write_bytes(idx)
    (folder / "images-ubyte.gz").write_bytes(gzip.compress(idx))
    images = np.zeros((32, 32, 3, 2), np.uint8)
    savemat(folder / "test_32x32.mat", {"X": images, "y": [[1], [10]]}, do_compression=True)
    for kind in ("png", "jpeg"):
        Image.fromarray(pixels.reshape(4, 6)).save(folder / f"image.{kind}")
    for name, (read, _) in READERS.items():
        if name != "test_32x32.mat":  # two images are too few
            read(folder / name)
    return folder


# ------------------------------------------------------------------------------------------------------------ damage

SPLINTERS = (
    b"",
    b"\0" * 8,
    b"\xff" * 8,
    b"[" * 3000,
    b"{",
    b'"',
    b"../" * 3,
    b"\x80\x05.",
    b"NaN",
    b"9" * 30,
    b"\xed\xa0\x80",
)


def damaged(content, rng):
    """The content with bits flipped, cut off, or a piece taken out, doubled or replaced."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        here, there = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        there = min(there, here + rng.choice((1, 4, 64, 4096)))
        match rng.randrange(6):
            case 0 | 1 if here < len(content):
                content[here] ^= 1 << rng.randrange(8)
            case 2:
                del content[here:]
            case 3:
                del content[here:there]
            case 4:
                content[here:here] = content[here:there]
            case _:
                content[here : here + rng.choice((0, 8))] = rng.choice(SPLINTERS)
        if not content:
            break
    return bytes(content)


VALUES = (
    None,
    True,
    -1,
    0,
    2**31,
    10**25,
    -1e308,
    0.5,
    "",
    "x" * 300,
    "../../up",
    "\ud800",
    "os:system",
    "\0",
    [],
    {},
    [[]],
)


def other_values(value, rng):
    """Plain values with one of them replaced, left out, doubled or renamed, anywhere in the structure."""
    places = [
        (owner, key)
        for owner in _containers(value)
        for key in (owner if isinstance(owner, dict) else range(len(owner)))
    ]
    if not places:
        return rng.choice(VALUES)
    for _ in range(rng.choice((1, 1, 3))):
        owner, key = rng.choice(places)
        match rng.randrange(5):
            case 0 if isinstance(owner, dict):
                owner.pop(key, None)
            case 1 if isinstance(owner, dict):
                owner[rng.choice(("__class__", "", "../up", key + "_"))] = owner.get(key)
            case 2 if isinstance(owner, list):
                owner.extend(owner[-1:] * rng.choice((1, 50)))
            case _ if isinstance(owner, dict) or key < len(owner):
                owner[key] = rng.choice(VALUES)
    return value


def _containers(value):
    if isinstance(value, dict | list):
        yield value
        for inner in list(value.values()) if isinstance(value, dict) else list(value):
            yield from _containers(inner)


def other_json(content, rng):
    """A file with a right checksum over wrong values."""
    values = json.loads(content)
    del values["sha256"]
    changed = other_values(values, rng)
    try:
        return sealed_json(changed).encode() if isinstance(changed, dict) else json.dumps(changed).encode()
    except UnicodeEncodeError:
        return json.dumps(changed).encode()


def other_checkpoint(content, rng):
    """A state file with a right checksum over a wrong header, metadata or structure."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = header["__metadata__"]
    structure = json.loads(metadata["content"])
    match rng.randrange(3):
        case 0:
            metadata["content"] = json.dumps(other_values(structure, rng))
        case 1:
            header = other_values(header, rng)
        case _:
            metadata["schema"], metadata["kind"] = rng.choice(("1", "x", "-1", "²")), rng.choice(("checkpoint", "y"))
    return signed(header, content[8 + size :])


def signed(header, rest):
    """A state file of a header and tensors, with a right checksum if the header has a place for it."""
    if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["sha256"] = statefile._UNSIGNED
    text = json.dumps(header, separators=(",", ":")).encode()
    unsigned = struct.pack("<Q", len(text)) + text + rest
    return statefile._with_checksum(unsigned, statefile._UNSIGNED, statefile.sha256(unsigned).hexdigest())


STRUCTURED = {"checkpoint": other_checkpoint, "record.json": other_json, "spec.json": other_json}


# ------------------------------------------------------------------------------------------------------------- trials

SPARE = 2**28
"""Bytes of memory that a reader may need more than there are."""

FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "os.remove",
    "os.rename",
)


def trial(names, sound, tmp_path, n, seed=0):
    """Let each reader read ``n`` damaged files, in a process that may use little memory and write nothing elsewhere."""

    def child():
        import_module("matplotlib.pyplot")  # imports need memory, too

        for name, (read, _) in READERS.items():
            try:
                read(sound / name)
            except ValueError:
                assert name == "test_32x32.mat"
        tmp_path.mkdir(exist_ok=True)
        armed = []

        def watch(event, arguments):
            if armed and (
                event in FORBIDDEN or (event == "open" and _writes(arguments) and not _inside(arguments, tmp_path))
            ):
                raise PermissionError(f"a reader tried {event} {arguments}")

        sys.addaudithook(watch)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + SPARE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.signal(signal.SIGVTALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("a reader takes seconds")))
        for name in names:
            read, error = READERS[name]
            content, rng = (sound / name).read_bytes(), random.Random(f"{name} {seed}")
            for case in range(n):
                harm = STRUCTURED[name] if name in STRUCTURED and case % 2 else damaged
                path = tmp_path / name
                path.write_bytes(harm(content, rng))
                armed.append(True)
                signal.setitimer(signal.ITIMER_VIRTUAL, 10)
                try:
                    read(path)
                except error:
                    pass
                except BaseException:
                    print(f"case {case} of {name}: {path.read_bytes()[:2000]!r}", file=sys.__stderr__)
                    raise
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                    armed.clear()

    assert how_it_ended(forked(child)) == 0


def _writes(arguments):
    return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR)) if isinstance(arguments[2], int) else False


def _inside(arguments, folder):
    return str(arguments[0]).startswith(str(folder))


def test_damaged_files(sound, tmp_path):
    trial(READERS, sound, tmp_path / "some", 40)


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files(name, sound, tmp_path):
    trial([name], sound, tmp_path / "many", 1200, seed=1)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=10)
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="replace")))
def test_any_bytes(name, sound, content):
    path = sound.with_name("any") / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    read, error = READERS[name]
    if name == "study.toml" or name == "test_32x32.mat":
        error = (error, ValueError)
    with pytest.raises(error):
        read(path)


# --------------------------------------------------------------------------------------------------- made on purpose


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


class Twice(Call):
    """... with a state."""

    def __init__(self, function, *arguments, state):
        super().__init__(function, *arguments)
        self.state = state

    def __reduce__(self):
        return self.function, self.arguments, self.state


def doubled(levels):
    values = [0]
    for _ in range(levels):
        values = [values, values]
    return values


def bomb(n):
    return gzip.compress(struct.pack(">HBBI", 0, 8, 1, n)[:8] + bytes(n))


OBJECTS = Twice(np.dtype, "u1", False, True, state=(3, "<", None, ("a",), {"a": (np.dtype("O"), 0)}, 64, 1, 63))

PICKLES = {
    "a command": (pickle.dumps(Call(os.system, "touch ran")), r"asks for (posix|nt)\.system"),
    "a command by OBJ": (b"(cos\nsystem\nS'touch ran'\no.", r"asks for os\.system"),
    "eval": (pickle.dumps(Call(eval, "open('ran', 'w')")), "asks for builtins.eval"),
    "an attribute of a module": (b"\x80\x04\x8c\x05numpy\x8c\x0dlib.npyio.sys\x93.", "asks for numpy.lib.npyio.sys"),
    "an array of addresses": (
        pickle.dumps({"data": Call(np.ndarray, (1,), OBJECTS, bytes(64)), "labels": [0]}), "is corrupt"),
    "numbers made into addresses": (
        pickle.dumps({"data": Call(np.frombuffer, bytes(64), OBJECTS), "labels": [0]}), "asks for"),
    "objects": (pickle.dumps({"data": np.array([{}], dtype=object), "labels": [0]}), "only numbers are allowed"),
    "a huge array": (pickle.dumps({"data": Call(np.ndarray, (10**13,), np.dtype("u1")), "labels": [0]}), "is corrupt"),
    "a huge text": (b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.", "is corrupt"),
    "a huge number of a value": (b"\x80\x02]r\xf0\xff\xff\x7f.", "gives a value the number"),
    "lists of lists of lists": (pickle.dumps({"data": np.zeros(4, np.uint8), "labels": doubled(40)}), "no arrays"),
    "a deep list": (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "no arrays|is corrupt"),
}  # fmt: skip


@pytest.mark.parametrize("case", PICKLES)
def test_pickles_that_want_more_than_numbers(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, message = PICKLES[case]
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(ValueError, match=message), little_memory():
        files.pickled_images(tmp_path / "batch", ("data", "labels"))
    assert os.listdir(tmp_path) == ["batch"]


@contextmanager
def little_memory():
    """A context in which not much more memory can be had."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def huge_png(side):
    """A file of a pixel that says it is a square of ``side`` pixels."""
    content = io.BytesIO()
    Image.new("L", (1, 1)).save(content, "PNG")
    pixel = content.getvalue()
    header = b"IHDR" + struct.pack(">II", side, side) + pixel[24:29]
    return pixel[:12] + header + struct.pack(">I", zlib.crc32(header)) + pixel[33:]


def nested(n):
    return '{"schema_version": 1, "key": ' + "[" * n + "]" * n + "}"


def record_with(**changes):
    return lambda sound: sealed_json({**_unsealed(sound / "record.json"), **changes})


def _unsealed(path):
    return {name: value for name, value in json.loads(path.read_bytes()).items() if name != "sha256"}


def state_with(structure, shapes=()):
    """A signed state file with this structure, and tensors of these declared shapes but no values."""

    def content(sound):
        metadata = {
            "kind": "checkpoint",
            "schema": "1",
            "content": json.dumps(structure),
            "sha256": statefile._UNSIGNED,
        }
        tensors = {str(i): {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for i, shape in enumerate(shapes)}
        return signed({"__metadata__": metadata, **tensors}, b"")

    return content


def deep_state():
    content = '["dict", ["a", ' + '["list", ' * 5000 + "1" + "]" * 5002
    return signed({"__metadata__": {"kind": "checkpoint", "schema": "1", "content": content}}, b"")


CASES = {
    "JSON nested deeply": ("record.json", nested(100_000), "nested too deeply"),
    "NaN in a record": ("record.json", '{"schema_version": 1, "key": NaN}', "NaN is not a number"),
    "a number of 5000 digits": ("record.json", '{"schema_version": 1' + "0" * 5000 + "}", "is corrupt"),
    "an accuracy matrix of empty rows": (
        "record.json", record_with(accuracy={"test": [[]] * 50_000}), "one column per task"),
    "a specification without a seed": ("record.json", record_with(spec={"benchmark": "x"}), "seed"),
    "so many tasks": ("spec.json", '{"schema_version": 1, "n_tasks": 1e99}', "n_tasks"),
    "TOML nested deeply": ("study.toml", "methods = " + "[" * 100_000, "nested too deeply"),
    "10^12 seeds": ("study.toml", STUDY.replace("[0, 3]", "1000000000000"), "from 1 to 1000"),
    "a name that leads elsewhere": ("study.toml", STUDY.replace('"mine"', '"../../mine"'), "no slashes"),
    "a name with a zero byte": ("study.toml", STUDY.replace('"mine"', '"mi\\u0000ne"'), "printable"),
    "a tensor larger than its values": ("checkpoint", state_with(["dict"], [[2**40]]), "corrupt"),
    "strides beyond the values": (
        "checkpoint", state_with(["dict", ["a", ["tensor", 0, [2**40, 1]]]], [[0, 3]]), None),
    "a tensor that is not there": ("checkpoint", state_with(["dict", ["a", ["tensor", 7, None]]]), "corrupt"),
    "a key that is a list": ("checkpoint", state_with(["dict", [["a"], 1]]), "corrupt"),
    "a list for a state": ("checkpoint", state_with(["list"]), "instead of a dict"),
    "a structure nested deeply": ("checkpoint", lambda sound: deep_state(), "corrupt"),
    "a header of 2^60 bytes": ("checkpoint", struct.pack("<Q", 2**60) + b"{}", "not a state file"),
    "a gzip bomb": ("images-ubyte.gz", lambda sound: bomb(2**24), None),
    "a gzip bomb that says it is small": (
        "images-ubyte.gz", lambda sound: gzip.compress(struct.pack(">HBBI", 0, 8, 1, 3) + bytes(2**24)), "incomplete"),
    "an image of 9000 x 9000 pixels": ("image.png", lambda sound: huge_png(9000), "9000 x 9000 pixels"),
    "an image of 50000 x 50000 pixels": ("image.png", lambda sound: huge_png(50_000), "decompression bomb"),
    "PostScript called png": ("image.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be decoded"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_files_made_on_purpose(case, sound, tmp_path):
    name, content, message = CASES[case]
    content = content(sound) if callable(content) else content
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    read, error = READERS[name]
    with little_memory():
        if message is None:
            read(tmp_path / name)
        else:
            with pytest.raises(error, match=message):
                read(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["random"]["numpy"]["state"].update(pos=10**6), "random state of NumPy is corrupt"),
        (lambda state: state["random"].update(torch=torch.zeros(3)), "does not fit this strategy|RNG state"),
        (lambda state: state["optimizer"]["replaced"].update({"features.0.weight": [10**12, 6]}), "not fit into its"),
        (lambda state: state["model"]["units"].update({"classifier.classifiers.0": 10**12}), "weight has 2 rows"),
        (lambda state: state["model"]["heads"].update({"features": ["0"]}), "does not fit this strategy"),
        (lambda state: state["model"]["tensors"].pop("features.0.weight"), "does not exist"),
        (lambda state: state["plugins"].pop(), "same plugins in the same order"),
        (lambda state: state.pop("model"), "does not fit this strategy"),
        (lambda state: state["optimizer"]["groups"][0].append("__class__"), "does not fit this strategy"),
    ],
)  # fmt: skip
def test_checkpoints_that_do_not_fit(change, message, tmp_path):
    strategy = naive(mlp())
    save_strategy(strategy, tmp_path / "sound")
    state = read_state(tmp_path / "sound", kind="strategy")
    change(state)
    write_state(tmp_path / "state", state, kind="strategy")
    with pytest.raises(ValueError, match=message), little_memory():
        load_strategy(naive(mlp()), tmp_path / "state")


# --------------------------------------------------------------------------------------------------------- run folders


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that is not finished."""
    folder = Store(tmp_path / "runs").open(SPEC)
    folder.keep_spec(SPEC)
    return folder


@pytest.mark.parametrize("name", ["lock", "log.txt"])
def test_a_link_in_a_run_folder_harms_no_file_elsewhere(name, folder, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (folder.path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(StoreError, match=re.escape(os.strerror(errno.ELOOP))):
        run(SPEC, Store(tmp_path / "runs"))
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("name", ["record.json", "spec.json", "checkpoint-001.safetensors"])
def test_a_link_is_replaced_and_its_goal_is_left_alone(name, folder, tmp_path):
    goal = tmp_path / "goal"
    goal.write_bytes((folder.path / "spec.json").read_bytes() if name == "spec.json" else b"precious")
    before = goal.read_bytes()
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).symlink_to(goal)
    store = Store(tmp_path / "runs")
    if name == "record.json":
        with pytest.raises(RecordError, match="is corrupt"):
            run(SPEC, store)
    else:
        assert run(SPEC, store).status == "done"
    assert goal.read_bytes() == before


def test_a_run_folder_that_is_a_link(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    store = Store(tmp_path / "runs")
    store.make_writable()
    store.folder(SPEC).path.symlink_to(elsewhere)
    with pytest.raises(StoreError, match=r"is a link to .*elsewhere; replace the link by the folder itself"):
        run(SPEC, store)
    assert not os.listdir(elsewhere)


@pytest.mark.parametrize("name", ["record.json", "spec.json", "lock"])
def test_a_pipe_in_a_run_folder_does_not_block(name, folder, tmp_path):
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)
    store = Store(tmp_path / "runs")
    with pytest.raises((StoreError, RecordError, SpecError), match="not a regular file"):
        run(SPEC, store)
    (status,) = status_of([SPEC], store)
    assert status.state in ("unreadable", "interrupted")


def test_a_pipe_instead_of_a_scan_does_not_block(tmp_path):
    os.mkfifo(PathScan.path(tmp_path, 2))
    with pytest.raises(RecordError, match="not a regular file"):
        read_scans(PathScan, tmp_path)


def test_looking_at_a_run_folder_imports_nothing_that_it_names(folder, tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    for component in ("stream", "network"):
        values = _unsealed(folder.path / "spec.json")
        values[component]["name"] = "evil:component"
        values["method"]["base"] = "evil:Plugin"
        (folder.path / "spec.json").write_text(sealed_json(values))
    (status,) = status_of([SPEC], Store(tmp_path / "runs"))
    assert status.state == "missing"  # the folder belongs to another specification
    assert not (tmp_path / "ran").exists()
