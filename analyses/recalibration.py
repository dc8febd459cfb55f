"""Which rotations does a trained model need, if it may adapt?

Source: DroPE (Gelberg et al., ICLR 2026, arXiv 2512.12167) removes RoPE after pretraining,
trains on, and reports the original loss within the context. The paper has no control that
trains on with RoPE in the same way, and no look at the heads.

Method: runs of `ropelens train --from` (tools/README.md). Control and variants start from the
same weights and read the same tokens in the same order; gaps are on documents that no run read.

Expectation: p-rope:0.5 has little damage, p-rope:0.25 recovers most of it, and nope does not
learn induction again, because nothing else tells it which token came before.

    python analyses/recalibration.py --runs runs/recalibration [--sequences 512]

Reads finished runs, and writes reports/recalibration/<name of the folder>/.
"""

from pathlib import Path

import typer

import ropelens as rl
from ropelens.analysis.answer import save_comparison
from ropelens.commands.terminal import run_script
from ropelens.report import write_index

REPORTS = Path(__file__).parent.parent / "reports"


def main(
    runs: Path = typer.Option(Path("runs/recalibration"), help="Folder of a study."),
    sequences: int = typer.Option(512, help="Held-out sequences for the tasks."),
) -> None:
    comparison = rl.compare([runs], cache=runs / "measured", sequences=sequences)
    folder = REPORTS / "recalibration" / runs.name
    page = save_comparison(folder, comparison, with_models=False)
    write_index(REPORTS)
    typer.echo(page)


if __name__ == "__main__":
    run_script(main)
