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

import numpy as np
import pandas as pd
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
Change = tuple[float, float, float]


def answer(analysis: rl.Analysis) -> Answer:
    heads, plain = analysis.heads, losses(analysis)
    rows: list[dict[str, object]] = []
    findings: list[str] = []
    short: list[str] = []
    for label, by in KINDS.items():
        chosen = most(heads, FRACTIONS[label])
        if chosen.empty:
            reason = "every head is diffuse, or the only head of its layer"
            findings.append(f"No head that chooses by {by} is silenced: {reason}.")
            continue
        count = f"{len(chosen)} heads" if len(chosen) > 1 else "one head"
        words = f"{count}, most by {by}", f"random ({by})"
        of_label, (_, *random), beyond, last = against_random(
            analysis, chosen, plain, words, label=label
        )
        rows += of_label
        verdicts = (
            f"on {tokens} it {say(change)}"
            for tokens, change in zip(TOKENS, beyond, strict=True)
        )
        all_drawn = ", which are all possible draws" if last else ""
        findings.append(
            f"That silencing the {count} that choose most by {by} costs more than silencing "
            f"random other heads of the same layers (draws: {len(random)}{all_drawn}): "
            f"{'; '.join(verdicts)}."
        )
        costs = COSTS[verdict(beyond[0])]
        short.append(f"silencing the {count} that choose most by {by} {costs}")
        if label == "positional":
            of_planes, sentences = stopped_planes(analysis, chosen, plain)
            rows += of_planes
            findings += sentences
    if short:
        findings.insert(
            0, f"Compared with random heads of their layers, {', and '.join(short)}."
        )
    sentence, of_repeats = without_previous(analysis)
    findings.insert(1, sentence)
    question = "Do labels describe the use of heads?"
    if not rows:
        return Answer(question, findings, {})
    table = pd.DataFrame(rows)
    figures = {
        "Change of loss with its 95% interval. Heads output their mean over the text, or "
        "their planes stop. Grey: random heads of the same layers.":
            plot_silenced(table)
    }  # fmt: skip
    if of_repeats:
        repeats = pd.DataFrame(of_repeats)
        figures[
            "The same for repeated random tokens, with heads that attend to the previous "
            "token silenced."
        ] = plot_silenced(repeats)
        table = pd.concat([table, repeats])
    return Answer(question, findings, figures, {"causal.csv": table})


def stopped_planes(
    analysis: rl.Analysis, chosen: pd.DataFrame, plain: xr.Dataset
) -> tuple[list[dict[str, object]], list[str]]:
    """Cost of the strongest and of the other planes of positional heads: rows, a sentence."""
    strong, weak, share = planes_of(analysis, chosen)
    if not strong or not weak:
        return [], []
    with_strong, with_weak = losses(analysis, strong), losses(analysis, weak)
    rows: list[dict[str, object]] = []
    for planes, stopped in (("strongest", with_strong), ("other", with_weak)):
        costs = changes(plain, stopped)
        rows += rows_of(f"their {planes} planes stop", "positional", chosen, costs)
    difference = changes(with_weak, with_strong)[0]
    fair = difference[0] * (0.5 - share) >= 0
    sentence = (
        f"That stopping their strongest planes, which hold {share:.0%} of their push toward "
        f"keys, costs more than stopping all other planes, which hold {1 - share:.0%}: it "
        f"{say(difference, unless='' if fair else UNFAIR)}."
    )
    return rows, [sentence]


def without_previous(analysis: rl.Analysis) -> tuple[str, list[dict[str, object]]]:
    """Induction without the previous-token heads: a sentence, and rows of the table."""
    heads = analysis.heads
    chosen = at_most_half(heads[heads["previous_token"] >= PREVIOUS], heads)
    if chosen.empty:
        return f"No head has {PREVIOUS:.0%} of its attention on the previous token.", []
    plain, words = repeats(analysis), ("previous-token heads", "random")
    kind = {"measure": repeats, "tokens": REPEATED}
    rows, silent, (beyond,), _ = against_random(analysis, chosen, plain, words, **kind)
    best = plain["induction"].argmax(("layer", "head"))
    before, after, *others = (float(run["induction"][best]) for run in (plain, *silent))
    sentence = (
        f"Silencing the heads with {PREVIOUS:.0%} or more of their attention on the previous "
        f"token ({names(chosen)}) takes the best induction head, "
        f"{int(best['layer'])}.{int(best['head'])}, from {before:.2f} to {after:.2f}; random "
        f"heads of the same layers leave it at {np.mean(others):.2f} ({min(others):.2f} to "
        f"{max(others):.2f} in {len(others)} draws). That this costs repeated random tokens "
        f"more than silencing random heads: it {say(beyond)}."
    )
    return sentence, rows


def against_random(
    analysis: rl.Analysis,
    chosen: pd.DataFrame,
    plain: xr.Dataset,
    words: tuple[str, str],
    *,
    label: str = "positional",
    measure: Callable[[rl.Analysis], xr.Dataset] | None = None,
    tokens: Sequence[str] = TOKENS,
) -> tuple[list[dict[str, object]], list[xr.Dataset], list[Change], bool]:
    """Silence the `chosen` heads, then random other heads of the same layers, in up to 8 draws.

    Returns rows of the table, in which `words` name the chosen heads and the draws; the result
    of `measure` for each, `chosen` first; how much more the chosen heads cost than the random
    heads; and whether all possible sets were drawn.
    """
    sets, possible = draws(analysis.heads, chosen)
    silent = [silenced(analysis, heads, measure or losses) for heads in (chosen, *sets)]
    what, random = words
    rows = rows_of(what, label, chosen, changes(plain, silent[0]), tokens)
    for n, (drawn, run) in enumerate(zip(sets, silent[1:], strict=True), start=1):
        rows += rows_of(f"{random}, {n}", "", drawn, changes(plain, run), tokens)
    beyond = changes_beyond(silent[1:], silent[0], 1 - len(sets) / possible)
    return rows, silent, beyond, len(sets) == possible


def repeats(analysis: rl.Analysis) -> xr.Dataset:
    """Losses of repeated random tokens, as from `losses`, and induction scores of heads."""
    measured = rl.evaluate(analysis.model, analysis.text, measures=["induction"])
    loss = (
        measured["repeat_loss"]
        .isel(edit=0)
        .rename(trial="sequence")
        .expand_dims("tokens")
    )
    loss = loss.assign_coords(group=("sequence", np.arange(loss.sizes["sequence"])))
    summed = xr.Dataset({"loss": loss, "count": xr.ones_like(loss)})
    return summed.assign(induction=measured["induction"].isel(edit=0))


def most(heads: pd.DataFrame, fraction: str) -> pd.DataFrame:
    """A ninth of all heads by `fraction`, without diffuse heads, at most half of a layer."""
    named = heads[heads["label"] != "diffuse"].dropna(subset=fraction)
    named = named.sort_values(fraction, ascending=False, kind="stable")
    return at_most_half(named, heads).head(max(1, round(len(heads) / 9)))


def at_most_half(chosen: pd.DataFrame, heads: pd.DataFrame) -> pd.DataFrame:
    """The first of the `chosen` heads, at most half of each layer."""
    return chosen.groupby("layer").head(len(heads) // heads["layer"].nunique() // 2)


def draws(heads: pd.DataFrame, chosen: pd.DataFrame) -> tuple[list[pd.DataFrame], int]:
    """Random sets of other heads, as many in each layer as `chosen`; how many sets exist."""
    free = heads.drop(chosen.index).groupby("layer").groups
    counts = chosen["layer"].value_counts().sort_index()
    possible = math.prod(math.comb(len(free[layer]), n) for layer, n in counts.items())
    random = np.random.default_rng(0)
    sets: dict[tuple[int, ...], None] = {}
    while len(sets) < min(DRAWS, possible):
        rows = [
            random.choice(free[layer], n, replace=False) for layer, n in counts.items()
        ]
        sets[tuple(sorted(np.concatenate(rows).tolist()))] = None
    return [heads.loc[[*rows]] for rows in sets], possible


def losses(analysis: rl.Analysis, edits: Sequence = ()) -> xr.Dataset:
    """Summed losses [tokens, sequence] of all, repeated and new tokens, and their numbers."""
    evaluated = rl.evaluate(
        analysis.model,
        analysis.text,
        edits={"edited": edits} if edits else None,
        measures=["loss"],
    ).isel(edit=-1)
    repeated = (evaluated["seen_loss"] * evaluated["seen_tokens"]).fillna(0)
    total = evaluated["loss"] * evaluated["predicted_tokens"]
    counts = evaluated["predicted_tokens"], evaluated["seen_tokens"]
    return xr.Dataset(
        {
            "loss": xr.concat([total, repeated, total - repeated], "tokens"),
            "count": xr.concat([*counts, counts[0] - counts[1]], "tokens"),
        }
    )


def silenced(
    analysis: rl.Analysis,
    chosen: pd.DataFrame,
    measure: Callable[[rl.Analysis], xr.Dataset] = losses,
) -> xr.Dataset:
    with rl.silence_heads(analysis.model, names(chosen), to="mean", text=analysis.text):
        return measure(analysis)


def planes_of(analysis: rl.Analysis, chosen: pd.DataFrame) -> tuple[list, list, float]:
    """Edits that stop the strongest planes of each head, edits that stop its other planes.

    Also returns the mean share of the strongest planes in the push of their head toward keys.
    It is as near to one half as a number of planes allows.
    """
    strong, weak, shares = [], [], []
    for row in chosen.itertuples():
        push = analysis.profile["selectivity_keys"].isel(layer=row.layer, head=row.head)
        push = push.where(np.isfinite(analysis.profile["wavelength"][row.layer])).clip(
            min=0
        )
        order = np.argsort(-push.fillna(0).values, kind="stable")[
            : int(push.notnull().sum())
        ]
        if not float(push.sum()):
            continue
        share = push.values[order].cumsum() / float(push.sum())
        half = 1 + int(np.abs(share - 0.5).argmin())
        shares.append(share[half - 1])
        for edits, planes in ((strong, order[:half]), (weak, order[half:])):
            if len(planes):
                head = f"{row.layer}.{row.head}"
                edits.append(rl.stop(rl.PlaneNumbers(planes.tolist()), heads=head))
    return strong, weak, float(np.mean(shares)) if shares else 0.0


def changes(before: xr.Dataset, after: xr.Dataset) -> list[Change]:
    """The change of loss by kind of tokens (nats/token), with its 95 % interval."""
    intervals = []
    for kind in range(before.sizes["tokens"]):
        a, b = (run.isel(tokens=kind) for run in (before, after))
        change = ((b["loss"] - a["loss"]) / a["count"]).where(a["count"] > 0, 0)
        weight = a["count"].values.astype(float)
        intervals.append(paired_interval(change.values, weight, a["group"].values))
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
    means = np.array([[mean for mean, _, _ in changes(run, silent)] for run in random])
    intervals = []
    for kind, (mean, _, high) in enumerate(changes(sum(random) / len(random), silent)):
        half = high - mean
        if left:
            middle, _, end = paired_interval(means[:, kind])
            half = math.hypot(half, math.sqrt(left) * (end - middle))
        intervals.append((mean, mean - half, mean + half))
    return intervals


def rows_of(
    what: str,
    label: str,
    heads: pd.DataFrame,
    intervals: list[Change],
    tokens: Sequence[str] = TOKENS,
) -> list[dict[str, object]]:
    """Rows of the table, with the heads that were silenced or lost planes."""
    numbers = [
        dict(zip(("change", "low", "high"), row, strict=True)) for row in intervals
    ]
    named = {"what": what, "label": label, "heads": names(heads)}
    return [
        named | {"tokens": kind} | row
        for kind, row in zip(tokens, numbers, strict=True)
    ]


def names(heads: pd.DataFrame) -> str:
    return ",".join(f"{row.layer}.{row.head}" for row in heads.itertuples())


def say(change: Change, unless: str = "") -> str:
    mean, low, high = (f"{number:+.3f}".replace("-", "−") for number in change)
    return f"{unless or verdict(change)} ({mean} nats/token, {low} to {high})"


def verdict(change: Change) -> str:
    _, low, high = change
    return "holds" if low > 0 else "is contradicted" if high < 0 else "is unresolved"


if __name__ == "__main__":
    run_analysis(answer)
