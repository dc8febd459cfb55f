"""What pages list: tables, columns with units and meanings, numbers as text, and the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import xarray as xr

from ropelens.figures.inputs import numbers
from ropelens.figures.text import (
    NOTHING,
    change_and_interval,
    mean_count,
    number,
    short_count,
)
from ropelens.report.words import CHANCE, scope
from ropelens.statistics.variables import NEEDLES

RETRIEVED = (
    "share of needles (pairs of a key and a value hidden in the text) whose value is retrieved "
    f"when the key comes again, among {NEEDLES} (chance: {CHANCE:.3g})"
)


@dataclass(frozen=True)
class Column:
    """A column of a table: its short title, its unit, what it means, how it is written."""

    name: str
    title: str
    unit: str
    meaning: str
    write: Callable[[Any], str] = number


# fmt: off
WHOLE, THREE = partial(number, form=".0f"), partial(number, form=".3f")

OF_HEADS = (
    Column("confidence", "conf.", "0–1", "share of resamples of sequences with this label"),
    Column("positional_fraction", "position", "0–1", "share of the bits without sinks"),
    Column("content_fraction", "content", "0–1", "share of the bits without sinks"),
    Column("share_low", "share from", "0–1", "95% interval of the largest share"),
    Column("share_high", "share to", "0–1", "95% interval of the largest share"),
    Column("total_bits", "total", "bits", "information in the choice of keys"),
    Column("sink_bits", "sink", "bits", "what sinks explain"),
    Column("position_bits", "position", "bits", "what only the offset explains"),
    Column("content_bits", "content", "bits", "what the tokens explain"),
    Column("interaction_bits", "both", "bits", "what needs tokens and offset at once"),
    Column("offset", "offset", "tokens", "the one that a positional head looks back to", WHOLE),
    Column("offset_low", "offset from", "tokens", "first of the kernel's middle half", WHOLE),
    Column("offset_high", "offset to", "tokens", "last of the kernel's middle half", WHOLE),
    Column("top_wavelength", "top plane", "tokens", "wavelength that pushes most", short_count),
    Column("top_share", "its share", "0–1", "of the push toward keys"),
    Column("planes_to_half", "to half", "planes", "planes that hold half of the push", WHOLE),
    Column("mean_wavelength", "mean", "tokens", "geometric mean by that push", short_count),
    Column("previous_token", "previous", "0–1", "attention on the token before"),
    Column("self_mass", "self", "0–1", "attention on the token itself"),
    Column("sink_mass", "on sinks", "0–1", "attention on sinks"),
    Column("entropy_bits", "entropy", "bits", "spread of the attention"),
    Column("induction", "induction", "0–1", "attention on what followed last time"),
    Column("duplicate_token", "duplicate", "0–1", "attention on the same token earlier"),
)

OF_COMPARISON = (
    Column("loss", "loss", "nats/token", "on text held out of training, or analyzed", THREE),
    Column("loss_change", "change", "nats/token",
           "of the loss from the baseline's, in pairs of the same text (and size and seed), "
           "with its 95% interval", str),
    Column("worse", "worse", "pairs", "pairs in which the loss is above the baseline's", str),
    Column("loss_past_context", "past\ncontext", "nats/token",
           "loss at positions beyond the trained context, up to four times it"),
    Column("repeat_gain", "repeats\ngain", "nats/token",
           "how much less random tokens cost the second time"),
    Column("retrieval", "retrieval", "0–1", RETRIEVED, THREE),
    Column("previous_token_heads", "previous\ntoken", "heads",
           "heads with at least half of their attention on the token before", mean_count),
    Column("previous_token_layer_0", "in\nlayer 0", "heads",
           "such heads in the first layer, where only RoPE tells positions apart", mean_count),
    Column("induction", "induction", "0–1",
           "the best head's attention on what followed the same token last time"),
    Column("positional", "positional", "heads",
           "heads with at least two thirds of their bits, sinks apart, from the offset "
           "alone", mean_count),
    Column("positional_wavelength", "positional\nthrough", "tokens",
           "the median wavelength through which positional heads select their keys, of planes "
           "that turn", short_count),
    Column("semantic", "semantic", "heads",
           "heads with at least two thirds of them from what the tokens are; all others are "
           "mixed, sinks or diffuse", mean_count),
    Column("semantic_wavelength", "semantic\nthrough", "tokens",
           "the median wavelength through which semantic heads select their keys, of planes "
           "that turn", short_count),
)
# fmt: on


def head_columns(profile: xr.Dataset, heads: pd.DataFrame) -> tuple[Column, ...]:
    """The columns that this table of heads has, those of tokens searched for last."""
    known = (column for column in OF_HEADS if column.name in heads)
    return (*known, *searched_columns(profile, heads))


def searched_columns(profile: xr.Dataset, heads: pd.DataFrame) -> tuple[Column, ...]:
    """A column for each set of tokens that heads were searched by (`attention_on`)."""
    names = [str(name) for name in heads if str(name).startswith("attention_on_")]
    meanings = {name: profile[name].attrs["long_name"] for name in names if name in profile}
    return tuple(
        Column(name, meaning.removeprefix("mean attention "), "0–1", meaning)
        for name, meaning in meanings.items()
    )


def head_rows(heads: pd.DataFrame, columns: tuple[Column, ...]) -> list[dict[str, Any]]:
    """A row a head, in the table's order: its layer, head, label and cells."""
    written = [map(column.write, numbers(heads, column.name)) for column in columns]
    places = heads[["layer", "head", "label"]].to_dict("records")
    return [place | {"cells": texts} for place, *texts in zip(places, *written, strict=True)]


def comparison_columns(table: pd.DataFrame) -> tuple[Column, ...]:
    """The columns of which this table has a number."""
    known = {name for name in table if table[name].notna().any()}
    if "loss_change" not in known:
        known.discard("worse")
    return tuple(column for column in OF_COMPARISON if column.name in known)


def comparison_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each group, in the table's order."""
    rows, columns = [], comparison_columns(table)
    for row in table.to_dict("records"):
        change = change_and_interval(row["loss_change"], row["low"], row["high"])
        row["loss_change"] = "\n".join(change) if row["over"] else NOTHING
        row["worse"] = f"{row['worse']} of {row['pairs']}" if row["pairs"] else NOTHING
        cells = [column.write(row[column.name]) for column in columns]
        rows.append({"name": str(row["group"]), "cells": cells})
    return rows


# ---- what was run: the line under a page's title, and the list at its end

OF_RUN = {
    **dict.fromkeys(("model", "revision", "dtype", "text"), "{}"),
    **dict.fromkeys(("tokens", "sequences", "documents"), "{:,}"),
    "context": "{} tokens",
    "rows": "{} of each sequence",
    "seed": "{}",
}


def about(profile: xr.Dataset, heads: pd.DataFrame) -> dict[str, Any]:
    """What every page of one model says of it and of the run, by the names in templates."""
    facts = {"facts": short_facts(profile), "run": run_facts(profile, heads)}
    return facts | {"model": model_name(profile)} | _ends(profile.attrs)


def _ends(attrs: Mapping[Any, Any]) -> dict[str, str]:
    """The scope of the text, the versions as "torch 2.13.0, ...", and the command."""
    versions = ", ".join(f"{of} {n}" for of, n in json.loads(attrs["versions"]).items())
    return {
        "scope": scope(attrs),
        "versions": versions,
        "command": str(attrs.get("command", "")),
    }


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
        trained = int(attrs.get("trained_context", 0))
        more = f" (trained on {trained:,})" if trained > attrs["context"] else ""
        facts.append(f"context {int(attrs['context']):,}{more}")
    if "loss" in attrs:
        facts.append(f"loss {_loss(attrs)}")
    return facts


def _loss(attrs: Mapping[str, Any]) -> str:
    error = float(attrs.get("loss_se", math.nan))
    of_text = f" ± {error:.3f} nats per token (standard error)"
    return f"{attrs['loss']:.3f}" + (of_text if math.isfinite(error) else " nats per token")


def run_facts(profile: xr.Dataset, heads: pd.DataFrame) -> list[tuple[str, str]]:
    """What was run, as pairs of a name and a value with its unit."""
    attrs, sizes = profile.attrs, profile.sizes
    facts = {
        name: form.format(attrs[name]) if attrs[name] or name == "seed" else "not recorded"
        for name, form in OF_RUN.items()
        if name in attrs
    }
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
