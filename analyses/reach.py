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
import xarray as xr

import ropelens as rl

REPORTS = Path(__file__).parents[1] / "reports"
DRAWN = ("rope", "p-rope:0.75", "p-rope:0.5", "nope")


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
    found = rl.reach(loaded, chosen.tokens, lengths=chosen.lengths, heads=names)
    first = asked.loc[asked["content_bits"].idxmax()]
    page = rl.write_answer(
        REPORTS / "reach",
        question="How far back do semantic heads find the key that they picked?",
        findings=findings(found, asked),
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


def findings(found: xr.Dataset, asked: pd.DataFrame) -> list[str]:
    """Who loses the picked key where, in sentences with numbers."""
    every = found.stack(one=("layer", "head")).dropna("one", how="all", subset=["horizon"])
    count, farthest = every.sizes["one"], int(found["distance"].max())
    kind = "semantic heads" if (asked["label"] == "semantic").all() else "heads (none semantic)"
    said = []
    for name in every["variant"].values:
        of = every.sel(variant=name)
        lost = of["horizon"].values[np.isfinite(of["horizon"].values)]
        certain = int((of["lowest_score"] > of["others_level"]).sum())
        sentence = f"Under {name} {len(lost)} of {count} {kind} lose the key they picked"
        if len(lost):
            ends = f" in the median ({lost.min():,.0f} to {lost.max():,.0f})"
            sentence += f", at {np.median(lost):,.0f} tokens{ends if len(lost) > 1 else ''}"
        safe = f"; {certain} cannot lose it at any distance" if certain else ""
        said.append(f"{sentence}{safe}.")
    own = every.sel(variant=every["variant"].values[0])
    sure = int((own["horizon_high"] < 2 * own["horizon_low"]).sum())
    near, trained = own["picked_distance"], found.attrs["trained_context"]
    within = int((own["horizon"] <= trained).sum())
    far = every["win_share"].sel(distance=slice(farthest / 10, None)).mean("distance")
    moved = [shares(every["unmoved_win_share"]), shares(far)]
    return [
        *said,
        f"In the text ({found.attrs['rows']} rows of every sequence) the picked keys stand "
        f"{float(near.mean()):,.0f} tokens back on average. "
        f"{within} of {count} horizons under the model's own rotation lie within the context "
        f"it was trained on, {trained:,} tokens; {sure} have a 95% interval, over sequences, "
        "with ends less than a factor 2 apart.",
        "A horizon is that of the mean score against the mean of the others. Row by row, the "
        f"picked key still scores above every other key, left where it stands: {moved[0]}; "
        f"moved {farthest // 10:,} to {farthest:,} tokens back: {moved[1]}.",
    ]


def shares(of: xr.DataArray) -> str:
    """The mean over heads under every variant, in words."""
    means = of.mean("one")
    return ", ".join(f"{float(one):.0%} under {one['variant'].item()}" for one in means)


if __name__ == "__main__":
    typer.run(main)
