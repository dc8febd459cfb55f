"""Which planes may stop rotating at no cost, and which planes may not?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205): a model
that is trained with the slowest planes stopped (p-RoPE) loses nothing. A model that is trained
with the fastest planes stopped loses much.

Method: planes of a trained model stop, from either end or a band of wavelengths at a time.
Random sets of the same size stop for comparison, on the same text. The text is as long as the
trained context, as far as memory and time allow: in a model that was made for 8,192 tokens,
planes that cost nothing in 256 tokens cost 0.3 nats/token at 4,000.

Expectation: planes slower than the high-norm band (Oka et al. 2026: at wavelength 2 pi
context / 3.657) cost nothing, the fastest cost nats/token. The more the heads select through
a band, the more it costs.

    python analyses/truncation.py [MODEL] [--text FILE]... [--context N]

Writes reports/truncation/<model>/. Takes about 10 minutes of CPU for the bundled checkpoint: 65
evaluations of the model, with attention in 64 rows of a sequence and a budget fitted to each.
"""

import ropelens as rl
from ropelens.analysis.answer import Answer
from ropelens.commands.terminal import run_analysis
from ropelens.report import describe

ROWS = 64
SWEEP = {"bands": 8, "measures": ("loss", "induction", "change", "labels", "copying")}
OTHERS = ("far_loss", "copy_loss", "repeat_loss", "labels")


def answer(analysis: rl.Analysis) -> Answer:
    sweep = analysis.truncation
    table = analysis.truncation_table
    figures = {
        "Planes stop step by step, the slowest first (left) or the fastest first (right), with "
        "95% intervals of the paired change. Grey: random planes.":
            rl.plot_truncation(sweep, table=table),
        "One band of wavelengths stops at a time. Grey: random planes.":
            rl.plot_truncation(sweep, by="band", table=table),
        "The same steps: loss near the end of the context, loss of the farthest possible "
        "copies, loss of repeated random tokens, and number of heads with a new label.":
            rl.plot_truncation(sweep, measures=OTHERS, table=table),
    }  # fmt: skip
    if sweep["class_tokens"].any():
        caption = "A quarter of the planes stopped: loss, attention, labels by class of token."
        figures[caption] = rl.plot_truncation(sweep, by="class", table=table)
    question = "Which planes may stop rotating at no cost?"
    return Answer(question, describe(sweep), figures)


if __name__ == "__main__":
    run_analysis(answer, rows=ROWS, truncation=SWEEP)
