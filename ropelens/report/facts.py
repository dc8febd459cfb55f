"""What was run, in words for a page: the line under its title, and the list at its end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import xarray as xr

OF_RUN = ("model", "revision", "dtype", "text", "tokens", "sequences", "documents", "context")
UNITS = {"context": " tokens", "rows": " of each sequence"}


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
        facts.append(f"loss {loss_text(attrs)}")
    return facts


def loss_text(attrs: Mapping[str, Any]) -> str:
    """The mean loss with its standard error, in nats per token."""
    error = float(attrs.get("loss_se", math.nan))
    loss = f"{float(attrs['loss']):.3f}"
    if not math.isfinite(error):
        return f"{loss} nats per token"
    return f"{loss} ± {error:.3f} nats per token (standard error)"


def run_facts(profile: xr.Dataset, heads: pd.DataFrame) -> list[tuple[str, str]]:
    """What was run, as pairs of a name and a value with its unit."""
    attrs = profile.attrs
    facts = {}
    for name in (*OF_RUN, "rows"):
        if name in attrs:
            counted = name in ("tokens", "sequences", "documents")
            text = f"{attrs[name]:,}" if counted and attrs[name] else str(attrs[name] or "")
            facts[name] = text + UNITS.get(name, "") if text else "not recorded"
    if "seed" in attrs:
        facts["seed"] = str(attrs["seed"])
    if "loss" in attrs:
        facts["loss"] = loss_text(attrs)
    if profile.sizes["kv_head"] != profile.sizes["head"]:
        facts["key-value heads"] = f"{profile.sizes['kv_head']} a layer"
    if thresholds := heads.attrs.get("thresholds"):
        shown = ", ".join(f"{name} {value:.3g}" for name, value in thresholds.items())
        facts["label thresholds"] = shown
    if "created" in attrs:
        facts["created"] = str(attrs["created"])
    return list(facts.items())


def versions(attrs: Mapping[str, Any]) -> str:
    """Package versions as "torch 2.13.0, ..."; the attribute as it is where not JSON."""
    text = str(attrs.get("versions", ""))
    try:
        return ", ".join(f"{name} {version}" for name, version in json.loads(text).items())
    except (json.JSONDecodeError, AttributeError):
        return text


def comparison_facts(comparison: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """The line under the title of a comparison: what stands side by side."""
    entries = comparison.sizes["entry"]
    of_runs = "context" in comparison.attrs
    facts = [f"{entries} {'runs' if of_runs else 'models'}"]
    if entries > len(table):
        facts.insert(0, f"{len(table)} variants")
    if of_runs:
        facts.append(f"context {int(comparison.attrs['context']):,}")
    if "tokens_seen" in comparison.coords:
        seen = sorted({int(tokens) for tokens in comparison["tokens_seen"].max("step").values})
        counts = " and ".join(f"{tokens:,}" for tokens in seen)
        facts.append(f"{counts} training tokens" + (" each" if len(seen) == 1 else ""))
    return facts


def comparison_run_facts(comparison: xr.Dataset) -> list[tuple[str, str]]:
    """What was run for a comparison, as pairs of a name and a value with its unit."""
    attrs = comparison.attrs
    entries = comparison["entry"].values.tolist()
    if "model" in comparison.coords:  # entries of analyses are named after folders
        models = comparison["model"].values.tolist()
        entries = [f"{entry} ({model})" for entry, model in zip(entries, models, strict=True)]
    facts = [("runs" if "context" in attrs else "models", ", ".join(entries))]
    facts.append(("baseline", str(attrs["baseline"])))
    if "context" in attrs:
        counts = (
            f"{attrs['sequences']:,} for the loss, {attrs['head_sequences']:,} for heads and "
            f"planes, {attrs['growth_sequences']:,} for these of each step"
        )
        facts += [("context", f"{attrs['context']:,} tokens")]
        facts += [("text", "validation text of the runs"), ("sequences", counts)]
    elif "source" in comparison.coords:
        sources = dict.fromkeys(comparison["source"].values.tolist())
        facts.append(("text", "; ".join(source for source in sources if source)))
    return [*facts, ("seed", str(attrs["seed"])), ("created", str(attrs["created"]))]
