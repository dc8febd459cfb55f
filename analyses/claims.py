"""Which published claims about RoPE hold in which model, and since when in training?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), and the papers that
docs/paper.md lists. Their claims come from models of billions of parameters.

Method: each claim is a number of the model beside the same number where only chance and
geometry speak; docs/measures.md defines both. For some claims planes of the model stop or drop
out, and 40 random sets of planes beside them.

Expectation: a large model shows most of the claims, a small one cannot decide many of them, and
random weights show none.

    python analyses/claims.py [MODEL]... [--text FILE]... [--context N] [--sequences N]

In the folder of the repository. Without MODEL: the bundled checkpoints, and their architecture
with random weights. Writes reports/claims/<model>/ for each, and reports/claims/models/, where
all that are there stand side by side. A model whose claims are there is passed over. Takes a
minute a bundled checkpoint. Claims link to the page that is written beside them; in the
repository, to that of analyses/positional_heads.py, where it measured the same tokens.
"""

import subprocess
import sys
from pathlib import Path

import torch
import typer

import ropelens as rl
from ropelens.commands.terminal import run_script
from ropelens.report import write_index

REPORTS = Path("reports")
ALL = "models"  # the folder in which they stand side by side
STEPS = [f"bundled:rope-step-{step}" for step in (1000, 3000, 5000)]
VARIANTS = [f"bundled:{name}" for name in ("p-rope-0.75", "p-rope-0.25")]
VARIANTS += ["bundled:p-rope-reversed-0.75", "bundled:nope"]
RANDOM, SAMPLE = Path("runs/random"), Path("ropelens/bundled/rope/sample.jsonl")


def main(
    models: list[str] = typer.Argument(None, help="Default: the bundled ones."),
    text: list[Path] = typer.Option([], help="Text files, or folders of them."),
    context: int = typer.Option(512, help="Tokens of a sequence."),
    sequences: int = typer.Option(16, help="Sequences that are measured."),
    quick: bool = typer.Option(False, "--quick", help="Without planes that stop."),
) -> None:
    if text:
        rl.read_documents(text)  # or says what is missing, before anything is written
    if not models:
        models, text = [str(RANDOM), *STEPS, "bundled:rope", *VARIANTS], [SAMPLE]
        random_weights(RANDOM)
    ours = REPORTS / "claims"
    ours.mkdir(parents=True, exist_ok=True)
    measure = ["--context", context, "--sequences", sequences, *["--quick"] * quick]
    for model in models:
        mine = [] if model.startswith("bundled:") else [f"--text={path}" for path in text]
        folder = ours / Path(model).name.replace(":", "-")
        if not (folder / "claims.csv").exists():
            ropelens("claims", model, *mine, *measure, "--out", folder)
    every = {path.parent for path in ours.glob("*/claims.csv")} - {ours / ALL}
    ropelens("claims", *sorted(every), "--out", ours / ALL)
    typer.echo(write_index(REPORTS))


def random_weights(folder: Path) -> None:
    """Save the bundled architecture, its weights as they are before training."""
    model, tokenizer = rl.load("bundled")
    torch.manual_seed(0)
    type(model)(model.config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ropelens(*words: object) -> None:
    """Run a command; where it fails it has said why."""
    if code := subprocess.run([sys.executable, "-m", "ropelens", *map(str, words)]).returncode:
        raise typer.Exit(code)


if __name__ == "__main__":
    run_script(main)
