"""Sentences about a sweep, in which more and more planes stop or are scaled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.figures.formats import (
    change_and_interval,
    in_words,
    number,
    plural,
    short_count,
    signed,
)
from ropelens.interventions.changes import class_changes
from ropelens.interventions.truncation_table import QUARTER, sweeps_by_kind
from ropelens.profiles.measures import NEEDLES
from ropelens.report.sentences.wording import Change, change_in, one_line, percent

CHANCE = 1 / NEEDLES  # share of needles found by a guess among the values in the prompt
FREE = 0.01  # nats/token: a step is called free if its interval ends below this
END_NAMES = {"slow": "slowest", "fast": "fastest"}


@dataclass(frozen=True)
class Setting:
    """The text of a sweep, the heads whose planes change, and what happens to the planes.

    `heads` is "" if the planes of all heads change. `scale` is None if planes stop.
    """

    context: int
    trained_context: int
    heads: str
    scale: str | None

    @property
    def stopping(self) -> str:
        return "stopping" if self.scale is None else f"scaling by {self.scale}"

    @property
    def stopped(self) -> str:
        return "stopped" if self.scale is None else f"scaled by {self.scale}"

    @property
    def stop(self) -> str:
        return "stop" if self.scale is None else f"be scaled by {self.scale}"

    def within(self) -> str:
        """The beginning of a sentence: the length of the text, and the heads."""
        longer = "" if self.covers_training else " (longer text may differ)"
        return f"Within {self.context:,} tokens{longer}{self._only_heads()},"

    def within_at_first(self) -> str:
        """The beginning of the first sentence, which names the trained context."""
        trained = (
            f" (the model was trained for {self.trained_context:,}; this result applies "
            "only to the measured length)"
        )
        longer = "" if self.covers_training else trained
        return f"Within {self.context:,} tokens{longer}{self._only_heads()},"

    @property
    def covers_training(self) -> bool:
        return self.context >= self.trained_context

    def _only_heads(self) -> str:
        return f", only in heads {self.heads}" if self.heads else ""


@dataclass(frozen=True)
class Step:
    """An entry of a sweep: its planes, and the changes from the unmodified model.

    `stopped` and `kept` are shares of the planes. `wavelengths` are the wavelengths of the
    stopped planes in words, and `shortest_wavelength` is in tokens. `random_loss` is the mean
    change of the loss if as many random planes stop. Losses are in nats/token.
    `labels_changed` is the number of heads whose label changed by more than its uncertainty,
    and `labels_differ` the number of all heads with another label.
    """

    edit: str
    kind: str
    kept: float
    wavelengths: str
    shortest_wavelength: float
    loss: Change
    far_loss: Change
    far_loss_measured: bool
    copy_loss: Change
    labels_changed: float
    labels_changed_share: float
    labels_differ: Change
    labels_differ_share: float
    random_loss: float

    @property
    def stopped(self) -> float:
        return 1 - self.kept

    @property
    def planes(self) -> str:
        """The stopped planes of one end: "the slowest 25%"."""
        return f"the {END_NAMES[self.kind]} {percent(self.stopped)}"


def sweep_sentences(sweep: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """Sentences about a sweep and its summary `table`, first on the cost of planes."""
    sweeps = sweeps_by_kind(sweep)
    if len(sweeps) == 1:
        return _one_sweep(sweep, table)
    sentences = []
    for of_kind in sweeps.values():
        edits = table["edit"].isin(of_kind["edit"].values)
        sentences += _one_sweep(of_kind, table[edits])
    return sentences


def _one_sweep(sweep: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """Sentences about a sweep in which the same layers change in all steps."""
    setting = _setting(sweep)
    steps = [_step(row, table) for row in table.to_dict("records")]
    sentences = [
        _short_sentence(setting, steps),
        _ends_sentence(setting, steps),
        _far_sentence(setting, steps),
        _copies_sentence(setting, steps, sweep, table),
        _free_sentence(setting, steps),
        _bands_sentence(setting, steps),
        _labels_sentence(setting, steps),
        _retrieval_sentence(table),
        _classes_sentence(setting, steps, sweep),
    ]
    return [one_line(sentence) for sentence in sentences if sentence]


def _setting(sweep: xr.Dataset) -> Setting:
    heads = str(sweep.attrs.get("heads", "*"))
    scale = sweep.attrs.get("scale")
    return Setting(
        context=int(sweep.attrs["context"]),
        trained_context=int(sweep.attrs["trained_context"]),
        heads=heads.removeprefix("*").removeprefix(".*"),
        scale=None if scale is None else f"{scale:g}",
    )


def _step(row: dict[Any, Any], table: pd.DataFrame) -> Step:
    low = short_count(row["wavelength_low"])
    high = short_count(row["wavelength_high"])
    return Step(
        edit=row["edit"],
        kind=row["kind"],
        kept=row["kept"],
        wavelengths=low if low == high else f"{low} to {high}",
        shortest_wavelength=row["wavelength_low"],
        loss=change_in(row, "loss_change"),
        far_loss=change_in(row, "far_loss_change"),
        far_loss_measured=not np.isnan(row["far_loss"]),
        copy_loss=change_in(row, "copy_loss_change"),
        labels_changed=row["labels_changed"],
        labels_changed_share=row["labels_changed_share"],
        labels_differ=change_in(row, "labels_differ"),
        labels_differ_share=row["labels_differ_share"],
        random_loss=_random_loss(row, table),
    )


def _random_loss(row: dict[Any, Any], table: pd.DataFrame) -> float:
    """Mean change of the loss if as many random planes stop; NaN if there is no such step."""
    if row["kind"] == "band":
        random = table[table["kind"] == "band control"]
        alike = random["band"] == row["band"]
    elif row["kind"] in END_NAMES:
        random = table[table["kind"] == "random"]
        alike = random["kept"] == row["kept"]
    else:
        return np.nan
    return float(random.loc[alike, "loss_change"].mean())


def _at_quarter(steps: Sequence[Step]) -> list[Step]:
    """For each end, the step that stops the share nearest to a quarter."""
    nearest = []
    for kind in END_NAMES:
        of_end = [step for step in steps if step.kind == kind]
        of_end.sort(key=lambda step: abs(step.kept - QUARTER))
        nearest += of_end[:1]
    return nearest


def _ends(steps: Sequence[Step]) -> list[Step]:
    """The steps about a quarter from each end whose loss was measured."""
    return _at_quarter([step for step in steps if step.loss.measured])


def _from_most_kept(steps: Sequence[Step]) -> list[Step]:
    """Steps from the slow end with an interval, from the fewest stopped planes."""
    slow = [s for s in steps if s.kind == "slow" and not np.isnan(s.loss.high)]
    return sorted(slow, key=lambda step: -step.kept)


def _last_free(slow: Sequence[Step]) -> Step | None:
    """The last of the first steps that hardly change the loss, near the end as well."""
    last = None
    for step in slow:
        free_near_end = not step.far_loss_measured or step.far_loss.high < FREE
        if step.loss.high >= FREE or not free_near_end:
            break
        last = step
    return last


def _changed_loss(change: Change) -> str:
    return change.in_words(" nats/token")


def _cost(change: Change) -> str:
    """The cost of a change of the loss, for certain or at most."""
    if change.low > 0:
        value, interval = change_and_interval(change.value, change.low, change.high)
        return f"costs {value} ({interval}) nats/token"
    if change.high > 0:
        return f"may cost up to {signed(change.high)} nats/token"
    return "costs nothing"


def _costs_for_certain(change: Change) -> bool:
    return change.high >= FREE and change.low > 0


def _short_sentence(setting: Setting, steps: Sequence[Step]) -> str:
    """Slow planes that can stop for free, and the cost of fast planes."""
    steps_from_slow = _from_most_kept(steps)
    steps_from_fast = [step for step in _ends(steps) if step.kind == "fast"]
    if not steps_from_slow or not steps_from_fast:
        return ""
    first = steps_from_slow[0]
    fast = steps_from_fast[0]
    free = _last_free(steps_from_slow)
    slowest = f"the slowest {percent((free or first).stopped)} of the planes"
    if free is not None:
        slow = f"{slowest} can {setting.stop} at almost no cost"
    elif _costs_for_certain(first.loss):
        slow = f"even {setting.stopping} {slowest} {_cost(first.loss)}"
    elif _costs_for_certain(first.far_loss):
        cost = _cost(first.far_loss)
        slow = f"even {setting.stopping} {slowest} {cost} near the end of the text"
    else:
        slow = f"even {setting.stopping} {slowest} may have a cost"
    return (
        f"{setting.within_at_first()} {slow}; {setting.stopping} {fast.planes} changes "
        f"the loss by {signed(fast.loss.value)} nats/token."
    )


def _ends_sentence(setting: Setting, steps: Sequence[Step]) -> str:
    """The change of the loss if a quarter of the planes stops at each end."""
    ends = _ends(steps)
    if not ends:
        return ""
    parts = [
        f"{setting.stopping} {step.planes} of the planes (wavelengths {step.wavelengths} "
        f"tokens) changes the loss by {_changed_loss(step.loss)}"
        for step in ends
    ]
    random = ends[-1].random_loss
    if not np.isnan(random):
        parts.append(
            f"{setting.stopping} the same number of random planes changes it by "
            f"{signed(random)} on average"
        )
    return f"{setting.within()} {'; '.join(parts)}."


def _far_sentence(setting: Setting, steps: Sequence[Step]) -> str:
    """The change of the loss in the second half of the context."""
    ends = _at_quarter([step for step in steps if step.far_loss.measured])
    if not ends:
        return ""
    parts = [
        f"{setting.stopping} {step.planes} changes the loss by "
        f"{_changed_loss(step.far_loss)}"
        for step in ends
    ]
    return f"{setting.within()} near the end of the text, {'; '.join(parts)}."


def _copies_sentence(
    setting: Setting, steps: Sequence[Step], sweep: xr.Dataset, table: pd.DataFrame
) -> str:
    """The loss of random tokens that are repeated after the longest distance."""
    ends = _at_quarter([step for step in steps if step.copy_loss.measured])
    if not ends:
        return ""
    distance = int(sweep["copy_distance"][-1])
    copy_loss = float(table["copy_loss"].iloc[0])
    parts = [
        f"{setting.stopping} {step.planes} changes it by {_changed_loss(step.copy_loss)}"
        for step in ends
    ]
    return (
        f"{setting.within()} random tokens that are repeated after {distance:,} tokens "
        f"have a loss of {number(copy_loss, '.2f')} nats/token; {'; '.join(parts)}."
    )


def _free_sentence(setting: Setting, steps: Sequence[Step]) -> str:
    """The slow planes that can stop for free, or the cost of the first step."""
    steps_from_slow = _from_most_kept(steps)
    if not steps_from_slow:
        return ""
    free = _last_free(steps_from_slow)
    if free is not None:
        shortest = short_count(free.shortest_wavelength)
        return (
            f"{setting.within()} the slowest planes can {setting.stop} at almost no cost "
            f"(the interval of the change ends below {FREE} nats/token) as long as "
            f"{percent(free.kept)} still rotate. Planes that are {setting.stopped} have "
            f"wavelengths of {shortest} tokens or more."
        )
    first = steps_from_slow[0]
    costs = _cost(first.loss)
    if not np.isnan(first.far_loss.high):
        costs += f"; near the end of the text it {_cost(first.far_loss)}"
    return (
        f"{setting.within()} {setting.stopping} {first.planes} of the planes {costs}."
    )


def _bands_sentence(setting: Setting, steps: Sequence[Step]) -> str:
    """The band of wavelengths that costs most."""
    bands = [step for step in steps if step.kind == "band" and step.loss.measured]
    if not bands:
        return ""
    most = max(bands, key=lambda step: step.loss.value)
    compared = ""
    if not np.isnan(most.random_loss):
        compared = (
            f", compared with {signed(most.random_loss)} for the same number of random "
            "planes"
        )
    return (
        f"{setting.within()} of {len(bands)} bands, the band with wavelengths of "
        f"{most.wavelengths} tokens costs most: {signed(most.loss.value)} nats/token"
        f"{compared}."
    )


def _labels_sentence(setting: Setting, steps: Sequence[Step]) -> str:
    """The number of heads that get a new label."""
    parts = []
    for step in _at_quarter([step for step in steps if step.labels_differ.measured]):
        begin = f"with {step.planes} of the planes {setting.stopped}, "
        parts.append(begin + in_words(_labels_of_step(step)))
    if not parts:
        return ""
    return f"{setting.within()} {'; '.join(parts)}."


def _labels_of_step(step: Step) -> list[str]:
    """Heads whose labels changed, if that is known, and all heads whose labels differ."""
    parts = []
    if not np.isnan(step.labels_changed):
        heads = _heads(step.labels_changed)
        verb = "has" if step.labels_changed == 1 else "have"
        share = number(step.labels_changed_share, ".0%")
        parts.append(f"{heads} {verb} a new label beyond its uncertainty ({share})")
    differ = step.labels_differ
    interval = ""
    if not np.isnan(differ.low):
        low = number(differ.low, ".0f")
        high = number(differ.high, ".0f")
        interval = f"; 95% interval {low} to {high} heads"
    share = number(step.labels_differ_share, ".0%")
    heads = _heads(differ.value)
    words = f"the label of {heads} differs"
    if differ.value != 1:
        words = f"the labels of {heads} differ"
    parts.append(f"{words} ({share}{interval})")
    return parts


def _heads(count: float) -> str:
    return plural(int(count), "head")


def _retrieval_sentence(table: pd.DataFrame) -> str:
    share = float(table["retrieval"].iloc[0])
    if np.isnan(share):
        return ""
    return (
        f"With all planes, the model retrieves {number(share, '.1%')} of the needles "
        f"(chance: {number(CHANCE, '.1%')})."
    )


def _classes_sentence(
    setting: Setting, steps: Sequence[Step], sweep: xr.Dataset
) -> str:
    """The changes for each class of tokens if a quarter of the planes stops at each end."""
    classes = class_changes(sweep)
    ends = _ends(steps)
    if classes.empty or not ends:
        return ""
    sentences = []
    begin = f"{setting.within()} {setting.stopping}"
    for step in ends:
        rows = classes[classes["edit"] == step.edit].to_dict("records")
        changes = "; ".join(_class_change(row) for row in rows)
        sentences.append(f"{begin} {step.planes} changes {changes}.")
        begin = setting.stopping.capitalize()
    return " ".join(sentences)


def _class_change(row: dict[Any, Any]) -> str:
    """The changes of the loss of a class of tokens and the attention in their rows."""
    parts = [
        f"the loss of {row['token_class']} tokens by "
        f"{_changed_loss(change_in(row, 'loss_change'))}"
    ]
    if "bits" in row:
        parts.append(f"their attention by {number(row['bits'], '.3f')} bits")
    changed = row.get("labels_changed", np.nan)
    differ = row.get("labels_differ", np.nan)
    if not np.isnan(changed):
        heads = plural(int(changed), "head")
        parts.append(f"the label of {heads} in their rows")
    elif not np.isnan(differ):
        heads = plural(int(differ), "head")
        parts.append(f"the label of {heads} in their rows (certain or not)")
    return in_words(parts)
