"""Numbers of sentences about evaluations, attributions, patches and captures."""

from typing import Any

import numpy as np
import xarray as xr

from ropelens.figures.formats import change_and_interval, visible_token
from ropelens.interventions.truncation_table import changes_of_edits, top_planes


def _evaluation_records(results: xr.Dataset) -> dict[str, dict[str, Any] | None]:
    """The changes of each edit, without its controls."""
    units = {"loss": ("the loss", " nats/token"), "induction": ("the induction score", "")}
    rows = []
    for row in changes_of_edits(results).iloc[1:].to_dict("records"):
        for name in (n for n in units if f"{n}_change" in row and not row.get("control_of")):
            ends = [row[f"{name}_change{end}"] for end in ("", "_low", "_high")]
            value, interval = change_and_interval(*ends)
            what, unit = units[name]
            record = {"edit": row["edit"], "what": what, "value": value + unit}
            rows.append(record | {"interval": interval})
    return {"evaluated": {"edits": results.sizes["edit"] - 1, "changes": rows}}


def _attribution_records(results: xr.Dataset) -> dict[str, dict[str, Any] | None]:
    """The planes with the largest attribution, and the check of their effects."""
    names = {"wrong": "wrong_signs", "rank": "rank_correlation", "worst": "worst"}
    checked = {name: results.attrs.get(attr, np.nan) for name, attr in names.items()}
    largest = top_planes(results, 5).to_dict("records")
    return {
        "planes": {"answer": results.attrs["answer"], "rows": largest},
        "checked": checked if "dropped" in results else None,
    }


def _patch_records(results: xr.Dataset) -> dict[str, dict[str, Any] | None]:
    """The head, layer or position whose patch changes the answer most."""
    change, attrs = results["change"], results.attrs
    place = np.unravel_index(int(abs(change).fillna(-1).values.argmax()), change.shape)
    words = ", ".join(f"{dim} {n}" for dim, n in zip(change.dims, place, strict=True))
    numbers = {name: attrs[name] for name in ("over", "answer", "source_answer")}
    return {"patched": numbers | {"place": words, "change": float(change.values[place])}}


def _capture_records(results: xr.Dataset) -> dict[str, dict[str, Any] | None]:
    """The heads that attend most to one key, in the last row."""
    results = results.isel(prompt=0, missing_dims="ignore")
    last = results["attention"].isel(query=-1)
    tokens = [visible_token(str(token)) for token in results["key_token"].values]
    rows = [
        {"head": str(last["head"].values[n]), "share": float(last.values[n].max())}
        | {"key": tokens[int(np.nanargmax(last.values[n]))]}
        for n in np.argsort(-last.max("key").values)[:4]
    ]
    sizes = {"heads": results.sizes["head"], "tokens": len(tokens)}
    return {"captured": sizes | {"query": tokens[-1], "rows": rows}}


RECORDS = {
    "evaluation": _evaluation_records,
    "attribution": _attribution_records,
    "patches": _patch_records,
    "capture": _capture_records,
}
"""Functions that return the records of sentences in templates/sentences/results.txt."""
