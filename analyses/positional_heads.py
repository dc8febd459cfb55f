"""Which heads are positional, which semantic, and through which wavelengths?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205). By eye, the paper
finds heads of Gemma 7B that attend to their own or to the previous token and use the highest
frequencies, and a head that looks for an apostrophe and uses low frequencies.

Method: the attention budget gives every head a label, on text to which its models were not
fitted. The verdict on the claim compares the model with the same frequencies in a random order.

Expectation: positional heads are in early layers, with offsets of a few tokens, and the claim
holds.

    python analyses/positional_heads.py [MODEL] [--text FILE]... [--context N]

Writes reports/positional_heads/<model>/. Takes seconds for the bundled checkpoint, a few
minutes for a billion parameters on a GPU.
"""

import ropelens as rl
from ropelens.analysis.answer import Answer
from ropelens.commands.terminal import run_analysis
from ropelens.figures.head_wavelengths import plot_head_wavelengths
from ropelens.report import describe


def answer(analysis: rl.Analysis) -> Answer:
    profile = analysis.profile
    heads = analysis.heads
    figures = {
        "Colour and sign show the label of a head, and the strength of the colour shows its "
        "bits. The number is the distance, in tokens, that a positional head looks back.":
            rl.plot_head_map(profile, heads),
        "The wavelengths through which heads pick their keys. Above: the mean of each label. "
        "Below: a row per head, sorted by the share that position explains.":
            plot_head_wavelengths(profile, heads),
        "Each point is a head. Points fall from top left to bottom right in any model, "
        "because slow planes cannot tell offsets apart. The claim holds if the diamond below "
        "lies left of the strokes of the surrogates.": rl.plot_claim(profile, heads),
    }  # fmt: skip
    low = heads[heads["confidence"] < 0.9]
    named = ", ".join(
        f"L{row.layer} H{row.head} {row.label}" for row in low.itertuples()
    )
    unsure = f"Labels with a confidence below 90%: {named or 'none'}."
    question = "Which heads are positional, and through which wavelengths?"
    return Answer(question, [*describe(heads), unsure], figures)


if __name__ == "__main__":
    run_analysis(answer)
