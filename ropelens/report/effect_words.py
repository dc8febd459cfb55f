"""Numbers of sentences about evaluations, attributions, patches and captures."""

from typing import Any

import numpy as np
import xarray as xr

from ropelens.figures.formats import visible_token
from ropelens.interventions.truncation_table import changes_of_edits, top_planes

Records = dict[str, dict[str, Any] | None]


def _evaluation_records(results: xr.Dataset) -> Records:
    """The changes of each edit, without its controls."""
    rows = changes_of_edits(results).iloc[1:].to_dict("records")
    changes = [row for row in rows if not row.get("control_of")]
    return {"evaluated": {"edits": len(rows), "changes": changes}}


def _attribution_records(results: xr.Dataset) -> Records:
    """The planes with the largest attribution, and the check of their effects."""
    names = {"wrong": "wrong_signs", "rank": "rank_correlation", "worst": "worst"}
    checked = {name: results.attrs.get(attr, np.nan) for name, attr in names.items()}
    rows = top_planes(results, 5).to_dict("records")
    planes = {"answer": results.attrs["answer"], "rows": rows}
    return {"planes": planes, "checked": checked if "dropped" in results else None}


def _patch_records(results: xr.Dataset) -> Records:
    """The head, layer or position whose patch changes the answer most."""
    change, attrs = results["change"], results.attrs
    largest = change[abs(change).fillna(-1).argmax(...)]
    words = ", ".join(f"{dim} {largest[dim].item()}" for dim in change.dims)
    numbers = {name: attrs[name] for name in ("over", "answer", "source_answer")}
    return {"patched": numbers | {"place": words, "change": largest.item()}}


def _capture_records(results: xr.Dataset) -> Records:
    """The heads that attend most to one key, in the last row."""
    results = results.isel(prompt=0, missing_dims="ignore")
    last = results["attention"].isel(query=-1)
    tokens = [visible_token(str(token)) for token in results["key_token"].values]
    rows = []
    for n in np.argsort(-last.max("key").values)[:4]:
        head, key = str(last["head"].values[n]), int(np.nanargmax(last.values[n]))
        rows.append({"head": head, "key": tokens[key], "share": float(last.values[n, key])})
    sizes = {"heads": results.sizes["head"], "tokens": len(tokens)}
    return {"captured": sizes | {"query": tokens[-1], "rows": rows}}


RECORDS = {
    "evaluation": _evaluation_records,
    "attribution": _attribution_records,
    "patches": _patch_records,
    "capture": _capture_records,
}
"""Functions that return the records of sentences in templates/sentences/results.txt."""
