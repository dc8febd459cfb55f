"""Which planes may stop rotating for nothing, and which may not?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205): p-RoPE, trained with
the slowest planes stopped, loses nothing. With the fastest stopped it loses much.

Method: planes of a trained model stop, from either end or a band of wavelengths at a time.
As many random planes stop for comparison, on the same text.

Text is as long as the trained context, as far as memory and time allow: planes that cost
nothing in 256 tokens of a model made for 8,192 cost 0.3 nats/token at 4,000.

Expectation: planes slower than the high-norm band (Oka et al. 2026: at wavelength 2 pi
context / 3.657) cost nothing, the fastest cost nats/token. The more the heads select through
a band, the more it costs.

    python analyses/truncation.py [MODEL] [--text FILE]... [--context N]

Writes reports/truncation/<model>/. Takes about 10 minutes of CPU for the bundled checkpoint: 65
evaluations of the model, with attention in 64 rows of a sequence and a budget fitted to each.
"""

import ropelens as rl

ROWS = 64
SWEEP = {"bands": 8, "measures": ("loss", "induction", "change", "labels", "copying")}
OTHERS = ("far_loss", "copy_loss", "repeat_loss", "labels")


def answer(analysis: rl.Analysis) -> rl.Answer:
    sweep, table = analysis.truncation, analysis.truncation_table
    figures = {
        "Planes stop one after the other, the slowest first (left) or the fastest first "
        "(right), with 95% intervals of the paired change. Grey: as many random planes.":
            rl.plot_truncation(sweep, table=table),
        "One band of wavelengths stops at a time, beside as many random planes.":
            rl.plot_truncation(sweep, by="band", table=table),
        "The same steps: loss near the end of the context, of copies as far back as it allows "
        "and of repeated random tokens, and heads with a new label.":
            rl.plot_truncation(sweep, measures=OTHERS, table=table),
    }  # fmt: skip
    if sweep["class_tokens"].any():
        words = "A quarter of the planes stopped: loss, attention and labels by class of token."
        figures[words] = rl.plot_truncation(sweep, by="class", table=table)
    question = "Which planes may stop rotating for nothing?"
    return rl.Answer(question, rl.describe(sweep), figures)


if __name__ == "__main__":
    rl.run_analysis(answer, rows=ROWS, truncation=SWEEP)
