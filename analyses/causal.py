"""Are the labels true of what the model does? Silence heads of a kind, and look at the loss.

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), which says what heads
of either kind are for, and silences none. Here heads are set to the mean of their output over
the text (Wang et al. 2023, arXiv 2211.00593): a ninth of all heads, those that go most by
position or by content, and as many random others of the same layers, in up to three draws.
Then planes of the most positional heads stop: in each the strongest, which hold half of its
push toward keys, or all others, which hold the other half.

Expectation: either kind costs more than random heads of its layers, heads that go by content
above all on tokens that the text has had before; the strongest planes cost more than the rest.

    python analyses/causal.py [MODEL] [--text FILE]... [--context N]

Writes reports/causal/<model>/. Takes a minute for the bundled checkpoint.
"""

import numpy as np
import pandas as pd
import xarray as xr

import ropelens as rl

KINDS = {"positional": "position", "semantic": "content"}
FRACTIONS = {"positional": "positional_fraction", "semantic": "content_fraction"}
TOKENS = ("all tokens", "tokens had before", "new tokens")
DRAWS = 3
COSTS = {
    "holds": "costs more",
    "is contradicted": "costs less",
    "is unresolved": "makes no difference that can be told",
}
Change = tuple[float, float, float]


def answer(analysis: rl.Analysis) -> rl.Answer:
    heads, plain = analysis.heads, losses(analysis)
    count = max(1, round(len(heads) / 9))
    rows: list[dict[str, object]] = []
    findings: list[str] = []
    short: list[str] = []
    for label, by in KINDS.items():
        chosen = heads[heads["label"] != "diffuse"].nlargest(count, FRACTIONS[label])
        others = heads.drop(chosen.index)
        pool = others[others["layer"].isin(chosen["layer"])]
        silent = silenced(analysis, chosen)
        rows += told(f"{len(chosen)} heads, most by {by}", label, changes(plain, silent))
        if len(pool) < count:
            findings.append(f"The layers of heads by {by} have too few others to compare with.")
            continue
        draws = (tuple(sorted(pool.sample(count, random_state=d).index)) for d in range(20))
        random = [silenced(analysis, heads.loc[[*d]]) for d in [*dict.fromkeys(draws)][:DRAWS]]
        for draw, one in enumerate(random, start=1):
            rows += told(f"random of their layers, draw {draw}", "", changes(plain, one), by)
        beyond = changes(sum(random) / len(random), silent)
        told_on = (f"on {on} it {say(one)}" for on, one in zip(TOKENS, beyond, strict=True))
        findings.append(
            f"That the {len(chosen)} heads which go most by {by} cost more when silenced than "
            f"random heads of their layers: {'; '.join(told_on)}."
        )
        costs = COSTS[verdict(beyond[0])]
        short.append(f"silencing the {len(chosen)} heads that go most by {by} {costs}")
        if label == "positional":
            strong, weak = (losses(analysis, edits) for edits in planes_of(analysis, chosen))
            rows += told("their strongest planes stop", label, changes(plain, strong))
            rows += told("their other planes stop", label, changes(plain, weak))
            findings.append(
                "That their strongest planes cost more when stopped than all others, which "
                f"push as much: it {say(changes(weak, strong)[0])}."
            )
    if short:
        findings.insert(0, f"Against random heads of their layers, {', and '.join(short)}.")
    table = pd.DataFrame(rows)
    figures = {
        "Change of loss with its 95% interval. Heads say the mean of what they say on the "
        "text, or planes of theirs stop; grey: random heads of the same layers.":
            rl.plot_silenced(table)
    }  # fmt: skip
    question = "Are the labels true of what the model does?"
    return rl.Answer(question, findings, figures, {"causal.csv": table})


def losses(analysis: rl.Analysis, edits: list[rl.Edit] | None = None) -> xr.Dataset:
    """Summed losses of every sequence, [sequence, tokens], with how many tokens there are."""
    found = rl.evaluate(
        analysis.model,
        analysis.sequences.tokens,
        lengths=analysis.sequences.lengths,
        documents=analysis.sequences.documents,
        edits={"edited": edits} if edits else None,
        measures=["loss"],
    ).isel(edit=-1)
    seen = (found["seen_loss"] * found["seen_tokens"]).fillna(0)
    whole = found["loss"] * found["predicted_tokens"]
    counts = found["predicted_tokens"], found["seen_tokens"]
    return xr.Dataset(
        {
            "loss": xr.concat([whole, seen, whole - seen], "tokens"),
            "count": xr.concat([*counts, counts[0] - counts[1]], "tokens"),
        }
    )


def silenced(analysis: rl.Analysis, chosen: pd.DataFrame) -> xr.Dataset:
    names = ",".join(f"{row.layer}.{row.head}" for row in chosen.itertuples())
    text = analysis.sequences
    reference = {"tokens": text.tokens, "lengths": text.lengths}
    with rl.silence_heads(analysis.model, names, to="mean", **reference):
        return losses(analysis)


def planes_of(
    analysis: rl.Analysis, chosen: pd.DataFrame
) -> tuple[list[rl.Edit], list[rl.Edit]]:
    """Edits that stop the strongest planes of each head, and that stop all others."""
    strong, weak = [], []
    for row in chosen.itertuples():
        push = analysis.profile["selectivity_keys"].isel(layer=row.layer, head=row.head)
        push = push.where(np.isfinite(analysis.profile["wavelength"][row.layer])).clip(min=0)
        order = np.argsort(-push.fillna(0).values, kind="stable")[: int(push.notnull().sum())]
        half = 1 + int((push.values[order].cumsum() < float(push.sum()) / 2).sum())
        for edits, planes in ((strong, order[:half]), (weak, order[half:])):
            if len(planes):
                edits.append(rl.stop_planes(planes.tolist(), heads=f"{row.layer}.{row.head}"))
    return strong, weak


def changes(before: xr.Dataset, after: xr.Dataset) -> list[Change]:
    """The change of loss by kind of tokens (nats/token), with its 95 % interval."""
    found = []
    for kind in range(len(TOKENS)):
        a, b = (one.isel(tokens=kind) for one in (before, after))
        change = ((b["loss"] - a["loss"]) / a["count"]).where(a["count"] > 0, 0)
        weight = a["count"].values.astype(float)
        found.append(rl.paired_interval(change.values, weight, a["group"].values))
    return found


def told(what: str, label: str, found: list[Change], by: str = "") -> list[dict[str, object]]:
    """Rows of the table; of random heads with whose layers they share."""
    what = what.replace("their", f"{by} heads'") if by else what
    numbers = [dict(zip(("change", "low", "high"), one, strict=True)) for one in found]
    named = [{"what": what, "label": label, "tokens": kind} for kind in TOKENS]
    return [name | one for name, one in zip(named, numbers, strict=True)]


def say(change: Change) -> str:
    mean, low, high = (f"{number:+.3f}".replace("-", "−") for number in change)
    return f"{verdict(change)} ({mean} nats/token, {low} to {high})"


def verdict(change: Change) -> str:
    _, low, high = change
    return "holds" if low > 0 else "is contradicted" if high < 0 else "is unresolved"


if __name__ == "__main__":
    rl.run_analysis(answer)
