import fcntl
import io
import os
import re
import struct
import sys
import termios

import pytest

from became_avalanche.results.record import last_line
from became_avalanche.runs.progress import Event, Progress, duration
from tests.runs.components import BLOBS, record_of

MERGED, JOINT = BLOBS.spec("gpm+became", 1), BLOBS.spec("joint")


@pytest.fixture
def progress(capsys):
    with Progress({MERGED.key(): MERGED, JOINT.key(): JOINT}, done=3) as progress:
        assert capsys.readouterr().err == "2 of 5 runs to train\n"
        yield progress


def test_plain_lines(progress, capsys):
    key = MERGED.key()
    progress(Event(key, "epoch", 1, 1, 1))
    assert capsys.readouterr().err == ""
    progress(Event(key, "stage", 1, 1, 7, 0.5, 2.0))
    progress(Event(key, "stage", 2, 1, 1, None, 0.25))
    lines = [re.sub(r"about .* left", "left", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "gpm+became, seed 1, task 1 of 3, stage 1: 7 epochs, accuracy 50.00 %, 2.0 s (left)",
        "gpm+became, seed 1, task 2 of 3, stage 1: 1 epoch, 0.2 s (left)",
    ]
    done = record_of(MERGED, accuracy={"test": [[0.5, None], [0.25, 0.75]]})
    progress.finished(key, done, None)
    progress.finished(JOINT.key(), None, "its process was killed. Try again: now")
    assert capsys.readouterr().err.splitlines() == [
        "gpm+became, seed 1: done, ACC 50.00 %, BWT -25.00 % (4 of 5 runs)",
        "joint, seed 0: not finished: its process was killed. Try again: now (5 of 5 runs)",
    ]


def test_a_long_stage_is_not_silent(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("became_avalanche.runs.progress.perf_counter", lambda: clock[0])
    with Progress({MERGED.key(): MERGED}) as progress:
        for epoch in range(1, 16):
            clock[0] += 10
            progress(Event(MERGED.key(), "epoch", 1, 1, epoch))
    assert capsys.readouterr().err.splitlines()[1:] == [
        "gpm+became, seed 1, task 1 of 3, stage 1, epoch 7",
        "gpm+became, seed 1, task 1 of 3, stage 1, epoch 14",
    ]


def test_time_left_falls_during_a_stage(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("became_avalanche.runs.progress.perf_counter", lambda: clock[0])
    with Progress({MERGED.key(): MERGED}) as progress:  # stages: 1 + 2 + 2
        clock[0] = 100.0
        progress(Event(MERGED.key(), "stage", 1, 1, 1))
        for epoch in (1, 2):
            clock[0] += 70.0
            progress(Event(MERGED.key(), "epoch", 2, 1, epoch))
        clock[0] = 1000.0  # this stage takes longer than all were expected to take
        progress(Event(MERGED.key(), "epoch", 2, 1, 3))
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(", ")[2] for line in lines[1:]] == [
        "0.0 s (about 7 min left)",
        "epoch 1 (about 6 min left)",
        "epoch 2 (about 4 min left)",
        "epoch 3",
    ]


def test_a_failure_without_a_reason(progress, capsys):
    progress.finished(MERGED.key(), record_of(MERGED, "failed", 0), None)
    assert capsys.readouterr().err == "gpm+became, seed 1: failed: no reason given (4 of 5 runs)\n"


def test_time_left_does_not_count_what_was_resumed(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("became_avalanche.runs.progress.perf_counter", lambda: clock[0])
    with Progress({MERGED.key(): MERGED}) as progress:  # stages: 1 + 2 + 2
        progress(Event(MERGED.key(), "resumed", 2))
        clock[0] = 30.0
        progress(Event(MERGED.key(), "stage", 3, 1, 1))
        assert capsys.readouterr().err.splitlines()[1:] == [
            "gpm+became, seed 1: resumed after task 2 of 3",
            "gpm+became, seed 1, task 3 of 3, stage 1: 1 epoch, 0.0 s (about 30 s left)",
        ]


def test_time_left_of_two_workers_and_after_a_failure(capsys, monkeypatch):
    clock, other = [0.0], BLOBS.spec("gpm+became", 2)
    monkeypatch.setattr("became_avalanche.runs.progress.perf_counter", lambda: clock[0])
    with Progress({MERGED.key(): MERGED, other.key(): other}) as progress:  # stages of each: 1 + 2 + 2
        clock[0] = 60.0
        progress(Event(MERGED.key(), "stage", 1, 1, 1, seconds=60.0))
        progress(Event(other.key(), "stage", 1, 1, 1, seconds=60.0))
        progress.finished(other.key(), None, "its process was killed")
        clock[0] = 120.0
        progress(Event(MERGED.key(), "stage", 2, 1, 1, seconds=60.0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("(")[2] for line in lines[1:]] == [
        "about 9 min left)",  # nine stages, one per minute so far
        "about 4 min left)",  # eight stages, two per minute
        "1 of 2 runs)",
        "about 3 min left)",  # three stages, one per minute, because only one run is left
    ]


def test_a_terminal_has_one_live_line(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress({MERGED.key(): MERGED}) as progress:
        progress(Event(MERGED.key(), "epoch", 1, 1, 3))
        progress(Event(MERGED.key(), "stage", 1, 1, 3, 0.5))
        assert "\n" not in terminal.getvalue()
        assert "gpm+became, seed 1, task 1 of 3, stage 1, epoch 3" in terminal.getvalue()
        progress.finished(MERGED.key(), record_of(MERGED, "failed", 1, error="ValueError: no"), None)
    assert "gpm+became, seed 1: failed: ValueError: no (1 of 1 runs)\n" in terminal.getvalue()


def test_a_narrow_terminal_shows_the_time_left(monkeypatch):
    """Read from a real terminal, of 60 columns."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    label = MERGED.model_copy(update={"method": MERGED.method.model_copy(update={"label": "a long label " * 4})})
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress({MERGED.key(): label}) as progress:
            progress(Event(MERGED.key(), "epoch", 1, 1, 3))
        terminal.write("end")
        terminal.flush()
        shown = ""
        while not shown.endswith("end"):
            shown += os.read(reader, 10_000).decode()
        lines = shown.replace("\r", "\n").splitlines()
    os.close(reader)
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("  0 %, ? left: a long label a long") for line in lines)


def test_texts():
    assert [duration(seconds) for seconds in (0.4, 89, 91, 5399, 5401)] == ["0 s", "89 s", "2 min", "90 min", "1.5 h"]
    assert last_line("Traceback\n  x\na.b.CError: no: more\n") == "CError: no: more"
    assert last_line("KeyboardInterrupt") == "KeyboardInterrupt"
    assert last_line("cannot write to a.b: full") == "cannot write to a.b: full"
    assert last_line("") == ""
