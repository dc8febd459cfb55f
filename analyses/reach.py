"""How far back do heads that choose by content find a key, and what do stopped planes add?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), a theorem: under RoPE
no plane is a robust channel for meaning over long contexts, because some distance turns any key
away. Planes that do not rotate (p-RoPE) are robust.

Method: random tokens come twice, with text between them, at distances up to the trained
context. Heads that act on a match find the copy or miss it: under the model's rotation, and
with the slowest quarter or half of the planes stopped. Beyond the context, keys of the farthest
run are turned to distances up to 1,000,000; each run is also predicted from a nearer run to
test this method. Needles of three random tokens, of which two ask for the third, are searched
at the same distances, up to 4,000 tokens.

Expectation: turned far enough, RoPE loses the copies. Stopped planes keep part of the score at
any distance, so a model with enough of them finds a share of copies at every distance. But the
model was not trained with stopped planes, so it may find fewer copies within its context.

    python analyses/reach.py [MODEL] [--text FILE]... [--context N]

Writes reports/reach/<model>/. Takes half a minute for the bundled checkpoint, a few minutes for
a billion parameters on a GPU.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

import ropelens as rl
from ropelens.analysis.answer import Answer
from ropelens.commands.terminal import run_analysis
from ropelens.figures.reach import plot_reach
from ropelens.report import describe

# Random distances, because even steps might be in phase with a plane.
FAR = np.random.default_rng(0).integers(100_000, 1_000_000, 200, endpoint=True)
DISTANCES = np.unique([*np.geomspace(1, 1_000_000, 49).round(), *FAR])
NEEDLE = 3  # tokens: two ask for the third
VARIANTS = ("own", "p-rope:0.75", "p-rope:0.5")
SHORT = 2048  # tokens of context; a draw of 7,000 tokens takes a minute of CPU
APART = (75, 150, 300, 600, 1200, 2400, 3900, 7000)  # distances in a longer context
FARTHEST = 4000  # largest distance of needles, in tokens
MOST = 24  # heads that are measured: the heads with the highest induction scores


@dataclass(frozen=True)
class Chosen:
    """The heads that are measured, and a sentence about them."""

    table: pd.DataFrame
    sentence: str

    @property
    def names(self) -> str:
        return ",".join(f"{row.layer}.{row.head}" for row in self.table.itertuples())


def answer(analysis: rl.Analysis) -> Answer:
    chosen = heads_by_content(analysis.heads)
    reach = copies_of_text(analysis, chosen)
    needles = hidden_needles(analysis, chosen, reach)
    return answer_from(chosen, reach, needles)


def answer_from(chosen: "Chosen", reach: xr.Dataset, needles: xr.Dataset) -> Answer:
    """The answer from what was measured."""
    question = "How far back do heads that choose by content find a key?"
    findings = [
        *describe(reach),
        *compare(reach, needles),
        *describe(needles),
        chosen.sentence,
    ]
    best = chosen.table.loc[chosen.table["induction"].idxmax()]
    figures = figures_of(reach, needles, best)
    files = {"reach.nc": reach, "needles.nc": needles}
    return Answer(question, findings, figures, more=files)


def has_long_context(analysis: rl.Analysis) -> bool:
    return analysis.profile.attrs["trained_context"] > SHORT


def copies_of_text(analysis: rl.Analysis, chosen: Chosen) -> xr.Dataset:
    """Shares of found copies of random tokens, also with stopped planes."""
    copies = None
    variants = VARIANTS
    if has_long_context(analysis):
        context = analysis.profile.attrs["trained_context"]
        copies = [apart for apart in APART if apart + 64 < context]
        variants = VARIANTS[:2]
    return rl.reach(
        analysis.model,
        analysis.text,
        heads=chosen.names,
        copies=copies,
        distances=DISTANCES,
        variants=variants,
    )


def hidden_needles(
    analysis: rl.Analysis, chosen: Chosen, reach: xr.Dataset
) -> xr.Dataset:
    """Shares of found needles, at the distances of the copies in `reach`."""
    measured = reach["run_distance"].values.tolist()
    return rl.reach(
        analysis.model,
        analysis.text,
        heads=chosen.names,
        copied=NEEDLE,
        copies=[distance for distance in measured if distance < FARTHEST],
        distances=(),
        draws=8 if has_long_context(analysis) else 16,
    )


def figures_of(
    reach: xr.Dataset, needles: xr.Dataset, best: pd.Series
) -> dict[str, go.Figure]:
    """Copies found by all heads and by the `best` head, and needles found."""
    of_best = plot_reach(reach, layer=int(best["layer"]), head=int(best["head"]))
    of_needles = plot_reach(needles)
    of_needles.update_layout(title_text="Needles, by distance")
    of_needles.update_yaxes(title_text="needles found (% of rows)")
    return {
        "Circles: how often heads find a copy at this distance, a mean over these heads. "
        "Dotted: distances beyond the runs, by turning the keys of the farthest run.":
            plot_reach(reach),
        "The same for the head with the highest induction score.": of_best,
        "Needles (three random tokens, of which two ask for the third): how often these heads "
        "find the third token, a mean over these heads.": of_needles,
    }  # fmt: skip


def heads_by_content(heads: pd.DataFrame) -> Chosen:
    """Heads that choose by content, with the highest induction scores."""
    if "reach" in heads:  # heads with a window cannot see far copies
        heads = heads[heads["reach"] == heads["reach"].max()]
    other_fractions = heads[["positional_fraction", "interaction_fraction"]].max(axis=1)
    by_content = heads["content_fraction"] > other_fractions
    measured = heads[by_content & (heads["label"] != "diffuse")]
    if measured.empty:
        return Chosen(
            heads.nlargest(1, "content_fraction"),
            "Content explains most bits of no head. Measured: the head that it explains best.",
        )
    semantic = (measured["label"] == "semantic").sum()
    return Chosen(
        measured.nlargest(MOST, "induction"),
        f"Content explains most bits (without sinks) of {len(measured)} of the {len(heads)} "
        f"heads with the longest reach; {semantic} of these are semantic. Measured: "
        f"{min(len(measured), MOST)}, by their induction scores.",
    )


def compare(reach: xr.Dataset, needles: xr.Dataset) -> list[str]:
    """Copies and needles by distance, means over the heads that find half of near copies."""
    nearest = reach["found_share"].isel(variant=0, run_distance=0)
    find_half = nearest >= 0.5
    if not find_half.any():
        return []
    distances = needles["run_distance"].values.tolist()
    copies = mean_found(reach.sel(run_distance=distances), find_half)
    hidden = mean_found(needles, find_half)
    shares = []
    for copy, needle, distance in zip(copies, hidden, distances, strict=True):
        shares.append(f"{copy:.0%} and {needle:.0%} {distance:,} tokens back")
    heads = f"The {int(find_half.sum())} heads that find half of the nearest copies"
    about = "these shares of copies and needles:"
    return [f"{heads} find {about} {', '.join(shares)}."]


def mean_found(runs: xr.Dataset, heads: xr.DataArray) -> np.ndarray:
    """Share that some heads find at each distance, under the model's own rotation."""
    found = runs["found_share"].isel(variant=0)
    return found.where(heads).mean(("layer", "head")).values


if __name__ == "__main__":
    run_analysis(answer)
