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

import pandas as pd

import ropelens as rl


def answer(analysis: rl.Analysis) -> rl.Answer:
    profile, heads = analysis.profile, analysis.heads
    figures = {
        "Colour says what a head does, strength how sure that is; the number is how many "
        "tokens a positional head looks back.": rl.plot_head_map(profile, heads),
        "Each line is the mean over the heads of a label: where on the axis do they get "
        "the push toward the keys they pick?": rl.plot_label_selectivity(profile, heads),
        "Each point is a head. If positional heads use fast planes and semantic heads "
        "slow ones, points fall from top left to bottom right.":
            rl.plot_claim(profile, heads),
    }  # fmt: skip
    question = "Which heads are positional, and through which wavelengths?"
    return rl.Answer(question, findings(heads), figures)


def findings(heads: pd.DataFrame) -> list[str]:
    """What the labels say, in sentences with numbers."""
    claim = heads.attrs["claim"]
    counts = heads["label"].value_counts()
    numbers = ", ".join(f"{count} are {label}" for label, count in counts.items())
    correlation = (
        f"only {claim['heads']} choose by position or content, too few to correlate"
        if math.isnan(claim["rank_correlation"])
        else f"rank correlation of positional fraction with mean wavelength "
        f"{claim['rank_correlation']:+.2f} (95% interval {claim['low']:+.2f} to "
        f"{claim['high']:+.2f}, {claim['heads']} heads)"
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
    if offsets := Counter(heads["offset"].dropna()):
        named = ", ".join(f"{offset} ({n} heads)" for offset, n in sorted(offsets.items()))
        said.append(f"Offsets of the positional heads, in tokens back: {named}.")
    if heads["confidence"].notna().any():
        low = heads[heads["confidence"] < 0.9]
        named = ", ".join(f"L{r.layer} H{r.head} {r.label}" for r in low.itertuples())
        said.append(f"Labels that fewer than 90% of resamples repeat: {named or 'none'}.")
    return said


if __name__ == "__main__":
    rl.run_analysis(answer)
