"""Sentences about a table of heads: labels, what heads follow, offsets and wavelengths."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.budget.labels import Thresholds
from ropelens.figures.follow import FOLLOWS
from ropelens.figures.formats import in_words, number, plural, ranges
from ropelens.figures.style import EXCLUDED_LABELS, LABEL_ORDER
from ropelens.profiles.heads import FRACTIONS
from ropelens.report.sentences.wording import is_or_are, one_line

COMMON_OFFSETS = 4  # offsets of positional heads that a sentence names
CLAIM_VERDICTS = {
    "holds": "holds",
    "contradicted": "is contradicted",
    "unresolved": "is unresolved",
    "not testable": "is not testable",
}
SIDES_OF_NULL = {"holds": "below", "contradicted": "above", "unresolved": "within"}


def heads_sentences(heads: pd.DataFrame) -> list[str]:
    """Sentences about a table of heads. The first one has the labels and the verdict."""
    first = labels_sentence(heads)
    claim = claim_sentence(heads)
    if claim:
        first = f"{first} {claim}"
    return [first, *detail_sentences(heads)]


def detail_sentences(heads: pd.DataFrame) -> list[str]:
    """Sentences about the heads of each label, without the numbers of heads."""
    sentences = [
        _bits_sentence(heads),
        _doubts_sentence(heads),
        _offsets_sentences(heads),
        _wavelengths_sentence(heads),
    ]
    return [sentence for sentence in sentences if sentence]


def label_counts(heads: pd.DataFrame) -> dict[str, int]:
    """Number of heads with each label, in the order of `LABEL_ORDER`, including 0."""
    counts = heads["label"].value_counts()
    return {label: int(counts.get(label, 0)) for label in LABEL_ORDER}


def _counts_from_largest(heads: pd.DataFrame) -> dict[str, int]:
    """Number of heads with each label, the most frequent label first, without 0."""
    counts = label_counts(heads)
    labels = sorted(counts, key=lambda label: -counts[label])
    return {label: counts[label] for label in labels if counts[label]}


def labels_sentence(heads: pd.DataFrame) -> str:
    (label, count), *others = _counts_from_largest(heads).items()
    parts = [f"{count} {is_or_are(count)} {label}"]
    parts += [f"{count} {label}" for label, count in others]
    return f"Of {plural(len(heads), 'head')}, {in_words(parts)}."


def claim_sentence(heads: pd.DataFrame) -> str:
    """Verdict on the claim of `classify_heads`; "" for a table from a file, without it."""
    claim = heads.attrs.get("claim")
    return verdict_sentence(claim) if claim else ""


def verdict_sentence(claim: Mapping[str, Any]) -> str:
    """Verdict on `heads.attrs["claim"]`, with the numbers that it rests on."""
    verdict = claim["verdict"]
    stated = (
        "The claim that positional heads use shorter wavelengths than semantic heads "
        f"{CLAIM_VERDICTS[verdict]} here"
    )
    if verdict == "not testable":
        return one_line(f"{stated}: {claim['why']}.")
    sentence = (
        f"{stated}. Over {plural(claim['heads'], 'head')}, the rank correlation between "
        "the share of bits that the offset explains and the mean wavelength is "
        f"{number(claim['rank_correlation'])}. This is {SIDES_OF_NULL[verdict]} the "
        f"middle 95% of {plural(claim['null_draws'], 'surrogate')} with the same "
        f"frequencies in a random order ({number(claim['null_low'])} to "
        f"{number(claim['null_high'])}, median {number(claim['null_median'])}). "
        "The verdict rests on this comparison."
    )
    if np.isnan(claim["low"]):
        return sentence
    return (
        f"{sentence} Leaving out one layer at a time gives a 95% interval of "
        f"{number(claim['low'])} to {number(claim['high'])}."
    )


def _bits_sentence(heads: pd.DataFrame) -> str:
    labels = _counts_from_largest(heads)
    return " ".join(
        _label_sentence(label, heads[heads["label"] == label]) for label in labels
    )


def _label_sentence(label: str, heads: pd.DataFrame) -> str:
    """The causes of the attention of heads with one label: medians over these heads."""
    columns = [*FOLLOWS, *FRACTIONS[:2], "total_bits"]
    median = heads.reindex(columns=columns).median()
    several = len(heads) > 1
    medians = " (medians)" if several else ""
    named = f"{label.capitalize()} ({plural(len(heads), 'head')}):"
    if label in EXCLUDED_LABELS:
        sink = (heads["sink_bits"] / heads["total_bits"]).median()
        return (
            f"{named} {number(median['total_bits'])} bits, of which sinks explain "
            f"{number(sink, '.0%')}{medians}."
        )
    if not np.isnan(median["follows_position"]):
        chance = number(median["follows_chance"], ".0%")
        return (
            f"{named} when keys exchange contents, "
            f"{number(median['follows_position'], '.0%')} of the attention on them "
            f"stays at the same positions and {number(median['follows_content'], '.0%')} "
            f"moves with the contents (chance {chance}{'; medians' if several else ''})."
        )
    return (
        f"{named} position explains {number(median['positional_fraction'], '.0%')} and "
        f"content explains {number(median['content_fraction'], '.0%')} of the bits that "
        f"sinks do not explain{medians}."
    )


def _doubts_sentence(heads: pd.DataFrame) -> str:
    uncertain = _marked(heads, "uncertain")
    opposed = _marked(heads, "opposed")
    sentences = []
    if uncertain:
        sentences.append(
            f"{uncertain} of {plural(len(heads), 'head')} {is_or_are(uncertain)} "
            "uncertain: the 95% interval of the fraction that decides the label "
            "contains 2/3."
        )
    if opposed:
        sentences.append(
            f"{plural(opposed, 'head')} {is_or_are(opposed)} opposed: the label disagrees "
            "with what the head follows when keys exchange contents."
        )
    return " ".join(sentences)


def _marked(heads: pd.DataFrame, name: str) -> int:
    """Number of heads that a column marks; 0 if the table lacks it."""
    return int(np.sum(heads[name])) if name in heads else 0


def _offsets_sentences(heads: pd.DataFrame) -> str:
    """Up to three sentences: layers of positional heads, offsets, and heads without one."""
    positional = heads[heads["label"] == "positional"]
    if positional.empty:
        return ""
    layers = sorted(positional["layer"].astype(int).unique())
    layer_noun = "layer" if len(layers) == 1 else "layers"
    sentences = [f"Positional heads are in {layer_noun} {ranges(layers)}."]
    counts = positional["offset"].dropna().astype(int).value_counts().sort_index()
    by_count = counts.sort_values(ascending=False, kind="stable")
    common = by_count.head(COMMON_OFFSETS).sort_index()
    if len(common):
        verb = "offset is" if len(common) == 1 else "offsets are"
        chosen = "" if len(common) == len(counts) else "most common "
        named = [
            f"{offset} ({plural(count, 'head')})" for offset, count in common.items()
        ]
        sentences.append(f"Their {chosen}{verb} {in_words(named)}.")
    without_offset = int(positional["offset"].isna().sum())
    if without_offset:
        verb = "attends" if without_offset == 1 else "attend"
        sentences.append(
            f"{plural(without_offset, 'positional head')} {verb} to a range of offsets."
        )
    return " ".join(sentences)


def _wavelengths_sentence(heads: pd.DataFrame) -> str:
    """The planes with the largest push in positional and in semantic heads."""
    parts = []
    for label in ("positional", "semantic"):
        pushing = heads[(heads["label"] == label) & heads["top_share"].notna()]
        if len(pushing):
            parts.append(_top_planes(label, pushing))
    if not parts:
        return ""
    return (
        "The plane that pushes most strongly toward the chosen keys has a wavelength of "
        f"{' and of '.join(parts)}."
    )


def _top_planes(label: str, heads: pd.DataFrame) -> str:
    """The wavelength of the strongest plane of these heads, and its share of the push."""
    wavelengths = heads["top_wavelength"].to_numpy(float)
    planes = int(heads["planes_to_half"].median())
    top_share = float(heads["top_share"].median())
    share = (
        f"{number(top_share, '.0%')} of the push; half of the push comes from "
        f"{plural(planes, 'plane')}"
    )
    middle = float(np.median(wavelengths))
    median = f"{_tokens(middle)} tokens"
    if len(heads) == 1:
        return f"{median} in the only {label} head ({share})"
    low = _tokens(float(wavelengths.min()))
    high = _tokens(float(wavelengths.max()))
    return (
        f"{median} in {plural(len(heads), f'{label} head')} "
        f"(median; range {low} to {high}; {share})"
    )


def _tokens(wavelength: float) -> str:
    return number(wavelength, ".3g" if wavelength < 100 else ",.0f")


def caution_sentences(profile: xr.Dataset, heads: pd.DataFrame) -> list[str]:
    """Warnings of the run (the attribute "warnings"), and sentences about weak labels."""
    warnings = str(profile.attrs.get("warnings", "")).splitlines()
    stripped = [line.strip() for line in warnings]
    return [line for line in stripped if line] + _weak_labels(profile, heads)


def _weak_labels(profile: xr.Dataset, heads: pd.DataFrame) -> list[str]:
    """Sentences about labels without confidence, with few bits, or with few rows."""
    if (heads["label"] == "untested").any():
        rows = int(profile["group_scored"].sum())
        return [
            f"Heads are untested, because {plural(rows, 'row')} of attention "
            f"{is_or_are(rows)} too few to split their bits. Measure more sequences or "
            "longer sequences to get labels."
        ]
    sentences = []
    if heads["confidence"].isna().all():
        sentences.append(
            "Labels have no confidence, because the sequences were not resampled."
        )
    named = heads[~heads["label"].isin(EXCLUDED_LABELS)]
    limit = heads.attrs.get("thresholds", {}).get("faint", np.nan)
    faint = int((named["total_bits"] < limit).sum())
    if faint:
        sentences.append(
            f"{faint} of {plural(len(named), 'head')} labelled positional, semantic "
            f"or mixed {is_or_are(faint)} faint: heads with fewer than "
            f"{number(limit, 'g')} bits say little about the model."
        )
    return sentences


def label_meanings(thresholds: Thresholds) -> dict[str, str]:
    """A sentence about each label, in the order of `LABEL_ORDER`."""
    named = f"{number(100 * thresholds.named, '.0f')} %"
    sink = f"{number(100 * thresholds.sink, '.0f')} %"
    meanings = {
        "positional": f"Position explains at least {named} of the bits that sinks do not "
        "explain: the head chooses keys by their offset.",
        "mixed": f"Neither position nor content explains {named} of the bits that sinks do "
        "not explain.",
        "semantic": f"Content explains at least {named} of the bits that sinks do not "
        "explain: the head chooses keys by their tokens.",
        "sink": f"Sinks explain more than {sink} of the bits: the head looks at keys that "
        "get attention regardless of their meaning.",
        "diffuse": f"The head has fewer than {number(thresholds.diffuse, 'g')} bits: its "
        "attention is nearly uniform.",
        "untested": f"Fewer than {thresholds.rows} rows of attention were measured, which "
        "are too few for a label.",
    }
    return {label: meanings[label] for label in LABEL_ORDER}


def label_rules(thresholds: Mapping[str, float] | None) -> str:
    """The rules of labels, with their `thresholds` if they are known."""
    if not thresholds:
        return (
            "A head is a sink head if sinks explain nearly all of its bits, and diffuse if "
            "it has almost no bits. Otherwise it is positional if the offset explains most "
            "of its choice of keys, semantic if the tokens explain most of it, and mixed "
            "if neither does."
        )
    named = number(thresholds["named"], ".1%")
    rules = (
        f"A head is a sink head if sinks explain more than "
        f"{number(thresholds['sink'], '.0%')} of its bits, and diffuse if it has fewer "
        f"than {number(thresholds['diffuse'], 'g')} bits. Other heads are labelled by the "
        f"bits that sinks do not explain. A head is positional if at least {named} of the "
        "bits come from what the offset adds to the tokens, and semantic if at least "
        f"{named} come from the tokens without rotation. All others are mixed. Shared "
        "bits, which the offset and the tokens explain equally well, count for what the "
        "head follows when keys exchange their contents."
    )
    if "rows" not in thresholds:
        return rules
    return (
        f"{rules} A head is untested if its bits are scored on fewer than "
        f"{thresholds['rows']} rows."
    )
