"""Sentences about the distances at which heads find copies."""

import numpy as np
import xarray as xr

from ropelens.figures.formats import number, plural
from ropelens.interventions.variables import OWN_ROTATION
from ropelens.report.sentences.wording import one_line


def reach_sentences(reach: xr.Dataset) -> list[str]:
    """One sentence for each variant about the heads that find copies, and the best head."""
    run = _heads_run(reach)
    sentences = []
    for name in reach["variant"].values.tolist():
        rotation = "" if name == OWN_ROTATION else f" and rotation {name}"
        found = _found(reach.sel(variant=name), run)
        sentence = (
            f"Copies of {reach.attrs.get('copied', '')} random tokens, with text between "
            f"the copies{rotation}: {found}"
        )
        sentences.append(one_line(sentence))
    return sentences


def _heads_run(reach: xr.Dataset) -> str:
    """The heads whose reach was measured: all, or a number of them."""
    run = reach["found_share"].notnull().any(("variant", "run_distance"))
    count = int(run.sum())
    heads = plural(count, "head")
    if count == run.size:
        return heads
    return f"the {heads} that {'was' if count == 1 else 'were'} run"


def _found(variant: xr.Dataset, run: str) -> str:
    """How many heads that were run find the nearest copies, and shares of the best head."""
    nearest = variant["run_distance"].values.tolist()[0]
    shares = variant["found_share"].isel(run_distance=0).fillna(0)
    finders = int((shares >= 0.5).sum())
    if not finders:
        return f"none of {run} finds half of the copies {nearest} tokens back."
    layer, head = np.unravel_index(shares.values.argmax(), shares.shape)
    best = variant.isel(layer=layer, head=head)
    name = f"{layer}.{head}"
    parts = [
        f"{finders} of {run} {'finds' if finders == 1 else 'find'} at least half of the "
        f"copies {nearest} tokens back. The best head, {name}, finds {_by_distance(best)} "
        "tokens back."
    ]
    error = 100 * abs(best["foretold_share"] - best["found_share"]).max().item()
    if np.isfinite(error):
        parts.append(
            "The share predicted from the previous distance differs from the measured "
            f"share by at most {number(error, '.0f')} percentage points."
        )
    distance = variant["distance"].values
    far = distance[distance >= max(distance, default=0) / 10]
    if len(far):
        share = float(best["extrapolated_share"].sel(distance=far).mean())
        parts.append(
            f"Extrapolated from the longest distance that was run, head {name} finds "
            f"{number(share, '.0%')} of copies {number(far.min(), ',.0f')} to "
            f"{number(far.max(), ',.0f')} tokens back."
        )
    return " ".join(parts)


def _by_distance(head: xr.Dataset) -> str:
    """The share of copies that a head finds at each distance, with its interval."""
    parts = []
    for distance in head["run_distance"].values.tolist():
        found = head.sel(run_distance=distance)
        share = _percent(found["found_share"])
        low = _percent(found["found_low"])
        high = _percent(found["found_high"])
        parts.append(f"{share} ({low} to {high}) {number(distance, ',d')}")
    return ", ".join(parts)


def _percent(share: xr.DataArray) -> str:
    return number(share.item(), ".0%")
