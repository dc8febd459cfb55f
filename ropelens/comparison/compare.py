"""Trained runs, or analyses, become one dataset over `entry`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ropelens.checkpoints.files import fingerprint
from ropelens.checkpoints.load import load
from ropelens.comparison.entries import Entry, find_entries
from ropelens.comparison.measure import head_measures, measure
from ropelens.comparison.table import ALONE
from ropelens.errors import BadArgument, Count, Positive, explained, public
from ropelens.profiles.measurement import versions
from ropelens.profiles.saved import open_profile
from ropelens.runtime.devices import device_named
from ropelens.runtime.folder import file_name
from ropelens.runtime.processes import gather, place
from ropelens.runtime.progress import Advance, ShowProgress, Stage, silent
from ropelens.runtime.results import open_results, save
from ropelens.train.data import DATA


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

    Returns a dataset over `entry` (coordinates group, variant, size, seed): heads and planes
    as a profile has them, `label`, `loss` and, of runs, the `fingerprint` of the weights, the
    losses, copying and retrieval of `evaluate`, on text up to four times the trained context;
    and the same of every checkpoint, over (entry, step), under names that begin with
    "growth_". Intervals draw the groups in `sequence_group`, of one document or stretch.
    Entries without a layer, head, plane or step hold NaN there, and "" as a label.

    Raises `BadArgument` as `find_entries`, and for a device that does not work here.
    """
    device_named(device)
    entries, unfinished = find_entries(paths)
    if entries[0].steps:
        how = {"sequences": sequences, "seed": seed}
        measured = partial(_measured, cache=Path(cache), how=how, device=device)
        dataset = _measure_runs(entries, measured, progress or silent)
        dataset.attrs["unfinished"] = ", ".join(unfinished)
    else:
        with explained("A profile lacks numbers.", "measure it again", error=BadArgument):
            dataset = _analyses(entries)
    texts = dataset["text"].values.tolist() if "text" in dataset.coords else ()
    dataset = dataset.assign_coords(partner=("entry", partners(entries, texts)))
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
    runs: Sequence[Entry], measured: Callable[..., xr.Dataset], show: ShowProgress
) -> xr.Dataset:
    """Every checkpoint of the runs: the finished ones over `entry`, all over `step` as well."""
    checkpoints = [run.checkpoints() for run in runs]
    total, grown = len(runs) + sum(map(len, checkpoints)), []
    with show(Stage("comparing", total, "checkpoints")) as advance:
        finished = [measured(run, run.folder, "final", advance=advance) for run in runs]
        for run, models in zip(runs, checkpoints, strict=True):
            steps = [
                measured(run, folder, f"step-{step:06d}", advance=advance)
                for step, folder in models.items()
            ]
            over = xr.Variable("step", list(models))
            grown.append(xr.concat(steps, over, combine_attrs="override"))
    growth, dataset = _side_by_side(grown, runs), _side_by_side(finished, runs)
    dataset = dataset.assign({f"growth_{n}": v for n, v in growth.data_vars.items()})
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
    run: Entry,
    folder: Path,
    name: str,
    *,
    cache: Path,
    how: Mapping[str, int],
    device: str,
    advance: Advance,
) -> xr.Dataset:
    """The checkpoint in `folder`: measured, or from its file where it is of the same weights.

    Where they were deleted, what was measured by any version stands.
    """
    file = cache / file_name(run.name) / f"{name}.nc"
    weights = (folder / "model.safetensors").exists()
    key: dict[str, object] = dict(how)
    if weights:
        key |= {"weights": fingerprint(folder), "text": fingerprint(run.data / DATA)}
        key["versions"] = versions()
    dataset = xr.Dataset()
    with contextlib.suppress(BadArgument):
        dataset = open_results(file, "measurement")
    # All processes read it, or none.
    if not all(gather(key_of(dataset).items() >= key.items())):
        if not weights:
            raise BadArgument(f"{folder} has no weights, and {file} does not stand for them.")
        model, _ = load(folder, device=device)
        dataset = measure(run, model, final=name == "final", **how)
        dataset = dataset.assign_attrs(kind="measurement", key=json.dumps(key))
        if place()[0] == 0:
            save(dataset, file)
    advance(1)
    return dataset


def key_of(measured: xr.Dataset) -> dict[str, Any]:
    """What a measurement was made of and how, {} for a dataset that is none."""
    return dict(json.loads(measured.attrs.get("key", "{}")))


def _analyses(entries: Sequence[Entry]) -> xr.Dataset:
    """The profiles that `ropelens analyze` wrote, over `entry`."""
    profiles = [open_profile(entry.folder / "profile.nc") for entry in entries]
    losses = ["group_loss", "group_predicted"]  # which pair two models on the same tokens
    heads = [head_measures(p).merge(p[losses].rename(group="sequence_group")) for p in profiles]
    dataset = _side_by_side(heads, entries)
    documents = [int(p.attrs["documents"]) for p in profiles]
    dataset.attrs = {"documents": min(documents)}
    return dataset.assign_coords(
        model=("entry", [str(p.attrs["model"]) for p in profiles]),
        text=("entry", [str(p.attrs["tokens_sha256"]) for p in profiles]),
        source=("entry", [str(p.attrs.get("text", "")) for p in profiles]),
        documents=("entry", documents),
        trained_context=("entry", [int(p.attrs["trained_context"]) for p in profiles]),
    )


def partners(entries: Sequence[Entry], texts: Sequence[str] = ()) -> list[int]:
    """The entry of the baseline that each entry is paired with.

    It is alike in size and seed, or has read the same of the `texts`. An entry of the baseline
    is paired with itself, one that has no pair with `ALONE`. Each size has a baseline.
    """
    first = entries[0]
    baselines = {entry.group for entry in entries if entry.variant == first.variant != ""}
    baselines = baselines or {first.group}
    alike: list[object] = list(texts) or [(entry.size, entry.seed) for entry in entries]
    own = [number for number, entry in enumerate(entries) if entry.group in baselines]
    first_of = {alike[number]: number for number in reversed(own)}
    return [n if n in own else first_of.get(like, ALONE) for n, like in enumerate(alike)]


def _side_by_side(datasets: Sequence[xr.Dataset], entries: Sequence[Entry]) -> xr.Dataset:
    """The datasets over `entry`; missing numbers are NaN, missing labels ""."""
    names = np.array([entry.name for entry in entries], dtype=object)
    dims = ("layer", "head", "kv_head", "frequency", "sequence_group")  # whose sizes differ
    numbered = [
        of.assign_coords({d: np.arange(of.sizes[d]) for d in dims if d in of.sizes})
        for of in datasets
    ]
    over = xr.Variable("entry", names)
    joined = xr.concat(numbered, over, join="outer", combine_attrs="override")
    joined["label"] = joined["label"].fillna("")
    texts = {
        name: ("entry", np.array([getattr(entry, name) for entry in entries], dtype=object))
        for name in ("group", "variant", "size")
    }
    seeds = [entry.seed for entry in entries]
    return joined.assign_coords({"entry": names, **texts, "seed": ("entry", seeds)})
