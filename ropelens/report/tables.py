"""Tables of pages: columns with units and meanings, numbers as text, and facts of the run."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import xarray as xr

from ropelens.figures import formats
from ropelens.figures.inputs import numbers
from ropelens.profiles.measures import NEEDLES
from ropelens.report.render import page_words
from ropelens.report.sentences.profile import kinds_sentence, scope_sentence
from ropelens.report.sentences.truncation import CHANCE


@dataclass(frozen=True)
class Column:
    """A column of a table. `write` formats its numbers."""

    name: str
    title: str
    unit: str
    meaning: str
    write: Callable[[Any], str] = formats.number


FORMS: dict[str, Any] = {
    "short": formats.short_count,
    "mean": formats.mean_count,
    "text": str,
}
"""Formats of templates/words.toml that are not format codes of Python."""
OF_RUN = {
    **dict.fromkeys(("model", "revision", "dtype", "text"), "{}"),
    **dict.fromkeys(("tokens", "sequences", "documents"), "{:,}"),
    "context": "{} tokens",
    "rows": "{} of each sequence",
    "seed": "{}",
}
SEQUENCES = (
    "{sequences:,} for the loss, {head_sequences:,} for heads and planes, "
    "{growth_sequences:,} for heads and planes at each step"
)


def columns_of(table: str) -> tuple[Column, ...]:
    """Columns of a table in templates/words.toml."""
    known, columns = {"needles": NEEDLES, "chance": f"{CHANCE:.3g}"}, []
    for name, title, unit, form, meaning in page_words()["columns"][table]:
        write = FORMS.get(form, partial(formats.number, form=form))
        columns.append(Column(name, title, unit, meaning.format(**known), write))
    return tuple(columns)


def head_columns(profile: xr.Dataset, heads: pd.DataFrame) -> tuple[Column, ...]:
    """Columns of this table of heads. Columns of searched tokens come last."""
    known = (column for column in columns_of("heads") if column.name in heads)
    return (*known, *searched_columns(profile, heads))


def searched_columns(profile: xr.Dataset, heads: pd.DataFrame) -> tuple[Column, ...]:
    """One column for each set of tokens in the option `attention_on` of the run."""
    names = heads.columns[heads.columns.str.startswith("attention_on_")]
    meanings = {
        name: profile[name].attrs["long_name"] for name in names if name in profile
    }
    titles = {
        name: meaning.removeprefix("mean attention ")
        for name, meaning in meanings.items()
    }
    return tuple(Column(name, titles[name], "0–1", meanings[name]) for name in meanings)


def head_rows(heads: pd.DataFrame, columns: tuple[Column, ...]) -> list[dict[str, Any]]:
    written = [map(column.write, numbers(heads, column.name)) for column in columns]
    places = heads[["layer", "head", "label"]].to_dict("records")
    return [
        place | {"cells": texts} for place, *texts in zip(places, *written, strict=True)
    ]


def compared_head_columns(comparison: xr.Dataset) -> tuple[Column, ...]:
    """Columns of the table of heads that a comparison has for each head."""
    known = {
        name
        for name, values in comparison.data_vars.items()
        if {*values.dims} == {"entry", "layer", "head"}
    }
    return tuple(column for column in columns_of("heads") if column.name in known)


def comparison_columns(table: pd.DataFrame) -> tuple[Column, ...]:
    """Columns in which this table has a number."""
    known = {name for name in table if table[name].notna().any()}
    known -= {"worse"} if "loss_change" not in known else set()
    return tuple(column for column in columns_of("comparison") if column.name in known)


def comparison_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    rows, columns = [], comparison_columns(table)
    for row in table.to_dict("records"):
        change = formats.change_and_interval(
            row["loss_change"], row["low"], row["high"]
        )
        worse = f"{row['worse']} of {row['pairs']}"
        row["loss_change"] = "\n".join(change) if row["over"] else formats.NO_NUMBER
        row["worse"] = worse if row["pairs"] else formats.NO_NUMBER
        cells = [column.write(row[column.name]) for column in columns]
        rows.append({"name": str(row["group"]), "cells": cells})
    return rows


def about(profile: xr.Dataset, heads: pd.DataFrame) -> dict[str, Any]:
    """Facts about one model and its run, by the names in templates."""
    facts = {"facts": short_facts(profile), "run": run_facts(profile, heads)}
    return facts | {"model": model_name(profile)} | _scope_and_command(profile.attrs)


def _scope_and_command(attrs: Mapping[Any, Any]) -> dict[str, str]:
    versions = ", ".join(
        f"{name} {n}" for name, n in json.loads(attrs["versions"]).items()
    )
    command = str(attrs.get("command", ""))
    return {"scope": scope_sentence(attrs), "versions": versions, "command": command}


def model_name(profile: xr.Dataset) -> str:
    """Name of the model for titles: a Hub id, or the last part of a path."""
    name = str(profile.attrs.get("model", "")) or "unnamed model"
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    is_folder = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return parts[-1] if is_folder and parts else name


def short_facts(profile: xr.Dataset) -> list[str]:
    attrs = profile.attrs
    context, trained = (int(attrs[name]) for name in ("context", "trained_context"))
    return [
        f"{profile.sizes['layer']} layers × {profile.sizes['head']} heads",
        f"{int(attrs['tokens']):,} tokens",
        f"context {context:,}" + f" (trained for {trained:,})" * (trained > context),
        f"loss {_loss(attrs)}",
        *filter(None, [kinds_sentence(profile).removesuffix(".")]),
    ]


def _loss(attrs: Mapping[str, Any]) -> str:
    error = float(attrs.get("loss_se", math.nan))
    known = math.isfinite(error)
    interval, source = f" ± {error:.3f}" * known, " (standard error)" * known
    return f"{attrs['loss']:.3f}{interval} nats per token{source}"


def run_facts(profile: xr.Dataset, heads: pd.DataFrame) -> list[tuple[str, str]]:
    """Facts about the run: pairs of a name and a value with its unit."""
    attrs, sizes = profile.attrs, profile.sizes
    facts = {
        name: form.format(attrs[name])
        if attrs[name] or name == "seed"
        else "not recorded"
        for name, form in OF_RUN.items()
        if name in attrs
    }
    facts |= {"loss": _loss(attrs), "created": str(attrs["created"])}
    if sizes["kv_head"] != sizes["head"]:
        facts["key-value heads"] = f"{sizes['kv_head']} per layer"
    if thresholds := heads.attrs.get("thresholds"):
        words = (f"{name} {value:.3g}" for name, value in thresholds.items())
        facts["label thresholds"] = ", ".join(words)
    return list(facts.items())


def about_comparison(comparison: xr.Dataset, table: pd.DataFrame) -> dict[str, Any]:
    """Facts about the compared runs or models, by the names in templates."""
    attrs, names = comparison.attrs, comparison["entry"].values.tolist()
    what = "runs" if "context" in attrs else "models"
    facts = [f"{len(table)} variants"] * (len(names) > len(table)) + [
        f"{len(names)} {what}"
    ]
    if what == "runs":
        seen = sorted(
            {int(tokens) for tokens in comparison["tokens_seen"].max("step").values}
        )
        tokens = " and ".join(f"{count:,}" for count in seen) + " training tokens"
        facts += [f"context {attrs['context']:,}", tokens + " each" * (len(seen) == 1)]
        run = {
            "context": f"{attrs['context']:,} tokens",
            "text": "validation text of the runs",
        }
        run["sequences"] = SEQUENCES.format(**attrs)
    else:
        models = comparison["model"].values.tolist()
        names = [
            f"{entry} ({model})" for entry, model in zip(names, models, strict=True)
        ]
        sources = dict.fromkeys(comparison["source"].values.tolist())
        run = {"text": "; ".join(filter(None, sources))}
    run = {what: ", ".join(names), "baseline": str(attrs["baseline"])} | run
    run |= {name: str(attrs[name]) for name in ("seed", "created")}
    shown = {"model": str(attrs["model"]), "facts": facts, "run": list(run.items())}
    return shown | _scope_and_command(attrs)
