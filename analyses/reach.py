"""How far back do heads that go by content find a key, and what do still planes add?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), a theorem: under RoPE
no plane is a robust channel for meaning over long contexts, since some distance turns any key
away. Planes that stand still (p-RoPE) are robust.

Method: random tokens come twice, with text between them, up to the length that the model was
trained for, and heads that act on a match find the copy or do not: under the model's rotation,
and with its slowest quarter and half of planes stopped. Beyond, keys of the farthest run are
turned to distances up to 1,000,000; how well that foretells the runs stands beside it. Needles
of three random tokens, of which two ask for the third, are looked for at the same distances, up
to 4,000 tokens.

Expectation: turned far enough, RoPE loses the copies. Stopped planes keep part of the score at
any distance, so with enough of them a share is found for ever; but the model was not trained
with them, so it may find fewer where it runs.

    python analyses/reach.py [MODEL] [--text FILE]... [--context N]

Writes reports/reach/<model>/. Takes half a minute for the bundled checkpoint, a few minutes for
a billion parameters on a GPU.
"""

from functools import partial

import numpy as np
import xarray as xr

import ropelens as rl

# At random, for even steps might keep time with a plane.
FAR = np.random.default_rng(0).integers(100_000, 1_000_000, 200, endpoint=True)
DISTANCES = np.unique([*np.geomspace(1, 1_000_000, 49).round(), *FAR])
NEEDLE = 3  # tokens: two ask for the third
VARIANTS = ("own", "p-rope:0.75", "p-rope:0.5")
SHORT = 2048  # tokens of context; a draw of 7,000 tokens takes a minute of CPU
APART = (75, 150, 300, 600, 1200, 2400, 3900, 7000)  # in a longer context, where they fit
FARTHEST = 4000  # tokens that needles are sought back
MOST = 24
"""Heads that are asked, at most: those that act most on a match."""


def answer(analysis: rl.Analysis) -> rl.Answer:
    heads = analysis.heads
    others = heads[["positional_fraction", "interaction_fraction"]].max(axis=1)
    asked = heads[(heads["content_fraction"] > others) & (heads["label"] != "diffuse")]
    semantic = (asked["label"] == "semantic").sum()
    about = (
        f"Of {len(asked)} heads content explains most bits, without sinks; {semantic} of them "
        f"are semantic. Measured: {min(len(asked), MOST)}, by their induction scores."
    )
    asked = asked.nlargest(MOST, "induction")
    if not len(asked):
        asked = heads.nlargest(1, "content_fraction")
        about = "Content explains most of no head; measured: the one it explains best."
    run = partial(
        rl.reach,
        analysis.model,
        analysis.sequences.tokens,
        lengths=analysis.sequences.lengths,
        heads=",".join(f"{row.layer}.{row.head}" for row in asked.itertuples()),
    )
    context = analysis.profile.attrs["trained_context"]
    fit = [apart for apart in APART if apart + 64 < context] if context > SHORT else None
    variants = VARIANTS if fit is None else VARIANTS[:2]
    reach = run(copies=fit, distances=DISTANCES, variants=variants)
    sought = [apart for apart in reach["run_distance"].values.tolist() if apart < FARTHEST]
    needles = run(copied=NEEDLE, copies=sought, distances=(), draws=16 if fit is None else 8)
    first = asked.loc[asked["induction"].idxmax()]
    hidden = rl.plot_reach(needles).update_layout(title_text="Needles, by distance")
    figures = {
        "Circles: how often heads find a copy that stands that far back, a mean over these "
        "heads. Dotted: farther than was run, by turning the keys of the farthest run.":
            rl.plot_reach(reach),
        "The same for the head with the highest induction score.": rl.plot_reach(
            reach, layer=int(first["layer"]), head=int(first["head"])
        ),
        "Needles, three random tokens of which two ask for the third: how often these heads "
        "find the one that is asked for, a mean over them.":
            hidden.update_yaxes(title_text="needles found (% of rows)"),
    }  # fmt: skip
    question = "How far back do heads that go by content find a key?"
    words = [*rl.describe(reach), *both(reach, needles), *rl.describe(needles), about]
    more = {"reach.nc": reach, "needles.nc": needles}
    return rl.Answer(question, words, figures, more=more)


def both(reach: xr.Dataset, needles: xr.Dataset) -> list[str]:
    """Copies and needles by distance, means over the heads that find half of near copies."""
    near = reach["found_share"].isel(variant=0, run_distance=0)
    apart = needles["run_distance"].values.tolist()
    copies, hidden = (
        of["found_share"].isel(variant=0).where(near >= 0.5).mean(("layer", "head"))
        for of in (reach.sel(run_distance=apart), needles)
    )
    shares = [
        f"{copy:.0%} and {needle:.0%} {distance:,} tokens back"
        for copy, needle, distance in zip(copies.values, hidden.values, apart, strict=True)
    ]
    heads = f"The {int((near >= 0.5).sum())} heads that find half of the nearest copies"
    about = "of copies, and of needles that hide in the text,"
    return [f"{heads} find {about} {', '.join(shares)}."] if (near >= 0.5).any() else []


if __name__ == "__main__":
    rl.run_analysis(answer)
