"""Read and write nested tensors and plain values as one file. Reading it executes no code.

It is a safetensors file. Its metadata hold the nested structure with all plain values as JSON, the kind of the file,
the version of the format and a checksum over the whole file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from became_avalanche.files import read_file, write_atomically

SCHEMA = 1
"""Version of the format. Raise it with every change that an older version of the package would misread."""

_UNSIGNED = "0" * 64
"""Placeholder for the checksum while it is computed."""


class StateFileError(ValueError):
    """Raised if a state file cannot be read: it is missing, corrupt, of another kind or of a newer version."""


def write_state(path: str | PathLike[str], state: Mapping[Any, Any], *, kind: str) -> None:
    """Write a state to a file, completely or not at all.

    :param path: the file; an existing one is replaced.
    :param state: nested dictionaries, lists and tuples of tensors, None, bool, int, float and str. The keys of
        dictionaries are int or str. Subclasses of these types come back as the plain types.
    :param kind: what the file holds; ``read_state`` must be called with the same word.
    """
    tensors: list[Tensor] = []
    content = json.dumps(_encoded(state, tensors, "state"))
    metadata = {"kind": kind, "schema": str(SCHEMA), "content": content, "sha256": _UNSIGNED}
    unsigned = save({str(i): tensor for i, tensor in enumerate(tensors)}, metadata)
    write_atomically(Path(path), _with_checksum(unsigned, _UNSIGNED, sha256(unsigned).hexdigest()))


def read_state(path: str | PathLike[str], *, kind: str) -> dict[Any, Any]:
    """Read a state that ``write_state`` has written. Tensors are on the CPU.

    :param path: the file.
    :param kind: what the file must hold.
    """
    try:
        data = read_file(path)
    except OSError as error:
        raise StateFileError(f"cannot read {path}: {error.strerror}") from None
    metadata = _metadata(data, path)
    checksum = metadata["sha256"]
    if sha256(_with_checksum(data, checksum, _UNSIGNED)).hexdigest() != checksum:
        raise StateFileError(f"{path} is corrupt: its content does not match its checksum")
    if metadata["schema"] not in map(str, range(SCHEMA + 1)):
        raise StateFileError(
            f"{path} has schema version {metadata['schema']}, and this version of became-avalanche reads up to "
            f"{SCHEMA}: upgrade the package"
        )
    if metadata["kind"] != kind:
        raise StateFileError(f"{path} holds a state of the kind {metadata['kind']!r}, not {kind!r}")
    try:
        state = _decoded(json.loads(metadata["content"]), load(data))
    except (SafetensorError, ValueError, LookupError, TypeError, OverflowError, RecursionError, RuntimeError) as error:
        raise StateFileError(f"{path} is corrupt: {error}") from error
    if not isinstance(state, dict):
        raise StateFileError(f"{path} is corrupt: it holds a {type(state).__name__} instead of a dict")
    return state


def _metadata(data: bytes, path: str | PathLike[str]) -> dict[str, str]:
    """Return the metadata of a safetensors file. Its first eight bytes are the length of a JSON header."""
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
        metadata: dict[str, str] = header["__metadata__"]
        ends = [int(info["data_offsets"][1]) for name, info in header.items() if name != "__metadata__"]
        missing = {"kind", "schema", "content", "sha256"} - metadata.keys()
        texts = all(isinstance(value, str) for value in metadata.values())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        texts = False
    if not texts:
        raise StateFileError(f"{path} is not a state file, or it is truncated or corrupt")
    if missing:
        raise StateFileError(f"{path} is not a state file: its metadata lacks {', '.join(sorted(missing))}")
    expected = 8 + size + max(ends, default=0)
    if len(data) != expected:
        raise StateFileError(f"{path} is truncated or corrupt: it has {len(data)} bytes instead of {expected}")
    return metadata


def _with_checksum(data: bytes, old: str, new: str) -> bytes:
    # quotes inside values are escaped, so the first match is the entry of the metadata
    return data.replace(f'"sha256":"{old}"'.encode(), f'"sha256":"{new}"'.encode(), 1)


def _encoded(value: Any, tensors: list[Tensor], where: str) -> Any:
    """Return plain values unchanged, and containers and tensors as JSON lists that start with their type.

    :param tensors: the list to which tensors are appended.
    :param where: where the value is in the state, for error messages.
    """
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().clone(memory_format=torch.contiguous_format))
        return ["tensor", len(tensors) - 1, _strides(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, int | str):
                raise TypeError(f"cannot save {where}: its key {key!r} is neither int nor str")
        return ["dict", *([key, _encoded(item, tensors, f"{where}[{key!r}]")] for key, item in value.items())]
    if isinstance(value, list | tuple):
        tag = "list" if isinstance(value, list) else "tuple"
        return [tag, *(_encoded(item, tensors, f"{where}[{i}]") for i, item in enumerate(value))]
    raise TypeError(
        f"cannot save {where}: it is a {type(value).__name__}, not a tensor, a plain value (None, bool, int, float, "
        "str) or a dict, list or tuple of these"
    )


def _strides(tensor: Tensor) -> list[int] | None:
    """Return the strides of a tensor. They are kept because products round differently in another layout.

    None if it is contiguous, if its elements share memory, as after ``expand``, or if there are wide gaps between them.
    """
    strides = list(tensor.stride())
    return None if tensor.is_contiguous() or not _is_compact(tensor.shape, strides) else strides


def _is_compact(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements with these strides share no memory and take at most four times the memory of contiguous ones."""
    span = 1  # extent of the dimensions so far, in elements
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < span:
                return False
            span += stride * (size - 1)
    return span <= 4 * prod(shape)


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    tag, *items = value
    if tag == "tensor":
        tensor, strides = tensors[str(items[0])], items[1]
        if strides is None or not _is_compact(tensor.shape, strides):
            return tensor.clone()  # so that each tensor has separate memory
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
    if tag == "dict":
        return {key: _decoded(item, tensors) for key, item in items}
    decoded = [_decoded(item, tensors) for item in items]
    return decoded if tag == "list" else tuple(decoded)
