"""Which planes may stop rotating for nothing, and which may not?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205): p-RoPE, trained with
the slowest planes stopped, loses nothing; with the fastest stopped it loses much. Here
planes of a trained model stop, from either end or a band of wavelengths at a time, beside
as many random planes, all on the same text.

Expectation: planes slower than the high-norm band (Oka et al. 2026: at wavelength 2 pi
context / 3.657) are free, the fastest cost nats/token. A band costs the more, the more the
heads select through it.

    python analyses/truncation.py [MODEL] [--text FILE]... [--context N]

Writes reports/truncation/<model>/. Takes about five minutes for the bundled checkpoint on two
cores: some 65 evaluations of the model, attention looked at in 64 rows of a sequence.
"""

from pathlib import Path

import numpy as np
import typer

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
    page = rl.write_answer(
        REPORTS / "truncation",
        question="Which planes may stop rotating for nothing?",
        findings=rl.describe_truncation(sweep),
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
        more={"truncation.nc": sweep, "truncation.csv": rl.summarize_truncation(sweep)},
    )  # fmt: skip
    rl.write_index(REPORTS)
    typer.echo(page)


if __name__ == "__main__":
    rl.run_script(main)
