"""The public `compare`: trained runs or analyses as one dataset over `entry`."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import xarray as xr

from ropelens.arguments import Count, Positive, public
from ropelens.comparison.checkpoint_cache import CheckpointCache
from ropelens.comparison.checkpoint_measures import head_measures
from ropelens.comparison.entries import ComparisonEntry, find_entries
from ropelens.comparison.join import join_entries, partners
from ropelens.comparison.recalibration import compare_recalibrations
from ropelens.comparison.recalibration_runs import find_recalibrations
from ropelens.errors import BadArgument, explained
from ropelens.interventions.changes import best_head
from ropelens.profiles.measurement import versions
from ropelens.profiles.measures import open_profile
from ropelens.runtime.devices import device_named
from ropelens.runtime.folder import PAGE, check_writable
from ropelens.runtime.netcdf import saved_key
from ropelens.runtime.progress import (
    ProgressOption,
    ShowProgress,
    Stage,
    display_of,
)


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
    """Compare trained runs, recalibrations, or analyzed models.

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

    Runs and studies of `ropelens train --from` that start from one checkpoint give a dataset
    with their losses over (variant, seed, step, sequence), `gap`, `recovered`,
    `tokens_to_half` and `tokens_to_90` with their intervals, and the measured models over
    `entry`: each variant before the training, and each run after it (coordinates group,
    phase, entry_seed). They need a control. docs/measures.md (Recalibration) defines the
    numbers.

    Raises `BadArgument` for the paths that `find_entries` refuses, for an unusable device, and
    for a folder that cannot be written to.
    """
    device_named(device)
    check_writable(cache)
    recalibrations = find_recalibrations(paths)
    if recalibrations is not None:
        dataset = compare_recalibrations(
            recalibrations,
            cache=Path(cache),
            sequences=sequences,
            seed=seed,
            device=device,
            show=display_of(progress),
        )
        return _with_provenance(dataset, recalibrations.variants, seed=seed)
    found = find_entries(paths)
    entries = found.entries
    if entries[0].steps:
        checkpoints = CheckpointCache(
            Path(cache), sequences=sequences, seed=seed, device=device
        )
        dataset = _measure_runs(entries, checkpoints, display_of(progress))
        dataset.attrs["unfinished"] = ", ".join(found.unfinished)
    else:
        with explained(
            "A profile lacks numbers.", "measure it again", error=BadArgument
        ):
            dataset = _read_analyses(entries)
    texts = dataset["text"].values.tolist() if "text" in dataset.coords else ()
    dataset = dataset.assign_coords(partner=("entry", partners(entries, texts)))
    groups = dict.fromkeys(entry.group for entry in entries)
    dataset = dataset.assign_attrs(baseline=entries[0].variant or entries[0].name)
    return _with_provenance(dataset, [*groups], seed=seed)


def _with_provenance(
    dataset: xr.Dataset, groups: Sequence[str], *, seed: int
) -> xr.Dataset:
    return dataset.assign_attrs(
        kind="comparison",
        model=", ".join(groups),
        seed=seed,
        versions=json.dumps(versions()),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _measure_runs(
    runs: Sequence[ComparisonEntry], cache: CheckpointCache, show: ShowProgress
) -> xr.Dataset:
    """Measure the finished runs over `entry`, and all checkpoints also over `step`."""
    checkpoints = [run.checkpoints() for run in runs]
    total = len(runs) + sum(map(len, checkpoints))
    finished = []
    grown = []
    with show(Stage("comparing", total, "checkpoints")) as advance:
        for run in runs:
            finished.append(cache.read_or_measure(run, run.folder, step=None))
            advance(1)
        for run, folders in zip(runs, checkpoints, strict=True):
            steps = []
            for step, folder in folders.items():
                steps.append(cache.read_or_measure(run, folder, step=step))
                advance(1)
            index = xr.Variable("step", list(folders))
            grown.append(xr.concat(steps, index, combine_attrs="override"))
    fingerprints = [str(saved_key(measured)["weights"]) for measured in finished]
    growth = with_best_induction(join_entries(grown, runs))
    dataset = join_entries(finished, runs)
    for name, variable in growth.data_vars.items():
        dataset[f"growth_{name}"] = variable
    tokens_per_step = np.array([run.tokens_per_step for run in runs])
    tokens_seen = tokens_per_step[:, None] * dataset["step"].values
    attrs = {
        "context": runs[0].context,
        "trained_context": runs[0].context,
        "sequences": dataset.sizes["sequence"],
        "documents": dataset.attrs["documents"],
        "head_sequences": dataset.attrs["sequences"],
        "growth_sequences": growth.attrs["sequences"],
    }
    profiles = [str(cache.profile_file(run).resolve()) for run in runs]
    dataset = dataset.assign_coords(
        tokens_seen=(("entry", "step"), tokens_seen),
        fingerprint=("entry", fingerprints),
        page=("entry", np.full(len(runs), "", dtype=object)),
        profile=("entry", np.array(profiles, dtype=object)),
    )
    dataset.attrs = attrs
    return dataset


def with_best_induction(growth: xr.Dataset) -> xr.Dataset:
    """The scores of the best induction heads in place of those of all heads and trials.

    These would take as much space as all other maps of heads together.
    """
    best = best_head(growth["trial_induction"]).mean("trial")
    growth = growth.drop_vars("trial_induction")
    growth["best_induction"] = best
    return growth


def _read_analyses(entries: Sequence[ComparisonEntry]) -> xr.Dataset:
    """Dataset over `entry` of the profiles that `ropelens analyze` wrote."""
    profiles = [open_profile(entry.folder / "profile.nc") for entry in entries]
    analyses = []
    for profile in profiles:
        # For pairs of models on the same tokens
        losses = profile[["group_loss", "group_predicted"]]
        losses = losses.rename(group="sequence_group")
        analyses.append(head_measures(profile).merge(losses))
    dataset = join_entries(analyses, entries)
    attrs = [profile.attrs for profile in profiles]
    sources = [str(of_profile.get("text", "")) for of_profile in attrs]
    documents = [int(of_profile["documents"]) for of_profile in attrs]
    trained_contexts = [int(of_profile["trained_context"]) for of_profile in attrs]
    bytes_per_token = [
        of_profile.get("bytes_per_token", np.nan) for of_profile in attrs
    ]
    pages = [entry.folder / PAGE for entry in entries]
    existing = [str(page) if page.exists() else "" for page in pages]
    dataset.attrs = {"documents": min(documents)}
    return dataset.assign_coords(
        model=("entry", [str(of_profile["model"]) for of_profile in attrs]),
        text=("entry", [str(of_profile["tokens_sha256"]) for of_profile in attrs]),
        source=("entry", sources),
        documents=("entry", documents),
        trained_context=("entry", trained_contexts),
        bytes_per_token=("entry", bytes_per_token),
        page=("entry", existing),
    )
