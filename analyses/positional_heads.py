"""Which heads are positional, which semantic, and through which wavelengths?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205): heads that attend
to a fixed offset (themselves, the previous token) are built from the fastest frequencies,
heads that attend to content from the slowest. The paper found such heads by eye in Gemma
7B; here every head gets a label from its attention budget, and the claim a number.

Expectation: positional heads early, with offsets of a few tokens; a rank correlation of
positional_fraction with mean wavelength well below 0.

    python analyses/positional_heads.py [MODEL] [--text FILE]... [--context N]

Writes reports/positional_heads/<model>/. Takes seconds for the bundled checkpoint, a few
minutes for a billion parameters on a GPU.
"""

import math
from collections import Counter
from pathlib import Path

import pandas as pd
import typer

import ropelens as rl

REPORTS = Path(__file__).parents[1] / "reports"


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
    page = rl.write_answer(
        REPORTS / "positional_heads",
        question="Which heads are positional, and through which wavelengths?",
        findings=findings(heads),
        figures={
            "Colour says what a head does, strength how sure that is; the number is how many "
            "tokens a positional head looks back.": rl.plot_head_map(profile, heads),
            "Each line is the mean over the heads of a label: where on the axis do they get "
            "the push toward the keys they pick?": rl.plot_label_selectivity(profile, heads),
            "Each point is a head. If positional heads use fast planes and semantic heads "
            "slow ones, points fall from top left to bottom right.":
                rl.plot_claim(profile, heads),
        },
        profile=profile,
        heads=heads,
    )  # fmt: skip
    rl.write_index(REPORTS)
    typer.echo(page)


def findings(heads: pd.DataFrame) -> list[str]:
    """What the labels say, in sentences with numbers."""
    counts = heads["label"].value_counts()
    claim = heads.attrs["claim"]
    numbers = ", ".join(f"{count} are {label}" for label, count in counts.items())
    correlation = (
        f"rank correlation of positional fraction with mean wavelength "
        f"{claim['rank_correlation']:+.2f} (95% interval {claim['low']:+.2f} to "
        f"{claim['high']:+.2f}, {claim['heads']} heads)"
    )
    if math.isnan(claim["rank_correlation"]):
        correlation = (
            f"only {claim['heads']} choose by position or content, too few to correlate"
        )
    said = [f"Of {len(heads)} heads, {numbers}; {correlation}.".replace("-0", "−0")]
    for label in ("positional", "semantic"):
        rows = heads[heads["label"] == label]
        if len(rows):
            layers = Counter(rows["layer"])
            where = ", ".join(f"{n} in layer {layer}" for layer, n in sorted(layers.items()))
            said.append(
                f"{label.capitalize()} heads select through a median wavelength of "
                f"{rows['mean_wavelength'].median():,.0f} tokens ({where})."
            )
    offsets = Counter(heads["offset"].dropna())
    if offsets:
        named = ", ".join(f"{offset} ({n} heads)" for offset, n in sorted(offsets.items()))
        said.append(f"Offsets of the positional heads, in tokens back: {named}.")
    sure = heads["confidence"]
    if sure.notna().any():
        low = heads[sure < 0.9]
        named = ", ".join(f"L{r.layer} H{r.head} {r.label}" for r in low.itertuples())
        said.append(f"Labels that fewer than 90% of resamples repeat: {named or 'none'}.")
    return said


if __name__ == "__main__":
    rl.run_script(main)
