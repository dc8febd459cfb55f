"""Several checkpoints, analyzed alike: which are measured already, and all in one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.analysis.analysis import Analysis, open_analysis
from ropelens.analysis.folders import write_comparison
from ropelens.analysis.provenance import arguments_of
from ropelens.comparison.compare import compare
from ropelens.errors import BadArgument
from ropelens.files.results import read_record
from ropelens.measure.profile import versions
from ropelens.models.checkpoint import fingerprint, locate
from ropelens.models.loading import Loading
from ropelens.models.texts import fingerprint_of, read_documents


def stack(analyses: Mapping[str, Analysis]) -> xr.Dataset:
    """The profiles of several checkpoints over `checkpoint`, by their names, with their labels.

    All that `ropelens.profile` gives, over (checkpoint, ...), but for excerpts, which each
    chooses for itself; coordinates in which the checkpoints differ too, such as `inv_freq`; and
    `label`, `confidence` (checkpoint, layer, head). Attributes that they share stay; `loss`
    and `loss_se` (nats/token) become variables.

    Raises BadArgument for checkpoints of different shapes, or that read different tokens.
    """
    known = isinstance(analyses, Mapping) and all(
        isinstance(one, Analysis) for one in analyses.values()
    )
    if not known or not analyses:
        raise BadArgument(
            "There is nothing to stack.",
            seen=repr(analyses)[:80],
            attempt="analyses by name, one or more",
        )
    tokens = {name: one.profile.attrs["tokens_sha256"] for name, one in analyses.items()}
    if len(set(tokens.values())) > 1:
        raise BadArgument(
            "Only checkpoints that read the same tokens can be stacked.",
            seen=", ".join(f"{name}: {digest[:8]}" for name, digest in tokens.items())[:200],
            attempt="the same text, context, seed and tokenizer; or ropelens.compare",
        )
    names = xr.Variable("checkpoint", np.array(list(analyses), dtype=object))
    try:
        return xr.concat(
            [_numbers(one) for one in analyses.values()],
            names,
            data_vars="all",
            coords="different",
            compat="equals",
            join="exact",
            combine_attrs="drop_conflicts",
        )
    except ValueError as error:
        raise BadArgument(
            "Only checkpoints of one shape can be stacked.",
            seen=str(error).splitlines()[0][:200],
            attempt="ropelens.compare, which takes others too",
        ) from error


def _numbers(analysis: Analysis) -> xr.Dataset:
    """What is stacked of one analysis."""
    profile = analysis.profile
    kept = profile[[name for name in profile.data_vars if not str(name).startswith("excerpt_")]]
    for name in ("label", "confidence"):
        values = analysis.heads[name].to_numpy().reshape(kept["total_bits"].shape)
        kept[name] = kept["total_bits"].dims, values
    for name in ("loss", "loss_se"):
        kept[name] = (), kept.attrs.pop(name), {"units": "nats/token"}
    return kept


def is_measured(folder: Path, model: str, asked: Mapping[str, Any]) -> bool:
    """Whether `folder` holds what `analyze(model, **asked)` would give.

    With the same arguments, weights, text and versions.
    """
    record = read_record(folder)
    try:
        held = record["arguments"], record["versions"]
        digests = record["model"]["fingerprint"], record["text"]["fingerprint"]
    except (KeyError, TypeError):
        return False
    if held != (arguments_of({"model": model, **asked}), versions()):
        return False
    options = {name: asked[name] for name in ("revision", "local_files_only")}
    path, ids = locate(model, Loading(**options)).path, asked["ids"]
    text = fingerprint_of(read_documents(asked["text"])) if ids is None else fingerprint(ids)
    return digests == (fingerprint(path), text)


def write_checkpoints(folder: Path, names: list[str], *, command: str) -> Path:
    """Set the analyses in `folder`, a folder each, side by side there; the path of the page.

    Beside what `write_comparison` writes there are checkpoints.nc (`stack`) and heads.csv, in
    which the column `checkpoint` comes first.
    """
    analyses = {name: open_analysis(folder / name) for name in names}
    heads = [one.heads.assign(checkpoint=name) for name, one in analyses.items()]
    table = pd.concat(heads, ignore_index=True)
    table.insert(0, "checkpoint", table.pop("checkpoint"))
    return write_comparison(
        folder,
        compare(
            [folder / name for name in names], cache=folder
        ),  # where nothing is kept of analyses
        more={"checkpoints.nc": stack(analyses), "heads.csv": table},
        command=command,
    )
