"""What do a head's planes cause? Silence heads, stop their planes, and attribute an answer.

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), sections 5 and 6:
previous-token heads use the fastest planes; a head that looks for apostrophes uses slow planes.
Olsson et al. 2022 (arXiv 2209.11895): induction is built on previous-token heads.

Method:

1. Random tokens are repeated. The five heads with the most attention on the previous token are
silenced; then five random other heads of their layers are silenced; then the fastest quarter or
the slowest half of the planes of the five heads stop. 2. Every head is searched for attention
on apostrophes, outside sinks, compared with attention on tokens of similar frequency and
distance. The null is the same search for sets of random tokens of similar frequency. 3. Random
tokens come twice, without the last token of the second copy. The answer is the logit of this
token minus the logit of another token. The answer is attributed to planes of the five heads and
of the best induction head. The planes of largest attribution are dropped, and patched from a
prompt with the other token at this place.

Expectation: induction needs the five heads, but only their fastest planes. A head for
apostrophes has more attention on them than any head has on a random set. Fast planes of the
five heads make the answer, and attributions rank planes in the same order as dropping them.

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
from ropelens.analysis.answer import Answer
from ropelens.commands.terminal import run_analysis
from ropelens.figures.silenced import plot_silenced
from ropelens.intervals import paired_interval

FIVE = 5
DRAWS = 4
APOSTROPHE = "*'*"
SETS = 8  # of random tokens
SEARCHED = 16  # sequences, at most
COPIED = 24  # random tokens that come twice
CHECKED = (
    12  # planes of largest attribution that are dropped and patched; also random planes
)


def answer(analysis: rl.Analysis) -> Answer:
    five = analysis.heads.nlargest(FIVE, "previous_token")
    table, best, lead = five_heads(analysis, five)
    search = apostrophes(analysis)
    attributed, words = one_answer(analysis, five, best)
    losses = plot_silenced(table)
    losses.update_layout(
        title_text="Loss of copied tokens without heads, or their planes"
    )
    losses.update_yaxes(title_text="silenced or stopped", col=1)
    figures = {
        "Change of the loss of repeated random tokens, with its 95% interval over sequences. "
        "Grey: random heads of the same layers.": losses,
        "The part of each plane in the logit of the right token minus the logit of another "
        "token, by integrated gradients. Each line is a head.": plot_planes(attributed),
    }  # fmt: skip
    more = {"causes.csv": table, "attribution.nc": attributed}
    question = "What do previous-token heads, and their planes, cause?"
    return Answer(question, [*lead, *search, *words], figures, more)


def wavelength(tokens: float) -> str:
    return f"{tokens:,.0f} tokens" if tokens >= 100 else f"{tokens:.3g} tokens"


def named(heads: pd.DataFrame) -> str:
    return ",".join(f"{row.layer}.{row.head}" for row in heads.itertuples())


# five heads


def five_heads(
    analysis: rl.Analysis, five: pd.DataFrame
) -> tuple[pd.DataFrame, tuple[int, int], list[str]]:
    """Losses without the heads or their planes, the best induction head, and sentences."""
    model, text, heads = analysis.model, analysis.text, named(five)
    edits = {
        "fastest quarter of their planes stops": rl.stop(rl.Fastest(0.25), heads=heads),
        "slowest half of their planes stops": rl.stop_slowest(0.5, heads=heads),
    }
    plain = rl.evaluate(model, text, measures=["induction"], edits=edits)
    best = plain["induction"].sel(edit="none").argmax(("layer", "head"))
    measured = {name: plain.sel(edit=name) for name in plain["edit"].values}
    silences = {f"{len(five)} previous-token heads silent": heads}
    random = list(random_heads(analysis.heads, five))
    silences |= {
        f"random heads, draw {n}": drawn for n, drawn in enumerate(random, start=1)
    }
    for name, silent_heads in silences.items():
        with rl.silence_heads(model, silent_heads):
            without = rl.evaluate(model, text, measures=["induction"], edits={})
        measured[name] = without.isel(edit=0)
    rows: list[dict[str, Any]] = []
    scores = {name: float(run["induction"][best]) for name, run in measured.items()}
    for name, run in measured.items():
        change = run["repeat_loss"].values - measured["none"]["repeat_loss"].values
        change, low, high = paired_interval(change)
        row = {"what": name, "label": "" if "random" in name else "positional"}
        row |= {"tokens": "repeated tokens", "induction": scores[name]}
        rows.append(row | {"change": change, "low": low, "high": high})
    table = pd.DataFrame(rows[1:])
    unedited, fast, slow, silent, *others = scores.values()
    compared = f", {np.mean(others):.2f} without random heads" if others else ""
    place = (int(best["layer"]), int(best["head"]))
    sentence = (
        f"Induction of head {place[0]}.{place[1]} is {unedited:.2f}, and {silent:.2f} without "
        f"the {len(five)} heads that attend most to the previous token "
        f"({heads.replace(',', ', ')}){compared}. It is {fast:.2f} if the fastest quarter of "
        f"their planes stops, and {slow:.2f} if the slowest half stops."
    )
    return table, place, [sentence]


def random_heads(heads: pd.DataFrame, chosen: pd.DataFrame) -> Iterator[str]:
    """Random other heads, as many in each layer as `chosen`, if the layer has enough heads."""
    free = heads.drop(chosen.index)
    random = np.random.default_rng(0)
    for _ in range(DRAWS):
        drawn = [
            free[free["layer"] == layer].sample(len(in_layer), random_state=random)
            for layer, in_layer in chosen.groupby("layer")
            if (free["layer"] == layer).sum() >= len(in_layer)
        ]
        if drawn:
            yield named(pd.concat(drawn))


# the apostrophe head


def apostrophes(analysis: rl.Analysis) -> list[str]:
    """The head that attends most to apostrophes, compared with searches for random tokens."""
    tokenizer = analysis.tokenizer
    text = analysis.text[
        :: -(-len(analysis.text) // SEARCHED)
    ]  # some sequences of every document
    ids, counts = np.unique(text.ids, return_counts=True)
    names = np.array([str(tokenizer.decode([token])) for token in ids.tolist()])
    among = np.array(["'" in name for name in names])
    if not among.any():
        return ["The text has no apostrophe, so no head can be searched for."]
    usual = float(np.median(counts[among]))
    plain = np.char.isalpha(np.char.strip(names)) & (
        np.abs(np.log2(counts / usual)) <= 2
    )
    random = np.random.default_rng(0)
    words, size = np.unique(np.char.strip(names[plain])), int(among.sum())
    sets = [
        random.choice(words, min(size, len(words)), replace=False).tolist()
        for _ in range(SETS if len(words) else 0)
    ]
    statistics = {
        number: rl.attention_on(text, targets, tokenizer)
        for number, targets in enumerate([APOSTROPHE, *sets])
    }
    profile = rl.profile(
        analysis.model,
        text,
        statistics=[row for pair in statistics.values() for row in pair],
        rows=64,
        surrogates=0,
    )
    leads = [
        profile[on.name] - profile[control.name] for on, control in statistics.values()
    ]
    best = leads[0].argmax(("layer", "head"))
    on, control = (float(profile[row.name][best]) for row in statistics[0])
    null = [float(lead.max()) for lead in leads[1:]]
    beyond = all(float(leads[0][best]) > lead for lead in null)
    layer, head = int(best["layer"]), int(best["head"])
    row = analysis.heads.set_index(["layer", "head"]).loc[(layer, head)]
    verdict = "stands out" if beyond and null else "does not stand out"
    compared = f"{min(null):.2f} to {max(null):.2f}" if null else "missing"
    return [
        f"Head {layer}.{head} ({row['label']}, mean wavelength "
        f"{wavelength(row['mean_wavelength'])}) attends most to apostrophes. If an apostrophe "
        f"is in sight, the head puts {on:.2f} of its attention outside sinks on apostrophes, "
        f"and {control:.2f} on tokens of similar frequency and distance. The head {verdict}: "
        f"its lead is {on - control:.2f}, and for {len(null)} sets of random tokens of similar "
        f"frequency the lead of the best head is {compared}."
    ]


# one answer


def one_answer(
    analysis: rl.Analysis, five: pd.DataFrame, best: tuple[int, int]
) -> tuple[xr.Dataset, list[str]]:
    """The attribution of an answer to planes, and sentences about it."""
    first = int(analysis.text.ids[0, 0])
    vocabulary = analysis.model.config.get_text_config().vocab_size
    count = min(COPIED, vocabulary // 2)
    generator = torch.Generator().manual_seed(0)
    *once, other = torch.randperm(vocabulary, generator=generator)[: count + 1].tolist()
    prompts = [[first, *once[:-1], last, *once[:-1]] for last in (once[-1], other)]
    prompt, source = map(torch.tensor, prompts)
    causes = rl.attribute_planes(
        analysis.model,
        prompt,
        (once[-1], other),
        heads=f"{named(five)},{best[0]}.{best[1]}",
        steps=8,
        check=CHECKED,
        source=source,
    )
    values = causes["attribution"].values
    order = np.argsort(-np.abs(np.nan_to_num(values)), axis=None)[:3]
    top = [tuple(map(int, np.unravel_index(index, values.shape))) for index in order]

    def plane_name(layer: int, head: int, plane: int) -> str:
        return (
            f"{layer}.{head} at {wavelength(float(causes['wavelength'][layer, plane]))}"
        )

    most = ", ".join(f"{plane_name(*place)} ({values[place]:+.2f})" for place in top)
    patched = causes["patched"].values
    place = np.unravel_index(np.nanargmax(np.abs(patched)), patched.shape)
    sentences = [
        f"After repeated random tokens, the right token is {causes.attrs['answer']:+.2f} nats "
        f"above another token; it is {causes.attrs['source_answer']:+.2f} in the prompt with "
        f"the other token at its place. The planes with the largest attribution are {most}. "
        f"Without the first of these planes the answer changes by "
        f"{causes['dropped'].values[top[0]]:+.2f}. If planes are patched one at a time from "
        f"the other prompt, the plane of {plane_name(*place)} changes the answer most, by "
        f"{patched[place]:+.2f}.",
    ]
    if "rank_correlation" in causes.attrs:
        sentences.append(
            f"Over the {CHECKED} planes with the largest attribution, the rank correlation of "
            f"the attribution of a plane with the effect of dropping it is "
            f"{causes.attrs['rank_correlation']:+.2f}, and {causes.attrs['wrong_signs']} have "
            "the wrong sign. The "
            f"largest error over all dropped planes is {causes.attrs['worst']:.2f} nats."
        )
    return causes, [sentence.replace("-", "−") for sentence in sentences]


LOOKS = (
    *(("#006d9c", "square"), ("#b874ed", "diamond"), ("#935649", "triangle-up")),
    *(("#fa5d14", "cross"), ("#ae0ee9", "star"), ("#d5794f", "pentagon")),
)
"""Colours and markers of lines, as for variants; colour-blind readers can tell them apart."""


def plot_planes(causes: xr.Dataset) -> go.Figure:
    """Attributions by wavelength, a line per head."""
    figure = go.Figure(
        layout={"title": "Attribution of one answer to planes", "height": 420}
    )
    places = np.argwhere(causes["attribution"].notnull().any("frequency").values)
    for n, (layer, head) in enumerate(places):
        dash, look = divmod(n, len(LOOKS))
        color, symbol = LOOKS[look]
        line = {
            "name": f"{layer}.{head}",
            "mode": "lines+markers",
            "marker_symbol": symbol,
        }
        line |= {"line": {"color": color, "dash": ("solid", "dash", "dot")[dash % 3]}}
        x, y = (
            causes["wavelength"][layer].values,
            causes["attribution"][layer, head].values,
        )
        turns = np.isfinite(x)
        figure.add_scatter(x=x[turns], y=y[turns], **line)
    figure.update_xaxes(
        type="log", dtick=1, title_text="wavelength (tokens, log scale)"
    )
    return figure.update_yaxes(title_text="attribution (nats)")


if __name__ == "__main__":
    run_analysis(answer)
