import json
from math import inf, isnan, nan

import pytest
import torch
from safetensors.torch import save_file

from became_avalanche.strategy import statefile
from became_avalanche.strategy.statefile import StateFileError, read_state, write_state

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.int8, torch.bool]


def assert_equal(first, second):
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert first.stride() == second.stride()  # rounding depends on it
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)
    else:
        assert first == second


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.safetensors"


def test_everything_comes_back_as_it_was(path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "tensors": [torch.tensor([0, 1, 2]).to(dtype) for dtype in DTYPES],
        "shapes": (
            torch.tensor(1.5),
            torch.zeros(0),
            torch.zeros(2, 0, 3),
            base.T,
            base[:, ::2],
            base.T[:2].unsqueeze(0),
        ),
        "shared": {"a": base, "b": base, "row": base[1]},
        "plain": [None, True, 0, -1, 2**70, 0.1, -0.0, inf, -inf, "", 'λ "sha256":"' + "0" * 64 + '"', "tensor"],
        3: {0: {"w": torch.ones(1)}, 1: {}},
        "3": [[], (), {}, [("tensor", 0)]],
    }
    write_state(path, state, kind="test")
    assert_equal(read_state(path, kind="test"), state)


def test_numbers_that_json_does_not_know_come_back(path):
    write_state(path, {"nan": nan, "gradient": torch.tensor([nan, inf])}, kind="test")
    state = read_state(path, kind="test")
    assert isnan(state["nan"])
    assert state["gradient"].isnan().tolist() == [True, False]


def test_elements_that_share_memory_come_back_apart(path):
    write_state(path, {"w": torch.arange(3.0).expand(2, 3)}, kind="test")
    weight = read_state(path, kind="test")["w"]
    assert torch.equal(weight, torch.arange(3.0).expand(2, 3))
    assert weight.is_contiguous()


def test_parameters_come_back_as_tensors_of_their_own(path):
    layer = torch.nn.Linear(2, 2)
    write_state(path, {"w": layer.weight}, kind="test")
    weight = read_state(path, kind="test")["w"]
    assert type(weight) is torch.Tensor
    assert not weight.requires_grad
    weight.add_(1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [0, {"b": {1, 2}}]}, r"state\['a'\]\[1\]\['b'\]: it is a set"),
        ({"a": {0.5: 1}}, r"state\['a'\]: its key 0\.5"),
    ],
)
def test_what_cannot_be_saved_is_named(path, state, message):
    with pytest.raises(TypeError, match=message):
        write_state(path, state, kind="test")
    assert not path.exists()


def test_missing_and_foreign_files_are_refused(path):
    with pytest.raises(StateFileError, match=r"cannot read .*state\.safetensors: No such file"):
        read_state(path, kind="test")
    path.write_text("not a state file at all")
    with pytest.raises(StateFileError, match="is not a state file"):
        read_state(path, kind="test")
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(StateFileError, match="is not a state file"):
        read_state(path, kind="test")
    save_file({"w": torch.ones(2)}, path, {"kind": "test"})
    with pytest.raises(StateFileError, match="lacks content, schema, sha256"):
        read_state(path, kind="test")
    write_state(path, {}, kind="other")
    with pytest.raises(StateFileError, match="of the kind 'other', not 'test'"):
        read_state(path, kind="test")


def test_a_newer_version_is_refused(path, monkeypatch):
    monkeypatch.setattr(statefile, "SCHEMA", 2)
    write_state(path, {"a": 1}, kind="test")
    monkeypatch.undo()
    with pytest.raises(StateFileError, match=r"schema version 2.*reads up to 1: upgrade"):
        read_state(path, kind="test")


def test_every_truncation_and_every_changed_byte_is_noticed(path):
    write_state(path, {"a": [1, nan], "w": torch.arange(3.0)}, kind="test")
    sound = path.read_bytes()
    assert json.loads(sound[8 : 8 + int.from_bytes(sound[:8], "little")])["__metadata__"]["kind"] == "test"
    for size in range(len(sound)):
        path.write_bytes(sound[:size])
        with pytest.raises(StateFileError):
            read_state(path, kind="test")
    for place in range(len(sound)):
        for flip in (1, 0x80, sound[place] ^ ord(" ")):
            changed = bytearray(sound)
            changed[place] ^= flip
            if bytes(changed) == sound:
                continue
            path.write_bytes(changed)
            with pytest.raises(StateFileError):
                read_state(path, kind="test")
    path.write_bytes(sound + b"\0")
    with pytest.raises(StateFileError, match="bytes instead of"):
        read_state(path, kind="test")
