"""Which planes may stop rotating for nothing, and which may not?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205): p-RoPE, trained with
the slowest planes stopped, loses nothing; with the fastest stopped it loses much. Here
planes of a trained model stop, from either end or a band of wavelengths at a time, beside
as many random planes, all on the same text.

Expectation: planes slower than the band of long queries (Oka et al. 2026: at wavelength 2 pi
context / 3.657) are free, the fastest cost nats/token. A band costs the more, the more the
heads select through it.

    python analyses/truncation.py [MODEL] [--text FILE]... [--context N]

Writes reports/truncation/<model>/. Takes about five minutes for the bundled checkpoint on two
cores: some 65 evaluations of the model, attention looked at in 64 rows of a sequence.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import typer
import xarray as xr

import ropelens as rl

REPORTS = Path(__file__).parents[1] / "reports"
MEASURES = ("loss", "induction", "change", "labels")


def main(
    model: str = typer.Argument("bundled", help="A folder, a Hub id, or bundled."),
    text: list[Path] = typer.Option([], help="Text files or folders; else the bundled text."),
    context: int = typer.Option(512, help="Tokens a sequence."),
    sequences: int | None = typer.Option(None, help="Sequences, a sample; else all."),
) -> None:
    loaded, tokenizer = rl.load(model)
    documents = rl.read_documents(text or [rl.sample_path()])
    chosen = rl.tokenize(documents, tokenizer, context=context, sequences=sequences)
    given = {"lengths": chosen.lengths, "rows": 64}
    profile = rl.profile(loaded, chosen.tokens, tokenizer=tokenizer, **given)
    planes = np.isfinite(profile["wavelength"].values).sum(axis=1).max()
    bands = int(min(8, planes))
    sweep = rl.truncate(loaded, chosen.tokens, bands=bands, measures=MEASURES, **given)
    profile.attrs["text"] = sweep.attrs["text"] = chosen.source
    table = rl.summarize_truncation(sweep)
    page = rl.write_answer(
        REPORTS / "truncation",
        question="Which planes may stop rotating for nothing?",
        findings=findings(sweep, table),
        figures={
            "Planes stop one after the other, the slowest first (left) or the fastest first "
            "(right), with 95% intervals of the paired change. Grey: as many random planes.":
                rl.plot_truncation(sweep),
            "One band of wavelengths stops at a time, beside as many random planes; below, "
            "how much the heads select through each plane.": rl.plot_bands(sweep),
            "The same steps: loss on repeated random tokens, and heads with a new label.":
                rl.plot_truncation(sweep, measures=("repeat_loss", "labels")),
            "Colour: how far the attention moves. A word: the head's label, where it is new.":
                rl.plot_changed_heads(sweep),
        },
        profile=profile,
        heads=rl.classify_heads(profile),
        more={"truncation.nc": sweep, "truncation.csv": table},
    )  # fmt: skip
    rl.write_index(REPORTS)
    typer.echo(page)


def findings(sweep: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """What the planes are worth, in sentences with numbers."""
    slow, fast = (table[table["kind"] == end].set_index("kept") for end in ("slow", "fast"))
    random = table[table["kind"] == "random"].groupby("kept")["loss_change"].mean()
    kept = min(slow.index, key=lambda share: abs(share - 0.75))
    free = slow[(slow["loss_change_high"] < 0.01).cummin()]
    begin = f"those of {free['wavelength_low'].min():,.0f} tokens and more"
    context = sweep.attrs["trained_context"]
    changed, heads = "labels_changed", sweep["label"].isel(edit=0).size
    return [
        f"Stopping the slowest {1 - kept:.0%} of the planes costs {cost(slow.loc[kept])} "
        f"nats/token, the fastest {cost(fast.loc[kept])}, random ones "
        f"{signed(random.get(kept, np.nan))} (mean of the draws).",
        f"The slowest planes that may stop together for less than 0.01 nats/token (all of the "
        f"interval): {begin if len(free) else 'none'}. The trained context is {context:,} "
        f"tokens; the band of long queries is predicted at {2 * np.pi * context / 3.657:,.0f}.",
        bands(sweep, table),
        f"Labels change in {slow.loc[kept, changed]:.0f} of {heads} heads with the slowest "
        f"{1 - kept:.0%} stopped, in {fast.loc[kept, changed]:.0f} with the fastest; the head "
        f"that changes most is then {fast.loc[kept, 'changed_most']}.",
    ]


def bands(sweep: xr.Dataset, table: pd.DataFrame) -> str:
    """The dearest band, and whether the bands that heads select through are the dear ones."""
    of = table[table["kind"] == "band"].set_index("band")
    control = table[table["kind"] == "band control"].groupby("band")["loss_change"].mean()
    positive = sweep["selectivity"].clip(min=0)
    share = positive / positive.sum("frequency")
    low, high = (0.999 * of["wavelength_low"], 1.001 * of["wavelength_high"])
    inside = [
        (share["wavelength"] > low[n]) & (share["wavelength"] < high[n]) for n in of.index
    ]
    within = [float(share.where(part).sum("frequency").mean()) for part in inside]
    together = of["loss_change"].corr(pd.Series(within, of.index), method="spearman")
    top = of.loc[of["loss_change"].idxmax()]
    return (
        f"Of {len(of)} bands the dearest has wavelengths from {top['wavelength_low']:,.0f} "
        f"tokens: {cost(top)} nats/token, as many random planes "
        f"{signed(control.get(top.name, np.nan))}. Rank correlation over bands of cost with "
        f"share of selectivity: {signed(together, '+.2f')}."
    )


def cost(row: pd.Series) -> str:
    """A change of loss with its 95 % interval, in words."""
    low, high = signed(row["loss_change_low"]), signed(row["loss_change_high"])
    return f"{signed(row['loss_change'])} ({low} to {high})"


def signed(value: float, form: str = "+.3f") -> str:
    return "unknown" if np.isnan(value) else f"{value:{form}}".replace("-", "−")


if __name__ == "__main__":
    typer.run(main)
