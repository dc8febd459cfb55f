"""How far back do heads that go by content find a key, and what do still planes add?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), a theorem: under RoPE
no plane is a robust channel for meaning over long contexts, since some distance turns any key
away. Planes that stand still (p-RoPE) are robust.

Method: first, measured. Random tokens come twice, with text between them, up to the length that
the model was trained for, and heads that act on a match find the copy or do not, under the
model's rotation and with the slowest quarter of the planes stopped. Then, extrapolated: queries
and keys of real text, without their rotation, are scored at every distance up to 1,000,000.
What a head asks for may change where it stands, which the extrapolation does not know.

Expectation: under RoPE every such head has a horizon, where the key that it picked falls to the
level of the others. Stopped planes keep part of the score at any distance, so with enough of
them there is no horizon. The model was not trained with them, so its loss may suffer.

    python analyses/reach.py [MODEL] [--text FILE]... [--context N]

Writes reports/reach/<model>/. Takes half a minute for the bundled checkpoint, a few minutes
for a billion parameters on a GPU.
"""

import numpy as np

import ropelens as rl

# At random, for even steps might keep time with a plane.
FAR = np.random.default_rng(0).integers(100_000, 1_000_000, 200, endpoint=True)
DISTANCES = np.unique([0, *np.geomspace(1, 1_000_000, 49).round(), *FAR])
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
    reach = rl.reach(
        analysis.model,
        analysis.sequences.tokens,
        lengths=analysis.sequences.lengths,
        documents=analysis.sequences.documents,
        heads=",".join(f"{row.layer}.{row.head}" for row in asked.itertuples()),
        distances=DISTANCES,
        runs=("own", "p-rope:0.75"),
        draws=4 if analysis.profile.attrs["trained_context"] <= 2048 else 2,
    )
    first = asked.loc[asked["induction"].idxmax()]
    figures = {
        "Circles: how often heads find a copy that stands that far back, a mean over these "
        "heads. Thin lines, extrapolated: how often the key that they picked in the text, "
        "moved that far back, scores above every other key. Diamond: the median horizon, where "
        "a key's mean score falls to the mean of the other keys.": rl.plot_reach(reach),
        "The same for the head with the highest induction score.": rl.plot_reach(
            reach, layer=int(first["layer"]), head=int(first["head"])
        ),
    }  # fmt: skip
    question = "How far back do heads that go by content find a key?"
    return rl.Answer(question, [*rl.describe(reach), about], figures, more={"reach.nc": reach})


if __name__ == "__main__":
    rl.run_analysis(answer)
