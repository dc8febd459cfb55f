"""What was run, in words for a page: the line under its title, and the list at its end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import xarray as xr

from ropelens.report.words import scope

OF_RUN = {
    **dict.fromkeys(("model", "revision", "dtype", "text"), "{}"),
    **dict.fromkeys(("tokens", "sequences", "documents"), "{:,}"),
    "context": "{} tokens",
    "rows": "{} of each sequence",
}
"""The attributes of a profile that a page lists, and how."""


def about(profile: xr.Dataset, heads: pd.DataFrame) -> dict[str, Any]:
    """What every page of one model says of it and of the run, by the names in templates."""
    facts = {"facts": short_facts(profile), "run": run_facts(profile, heads)}
    return facts | {"model": model_name(profile)} | _ends(profile.attrs)


def _ends(attrs: Mapping[Any, Any]) -> dict[str, str]:
    """The scope of the text, the versions as "torch 2.13.0, ...", and the command."""
    versions = str(attrs.get("versions", ""))
    try:
        named = [f"{name} {version}" for name, version in json.loads(versions).items()]
    except (json.JSONDecodeError, AttributeError):
        named = [versions]
    command = str(attrs.get("command", ""))
    return {"scope": scope(attrs), "versions": ", ".join(named), "command": command}


def model_name(profile: xr.Dataset) -> str:
    """A Hub id as it is, a folder by its last part; the list of what was run has the path."""
    name = str(profile.attrs.get("model", "")) or "unnamed model"
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    is_folder = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return parts[-1] if is_folder and parts else name


def beside_name(profile: xr.Dataset, of_page: xr.Dataset) -> str:
    """The other model's name; with its revision where the page's model has the same name."""
    name, revision = model_name(profile), str(profile.attrs.get("revision", ""))
    if name != model_name(of_page):
        return name
    same = revision in ("", of_page.attrs.get("revision"))
    return f"{name} (beside)" if same else f"{name} at {revision[:12]}"


def short_facts(profile: xr.Dataset) -> list[str]:
    """The line under the title: size, text, loss."""
    attrs = profile.attrs
    facts = [f"{profile.sizes['layer']} layers × {profile.sizes['head']} heads"]
    if "tokens" in attrs:
        facts.append(f"{int(attrs['tokens']):,} tokens")
    if "context" in attrs:
        facts.append(f"context {int(attrs['context']):,}")
    if "loss" in attrs:
        facts.append(f"loss {_loss(attrs)}")
    return facts


def _loss(attrs: Mapping[str, Any]) -> str:
    """The mean loss with its standard error, in nats per token."""
    loss, error = float(attrs["loss"]), float(attrs.get("loss_se", math.nan))
    if not math.isfinite(error):
        return f"{loss:.3f} nats per token"
    return f"{loss:.3f} ± {error:.3f} nats per token (standard error)"


def run_facts(profile: xr.Dataset, heads: pd.DataFrame) -> list[tuple[str, str]]:
    """What was run, as pairs of a name and a value with its unit."""
    attrs, sizes = profile.attrs, profile.sizes
    facts = {
        name: form.format(attrs[name]) if attrs[name] else "not recorded"
        for name, form in OF_RUN.items()
        if name in attrs
    }
    if "seed" in attrs:
        facts["seed"] = str(attrs["seed"])
    if "loss" in attrs:
        facts["loss"] = _loss(attrs)
    if sizes["kv_head"] != sizes["head"]:
        facts["key-value heads"] = f"{sizes['kv_head']} a layer"
    if thresholds := heads.attrs.get("thresholds"):
        shown = ", ".join(f"{name} {value:.3g}" for name, value in thresholds.items())
        facts["label thresholds"] = shown
    if "created" in attrs:
        facts["created"] = str(attrs["created"])
    return list(facts.items())


def about_comparison(comparison: xr.Dataset, table: pd.DataFrame) -> dict[str, Any]:
    """What the page of a comparison says of what stands side by side, and of the runs."""
    attrs, names = comparison.attrs, comparison["entry"].values.tolist()
    of_runs = "context" in attrs
    what = "runs" if of_runs else "models"
    facts = [f"{len(table)} variants"] if len(names) > len(table) else []
    facts.append(f"{len(names)} {what}")
    if "model" in comparison.coords:  # entries of analyses are named after folders
        models = comparison["model"].values.tolist()
        names = [f"{entry} ({model})" for entry, model in zip(names, models, strict=True)]
    run = [(what, ", ".join(names)), ("baseline", str(attrs["baseline"]))]
    if of_runs:
        facts.append(f"context {int(attrs['context']):,}")
        counts = (
            f"{attrs['sequences']:,} for the loss, {attrs['head_sequences']:,} for heads and "
            f"planes, {attrs['growth_sequences']:,} for these of each step"
        )
        run += [("context", f"{attrs['context']:,} tokens")]
        run += [("text", "validation text of the runs"), ("sequences", counts)]
    elif "source" in comparison.coords:
        sources = dict.fromkeys(comparison["source"].values.tolist())
        run.append(("text", "; ".join(source for source in sources if source)))
    if "tokens_seen" in comparison.coords:
        seen = sorted({int(tokens) for tokens in comparison["tokens_seen"].max("step").values})
        counts = " and ".join(f"{tokens:,}" for tokens in seen)
        facts.append(f"{counts} training tokens" + (" each" if len(seen) == 1 else ""))
    run += [("seed", str(attrs["seed"])), ("created", str(attrs["created"]))]
    return {"model": str(attrs["model"]), "facts": facts, "run": run} | _ends(attrs)
