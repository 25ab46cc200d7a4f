"""Records of older versions, turned into records of the current one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from became_avalanche.results.metrics import METRICS
from became_avalanche.results.record import SCHEMA, Record, RecordError


def migrate(content: dict[str, Any], where: str) -> dict[str, Any]:
    """The content of a record of any older version in the current format.

    Raises a RecordError that says what is wrong, or pydantic's ValidationError if a value has the wrong type.
    """
    for version in range(content["schema_version"], SCHEMA):
        if version not in MIGRATIONS:
            raise RecordError(f"{where} has schema version {version}, which is not known")
        try:
            content = MIGRATIONS[version](content)
        except ValidationError:
            raise
        except KeyError as error:
            raise RecordError(f"{where} is corrupt: it has no {error}") from None
        except (TypeError, ValueError) as error:
            raise RecordError(f"{where} is corrupt: {error}") from None
    return content


def from_version_0(content: dict[str, Any]) -> dict[str, Any]:
    """A run of version 0.1: an entry of ``runs`` in its ``results.json``, with key, spec, label and references added.

    Version 0.1 kept ACC and BWT instead of computing them. They are dropped after a check that the metrics of the
    record give them back.
    """
    spec = content["spec"]
    for field, ours in (
        ("benchmark", content["benchmark"]),
        ("seed", content["seed"]),
        ("n_tasks", len(content["accuracy"])),
    ):
        if spec[field] != ours:
            raise ValueError(f"{field} is {ours!r} in the results and {spec[field]!r} in the specification")
    sums = {name: content[name] for name in ("seconds", "valid_acc") if content[name] is not None}
    migrated = {
        "schema_version": 1,
        **{name: content[name] for name in ("key", "spec", "label", "references", "method", "merges")},
        "status": "done",
        "accuracy": {"test": content["accuracy"]},
        "tasks": [{"stages": [{"epochs": epochs} for epochs in stages]} for stages in content["epochs"]],
        "converted": sums,
    }
    record = Record.model_validate(migrated)
    for name in ("acc", "bwt"):
        recorded, computed = content[name], METRICS[name].of(record)
        close = recorded is not None and computed is not None and abs(recorded - computed) <= 1e-12
        if not close and recorded != computed:
            raise ValueError(f"its {name} is {recorded}, but its accuracies give {computed}")
    return migrated


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {0: from_version_0}
"""Version n -> function that turns the content of a record of version n into that of version n + 1."""
