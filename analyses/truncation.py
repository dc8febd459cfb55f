"""Which planes may stop rotating for nothing, and which may not?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205): p-RoPE, trained with
the slowest planes stopped, loses nothing. With the fastest stopped it loses much.

Method: planes of a trained model stop, from either end or a band of wavelengths at a time.
As many random planes stop for comparison, on the same text.

Expectation: planes slower than the high-norm band (Oka et al. 2026: at wavelength 2 pi
context / 3.657) cost nothing, the fastest cost nats/token. The more the heads select through
a band, the more it costs.

    python analyses/truncation.py [MODEL] [--text FILE]... [--context N]

Writes reports/truncation/<model>/. Takes about 10 minutes of CPU for the bundled checkpoint: 65
evaluations of the model, with attention in 64 rows of a sequence and a budget fitted to each.
"""

from dataclasses import replace

import numpy as np

import ropelens as rl

MEASURES = ("loss", "induction", "change", "labels")
ROWS = 64


def answer(analysis: rl.Analysis) -> rl.Answer:
    planes = np.isfinite(analysis.profile["wavelength"].values).sum(axis=1).max()
    sweep = rl.truncate(
        analysis.model,
        analysis.sequences.tokens,
        lengths=analysis.sequences.lengths,
        documents=analysis.sequences.documents,
        bands=int(min(8, planes)),
        measures=MEASURES,
        rows=ROWS,
    )
    table = replace(analysis, truncation=sweep).truncation_table
    figures = {
        "Planes stop one after the other, the slowest first (left) or the fastest first "
        "(right), with 95% intervals of the paired change. Grey: as many random planes.":
            rl.plot_truncation(sweep, table=table),
        "One band of wavelengths stops at a time, beside as many random planes.":
            rl.plot_truncation(sweep, by="band", table=table),
        "The same steps: loss on repeated random tokens, and heads with a new label.":
            rl.plot_truncation(sweep, measures=("repeat_loss", "labels"), table=table),
        "Colour: how far the attention moves. A word: the head's label, where it is new.":
            rl.plot_truncation(sweep, by="head", table=table),
    }  # fmt: skip
    question = "Which planes may stop rotating for nothing?"
    more = {"truncation.nc": sweep, "truncation.csv": table}
    return rl.Answer(question, rl.describe(sweep), figures, more)


if __name__ == "__main__":
    rl.run_analysis(answer, rows=ROWS)
