"""How far back do semantic heads find the key that they picked, and what do still planes add?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205): under RoPE no
plane is a robust channel for meaning over long contexts, for some distance turns any key
away; planes that stand still (p-RoPE) are. The paper proves it; here queries and keys of real
text, with their rotation removed, are scored at every distance up to 1,000,000.

Expectation: under RoPE every semantic head has a horizon, where the key it picked falls to
the level of the others. Stopped planes keep a part of the score at any distance, so with
enough of them the horizon goes; the model was not trained for them, so its text may not.

    python analyses/reach.py [MODEL] [--text FILE]... [--context N]

Writes reports/reach/<model>/. Takes half a minute for the bundled checkpoint, a few minutes
for a billion parameters on a GPU.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import typer

import ropelens as rl

REPORTS = Path(__file__).parents[1] / "reports"
DRAWN = ("own", "p-rope:0.75", "p-rope:0.5", "nope")
# At random, for even steps might keep time with a plane.
FAR = np.random.default_rng(0).integers(100_000, 1_000_000, 200, endpoint=True)
DISTANCES = np.unique([0, *np.geomspace(1, 1_000_000, 49).round(), *FAR])


def main(
    model: str = typer.Argument("bundled", help="A folder, a Hub id, or bundled."),
    text: list[Path] = typer.Option([], help="Text files or folders; else the bundled text."),
    context: int = typer.Option(512, help="Tokens a sequence."),
    sequences: int | None = typer.Option(None, help="Sequences, a sample; else all."),
) -> None:
    loaded, tokenizer = rl.load(model)
    documents = rl.read_documents(text or [rl.sample_path()])
    chosen = rl.tokenize(documents, tokenizer, context=context, sequences=sequences)
    profile = rl.profile(loaded, chosen.tokens, lengths=chosen.lengths, tokenizer=tokenizer)
    profile.attrs["text"] = chosen.source
    heads = rl.classify_heads(profile)
    asked = most_semantic(heads)
    names = ",".join(f"{row.layer}.{row.head}" for row in asked.itertuples())
    found = rl.reach(
        loaded, chosen.tokens, lengths=chosen.lengths, heads=names, distances=DISTANCES
    )
    first = asked.loc[asked["content_bits"].idxmax()]
    page = rl.write_answer(
        REPORTS / "reach",
        question="How far back do semantic heads find the key that they picked?",
        findings=[*rl.describe_reach(found), asked_for(asked)],
        figures={
            "Each line is the share of these heads whose picked key, moved that far back, "
            "still scores above the mean of the other keys; bands are 95% intervals of the "
            "heads' horizons.": rl.plot_horizons(found),
            "The head with most content bits, a panel a variant: above 0 the key wins. Line "
            "and band: mean and range over distances nearby; diamond: the horizon; dashed: "
            "what no distance takes the score below.": rl.plot_reach(
                found, layer=int(first["layer"]), head=int(first["head"]), variants=DRAWN
            ),
        },
        profile=profile,
        heads=heads,
        more={"reach.nc": found},
    )  # fmt: skip
    rl.write_index(REPORTS)
    typer.echo(page)


def most_semantic(heads: pd.DataFrame) -> pd.DataFrame:
    """The semantic heads; without any, the head that is least positional."""
    semantic = heads[heads["label"] == "semantic"]
    return semantic if len(semantic) else heads.nsmallest(1, "positional_fraction")


def asked_for(asked: pd.DataFrame) -> str:
    """Which heads the numbers are about."""
    if (asked["label"] == "semantic").all():
        return f"Asked were the semantic heads, {len(asked)} in all layers."
    return "No head is semantic; asked was the one that is least positional."


if __name__ == "__main__":
    rl.run_script(main)
