"""Numbers of an analysis in a result folder, and whether they are used, kept or replaced.

Saved numbers are read without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from ropelens.errors import BadArgument
from ropelens.profiles.measures import open_profile
from ropelens.runtime.folder import locked
from ropelens.runtime.keys import Key
from ropelens.runtime.netcdf import open_results
from ropelens.runtime.run_record import read_record, this_command

if TYPE_CHECKING:
    from ropelens.analysis.plan import Plan

OF_ANALYSES = ("analysis", "truncation")  # kinds of result folders


@dataclass(frozen=True, eq=False)
class SavedNumbers:
    """The datasets and the run.json of an analysis in a folder."""

    profile: xr.Dataset
    provenance: dict[str, Any]
    truncation: xr.Dataset | None
    reach: xr.Dataset | None

    @classmethod
    def read(cls, folder: Path) -> SavedNumbers:
        """Read the numbers in `folder`; raises `BadArgument` if they are missing or damaged."""
        truncation = None
        reach = None
        with locked(folder):
            record = read_record(folder)
            profile = open_profile(folder / "profile.nc")
            if "command" in record:
                profile.attrs["command"] = str(record["command"])
            if (folder / "reach.nc").exists():
                reach = open_results(folder / "reach.nc", "reach")
            if record.get("kind") == "truncation":
                truncation = open_results(folder / "truncation.nc", "truncation")
        return cls(profile, record, truncation, reach)


def saved_key(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprints and settings in the run.json of an analysis, which a `Key` checks."""
    text = record.get("text", {})
    # Earlier records have the SHA-256 of the documents as the fingerprint.
    documents = text.get("documents_sha256", text.get("fingerprint"))
    return {
        "model": record.get("model", {}).get("fingerprint"),
        "text": documents,
        "arguments": record.get("arguments"),
        "versions": record.get("versions"),
    }


def earlier_numbers(folder: Path, fingerprint: str | None) -> SavedNumbers | None:
    """Numbers in `folder` that were measured on this model; None if missing or damaged."""
    record = read_record(folder)
    if fingerprint is None or record.get("kind") not in OF_ANALYSES:
        return None
    if not Key({"model": fingerprint}).fits(saved_key(record)):
        return None
    with suppress(BadArgument):  # damaged results are replaced
        return SavedNumbers.read(folder)
    return None


def is_measured(folder: Path, plan: Plan) -> bool:
    """True if `folder` has the results of the plan, with the same model and versions."""
    record = read_record(folder)
    return plan.key.fits(saved_key(record))


def is_joined(folder: Path, plan: Plan) -> bool:
    """Whether the sweep of the plan joins results in `folder`, and replaces no other sweep."""
    record = read_record(folder)
    text = plan.text.documents_sha256
    same = Key({"model": plan.model["fingerprint"], "text": text})
    if text == "" or not same.fits(saved_key(record)):
        return False
    if record.get("kind") != "truncation":
        return record.get("kind") == "analysis"
    with suppress(BadArgument):
        sweep = open_results(folder / "truncation.nc", "truncation")
        return sweep.attrs.get("command") == this_command()
    return False


def check_model(folder: Path, model: Mapping[str, Any], *, again: str = "") -> None:
    """Raise `BadArgument` if `folder` has results of another model than `model` in a run.json.

    Results of the model argument `again` may be replaced.
    """
    record = read_record(folder)
    if record.get("kind") not in OF_ANALYSES:
        return
    if again != "" and again == record.get("arguments", {}).get("model"):
        return
    before = record.get("model", {})
    if is_same_model(before, model):
        return
    old = str(before.get("fingerprint"))[:18]
    new = str(model.get("fingerprint"))[:18]
    raise BadArgument(
        f"{folder} has results of another model, {before.get('name')}.",
        seen=f"its fingerprint is {old}, now it is {new}; it covers the weights, "
        "configuration, adapters, tokenizer, dtype and quantization",
        hint="another --out, or delete the folder",
    )


def is_same_model(before: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether the models in two run.json are the same, by their fingerprints.

    If the fingerprints are of different kinds, the names count.
    """
    old = str(before.get("fingerprint"))
    new = str(model.get("fingerprint"))
    if old.partition(":")[0] == new.partition(":")[0]:
        return old == new
    return before.get("name") in (None, model.get("name"))


def check_sweep(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Raise `BadArgument` if `folder` has a sweep with other arguments."""
    if read_record(folder).get("kind") != "truncation":
        return
    changes = ""
    # Damaged sweeps are replaced.
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        sweep = open_results(folder / "truncation.nc", "truncation")
        before = json.loads(sweep.attrs["arguments"])
        key = Key({**dict.fromkeys(before), **arguments})
        changes = key.changes(before)
    if changes:
        raise BadArgument(
            f"{folder} has a sweep with other options, which this sweep would replace.",
            seen=changes[:300],
            hint="another folder, or the same options",
        )
