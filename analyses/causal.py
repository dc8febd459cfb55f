"""Do labels describe the use of heads? Silence heads of a kind, and measure the loss.

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205). The paper describes
the use of both kinds of heads but silences no heads.

Method: a ninth of all heads output their mean over the text (Wang et al. 2023, arXiv
2211.00593): the heads that choose most by position, or most by content, at most half of each
layer. For comparison, random other heads of the same layers are silenced, in up to eight draws.
Intervals cover the documents and the draws. Then planes of the most positional heads stop: the
strongest planes of each head, with about half of its push toward keys, or all its other planes.
Last, heads with at least half of their attention on the previous token are silenced while
random tokens are repeated: induction heads are built on them (Olsson et al. 2022, arXiv
2209.11895).

Expectation: both kinds of heads cost more than random heads of their layers. Heads that choose
by content cost most on tokens that occurred earlier in the text. The strongest planes cost more
than the remaining planes. Induction needs previous-token heads.

    python analyses/causal.py [MODEL] [--text FILE]... [--context N]

Writes reports/causal/<model>/. Takes minutes for the bundled checkpoint.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

import ropelens as rl
from ropelens.analysis.answer import Answer
from ropelens.commands.terminal import run_analysis
from ropelens.figures.silenced import plot_silenced
from ropelens.intervals import paired_interval

KINDS = {"positional": "position", "semantic": "content"}
FRACTIONS = {"positional": "positional_fraction", "semantic": "content_fraction"}
TOKENS = ("all tokens", "repeated tokens", "new tokens")
REPEATED = ("random tokens, repeated",)
PREVIOUS = 0.5
DRAWS = 8
COSTS = {
    "holds": "costs more",
    "is contradicted": "costs less",
    "is unresolved": "makes no clear difference",
}
UNFAIR = "is unresolved, because the planes that cost more hold more"

Row = dict[str, object]
Measure = Callable[[rl.Analysis], xr.Dataset]


@dataclass(frozen=True)
class Change:
    """A change of the loss with its 95 % interval, in nats/token."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low > 0:
            return "holds"
        if self.high < 0:
            return "is contradicted"
        return "is unresolved"

    def in_words(self, verdict: str = "") -> str:
        numbers = f"{self.mean:+.3f} nats/token, {self.low:+.3f} to {self.high:+.3f}"
        return f"{verdict or self.verdict} ({numbers.replace('-', '−')})"


@dataclass(frozen=True)
class Part:
    """Rows of the table and findings of a part of the answer, and a summary in a few words."""

    rows: list[Row]
    findings: list[str]
    summary: str = ""


def answer(analysis: rl.Analysis) -> Answer:
    question = "Do labels describe the use of heads?"
    plain = losses(analysis)
    rows: list[Row] = []
    findings: list[str] = []
    summaries: list[str] = []
    for label in KINDS:
        part = heads_of_kind(analysis, label, plain)
        rows += part.rows
        findings += part.findings
        if part.summary:
            summaries.append(part.summary)
    if summaries:
        words = ", and ".join(summaries)
        findings.insert(0, f"Compared with random heads of their layers, {words}.")
    previous = without_previous(analysis)
    findings[1:1] = previous.findings
    if not rows:
        return Answer(question, findings, {})
    table = pd.DataFrame([*rows, *previous.rows])
    figures = figures_of(rows, previous.rows)
    return Answer(question, findings, figures, more={"causal.csv": table})


def figures_of(rows: list[Row], repeated: list[Row]) -> dict[str, go.Figure]:
    """Changes of the loss of the text, and of repeated random tokens if there are any."""
    figures = {
        "Change of loss with its 95% interval. Heads output their mean over the text, or "
        "their planes stop. Grey: random heads of the same layers.":
            plot_silenced(pd.DataFrame(rows))
    }  # fmt: skip
    if repeated:
        figures[
            "The same for repeated random tokens, with heads that attend to the previous "
            "token silenced."
        ] = plot_silenced(pd.DataFrame(repeated))
    return figures


def heads_of_kind(analysis: rl.Analysis, label: str, plain: xr.Dataset) -> Part:
    """Cost of the heads with the most of a label, and of planes of positional heads."""
    by = KINDS[label]
    chosen = most(analysis.heads, FRACTIONS[label])
    if chosen.empty:
        reason = "every head is diffuse, or the only head of its layer"
        return Part([], [f"No head that chooses by {by} is silenced: {reason}."])
    count = f"{len(chosen)} heads" if len(chosen) > 1 else "one head"
    comparison = against_random(
        analysis,
        chosen,
        plain,
        what=f"{count}, most by {by}",
        random=f"random ({by})",
        label=label,
    )
    costs = COSTS[comparison.beyond[0].verdict]
    summary = f"silencing the {count} that choose most by {by} {costs}"
    finding = (
        f"That silencing the {count} that choose most by {by} costs more than silencing "
        f"random other heads of the same layers (draws: {comparison.draws}): "
        f"{comparison.verdicts()}."
    )
    if label != "positional":
        return Part(comparison.rows, [finding], summary)
    of_planes = stopped_planes(analysis, chosen, plain)
    rows = comparison.rows + of_planes.rows
    return Part(rows, [finding, *of_planes.findings], summary)


def stopped_planes(
    analysis: rl.Analysis, chosen: pd.DataFrame, plain: xr.Dataset
) -> Part:
    """Cost of the strongest planes of positional heads, and of their other planes."""
    planes = planes_of(analysis, chosen)
    if not planes.strongest or not planes.others:
        return Part([], [])
    with_strong = losses(analysis, planes.strongest)
    with_weak = losses(analysis, planes.others)
    rows = rows_of(
        "their strongest planes stop", "positional", chosen, changes(plain, with_strong)
    )
    rows += rows_of(
        "their other planes stop", "positional", chosen, changes(plain, with_weak)
    )
    difference = changes(with_weak, with_strong)[0]
    is_fair = difference.mean * (0.5 - planes.share) >= 0
    finding = (
        f"That stopping their strongest planes, which hold {planes.share:.0%} of their push "
        f"toward keys, costs more than stopping all other planes, which hold "
        f"{1 - planes.share:.0%}: it {difference.in_words('' if is_fair else UNFAIR)}."
    )
    return Part(rows, [finding])


def without_previous(analysis: rl.Analysis) -> Part:
    """Induction without the previous-token heads."""
    heads = analysis.heads
    chosen = at_most_half(heads[heads["previous_token"] >= PREVIOUS], heads)
    if chosen.empty:
        finding = f"No head has {PREVIOUS:.0%} of its attention on the previous token."
        return Part([], [finding])
    plain = repeats(analysis)
    comparison = against_random(
        analysis,
        chosen,
        plain,
        what="previous-token heads",
        random="random",
        measure=repeats,
        tokens=REPEATED,
    )
    best = plain["induction"].argmax(("layer", "head"))
    before = float(plain["induction"][best])
    after = float(comparison.silent["induction"][best])
    others = [float(run["induction"][best]) for run in comparison.random]
    finding = (
        f"Silencing the heads with {PREVIOUS:.0%} or more of their attention on the previous "
        f"token ({names(chosen)}) takes the best induction head, "
        f"{int(best['layer'])}.{int(best['head'])}, from {before:.2f} to {after:.2f}; random "
        f"heads of the same layers leave it at {np.mean(others):.2f} ({min(others):.2f} to "
        f"{max(others):.2f} in {len(others)} draws). That this costs repeated random tokens "
        f"more than silencing random heads: it {comparison.beyond[0].in_words()}."
    )
    return Part(comparison.rows, [finding])


@dataclass(frozen=True)
class Comparison:
    """Silenced heads next to random other heads of the same layers.

    `silent` and `random` are measured without the heads and without each random set. `beyond`
    is how much more the heads cost, by kind of tokens. `is_complete` if every possible random
    set was drawn.
    """

    rows: list[Row]
    silent: xr.Dataset
    random: list[xr.Dataset]
    beyond: list[Change]
    is_complete: bool

    @property
    def draws(self) -> str:
        if self.is_complete:
            return f"{len(self.random)}, which are all possible draws"
        return str(len(self.random))

    def verdicts(self) -> str:
        verdicts = []
        for tokens, change in zip(TOKENS, self.beyond, strict=True):
            verdicts.append(f"on {tokens} it {change.in_words()}")
        return "; ".join(verdicts)


def against_random(
    analysis: rl.Analysis,
    chosen: pd.DataFrame,
    plain: xr.Dataset,
    *,
    what: str,
    random: str,
    label: str = "positional",
    measure: Measure | None = None,
    tokens: Sequence[str] = TOKENS,
) -> Comparison:
    """Silence the `chosen` heads, then random other heads of the same layers, in up to 8 draws.

    `what` and `random` name the chosen heads and the draws in the rows of the table.
    """
    measure = measure or losses
    drawn = draws(analysis.heads, chosen)
    silent = silenced(analysis, chosen, measure)
    rows = rows_of(what, label, chosen, changes(plain, silent), tokens)
    runs = []
    for number, heads in enumerate(drawn.sets, start=1):
        run = silenced(analysis, heads, measure)
        rows += rows_of(f"{random}, {number}", "", heads, changes(plain, run), tokens)
        runs.append(run)
    left = 1 - len(drawn.sets) / drawn.possible
    return Comparison(
        rows=rows,
        silent=silent,
        random=runs,
        beyond=changes_beyond(runs, silent, left),
        is_complete=len(drawn.sets) == drawn.possible,
    )


def repeats(analysis: rl.Analysis) -> xr.Dataset:
    """Losses of repeated random tokens, as from `losses`, and induction scores of heads."""
    measured = rl.evaluate(analysis.model, analysis.text, measures=["induction"])
    by_sequence = measured["repeat_loss"].isel(edit=0).rename(trial="sequence")
    sequences = np.arange(by_sequence.sizes["sequence"])
    loss = by_sequence.expand_dims("tokens").assign_coords(
        group=("sequence", sequences)
    )
    summed = xr.Dataset({"loss": loss, "count": xr.ones_like(loss)})
    return summed.assign(induction=measured["induction"].isel(edit=0))


def most(heads: pd.DataFrame, fraction: str) -> pd.DataFrame:
    """A ninth of all heads by `fraction`, without diffuse heads, at most half of a layer."""
    named = heads[heads["label"] != "diffuse"].dropna(subset=fraction)
    named = named.sort_values(fraction, ascending=False, kind="stable")
    ninth = max(1, round(len(heads) / 9))
    return at_most_half(named, heads).head(ninth)


def at_most_half(chosen: pd.DataFrame, heads: pd.DataFrame) -> pd.DataFrame:
    """The first of the `chosen` heads, at most half of each layer."""
    heads_of_layer = len(heads) // heads["layer"].nunique()
    return chosen.groupby("layer").head(heads_of_layer // 2)


@dataclass(frozen=True)
class Draws:
    """Random sets of heads, and the number of sets that exist."""

    sets: list[pd.DataFrame]
    possible: int


def draws(heads: pd.DataFrame, chosen: pd.DataFrame) -> Draws:
    """Random sets of other heads, with the number of heads that `chosen` has in each layer."""
    free = heads.drop(chosen.index).groupby("layer").groups
    counts = chosen["layer"].value_counts().sort_index()
    possible = 1
    for layer, count in counts.items():
        possible *= math.comb(len(free[layer]), count)
    random = np.random.default_rng(0)
    sets: list[list[int]] = []
    while len(sets) < min(DRAWS, possible):
        rows: list[int] = []
        for layer, count in counts.items():
            rows += random.choice(free[layer], count, replace=False).tolist()
        rows.sort()
        if rows not in sets:
            sets.append(rows)
    return Draws([heads.loc[rows] for rows in sets], possible)


def losses(analysis: rl.Analysis, edits: Sequence = ()) -> xr.Dataset:
    """Summed losses [tokens, sequence] of all, repeated and new tokens, and their numbers."""
    evaluated = rl.evaluate(
        analysis.model,
        analysis.text,
        edits={"edited": edits} if edits else None,
        measures=["loss"],
    ).isel(edit=-1)
    repeated = (evaluated["seen_loss"] * evaluated["seen_tokens"]).fillna(0)
    count = evaluated["predicted_tokens"]
    count_repeated = evaluated["seen_tokens"]
    total = evaluated["loss"] * count
    counts = [count, count_repeated, count - count_repeated]
    return xr.Dataset(
        {
            "loss": xr.concat([total, repeated, total - repeated], "tokens"),
            "count": xr.concat(counts, "tokens"),
        }
    )


def silenced(
    analysis: rl.Analysis, chosen: pd.DataFrame, measure: Measure
) -> xr.Dataset:
    with rl.silence_heads(analysis.model, names(chosen), to="mean", text=analysis.text):
        return measure(analysis)


@dataclass(frozen=True)
class PlanesOfHeads:
    """Edits that stop the strongest planes of each head, and edits that stop its other planes.

    `share` is the mean share of the strongest planes in the push of their head toward keys. It
    is as near to one half as a number of planes allows.
    """

    strongest: list[Any]
    others: list[Any]
    share: float


def planes_of(analysis: rl.Analysis, chosen: pd.DataFrame) -> PlanesOfHeads:
    strongest: list[Any] = []
    others: list[Any] = []
    shares = []
    for row in chosen.itertuples():
        push = analysis.profile["selectivity_keys"].isel(layer=row.layer, head=row.head)
        rotates = np.isfinite(analysis.profile["wavelength"][row.layer])
        push = push.where(rotates).clip(min=0)
        total = float(push.sum())
        if not total:
            continue
        count = int(push.notnull().sum())
        order = np.argsort(-push.fillna(0).values, kind="stable")[:count]
        share = push.values[order].cumsum() / total
        half = 1 + int(np.abs(share - 0.5).argmin())
        shares.append(share[half - 1])
        head = f"{row.layer}.{row.head}"
        strongest += stops(order[:half], head)
        others += stops(order[half:], head)
    return PlanesOfHeads(
        strongest, others, share=float(np.mean(shares)) if shares else 0.0
    )


def stops(planes: np.ndarray, head: str) -> list[Any]:
    """The edit that stops these planes of a head; none without planes."""
    if not len(planes):
        return []
    numbers = rl.PlaneNumbers(planes.tolist())
    return [rl.stop(numbers, heads=head)]


def changes(before: xr.Dataset, after: xr.Dataset) -> list[Change]:
    """The change of loss by kind of tokens."""
    intervals = []
    for kind in range(before.sizes["tokens"]):
        a = before.isel(tokens=kind)
        b = after.isel(tokens=kind)
        change = ((b["loss"] - a["loss"]) / a["count"]).where(a["count"] > 0, 0)
        weight = a["count"].values.astype(float)
        interval = paired_interval(change.values, weight, a["group"].values)
        intervals.append(Change(*interval))
    return intervals


def changes_beyond(
    random: list[xr.Dataset], silent: xr.Dataset, left: float
) -> list[Change]:
    """How much more `silent` costs than the mean of the draws `random`, as from `changes`.

    Documents and draws each give an interval, and the squares of their half widths add: crossed
    factors, whose sum errs toward wide (Owen 2007, "The pigeonhole bootstrap"). `left` is the
    share of the possible sets that was not drawn. If `left` is 0, every possible set was drawn,
    so the draws do not widen the interval.
    """
    by_draw = [changes(run, silent) for run in random]
    over_documents = changes(sum(random) / len(random), silent)
    intervals = []
    for kind, change in enumerate(over_documents):
        half = change.high - change.mean
        if left:
            means = np.array([of_draw[kind].mean for of_draw in by_draw])
            middle, _, end = paired_interval(means)
            half = math.hypot(half, math.sqrt(left) * (end - middle))
        intervals.append(Change(change.mean, change.mean - half, change.mean + half))
    return intervals


def rows_of(
    what: str,
    label: str,
    heads: pd.DataFrame,
    intervals: list[Change],
    tokens: Sequence[str] = TOKENS,
) -> list[Row]:
    """Rows of the table, with the heads that were silenced or lost planes."""
    rows: list[Row] = []
    for kind, change in zip(tokens, intervals, strict=True):
        rows.append(
            {
                "what": what,
                "label": label,
                "heads": names(heads),
                "tokens": kind,
                "change": change.mean,
                "low": change.low,
                "high": change.high,
            }
        )
    return rows


def names(heads: pd.DataFrame) -> str:
    return ",".join(f"{row.layer}.{row.head}" for row in heads.itertuples())


if __name__ == "__main__":
    run_analysis(answer)
