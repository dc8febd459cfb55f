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

from ropelens.figures.formats import (
    NO_NUMBER,
    change_and_interval,
    mean_count,
    number,
    short_count,
)
from ropelens.figures.inputs import numbers
from ropelens.interventions.variables import NEEDLES
from ropelens.report.render import page_words
from ropelens.report.words import CHANCE, scope

Write = Callable[[Any], str]


@dataclass(frozen=True)
class Column:
    """A column of a table: its short title, its unit, what it means, how it is written."""

    name: str
    title: str
    unit: str
    meaning: str
    write: Write = number


WRITTEN: dict[str, Write] = {"short": short_count, "mean": mean_count, "text": str}
"""How numbers are written that have no format such as ".2f"."""


def columns_of(table: str) -> tuple[Column, ...]:
    """The columns of a table, as templates/words.toml has them."""
    known = {"needles": NEEDLES, "chance": f"{CHANCE:.3g}"}
    return tuple(
        Column(
            name,
            title,
            unit,
            meaning.format(**known),
            WRITTEN.get(form, partial(number, form=form)),
        )
        for name, title, unit, form, meaning in page_words()["columns"][table]
    )


def head_columns(profile: xr.Dataset, heads: pd.DataFrame) -> tuple[Column, ...]:
    """The columns that this table of heads has, those of tokens searched for last."""
    known = (column for column in columns_of("heads") if column.name in heads)
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
    """A row per head, in the table's order: its layer, head, label and cells."""
    written = [map(column.write, numbers(heads, column.name)) for column in columns]
    places = heads[["layer", "head", "label"]].to_dict("records")
    return [place | {"cells": texts} for place, *texts in zip(places, *written, strict=True)]


def comparison_columns(table: pd.DataFrame) -> tuple[Column, ...]:
    """The columns of which this table has a number."""
    known = {name for name in table if table[name].notna().any()}
    if "loss_change" not in known:
        known.discard("worse")
    return tuple(column for column in columns_of("comparison") if column.name in known)


def comparison_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each group, in the table's order."""
    rows, columns = [], comparison_columns(table)
    for row in table.to_dict("records"):
        change = change_and_interval(row["loss_change"], row["low"], row["high"])
        row["loss_change"] = "\n".join(change) if row["over"] else NO_NUMBER
        row["worse"] = f"{row['worse']} of {row['pairs']}" if row["pairs"] else NO_NUMBER
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
    command = str(attrs.get("command", ""))
    return {"scope": scope(attrs), "versions": versions, "command": command}


def model_name(profile: xr.Dataset) -> str:
    """A Hub id as it is, a folder by its last part; the list of what was run has the path."""
    name = str(profile.attrs.get("model", "")) or "unnamed model"
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    is_folder = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return parts[-1] if is_folder and parts else name


def short_facts(profile: xr.Dataset) -> list[str]:
    """The line under the title: size, text, loss."""
    attrs = profile.attrs
    context, trained = (int(attrs[name]) for name in ("context", "trained_context"))
    return [
        f"{profile.sizes['layer']} layers × {profile.sizes['head']} heads",
        f"{int(attrs['tokens']):,} tokens",
        f"context {context:,}" + f" (trained for {trained:,})" * (trained > context),
        f"loss {_loss(attrs)}",
    ]


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
    facts |= {"loss": _loss(attrs), "created": str(attrs["created"])}
    if sizes["kv_head"] != sizes["head"]:
        facts["key-value heads"] = f"{sizes['kv_head']} a layer"
    if thresholds := heads.attrs.get("thresholds"):
        shown = ", ".join(f"{name} {value:.3g}" for name, value in thresholds.items())
        facts["label thresholds"] = shown
    return list(facts.items())


def about_comparison(comparison: xr.Dataset, table: pd.DataFrame) -> dict[str, Any]:
    """What the page of a comparison says of what stands side by side, and of the runs."""
    attrs, names = comparison.attrs, comparison["entry"].values.tolist()
    what = "runs" if "context" in attrs else "models"
    facts = [f"{len(table)} variants"] if len(names) > len(table) else []
    facts.append(f"{len(names)} {what}")
    if what == "runs":
        seen = sorted({int(tokens) for tokens in comparison["tokens_seen"].max("step").values})
        counts = " and ".join(f"{tokens:,}" for tokens in seen)
        facts.append(f"context {int(attrs['context']):,}")
        facts.append(f"{counts} training tokens" + (" each" if len(seen) == 1 else ""))
        counts = (
            f"{attrs['sequences']:,} for the loss, {attrs['head_sequences']:,} for heads and "
            f"planes, {attrs['growth_sequences']:,} for these of each step"
        )
        run = [("context", f"{attrs['context']:,} tokens")]
        run += [("text", "validation text of the runs"), ("sequences", counts)]
    else:  # entries are named after folders
        models = comparison["model"].values.tolist()
        names = [f"{entry} ({model})" for entry, model in zip(names, models, strict=True)]
        sources = dict.fromkeys(comparison["source"].values.tolist())
        run = [("text", "; ".join(filter(None, sources)))]
    compared = [(what, ", ".join(names)), ("baseline", str(attrs["baseline"])), *run]
    made = [("seed", str(attrs["seed"])), ("created", str(attrs["created"]))]
    return {"model": str(attrs["model"]), "facts": facts, "run": compared + made} | _ends(attrs)
