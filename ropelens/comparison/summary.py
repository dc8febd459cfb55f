"""Table of a comparison: a row per variant, with paired differences from the baseline."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from ropelens.budget.labels import LABELS
from ropelens.comparison.pairs import group_entries, group_names, paired_changes
from ropelens.intervals import paired_interval
from ropelens.interventions.changes import best_head

# Attention on the previous token of a previous-token head, at least
PREVIOUS_TOKEN = 0.5


@dataclass(frozen=True)
class Samples:
    """Numbers [entry, sample] of sequences, groups of sequences, or trials.

    The interval of a single pair of entries is over its samples. Samples have a `weight`, and
    samples of one `group` are drawn together.
    """

    values: xr.DataArray
    weight: xr.DataArray | None = None
    group: xr.DataArray | None = None


@dataclass(frozen=True)
class MeanChange:
    """The mean of paired differences, and the ends of its 95 % interval; NaN without pairs."""

    mean: float = np.nan
    low: float = np.nan
    high: float = np.nan


def summarize_comparison(comparison: xr.Dataset) -> pd.DataFrame:
    """Table of a comparison with a row per group; docs/measures.md defines the columns."""
    rows = []
    for group in group_names(comparison):
        entries = group_entries(comparison, group)
        row = {
            "group": group,
            "variant": str(entries["variant"][0].item()),
            "size": str(entries["size"][0].item()),
            "entries": entries.sizes["entry"],
            "loss": float(entries["loss"].mean()),
            **_loss_change(comparison, group),
            **_bits_per_byte(entries),
            **_behaviour(comparison, group),
            **_heads(entries),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def _loss_change(comparison: xr.Dataset, group: str) -> dict[str, object]:
    pairs = paired_changes(comparison["loss"], group).values
    samples = _loss_samples(comparison)
    change = _mean_change(pairs, samples, group)
    over = ""  # the interval is over
    if len(pairs) > 1:
        over = "seeds"
    elif np.isfinite(change.low):
        over = "groups" if "group_loss" in comparison else "sequences"
    return {
        "loss_change": change.mean,
        "low": change.low,
        "high": change.high,
        "over": over,
        "pairs": len(pairs),
        "worse": int((pairs > 0).sum()),
    }


def _loss_samples(comparison: xr.Dataset) -> Samples | None:
    """The losses of groups (analyses) or sequences (runs), if they are known."""
    if "group_loss" in comparison:
        return Samples(
            comparison["group_loss"], weight=comparison.get("group_predicted")
        )
    if "sequence_loss" in comparison:
        return Samples(
            comparison["sequence_loss"], group=comparison.get("sequence_group")
        )
    return None


def _mean_change(
    pairs: Float[np.ndarray, " pair"], samples: Samples | None, group: str
) -> MeanChange:
    """Mean change of the `pairs`; the interval of one pair is over its `samples`."""
    if not len(pairs):
        return MeanChange()
    if len(pairs) > 1 or samples is None:
        return MeanChange(*paired_interval(pairs))
    change = paired_changes(samples.values, group)[0]
    measured = change.notnull().values  # analyses of less text have fewer samples
    if not measured.any():
        return MeanChange(*paired_interval(pairs))
    entry = change["entry"]
    weight = None
    if samples.weight is not None:
        weight = samples.weight.sel(entry=entry).values[measured]
    drawn_with = None
    if samples.group is not None:
        drawn_with = samples.group.sel(entry=entry).values[measured]
    return MeanChange(*paired_interval(change.values[measured], weight, drawn_with))


def _bits_per_byte(entries: xr.Dataset) -> dict[str, float]:
    """The loss in a unit that is comparable if the tokenizers differ (analyses)."""
    if "bytes_per_token" not in entries.coords:
        return {}
    bits = entries["loss"] / entries["bytes_per_token"] / np.log(2)
    return {"bits_per_byte": float(bits.mean())}


def _behaviour(comparison: xr.Dataset, group: str) -> dict[str, float]:
    """Loss past the trained context, gain of repeats, and retrieval, if measured (runs)."""
    if "position_loss" not in comparison:
        return {}
    # The lengths and depths of a trial may share tokens, so take the mean of each trial.
    hit = comparison["retrieval_hit"].mean(("retrieval_length", "depth"))
    gain = repeat_gain(comparison)
    past_context = loss_past_context(comparison)
    return {
        **_columns("loss_past_context", past_context, None, group),
        **_columns("repeat_gain", gain.mean("trial"), Samples(gain), group),
        **_columns("retrieval", hit.mean("retrieval_trial"), Samples(hit), group),
    }


def _columns(
    name: str, by_entry: xr.DataArray, samples: Samples | None, group: str
) -> dict[str, float]:
    """The mean of a measure over the entries of a group, and its change with the interval."""
    pairs = paired_changes(by_entry, group).values
    change = _mean_change(pairs, samples, group)
    return {
        name: float(group_entries(by_entry, group).mean()),
        f"{name}_change": change.mean,
        f"{name}_low": change.low,
        f"{name}_high": change.high,
    }


def loss_past_context(
    comparison: xr.Dataset, prefix: str = "", *, context: str = "context"
) -> xr.DataArray:
    """Mean loss of the tokens past a context, which is an attribute (nats/token).

    NaN if no text is longer, and if the context is unknown (0).
    """
    length = int(comparison.attrs[context])
    beyond = (comparison["position_start"] >= length) & (length > 0)
    past = comparison[prefix + "position_loss"].where(beyond, drop=True)
    tokens = past["position_stop"] - past["position_start"]
    return past.weighted(tokens).mean("position_bin")


def repeat_gain(comparison: xr.Dataset, prefix: str = "") -> xr.DataArray:
    """Loss of random tokens minus their loss the second time (nats/token), by trial."""
    return comparison[prefix + "first_loss"] - comparison[prefix + "repeat_loss"]


def _heads(entries: xr.Dataset) -> dict[str, float]:
    """Number of heads by role and label, and their wavelengths, as means over the entries."""
    count = entries.sizes["entry"]
    label_of = entries["label"]
    is_previous = entries["previous_token"] >= PREVIOUS_TOKEN
    columns = {
        "previous_token_heads": float(is_previous.sum() / count),
        "previous_token_layer_0": float(is_previous.isel(layer=0).sum() / count),
        "induction": float(best_head(entries["trial_induction"]).mean()),
    }
    for label in LABELS:
        columns[label] = float((label_of == label).sum() / count)
    columns.update(rotating_planes(entries))
    for label in ("positional", "semantic"):
        wavelengths = entries["mean_wavelength"].where(label_of == label)
        medians = wavelengths.median(("layer", "head"))
        columns[f"{label}_wavelength"] = float(medians.mean())
    return columns


def rotating_planes(entries: xr.Dataset) -> dict[str, float]:
    """Numbers of planes, and the wavelengths of the planes that rotate (tokens).

    A plane that rotates in one of the layers counts as rotating. The wavelengths limit the mean
    wavelengths of heads.
    """
    wavelength = entries["wavelength"].isel(entry=0).transpose("layer", "frequency")
    values = wavelength.values
    rotates = np.isfinite(values)
    exists = ~np.isnan(values)
    planes = int(exists.any(axis=0).sum())
    columns: dict[str, float] = {
        "planes": planes,
        "stopped_planes": planes - int(rotates.any(axis=0).sum()),
        "shortest_wavelength": np.nan,
        "longest_wavelength": np.nan,
    }
    if rotates.any():
        columns["shortest_wavelength"] = float(values[rotates].min())
        columns["longest_wavelength"] = float(values[rotates].max())
    return columns
