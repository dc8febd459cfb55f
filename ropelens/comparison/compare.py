"""Comparison of trained runs or analyses, as one dataset over `entry`."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ropelens.arguments import Count, Positive, public
from ropelens.checkpoints.files import sha256_of
from ropelens.checkpoints.identity import identity
from ropelens.checkpoints.load import open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.comparison.entries import (
    ComparisonEntry,
    find_entries,
    head_measures,
    measure,
)
from ropelens.comparison.table import NO_PARTNER
from ropelens.errors import BadArgument, explained
from ropelens.profiles.measurement import versions
from ropelens.profiles.measures import open_profile
from ropelens.runtime.devices import device_named
from ropelens.runtime.folder import file_name
from ropelens.runtime.keys import Key
from ropelens.runtime.netcdf import read_if_fits, save, saved_key, with_key
from ropelens.runtime.processes import all_agree, process_index
from ropelens.runtime.progress import (
    Advance,
    ProgressOption,
    ShowProgress,
    Stage,
    display_of,
)
from ropelens.train.data import DATA


@public
def compare(
    paths: Sequence[str | Path],
    *,
    cache: str | Path,
    sequences: Positive = 512,
    seed: Count = 0,
    device: str = "auto",
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Compare trained runs, or analyzed models.

    `paths` are runs and studies of `ropelens train`, whose checkpoints are measured on their
    validation text, or folders that `ropelens analyze` wrote. The group of the first entry (a
    variant of RoPE with all its seeds) is the baseline. The folder `cache` gets a file for each
    checkpoint, so that a stopped comparison can continue without the measured weights.

    Number of sequences of validation text, as a part of `sequences`:

    | | loss | loss by position (4 times the length) | heads and planes |
    |---|---|---|---|
    | finished run | 1 | 1/8 | 1/8 |
    | early checkpoint | 1/32 | 1/64 | 1/32 |

    Returns a dataset over `entry` (coordinates group, variant, size, seed) with the heads and
    planes of a profile, `label` and `loss`. Runs also have the `fingerprint` of the model,
    losses, copying and retrieval up to four times the trained context, and results over
    (entry, step) in variables that start with "growth_". Intervals draw the documents or
    stretches in `sequence_group`. NaN and "" mark what an entry does not have.

    Raises `BadArgument` for the paths that `find_entries` refuses, and for an unusable device.
    """
    device_named(device)
    entries, unfinished = find_entries(paths)
    if entries[0].steps:
        how = {"sequences": sequences, "seed": seed}
        measured = partial(_measure_or_read, cache=Path(cache), how=how, device=device)
        dataset = _measure_runs(entries, measured, display_of(progress))
        dataset.attrs["unfinished"] = ", ".join(unfinished)
    else:
        with explained(
            "A profile lacks numbers.", "measure it again", error=BadArgument
        ):
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
    runs: Sequence[ComparisonEntry],
    measured: Callable[..., xr.Dataset],
    show: ShowProgress,
) -> xr.Dataset:
    """Measure the finished runs over `entry`, and all checkpoints also over `step`."""
    checkpoints = [run.checkpoints() for run in runs]
    total, grown = len(runs) + sum(map(len, checkpoints)), []
    with show(Stage("comparing", total, "checkpoints")) as advance:
        measured = partial(measured, advance=advance)
        finished = [measured(run, run.folder, "final") for run in runs]
        for run, models in zip(runs, checkpoints, strict=True):
            steps = [measured(run, path, f"step-{n:06d}") for n, path in models.items()]
            over = xr.Variable("step", list(models))
            grown.append(xr.concat(steps, over, combine_attrs="override"))
    growth, dataset = _join_entries(grown, runs), _join_entries(finished, runs)
    dataset = dataset.assign({f"growth_{n}": v for n, v in growth.data_vars.items()})
    per_step = np.array([run.tokens_per_step for run in runs])
    dataset = dataset.assign_coords(
        tokens_seen=(("entry", "step"), per_step[:, None] * dataset["step"].values),
        fingerprint=(
            "entry",
            [str(saved_key(of_run)["weights"]) for of_run in finished],
        ),
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


def _measure_or_read(
    run: ComparisonEntry,
    folder: Path,
    name: str,
    *,
    cache: Path,
    how: Mapping[str, int],
    device: str,
    advance: Advance,
) -> xr.Dataset:
    """Results of the checkpoint in `folder`, from the cache if they belong to its weights."""
    file = cache / file_name(run.name) / f"{name}.nc"
    weights = (folder / "model.safetensors").exists()
    settings: dict[str, Any] = dict(how)
    if weights:
        opened = open_checkpoint(folder, Loading(device=device))
        settings["weights"] = identity(opened)
        settings["text"] = sha256_of(run.data / DATA)
        settings["versions"] = versions()
    key = Key(settings)
    dataset = read_if_fits(file, "measurement", key)
    # Either all processes use the cached file, or none does.
    in_cache = all_agree(dataset is not None)
    if dataset is None or not in_cache:
        if not weights:
            hint = (
                "the settings of the earlier comparison, or the folder with its weights"
            )
            what = f"{folder} has no weights, and {file} has no results for these settings."
            raise BadArgument(what, hint=hint)
        dataset = measure(run, opened.read(), final=name == "final", **how)
        dataset = with_key(dataset.assign_attrs(kind="measurement"), key)
        if process_index() == 0:
            save(dataset, file)
    advance(1)
    return dataset


def _analyses(entries: Sequence[ComparisonEntry]) -> xr.Dataset:
    """Dataset over `entry` of the profiles that `ropelens analyze` wrote."""
    profiles = [open_profile(entry.folder / "profile.nc") for entry in entries]
    losses = ["group_loss", "group_predicted"]  # for pairs of models on the same tokens
    heads = [
        head_measures(p).merge(p[losses].rename(group="sequence_group"))
        for p in profiles
    ]
    dataset = _join_entries(heads, entries)
    dataset.attrs = {"documents": min(int(p.attrs["documents"]) for p in profiles)}
    return dataset.assign_coords(
        model=("entry", [str(p.attrs["model"]) for p in profiles]),
        text=("entry", [str(p.attrs["tokens_sha256"]) for p in profiles]),
        source=("entry", [str(p.attrs.get("text", "")) for p in profiles]),
        documents=("entry", [int(p.attrs["documents"]) for p in profiles]),
        trained_context=("entry", [int(p.attrs["trained_context"]) for p in profiles]),
        bytes_per_token=(
            "entry",
            [p.attrs.get("bytes_per_token", np.nan) for p in profiles],
        ),
    )


def partners(
    entries: Sequence[ComparisonEntry], texts: Sequence[str] = ()
) -> list[int]:
    """Index of the baseline entry of the same size and seed, or of the same text if known.

    The baseline, which each size has, is paired with itself. Others have `NO_PARTNER`.
    """
    first = entries[0]
    baselines = {
        entry.group for entry in entries if entry.variant == first.variant != ""
    }
    baselines = baselines or {first.group}
    alike: list[object] = list(texts) or [(entry.size, entry.seed) for entry in entries]
    base = [number for number, entry in enumerate(entries) if entry.group in baselines]
    first_of = {alike[number]: number for number in reversed(base)}
    return [
        n if n in base else first_of.get(like, NO_PARTNER)
        for n, like in enumerate(alike)
    ]


def _join_entries(
    datasets: Sequence[xr.Dataset], entries: Sequence[ComparisonEntry]
) -> xr.Dataset:
    """Concatenate datasets over `entry`, with NaN and "" for missing numbers and labels."""
    dims = (
        "layer",
        "head",
        "kv_head",
        "frequency",
        "sequence_group",
    )  # sizes may differ
    numbered = [
        data.assign_coords(
            {d: np.arange(data.sizes[d]) for d in dims if d in data.sizes}
        )
        for data in datasets
    ]
    columns: dict[str, Any] = {
        name: (
            "entry",
            np.array([getattr(entry, name) for entry in entries], dtype=object),
        )
        for name in ("name", "group", "variant", "size")
    }
    names = columns.pop("name")
    joined = xr.concat(
        numbered, xr.Variable(*names), join="outer", combine_attrs="override"
    )
    joined["label"] = joined["label"].fillna("")
    seeds = "entry", [entry.seed for entry in entries]
    return joined.assign_coords({"entry": names, **columns, "seed": seeds})
