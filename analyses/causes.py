"""What do a head's planes cause? Silence heads, stop their planes, and attribute an answer.

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), sections 5 and 6:
previous-token heads use the fastest planes; a head that looks for apostrophes uses slow planes.
Olsson et al. 2022 (arXiv 2209.11895): induction is built on previous-token heads.

Method:

1. Random tokens are repeated. The five heads with the most attention on the previous token are
silenced; then five random other heads of their layers are silenced; then the fastest quarter or
the slowest half of the planes of the five heads stop.

2. Every head is searched for attention on apostrophes, outside sinks, compared with attention
on tokens of similar frequency and distance. The null is the same search for sets of random
tokens of similar frequency.

3. Random tokens come twice, without the last token of the second copy. The answer is the logit
of this token minus the logit of another token. The answer is attributed to planes of the five
heads and of the best induction head. The planes of largest attribution are dropped, and patched
from a prompt with the other token at this place.

Expectation: induction needs the five heads, but only their fastest planes. A head for
apostrophes has more attention on them than any head has on a random set. Fast planes of the
five heads make the answer, and attributions rank planes in the same order as dropping them.

    python analyses/causes.py [MODEL] [--text FILE]... [--context N]

Writes reports/causes/<model>/. Takes minutes for the bundled checkpoint, and for SmolLM2.
"""

from dataclasses import dataclass
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
SETS = 8  # sets of random tokens
SEARCHED = 16  # sequences, at most
COPIED = 24  # random tokens that come twice
# Planes of largest attribution that are dropped and patched; also random planes.
CHECKED = 12


def answer(analysis: rl.Analysis) -> Answer:
    five = analysis.heads.nlargest(FIVE, "previous_token")
    silenced = five_heads(analysis, five)
    attribution = one_answer(analysis, five, silenced.best)
    losses = plot_silenced(silenced.table)
    losses.update_layout(
        title_text="Loss of copied tokens without heads, or their planes"
    )
    losses.update_yaxes(title_text="silenced or stopped", col=1)
    figures = {
        "Change of the loss of repeated random tokens, with its 95% interval over sequences. "
        "Grey: random heads of the same layers.": losses,
        "The part of each plane in the logit of the right token minus the logit of another "
        "token, by integrated gradients. Each line is a head.": plot_planes(attribution),
    }  # fmt: skip
    findings = [
        silenced.sentence(five),
        apostrophes(analysis),
        *sentences_about(attribution),
    ]
    question = "What do previous-token heads, and their planes, cause?"
    tables = {"causes.csv": silenced.table, "attribution.nc": attribution}
    return Answer(question, findings, figures, more=tables)


def in_tokens(wavelength: float) -> str:
    if wavelength >= 100:
        return f"{wavelength:,.0f} tokens"
    return f"{wavelength:.3g} tokens"


def names_of(heads: pd.DataFrame) -> str:
    return ",".join(f"{row.layer}.{row.head}" for row in heads.itertuples())


# five heads

FAST_STOP = "fastest quarter of their planes stops"
SLOW_STOP = "slowest half of their planes stops"


@dataclass(frozen=True)
class Silenced:
    """Losses without heads or planes, and the score of the best induction head, by name.

    `best` is the layer and the index of this head.
    """

    table: pd.DataFrame
    induction: dict[str, float]
    best: tuple[int, int]

    def sentence(self, five: pd.DataFrame) -> str:
        unedited = self.induction["none"]
        silent = self.induction[silent_name(five)]
        fast = self.induction[FAST_STOP]
        slow = self.induction[SLOW_STOP]
        random = [
            score for name, score in self.induction.items() if name.startswith("random")
        ]
        compared = ""
        if random:
            compared = f", {np.mean(random):.2f} without random heads"
        layer, head = self.best
        return (
            f"Induction of head {layer}.{head} is {unedited:.2f}, and {silent:.2f} without "
            f"the {len(five)} heads that attend most to the previous token "
            f"({names_of(five).replace(',', ', ')}){compared}. It is {fast:.2f} if the "
            f"fastest quarter of their planes stops, and {slow:.2f} if the slowest half stops."
        )


def silent_name(five: pd.DataFrame) -> str:
    return f"{len(five)} previous-token heads silent"


def five_heads(analysis: rl.Analysis, five: pd.DataFrame) -> Silenced:
    """Losses and induction without the heads, without random heads, and without planes."""
    heads = names_of(five)
    edits = {
        FAST_STOP: rl.stop(rl.Fastest(0.25), heads=heads),
        SLOW_STOP: rl.stop_slowest(0.5, heads=heads),
    }
    edited = rl.evaluate(
        analysis.model, analysis.text, measures=["induction"], edits=edits
    )
    measured = {str(name): edited.sel(edit=name) for name in edited["edit"].values}
    measured[silent_name(five)] = without(analysis, heads)
    for number, drawn in enumerate(random_heads(analysis.heads, five), start=1):
        measured[f"random heads, draw {number}"] = without(analysis, drawn)
    best = measured["none"]["induction"].argmax(("layer", "head"))
    induction = {name: float(run["induction"][best]) for name, run in measured.items()}
    return Silenced(
        table=changes_of_loss(measured, induction),
        induction=induction,
        best=(int(best["layer"]), int(best["head"])),
    )


def changes_of_loss(
    measured: dict[str, xr.Dataset], induction: dict[str, float]
) -> pd.DataFrame:
    """Changes of the loss of repeated tokens, compared with the unedited model ("none")."""
    unedited = measured["none"]["repeat_loss"].values
    rows: list[dict[str, Any]] = []
    for name, run in measured.items():
        if name == "none":
            continue
        change, low, high = paired_interval(run["repeat_loss"].values - unedited)
        rows.append(
            {
                "what": name,
                "label": "" if "random" in name else "positional",
                "tokens": "repeated tokens",
                "induction": induction[name],
                "change": change,
                "low": low,
                "high": high,
            }
        )
    return pd.DataFrame(rows)


def without(analysis: rl.Analysis, heads: str) -> xr.Dataset:
    """Losses and induction scores while `heads` are silent."""
    with rl.silence_heads(analysis.model, heads):
        evaluated = rl.evaluate(
            analysis.model, analysis.text, measures=["induction"], edits={}
        )
    return evaluated.isel(edit=0)


def random_heads(heads: pd.DataFrame, chosen: pd.DataFrame) -> list[str]:
    """Random sets of other heads, with the number of heads that `chosen` has in each layer.

    Layers with too few other heads are left out.
    """
    free = heads.drop(chosen.index)
    random = np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        drawn: list[pd.DataFrame] = []
        for layer, in_layer in chosen.groupby("layer"):
            others = free[free["layer"] == layer]
            count = len(in_layer)
            if len(others) >= count:
                drawn.append(others.sample(count, random_state=random))
        if drawn:
            heads_of_draw = pd.concat(drawn)
            draws.append(names_of(heads_of_draw))
    return draws


# the apostrophe head

StatisticPair = tuple[rl.Statistic, rl.Statistic]


def apostrophes(analysis: rl.Analysis) -> str:
    """The head that attends most to apostrophes, compared with searches for random tokens."""
    tokenizer = analysis.tokenizer
    step = -(-len(analysis.text) // SEARCHED)
    text = analysis.text[::step]  # some sequences of every document
    sets = random_sets(text, tokenizer)
    if sets is None:
        return "The text has no apostrophe, so no head can be searched for."
    pairs = [rl.attention_on(text, words, tokenizer) for words in (APOSTROPHE, *sets)]
    found, *of_sets = search(analysis.model, text, pairs)
    null = [of_set.lead for of_set in of_sets]
    verdict = "does not stand out"
    compared = "missing"
    if null:
        compared = f"{min(null):.2f} to {max(null):.2f}"
        if found.lead > max(null):
            verdict = "stands out"
    heads = analysis.heads.set_index(["layer", "head"])
    row = heads.loc[(found.layer, found.head)]
    return (
        f"Head {found.layer}.{found.head} ({row['label']}, mean wavelength "
        f"{in_tokens(row['mean_wavelength'])}) attends most to apostrophes. If an apostrophe "
        f"is in sight, the head puts {found.on:.2f} of its attention outside sinks on "
        f"apostrophes, and {found.control:.2f} on tokens of similar frequency and distance. "
        f"The head {verdict}: its lead is {found.lead:.2f}, and for {len(null)} sets of random "
        f"tokens of similar frequency the lead of the best head is {compared}."
    )


def random_sets(text: rl.Text, tokenizer: Any) -> list[list[str]] | None:
    """Sets of random words that are as frequent as apostrophes; None without apostrophes."""
    ids, counts = np.unique(text.ids, return_counts=True)
    decoded = [tokenizer.decode([token]) for token in ids.tolist()]
    names = np.array(decoded, dtype=str)
    have_apostrophe = np.array(["'" in name for name in names])
    if not have_apostrophe.any():
        return None
    usual = float(np.median(counts[have_apostrophe]))
    is_word = np.char.isalpha(np.char.strip(names))
    is_similar = np.abs(np.log2(counts / usual)) <= 2
    words = np.unique(np.char.strip(names[is_word & is_similar]))
    if not len(words):
        return []
    size = min(int(have_apostrophe.sum()), len(words))
    return draw_sets(words, size)


def draw_sets(words: np.ndarray, size: int) -> list[list[str]]:
    random = np.random.default_rng(0)
    sets = []
    for _ in range(SETS):
        drawn = random.choice(words, size, replace=False)
        sets.append(drawn.tolist())
    return sets


@dataclass(frozen=True)
class Found:
    """The head with the largest lead of attention on a set of tokens over control tokens."""

    layer: int
    head: int
    on: float
    control: float

    @property
    def lead(self) -> float:
        return self.on - self.control


def search(model: Any, text: rl.Text, pairs: list[StatisticPair]) -> list[Found]:
    """The best head for each pair of statistics: attention on a set, and on its control."""
    statistics: list[rl.Statistic] = []
    for pair in pairs:
        statistics += pair
    profile = rl.profile(model, text, statistics=statistics, rows=64, surrogates=0)
    found = []
    for on, control in pairs:
        lead = profile[on.name] - profile[control.name]
        best = lead.argmax(("layer", "head"))
        found.append(
            Found(
                layer=int(best["layer"]),
                head=int(best["head"]),
                on=float(profile[on.name][best]),
                control=float(profile[control.name][best]),
            )
        )
    return found


# one answer


def one_answer(
    analysis: rl.Analysis, five: pd.DataFrame, best: tuple[int, int]
) -> xr.Dataset:
    """The attribution of an answer to planes of the five heads and of the induction head."""
    first = int(analysis.text.ids[0, 0])
    vocabulary = analysis.model.config.get_text_config().vocab_size
    count = min(COPIED, vocabulary // 2)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(vocabulary, generator=generator).tolist()
    *once, right = drawn[:count]
    other = drawn[count]
    return rl.attribute_planes(
        analysis.model,
        torch.tensor([first, *once, right, *once]),
        (right, other),
        heads=f"{names_of(five)},{best[0]}.{best[1]}",
        steps=8,
        check=CHECKED,
        source=torch.tensor([first, *once, other, *once]),
    )


def sentences_about(causes: xr.Dataset) -> list[str]:
    values = causes["attribution"].values
    sizes = np.abs(np.nan_to_num(values))
    order = np.argsort(-sizes, axis=None)[:3]
    top = [np.unravel_index(index, values.shape) for index in order]
    named = [f"{plane_name(causes, place)} ({values[place]:+.2f})" for place in top]
    dropped = causes["dropped"].values[top[0]]
    patched = causes["patched"].values
    largest = np.nanargmax(np.abs(patched))
    most = np.unravel_index(largest, patched.shape)
    sentences = [
        f"After repeated random tokens, the right token is {causes.attrs['answer']:+.2f} nats "
        f"above another token; it is {causes.attrs['source_answer']:+.2f} in the prompt with "
        "the other token at its place. The planes with the largest attribution are "
        f"{', '.join(named)}. Without the first of these planes the answer changes by "
        f"{dropped:+.2f}. If planes are patched one at a time from the other prompt, the plane "
        f"of {plane_name(causes, most)} changes the answer most, by {patched[most]:+.2f}.",
    ]
    if "rank_correlation" in causes.attrs:
        sentences.append(
            f"Over the {CHECKED} planes with the largest attribution, the rank correlation of "
            f"the attribution of a plane with the effect of dropping it is "
            f"{causes.attrs['rank_correlation']:+.2f}, and {causes.attrs['wrong_signs']} have "
            "the wrong sign. The "
            f"largest error over all dropped planes is {causes.attrs['worst']:.2f} nats."
        )
    return [sentence.replace("-", "−") for sentence in sentences]


def plane_name(causes: xr.Dataset, place: tuple[Any, ...]) -> str:
    layer, head, plane = place
    wavelength = float(causes["wavelength"][layer, plane])
    return f"{layer}.{head} at {in_tokens(wavelength)}"


LOOKS = (
    ("#006d9c", "square"),
    ("#b874ed", "diamond"),
    ("#935649", "triangle-up"),
    ("#fa5d14", "cross"),
    ("#ae0ee9", "star"),
    ("#d5794f", "pentagon"),
)
"""Colours and markers of lines, as for variants; colour-blind readers can tell them apart."""

DASHES = ("solid", "dash", "dot")


def plot_planes(causes: xr.Dataset) -> go.Figure:
    """Attributions by wavelength, a line per head."""
    figure = go.Figure(
        layout={"title": "Attribution of one answer to planes", "height": 420}
    )
    places = np.argwhere(causes["attribution"].notnull().any("frequency").values)
    for number, (layer, head) in enumerate(places):
        color, symbol = LOOKS[number % len(LOOKS)]
        dash = DASHES[number // len(LOOKS) % len(DASHES)]
        wavelength = causes["wavelength"][layer].values
        turns = np.isfinite(wavelength)
        figure.add_scatter(
            x=wavelength[turns],
            y=causes["attribution"][layer, head].values[turns],
            name=f"{layer}.{head}",
            mode="lines+markers",
            marker_symbol=symbol,
            line={"color": color, "dash": dash},
        )
    figure.update_xaxes(
        type="log", dtick=1, title_text="wavelength (tokens, log scale)"
    )
    return figure.update_yaxes(title_text="attribution (nats)")


if __name__ == "__main__":
    run_analysis(answer)
