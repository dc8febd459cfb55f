"""Trained runs, or analyses, become one dataset over `entry`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ropelens.comparison.entries import Entry, Run, find_entries
from ropelens.comparison.measure import head_measures, measure
from ropelens.comparison.table import ALONE
from ropelens.errors import BadArgument, Count, Positive, public
from ropelens.files.folder import file_name
from ropelens.files.progress import ShowProgress, silent
from ropelens.files.results import open_results, save
from ropelens.measure.measurement import versions
from ropelens.models.checkpoint import fingerprint
from ropelens.models.device import device_named
from ropelens.models.load import load
from ropelens.models.processes import gather, place
from ropelens.train.data import DATA

GROWTH = "growth_"
"""Prefix of the variables that are over (entry, step), a step for each checkpoint."""

GROUP_LOSS = ("group_loss", "group_predicted")
"""Variables of a profile that pair two models on the same tokens."""


@public
def compare(
    paths: Sequence[str | Path],
    *,
    cache: str | Path,
    sequences: Positive = 512,
    seed: Count = 0,
    device: str = "auto",
    progress: ShowProgress | None = None,
) -> xr.Dataset:
    """Compare trained runs, or analyzed models.

    `paths` are runs and studies of `ropelens train`, whose every checkpoint in history/ is
    measured on the text that was held out of training; or folders that `ropelens analyze`
    wrote, which are read. The first entry's group (a variant of RoPE, all its seeds) is
    the baseline. The folder `cache` gets a file for each checkpoint, so that a stopped
    comparison measures only the rest, and a run's model.safetensors may be deleted after it.
    `device` and `progress` are as in `ropelens.analyze`.

    Sequences of validation text, in parts of `sequences`; long ones are four times as long:

    | | loss | loss by position (long) | heads and planes |
    |---|---|---|---|
    | finished run | 1 | 1/8 | 1/8 |
    | early checkpoint | 1/32 | 1/64 | 1/32 |

    Returns a dataset over `entry` (coordinates group, variant, size, seed): the heads and
    planes of each as a profile has them, `label`, `loss` and, of runs, the `fingerprint`
    of the weights, `sequence_loss` (all on the same sequences; intervals draw the groups in
    `sequence_group`, of one document or stretch), `position_loss`, `first_loss` and
    `repeat_loss` on repeated random tokens, `retrieval` and `retrieval_hit` of each trial,
    `copy_loss` by distance and `far_retrieval` by the length of the prompt, up to four times
    the trained context; and the same of every checkpoint, over (entry, step), under names that
    begin with "growth_". Entries without a layer, head, plane or step hold NaN there, and ""
    as a label.

    Raises:
        BadArgument: as `find_entries`, or no such device.
    """
    device_named(device)
    entries, unfinished = find_entries(paths)
    runs = [entry for entry in entries if isinstance(entry, Run)]
    if runs:
        how = {"sequences": sequences, "seed": seed}
        dataset = _measure_runs(runs, Path(cache), how, device, progress or silent)
        dataset.attrs["unfinished"] = ", ".join(unfinished)
    else:
        dataset = _analyses(entries)
    dataset = dataset.assign_coords(partner=("entry", _partners(dataset, entries)))
    dataset.attrs |= {
        "kind": "comparison",
        "model": ", ".join(dict.fromkeys(entry.group for entry in entries)),
        "baseline": entries[0].variant or entries[0].name,
        "seed": seed,
        "versions": json.dumps(versions()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return dataset


def _measure_runs(
    runs: Sequence[Run], cache: Path, how: dict[str, int], device: str, show: ShowProgress
) -> xr.Dataset:
    """Every checkpoint of the runs: the finished ones over `entry`, all over `step` as well."""
    finished, grown = [], []
    total = sum(1 + len(run.checkpoints()) for run in runs)
    with show("comparing", total=total, unit="checkpoints") as advance:
        for run in runs:
            place = cache / file_name(run.name)
            finished.append(_measured(run, run.folder, place / "final.nc", how, device))
            advance(1)
        for run in runs:
            steps = []
            for step, folder in run.checkpoints().items():
                file = cache / file_name(run.name) / f"step-{step:06d}.nc"
                steps.append(_measured(run, folder, file, how, device))
                advance(1)
            over = xr.Variable("step", list(run.checkpoints()))
            grown.append(xr.concat(steps, over, combine_attrs="override"))
    growth, dataset = _side_by_side(grown, runs), _side_by_side(finished, runs)
    dataset = dataset.assign({GROWTH + str(n): v for n, v in growth.data_vars.items()})
    per_step = np.array([run.tokens_per_step for run in runs])
    weights = [str(key_of(measured)["weights"]) for measured in finished]
    dataset = dataset.assign_coords(
        tokens_seen=(("entry", "step"), per_step[:, None] * dataset["step"].values),
        fingerprint=("entry", weights),
    )
    dataset.attrs = {
        "context": runs[0].context,
        "trained_context": runs[0].context,
        "sequences": dataset.sizes["sequence"],
        "documents": dataset.attrs["documents"],
        "head_sequences": dataset.attrs["sequences"],
        "growth_sequences": growth.attrs["sequences"],
    }
    return dataset


def _measured(
    run: Run, folder: Path, file: Path, how: Mapping[str, int], device: str
) -> xr.Dataset:
    """The checkpoint in `folder`: measured, or from `file` where it is of the same weights.

    Where they were deleted, what was measured by any version stands.
    """
    weights = (folder / "model.safetensors").exists()
    key: dict[str, object] = dict(how)
    if weights:
        key |= {"weights": fingerprint(folder), "text": fingerprint(run.data / DATA)}
        key["versions"] = versions()
    dataset = xr.Dataset()
    with contextlib.suppress(BadArgument):
        dataset = open_results(file, "measurement")
    if all(gather(key_of(dataset).items() >= key.items())):  # all processes read it, or none
        return dataset
    if not weights:
        raise BadArgument(f"{folder} has no weights, and {file} does not stand for them.")
    model, _ = load(folder, local_files_only=True, device=device)
    dataset = measure(run, model, final=file.stem == "final", **how)
    dataset = dataset.assign_attrs(kind="measurement", key=json.dumps(key))
    if place()[0] == 0:
        save(dataset, file)
    return dataset


def key_of(measured: xr.Dataset) -> dict[str, Any]:
    """What a measurement was made of and how, {} for a dataset that is none."""
    return dict(json.loads(measured.attrs.get("key", "{}")))


def _analyses(entries: Sequence[Entry]) -> xr.Dataset:
    """The profiles that `ropelens analyze` wrote, over `entry`."""
    profiles = [open_results(entry.folder / "profile.nc", "profile") for entry in entries]
    losses = [p[list(GROUP_LOSS)].rename(group="sequence_group") for p in profiles]
    measured = [
        head_measures(profile).merge(loss)
        for profile, loss in zip(profiles, losses, strict=True)
    ]
    dataset = _side_by_side(measured, entries)
    documents = [int(p.attrs["documents"]) for p in profiles]
    dataset.attrs = {"documents": min(documents)}
    return dataset.assign_coords(
        model=("entry", [str(p.attrs["model"]) for p in profiles]),
        text=("entry", [str(p.attrs["tokens_sha256"]) for p in profiles]),
        source=("entry", [str(p.attrs.get("text", "")) for p in profiles]),
        documents=("entry", documents),
        trained_context=("entry", [int(p.attrs["trained_context"]) for p in profiles]),
    )


def _partners(dataset: xr.Dataset, entries: Sequence[Entry]) -> list[int]:
    """Pairs of runs have one size and seed, pairs of analyses have read one text."""
    first = entries[0]
    baselines = {entry.group for entry in entries if entry.variant == first.variant != ""}
    groups = [entry.group for entry in entries]
    alike: list[object] = [(entry.size, entry.seed) for entry in entries]
    if "text" in dataset.coords:
        alike = dataset["text"].values.tolist()
    return partners(groups, alike, baselines=baselines or {first.group})


def partners(
    groups: Sequence[str], alike: Sequence[object], *, baselines: set[str]
) -> list[int]:
    """The entry that each entry is paired with: the one `alike` in one of the `baselines`.

    Entries are alike by size and seed, or by their text. An entry of a baseline is paired
    with itself, one that has no pair with `ALONE`.
    """
    baseline: dict[object, int] = {}
    for entry, (group, like) in enumerate(zip(groups, alike, strict=True)):
        if group in baselines:
            baseline.setdefault(like, entry)
    return [
        entry if group in baselines else baseline.get(like, ALONE)
        for entry, (group, like) in enumerate(zip(groups, alike, strict=True))
    ]


def _side_by_side(datasets: Sequence[xr.Dataset], entries: Sequence[Entry]) -> xr.Dataset:
    """The datasets over `entry`; missing numbers are NaN, missing labels ""."""
    names = np.array([entry.name for entry in entries], dtype=object)
    numbered = [_numbered(dataset) for dataset in datasets]
    joined = xr.concat(
        numbered, xr.Variable("entry", names), join="outer", combine_attrs="override"
    )
    joined["label"] = joined["label"].fillna("")
    return joined.assign_coords(
        {
            "entry": names,
            "group": ("entry", np.array([entry.group for entry in entries], dtype=object)),
            "variant": ("entry", np.array([entry.variant for entry in entries], dtype=object)),
            "size": ("entry", np.array([entry.size for entry in entries], dtype=object)),
            "seed": ("entry", [entry.seed for entry in entries]),
        }
    )


def _numbered(dataset: xr.Dataset) -> xr.Dataset:
    """`dataset` with an index on every dim whose size may differ, for alignment."""
    dims = {"layer", "head", "kv_head", "frequency", "sequence_group"} & set(dataset.sizes)
    return dataset.assign_coords({str(dim): np.arange(dataset.sizes[dim]) for dim in dims})
