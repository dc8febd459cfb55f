"""Facts on a page about its model or models, and about the run that measured them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import xarray as xr

from ropelens.report.sentences.profile import kinds_sentence, scope_sentence

FACTS_OF_RUN = {
    "model": "{}",
    "revision": "{}",
    "dtype": "{}",
    "text": "{}",
    "tokens": "{:,}",
    "sequences": "{:,}",
    "documents": "{:,}",
    "context": "{} tokens",
    "rows": "{} of each sequence",
    "seed": "{}",
}
"""Attributes of a profile that are facts of its run, and their formats."""


@dataclass(frozen=True)
class PageFacts:
    """Facts on a page. `facts` are in its head, and `run` has names and values for its end."""

    facts: Sequence[str]
    model: str = ""
    run: Sequence[tuple[str, str]] = ()
    scope: str = ""
    versions: str = ""
    command: str = ""


def profile_facts(profile: xr.Dataset, heads: pd.DataFrame) -> PageFacts:
    """Facts about one model and its run."""
    return PageFacts(
        facts=short_facts(profile),
        model=model_name(profile),
        run=run_facts(profile, heads),
        scope=scope_sentence(profile.attrs),
        versions=version_words(json.loads(profile.attrs["versions"])),
        command=str(profile.attrs.get("command", "")),
    )


def version_words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def model_name(profile: xr.Dataset) -> str:
    """Name of the model for titles: a Hub id, or the last part of a path."""
    name = str(profile.attrs.get("model", "")) or "unnamed model"
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    is_folder = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return parts[-1] if is_folder and parts else name


def short_facts(profile: xr.Dataset) -> list[str]:
    """The size of the model, its text, its loss, and its kinds of layers."""
    attrs = profile.attrs
    trained = int(attrs["trained_context"])
    context = f"context {int(attrs['context']):,}"
    if trained > int(attrs["context"]):
        context = f"{context} (trained for {trained:,})"
    facts = [
        f"{profile.sizes['layer']} layers × {profile.sizes['head']} heads",
        f"{int(attrs['tokens']):,} tokens",
        context,
    ]
    if attrs.get("beginning"):
        facts.append(attrs["beginning"])
    facts.append(f"loss {_loss(attrs)}")
    kinds = kinds_sentence(profile)
    if kinds:
        facts.append(kinds.removesuffix("."))
    return facts


def _loss(attrs: Mapping[str, Any]) -> str:
    error = float(attrs.get("loss_se", math.nan))
    if not math.isfinite(error):
        return f"{attrs['loss']:.3f} nats per token"
    return f"{attrs['loss']:.3f} ± {error:.3f} nats per token (standard error)"


def run_facts(profile: xr.Dataset, heads: pd.DataFrame) -> list[tuple[str, str]]:
    """Facts about the run: pairs of a name and a value with its unit."""
    attrs = profile.attrs
    facts = []
    for name, form in FACTS_OF_RUN.items():
        if name in attrs:
            recorded = attrs[name] or name == "seed"
            value = form.format(attrs[name]) if recorded else "not recorded"
            facts.append((name, value))
    facts.append(("loss", _loss(attrs)))
    facts.append(("created", str(attrs["created"])))
    key_heads = profile.sizes["kv_head"]
    if key_heads != profile.sizes["head"]:
        facts.append(("key-value heads", f"{key_heads} per layer"))
    thresholds = heads.attrs.get("thresholds")
    if thresholds:
        words = [f"{name} {value:.3g}" for name, value in thresholds.items()]
        facts.append(("label thresholds", ", ".join(words)))
    return facts


def comparison_facts(comparison: xr.Dataset, table: pd.DataFrame) -> PageFacts:
    """Facts about compared runs or models. Only a comparison of runs has a context."""
    attrs = comparison.attrs
    if "context" in attrs:
        entry_noun = "runs"
        entries = comparison["entry"].values.tolist()
        facts = _facts_of_runs(comparison)
        run = _run_of_runs(attrs)
    else:
        entry_noun = "models"
        entries = _named_models(comparison)
        facts = []
        run = [("text", _texts(comparison))]
    first = [f"{len(entries)} {entry_noun}"]
    if len(entries) > len(table):
        first.insert(0, f"{len(table)} variants")
    return PageFacts(
        facts=[*first, *facts],
        model=str(attrs["model"]),
        run=[
            (entry_noun, ", ".join(entries)),
            ("baseline", str(attrs["baseline"])),
            *run,
            ("seed", str(attrs["seed"])),
            ("created", str(attrs["created"])),
        ],
        scope=scope_sentence(attrs),
        versions=version_words(json.loads(attrs["versions"])),
        command=str(attrs.get("command", "")),
    )


def _facts_of_runs(comparison: xr.Dataset) -> list[str]:
    """The context of trained runs, and the tokens that they have seen."""
    last = comparison["tokens_seen"].max("step").values
    counts = sorted({int(tokens) for tokens in last})
    tokens = " and ".join(f"{count:,}" for count in counts)
    each = " each" if len(counts) == 1 else ""
    return [
        f"context {comparison.attrs['context']:,}",
        f"{tokens} training tokens{each}",
    ]


def _run_of_runs(attrs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The text on which trained runs are compared."""
    return [
        ("context", f"{attrs['context']:,} tokens"),
        ("text", "validation text of the runs"),
        (
            "sequences",
            f"{attrs['sequences']:,} for the loss, {attrs['head_sequences']:,} for heads "
            f"and planes, {attrs['growth_sequences']:,} for heads and planes at each step",
        ),
    ]


def _named_models(comparison: xr.Dataset) -> list[str]:
    names = comparison["entry"].values.tolist()
    models = comparison["model"].values.tolist()
    return [f"{name} ({model})" for name, model in zip(names, models, strict=True)]


def _texts(comparison: xr.Dataset) -> str:
    """The texts that the compared models read."""
    sources = dict.fromkeys(comparison["source"].values.tolist())
    return "; ".join(source for source in sources if source)
