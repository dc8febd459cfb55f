"""What do a head's planes cause? Silence heads, stop their planes, and attribute an answer.

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), sections 5 and 6:
previous-token heads are made of the fastest planes; a head that looks for apostrophes is made
of slow ones. Olsson et al. 2022 (arXiv 2209.11895): induction is built on previous-token heads.

Method: random tokens are repeated while the five heads with the most attention on the previous
token give zero, while five random others of their layers do, and while the fastest quarter or
the slowest half of the five heads' planes stop. Then every head is searched for attention on
apostrophes where one is in sight, sinks apart, beside tokens as frequent and as far; the null
is the same search for sets of random tokens that are as frequent. Last, random tokens come
twice, the last of the second copy left out: the logit of that token less that of another is
attributed to planes of the five heads and of the best induction head, and the planes with most
of it are dropped, and patched from a prompt in which the other token stood there.

Expectation: induction needs the five heads, and their fastest planes alone. A head for
apostrophes has more attention on them than any head has on a random set. The answer is made of
fast planes in the five heads, and its attributions rank planes as dropping them does.

    python analyses/causes.py [MODEL] [--text FILE]... [--context N]

Writes reports/causes/<model>/. Takes minutes for the bundled checkpoint, and for SmolLM2.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr

import ropelens as rl
from ropelens.intervals import paired_interval

FIVE = 5
DRAWS = 4
APOSTROPHE = "*'*"
SETS = 8  # of random tokens
SEARCHED = 16  # sequences, at most
COPIED = 24  # random tokens that come twice
CHECKED = 12  # planes that are dropped and patched, and as many others


def answer(analysis: rl.Analysis) -> rl.Answer:
    five = analysis.heads.nlargest(FIVE, "previous_token")
    table, best, lead = five_heads(analysis, five)
    search = apostrophes(analysis)
    attributed, words = one_answer(analysis, five, best)
    losses = rl.plot_silenced(table)
    losses.update_layout(title_text="Loss of copied tokens without heads, or their planes")
    losses.update_yaxes(title_text="what is silenced or stopped", col=1)
    figures = {
        "Change of the loss of random tokens that come again, with its 95% interval over "
        "sequences. Grey: as many random heads of the same layers.": losses,
        "What each plane adds to the logit of the right token less that of another, by "
        "integrated gradients. Each line is a head.": plot_planes(attributed),
    }  # fmt: skip
    more = {"causes.csv": table, "attribution.nc": attributed}
    question = "What do previous-token heads, and their planes, cause?"
    return rl.Answer(question, [*lead, *search, *words], figures, more)


def wavelength(tokens: float) -> str:
    return f"{tokens:,.0f} tokens" if tokens >= 100 else f"{tokens:.3g} tokens"


def named(heads: pd.DataFrame) -> str:
    return ",".join(f"{row.layer}.{row.head}" for row in heads.itertuples())


# five heads


def five_heads(
    analysis: rl.Analysis, five: pd.DataFrame
) -> tuple[pd.DataFrame, tuple[int, int], list[str]]:
    """Losses without them or their planes, the best induction head, and sentences."""
    model, tokens, heads = analysis.model, analysis.sequences.tokens, named(five)
    edits = {
        "fastest quarter of their planes stops": rl.stop(rl.Fastest(0.25), heads=heads),
        "slowest half of their planes stops": rl.stop_slowest(0.5, heads=heads),
    }
    plain = rl.evaluate(model, tokens, measures=["induction"], edits=edits)
    best = plain["induction"].sel(edit="none").argmax(("layer", "head"))
    measured = {name: plain.sel(edit=name) for name in plain["edit"].values}
    silences = {f"{len(five)} previous-token heads silent": heads}
    random = list(drawn(analysis.heads, five))
    silences |= {f"random heads, draw {n}": of for n, of in enumerate(random, start=1)}
    for name, of in silences.items():
        with rl.silence_heads(model, of):
            without = rl.evaluate(model, tokens, measures=["induction"], edits={})
        measured[name] = without.isel(edit=0)
    rows: list[dict[str, Any]] = []
    scores = {name: float(of["induction"][best]) for name, of in measured.items()}
    for name, of in measured.items():
        change = of["repeat_loss"].values - measured["none"]["repeat_loss"].values
        change, low, high = paired_interval(change)
        row = {"what": name, "label": "" if "random" in name else "positional"}
        row |= {"tokens": "repeated tokens", "induction": scores[name]}
        rows.append(row | {"change": change, "low": low, "high": high})
    table = pd.DataFrame(rows[1:])
    own, fast, slow, silent, *others = scores.values()
    drops = f", {np.mean(others):.2f} without random ones" if others else ""
    place = (int(best["layer"]), int(best["head"]))
    sentence = (
        f"Induction of head {place[0]}.{place[1]} is {own:.2f}; {silent:.2f} without the "
        f"{len(five)} heads that attend most to the previous token ({heads.replace(',', ', ')})"
        f"{drops}; {fast:.2f} where the fastest quarter of their planes stops, and {slow:.2f} "
        "where the slowest half does."
    )
    return table, place, [sentence]


def drawn(heads: pd.DataFrame, chosen: pd.DataFrame) -> Iterator[str]:
    """Sets of as many random other heads of each layer, where it has so many."""
    free = heads.drop(chosen.index)
    random = np.random.default_rng(0)
    for _ in range(DRAWS):
        of = [
            free[free["layer"] == layer].sample(len(some), random_state=random)
            for layer, some in chosen.groupby("layer")
            if (free["layer"] == layer).sum() >= len(some)
        ]
        if of:
            yield named(pd.concat(of))


# the apostrophe head


def apostrophes(analysis: rl.Analysis) -> list[str]:
    """Which head attends most to apostrophes, beside searches for random tokens."""
    text, tokenizer = analysis.sequences, analysis.tokenizer
    some = slice(None, None, -(-len(text.tokens) // SEARCHED))  # of every document
    tokens, documents = text.tokens[some], text.documents
    ids, counts = np.unique(tokens, return_counts=True)
    names = np.array([str(tokenizer.decode([token])) for token in ids.tolist()])
    among = np.array(["'" in name for name in names])
    if not among.any():
        return ["The text has no apostrophe, so there is no head of one to search for."]
    usual = float(np.median(counts[among]))
    plain = np.char.isalpha(np.char.strip(names)) & (np.abs(np.log2(counts / usual)) <= 2)
    random = np.random.default_rng(0)
    words, size = np.unique(np.char.strip(names[plain])), int(among.sum())
    sets = [
        random.choice(words, min(size, len(words)), replace=False).tolist()
        for _ in range(SETS if len(words) else 0)
    ]
    statistics = {
        number: rl.attention_on(tokens, what, tokenizer)
        for number, what in enumerate([APOSTROPHE, *sets])
    }
    profile = rl.profile(
        analysis.model,
        tokens,
        lengths=text.lengths[some],
        documents=None if documents is None else documents[some],
        statistics=[row for pair in statistics.values() for row in pair],
        rows=64,
        surrogates=0,
    )
    leads = [profile[on.name] - profile[control.name] for on, control in statistics.values()]
    at = leads[0].argmax(("layer", "head"))
    on, control = (float(profile[row.name][at]) for row in statistics[0])
    null = [float(lead.max()) for lead in leads[1:]]
    beyond = all(float(leads[0][at]) > one for one in null)
    place = f"{int(at['layer'])}.{int(at['head'])}"
    row = analysis.heads[(analysis.heads["layer"] == int(at["layer"]))]
    row = row[row["head"] == int(at["head"])].iloc[0]
    verdict = "stands out" if beyond and null else "does not stand out"
    beside = f"{min(null):.2f} to {max(null):.2f}" if null else "nothing to compare with"
    return [
        f"Of all heads {place} ({row['label']}, mean wavelength "
        f"{wavelength(row['mean_wavelength'])}) attends most to apostrophes: where one is in "
        f"sight, {on:.2f} of its attention outside of sinks, and {control:.2f} to tokens as "
        f"frequent and as far. It {verdict}: the lead is {on - control:.2f}, and that of the "
        f"best head for {len(null)} sets of random tokens as frequent is {beside}."
    ]


# one answer


def one_answer(
    analysis: rl.Analysis, five: pd.DataFrame, best: tuple[int, int]
) -> tuple[xr.Dataset, list[str]]:
    """The answer's attribution to planes, and sentences on it."""
    first = int(analysis.sequences.tokens[0, 0])
    vocabulary = analysis.model.config.get_text_config().vocab_size
    count = min(COPIED, vocabulary // 2)
    generator = torch.Generator().manual_seed(0)
    *once, other = torch.randperm(vocabulary, generator=generator)[: count + 1].tolist()
    prompts = [[first, *once[:-1], last, *once[:-1]] for last in (once[-1], other)]
    prompt, source = (torch.tensor(of) for of in prompts)
    of = rl.attribute_planes(
        analysis.model,
        prompt,
        (once[-1], other),
        heads=f"{named(five)},{best[0]}.{best[1]}",
        steps=8,
        check=CHECKED,
        source=source,
    )
    values = of["attribution"].values
    order = np.argsort(-np.abs(np.nan_to_num(values)), axis=None)[:3]
    top = [tuple(map(int, np.unravel_index(at, values.shape))) for at in order]
    planes = [
        f"{layer}.{head} at {wavelength(float(of['wavelength'][layer, plane]))}"
        for layer, head, plane in top
    ]
    most = ", ".join(
        f"{name} ({values[at]:+.2f})" for name, at in zip(planes, top, strict=True)
    )
    patched = of["patched"].values
    at = np.unravel_index(np.nanargmax(np.abs(patched)), patched.shape)
    where = f"{at[0]}.{at[1]} at {wavelength(float(of['wavelength'][at[0], at[2]]))}"
    sentences = [
        f"Of random tokens that come again, the right one is {of.attrs['answer']:+.2f} nats "
        f"above another; {of.attrs['source_answer']:+.2f} in the prompt where that one stood "
        f"there. The planes that count most are {most}. Without the first of them the answer "
        f"changes by {of['dropped'].values[top[0]]:+.2f}. Of planes patched one at a "
        f"time from the other prompt, that of {where} changes it most, by {patched[at]:+.2f}.",
    ]
    if "rank_correlation" in of.attrs:
        sentences.append(
            f"Over {CHECKED} planes at random the rank correlation of attributions with what "
            f"dropping the plane takes is {of.attrs['rank_correlation']:+.2f}; the worst of "
            f"all that were dropped is off by {of.attrs['worst']:.2f} nats."
        )
    return of, [sentence.replace("-", "−") for sentence in sentences]


LOOKS = (
    *(("#006d9c", "square"), ("#b874ed", "diamond"), ("#935649", "triangle-up")),
    *(("#fa5d14", "cross"), ("#ae0ee9", "star"), ("#d5794f", "pentagon")),
)
"""Colours and markers of lines: those of variants, which all kinds of sight tell apart."""


def plot_planes(of: xr.Dataset) -> go.Figure:
    """A line per head: its attributions by wavelength."""
    figure = go.Figure(layout={"title": "Attribution of one answer to planes", "height": 420})
    places = np.argwhere(of["attribution"].notnull().any("frequency").values)
    for n, (layer, head) in enumerate(places):
        again, at = divmod(n, len(LOOKS))
        color, symbol = LOOKS[at]
        line = {"name": f"{layer}.{head}", "mode": "lines+markers", "marker_symbol": symbol}
        line |= {"line": {"color": color, "dash": ("solid", "dash", "dot")[again % 3]}}
        x, y = of["wavelength"][layer].values, of["attribution"][layer, head].values
        turns = np.isfinite(x)
        figure.add_scatter(x=x[turns], y=y[turns], **line)
    figure.update_xaxes(type="log", dtick=1, title_text="wavelength (tokens, log scale)")
    return figure.update_yaxes(title_text="attribution (nats)")


if __name__ == "__main__":
    rl.run_analysis(answer)
