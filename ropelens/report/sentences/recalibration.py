"""Sentences about recalibrations. A row is a row of the table of a comparison."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.comparison.recalibration_table import (
    NOT_DEFINED,
    NOT_REACHED,
    excludes_zero,
    gap_between,
    gaps_past_context,
)
from ropelens.comparison.recovery import LEAST_DAMAGE
from ropelens.figures.formats import (
    in_words,
    mean_count,
    number,
    plural,
    short_count,
    signed,
)
from ropelens.report.sentences.comparison import stopped_planes_sentence
from ropelens.report.sentences.recalibration_rates import rates_sentence
from ropelens.report.sentences.wording import one_line
from ropelens.train.recalibration_settings import WORSE

Row = Mapping[Any, Any]
SMALL = 0.1  # nats/token; smaller numbers have three decimals
MANY_TOKENS = 100_000  # are written in millions
# Rise of the recovered share between the last evaluations, if a curve had not ended
RISE = 0.01


def recalibration_sentences(comparison: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """Sentences about recalibrations. The first one answers the question of the page."""
    control, *variants = table.to_dict("records")
    sentences = [
        _answer(comparison, control, variants),
        _best_sentence(comparison, variants),
        _tokens_sentence(variants),
        _slope_sentence(comparison, variants),
        _past_context_sentence(comparison, [control, *variants]),
        _tasks_sentence([control, *variants]),
        _labels_sentence(variants),
        stopped_planes_sentence(table.rename(columns={"variant": "group"})),
        _still_sentence(table),
        _seeds_sentence(variants),
        _missing_runs_sentence(comparison),
        rates_sentence(comparison),
    ]
    return [one_line(sentence) for sentence in sentences if sentence]


def _answer(comparison: xr.Dataset, control: Row, variants: Sequence[Row]) -> str:
    """The variants, the smallest gap first, and the change of the control."""
    attrs = comparison.attrs
    steps = plural(int(attrs["steps"]), "step")
    begin = f"After {steps} ({tokens_in_words(int(attrs['tokens']))})"
    ranked = by_gap(variants)
    best = str(ranked[0]["variant"]) if len(ranked) > 1 else ""
    parts = [_recovered(ranked, best), _undamaged(ranked, best)]
    if not _is_damaged(ranked[0]):
        parts.reverse()
    parts.append(_control_words(control))
    sentence = f"{begin}, {'; '.join(part for part in parts if part)}."
    change = float(control["loss_change"])
    if change <= WORSE:
        return sentence
    return (
        f"The training itself damaged the model: the control is worse by {nats(change)} "
        f"nats/token than before, so a learning rate of {attrs['learning_rate']:g} is too "
        f"high, and these numbers do not show the needs of the variants. {sentence}"
    )


def _control_words(control: Row) -> str:
    change = signed(float(control["loss_change"]), "+.2f")
    low = nats(control["loss_change_low"], "+")
    high = nats(control["loss_change_high"], "+")
    words = f"the control changed by {change} ({low} to {high})"
    if not excludes_zero(control, "loss_change"):
        words = f"{words}, which is not certain"
    return words


def _is_damaged(row: Row) -> bool:
    """Whether the damage of a variant is large enough to measure a recovery."""
    return math.isfinite(row["recovered"])


def _short_gap(row: Row) -> str:
    """The gap after training, and whether it is certain: "+0.003, not certain"."""
    words = nats(row["gap_after"], "+")
    return words if excludes_zero(row, "gap_after") else f"{words}, not certain"


def _subject(row: Row, best: str) -> str:
    """The name of a variant. The best one is introduced by its gap; "" if it is alone."""
    name = str(row["variant"])
    if name != best:
        return name
    return f"{name} has the smallest gap to the control ({_short_gap(row)}): it"


def _recovered(ranked: Sequence[Row], best: str) -> str:
    """The recovered shares of the variants that were damaged."""
    parts: list[str] = []
    for row in ranked:
        if not _is_damaged(row):
            continue
        subject = _subject(row, best)
        share = percent_and_interval(row)
        damage = nats(row["gap_before"])
        if parts:
            parts.append(f"{subject} {share} of {damage}")
            continue
        words = f"{subject} has recovered {share} of its damage of {damage} nats/token"
        parts.append(words)
    if len(parts) == 2:
        return ", and ".join(parts)
    return "; ".join(parts)


def _undamaged(ranked: Sequence[Row], best: str) -> str:
    """The variants whose damage is too small to measure a recovery."""
    words = []
    for row in ranked:
        if _is_damaged(row):
            continue
        subject = _subject(row, best)
        before = nats(row["gap_before"], "+")
        if row["gap_before_high"] < 0:
            words.append(
                f"{subject} was better than the control from the start ({before})"
            )
            continue
        damage = "no clear damage"
        if row["gap_before_low"] > 0:
            damage = f"a damage too small for a recovered share ({before})"
        if row["variant"] == best:
            words.append(f"{subject} had {damage}")
        else:
            words.append(f"{subject} had {damage}, gap {_short_gap(row)}")
    return "; ".join(words)


def _best_sentence(comparison: xr.Dataset, variants: Sequence[Row]) -> str:
    """The variant with the smallest gap, and whether its difference to the next is certain."""
    ranked = by_gap(variants)
    best = ranked[0]
    gap = (
        f"{gap_in_words(best, 'gap_after')} nats/token, a difference that is "
        f"{_certain(excludes_zero(best, 'gap_after'))}."
    )
    if len(ranked) < 2:
        return f"After training, the gap of {best['variant']} to the control is {gap}"
    name = best["variant"]
    sentence = f"Best variant: {name}. After training, its gap to the control is {gap}"
    second = ranked[1]
    difference = gap_between(comparison, second["variant"], best["variant"])
    if np.isnan(difference.value):
        return f"{sentence} No seed has both it and {second['variant']}."
    value = float(difference.value)
    low = float(difference.low)
    high = float(difference.high)
    is_certain = low > 0 or high < 0
    comparative = f"worse than {name}"
    if value < 0:
        # The seeds that both have are fewer than the seeds of the best variant
        comparative = f"better than {name} in the seeds that both have,"
        value = -value
        low = -float(difference.high)
        high = -float(difference.low)
    return (
        f"{sentence} Second: {second['variant']}, {comparative} by {nats(value)} "
        f"({nats(low)} to {nats(high)}), which is {_certain(is_certain)}."
    )


def _certain(is_certain: bool) -> str:
    return "certain" if is_certain else "not certain (the interval contains 0)"


def _tokens_sentence(variants: Sequence[Row]) -> str:
    parts = []
    for row in by_gap(variants):
        if row["tokens_to_half"] == NOT_DEFINED:
            continue
        parts.append(f"{row['variant']} {_tokens_to_shares(row)}")
    if not parts:
        return (
            f"The recovered share is not defined for any variant: it needs a gap before "
            f"training whose interval is above {LEAST_DAMAGE} nats/token."
        )
    return f"Training tokens until half and 90 % were recovered: {'; '.join(parts)}."


def _tokens_to_shares(row: Row) -> str:
    """Tokens to half and to 90 %, or the shares that the variant did not reach."""
    if row["tokens_to_half"] == NOT_REACHED:
        return "reached neither"
    half = short_count(float(row["tokens_to_half"]))
    if row["tokens_to_90"] == NOT_REACHED:
        return f"{half}, without reaching 90 %"
    return f"{half} and {short_count(float(row['tokens_to_90']))}"


def _slope_sentence(comparison: xr.Dataset, variants: Sequence[Row]) -> str:
    """How fast variants that did not reach 90 % still recovered at the end."""
    tokens = comparison["tokens_seen"].values
    if len(tokens) < 3:
        return ""
    parts = []
    rising = []
    for row in by_gap(variants):
        if row["tokens_to_90"] != NOT_REACHED:
            continue
        share = comparison["recovered"].sel(variant=row["variant"]).values
        before = number(100 * share[-2], ".1f")
        after = number(100 * share[-1], ".1f")
        parts.append(f"{row['variant']} from {before} to {after} %")
        if share[-1] - share[-2] >= RISE:
            rising.append(row["variant"])
    if not parts:
        return ""
    span = f"the last {short_count(float(tokens[-1] - tokens[-2]))} training tokens"
    sentence = f"In {span}, the recovered share of variants below 90 % went {', '.join(parts)}."
    if rising:
        sentence += f" Curves that had not ended: {in_words(rising)}."
    return sentence


def _past_context_sentence(comparison: xr.Dataset, rows: Sequence[Row]) -> str:
    """Losses past the recalibrated context, after the training and before it."""
    name = "loss_past_recalibrated_context"
    parts = []
    for row in rows:
        after = number(row[f"{name}_after"])
        before = number(row[f"{name}_before"])
        parts.append(f"{row['variant']} {after} (before {before})")
    context = int(comparison.attrs["context"])
    sentence = (
        f"Loss past the recalibrated context of {context:,} tokens, up to four times its "
        f"length: {', '.join(parts)} nats/token."
    )
    better = _better_past_context(comparison, [row["variant"] for row in rows[1:]])
    if better:
        sentence += f" Lower than the control in each seed: {in_words(better)}."
    return sentence


def _better_past_context(comparison: xr.Dataset, variants: Sequence[str]) -> list[str]:
    """Variants with a clearly lower loss past the context than the control, in all seeds."""
    better = []
    for variant in variants:
        gains = -gaps_past_context(comparison, variant)
        if gains.min() >= LEAST_DAMAGE:
            least = nats(gains.min())
            most = nats(gains.max())
            by = least if least == most else f"{least} to {most}"
            better.append(f"{variant} (by {by})")
    return better


def _tasks_sentence(rows: Sequence[Row]) -> str:
    induction = []
    needles = []
    for row in rows:
        name = row["variant"]
        before = number(row["induction_before"])
        induction.append(f"{name} {number(row['induction_after'])} (before {before})")
        before = number(row["retrieval_before"])
        needles.append(f"{name} {number(row['retrieval_after'])} (before {before})")
    return (
        f"Attention of the best induction head: {', '.join(induction)}. Share of needles "
        f"that are found in prompts of up to the recalibrated context: {', '.join(needles)}."
    )


def _labels_sentence(variants: Sequence[Row]) -> str:
    parts = []
    for row in variants:
        after = mean_count(row["labels_changed_after"])
        before = mean_count(row["labels_changed_before"])
        parts.append(f"{row['variant']} {after} (before {before})")
    return (
        "Heads whose label differs from the control's by more than its uncertainty: "
        f"{', '.join(parts)}."
    )


def _still_sentence(table: pd.DataFrame) -> str:
    still = table["variant"][table["stopped_planes"] == table["planes"]].tolist()
    if not still:
        return ""
    return (
        f"No plane rotates in {in_words(still)}. No head there can be positional through "
        "rotation, and positions that lower layers compute count as content."
    )


def _seeds_sentence(variants: Sequence[Row]) -> str:
    several = [row for row in variants if row["seeds"] > 1]
    alone = [row["variant"] for row in variants if row["seeds"] == 1]
    words = []
    if several:
        parts = []
        for row in several:
            spread = signed(row["gap_after_spread_of_seeds"], ".3f")
            parts.append(f"{row['variant']} {spread} (of {row['seeds']} seeds)")
        words.append(
            "Largest minus smallest gap of the seeds after training: "
            f"{', '.join(parts)} nats/token. A seed changes only the order of the text."
        )
    if alone:
        words.append(
            f"One seed only: {in_words(alone)}. The intervals are over documents, and do "
            "not include the variation between orders of the text."
        )
    return " ".join(words)


def _missing_runs_sentence(comparison: xr.Dataset) -> str:
    words = []
    if comparison.attrs["unfinished"]:
        words.append(f"These runs are not finished: {comparison.attrs['unfinished']}.")
    if comparison.attrs["unpaired"]:
        words.append(
            "These runs are left out, because no control has their seed and learning rate: "
            f"{comparison.attrs['unpaired']}."
        )
    return " ".join(words)


# ---- parts of sentences


def by_gap(variants: Sequence[Row]) -> list[Row]:
    """The variants, the smallest gap after training first."""
    return sorted(variants, key=lambda row: row["gap_after"])


def nats(value: float, sign: str = "") -> str:
    """A loss with two decimals, or three if it is small."""
    decimals = 2 if abs(value) >= SMALL else 3
    return signed(value, f"{sign}.{decimals}f")


def percent_and_interval(row: Row, name: str = "recovered") -> str:
    """The recovered share with its interval: "93 % (90 to 95 %)"."""
    share = _percent(row[name])
    low = _percent(row[f"{name}_low"])
    high = _percent(row[f"{name}_high"])
    return f"{share} % ({low} to {high} %)"


def _percent(share: float) -> str:
    return number(100 * share, ".0f")


def tokens_in_words(tokens: int) -> str:
    """ "0.2 million tokens", or the whole number if it is small."""
    if tokens < MANY_TOKENS:
        return plural(tokens, "token")
    millions = f"{tokens / 1e6:,.2g}" if tokens < 1e7 else f"{tokens / 1e6:,.0f}"
    return f"{millions} million tokens"


def gap_in_words(row: Row, name: str) -> str:
    """A gap with its interval: "+0.056 (+0.050 to +0.061)"."""
    value = nats(row[name], "+")
    low = nats(row[f"{name}_low"], "+")
    high = nats(row[f"{name}_high"], "+")
    return f"{value} ({low} to {high})"
