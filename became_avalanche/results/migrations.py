"""Convert records of older versions to the current version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from became_avalanche.results.metrics import METRICS
from became_avalanche.results.record import SCHEMA, Record, RecordError


def migrate(content: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert the content of a record of an older version to the current format.

    Raises a RecordError that says what is wrong, or pydantic's ValidationError if a value has the wrong type.
    """
    for version in range(content["schema_version"], SCHEMA):
        if version not in MIGRATIONS:
            raise RecordError(f"{where} has schema version {version}, which is unknown")
        try:
            content = MIGRATIONS[version](content)
        except ValidationError:
            raise
        except KeyError as error:
            raise RecordError(f"{where} is corrupt: the field {error} is missing") from None
        except (TypeError, ValueError) as error:
            raise RecordError(f"{where} is corrupt: {error}") from None
    return content


def from_version_0(content: dict[str, Any]) -> dict[str, Any]:
    """Convert a run of version 0.1, an entry of ``runs`` in ``results.json``.

    Key, spec, label and references have been added to the entry. Version 0.1 stored ACC and BWT. They
    are dropped after a check that the metrics computed from the record agree.
    """
    spec = content["spec"]
    for field, recorded in (
        ("benchmark", content["benchmark"]),
        ("seed", content["seed"]),
        ("n_tasks", len(content["accuracy"])),
    ):
        if spec[field] != recorded:
            raise ValueError(f"{field} is {recorded!r} in the results and {spec[field]!r} in the specification")
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
            raise ValueError(f"the stored {name} is {recorded}, but the accuracies give {computed}")
    return migrated


def from_version_1(content: dict[str, Any]) -> dict[str, Any]:
    """Convert a record whose specification does not say in which mode Fisher information was estimated."""
    return {**content, "schema_version": 2, "spec": in_eval_mode(content["spec"])}


def in_eval_mode(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a specification of version 1 with the mode of its Fisher estimator, which was eval mode by default.

    Since version 2, batched estimators use train mode by default. In our networks for digits both modes are the same,
    because they have neither dropout nor batch normalisation. So their specifications stay as they are.
    """
    match spec:
        case {"network": {"name": "mlp" | "single-head-mlp"}} | {"method": {"merge": {"options": {"reference": True}}}}:
            return spec
        case {"method": {"merge": {"options": {"fisher": str(name)}}}} if name.startswith("batched"):
            fisher: dict[str, Any] = {"name": name, "mode": "eval"}
        case {"method": {"merge": {"options": {"fisher": dict(options)}}}}:
            fisher = {"mode": "eval", **options}
        case _:
            return spec
    merge = spec["method"]["merge"]
    merge = {**merge, "options": {**merge["options"], "fisher": fisher}}
    return {**spec, "method": {**spec["method"], "merge": merge}}


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {0: from_version_0, 1: from_version_1}
"""Version n -> function that converts the content of a record from version n to version n + 1."""
