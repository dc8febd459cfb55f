"""Which published claims about RoPE hold in which model, and from which training step on?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), and the papers that
docs/paper.md lists. Most of these papers study models of billions of parameters.

Method: each claim is a number of the model, compared with the same number in draws that only
chance and geometry shape; docs/measures.md defines both. For some claims planes of the model
stop or drop out, and 40 random sets of planes for comparison.

Expectation: a large model shows most of the claims, a small model decides few claims, and
random weights show none.

    python analyses/claims.py [MODEL]... [--text FILE]... [--context N] [--sequences N]

Run it in the folder of the repository. Without MODEL, it measures the bundled checkpoints, and
their architecture with random weights. Writes reports/claims/<model>/ for each model, and
reports/claims/models/, which compares all models measured so far. Skips models whose claims
were measured before. Takes a minute for each bundled checkpoint. Claims link to the page of the
model, or in the repository to the page of analyses/positional_heads.py if it measured the same
tokens.
"""

import subprocess
import sys
from pathlib import Path

import torch
import typer

import ropelens as rl
from ropelens.commands.terminal import run_script
from ropelens.report import write_index
from ropelens.report.model_order import in_model_order

REPORTS = Path("reports")
ALL = "models"  # the folder that compares them
SEVERAL_SETTINGS = "-robust"  # end of the name of a folder that --robust wrote
STEPS = [f"bundled:rope-step-{step}" for step in (1000, 3000, 5000)]
VARIANTS = [f"bundled:{name}" for name in ("p-rope-0.75", "p-rope-0.25")]
VARIANTS += ["bundled:p-rope-reversed-0.75", "bundled:nope"]
RANDOM = Path("runs/random")
SAMPLE = Path("ropelens/bundled/rope/sample.jsonl")


def main(
    models: list[str] = typer.Argument(None, help="Default: the bundled checkpoints."),
    text: list[Path] = typer.Option([], help="Text files, or folders with text files."),
    context: int = typer.Option(512, help="Tokens of a sequence."),
    sequences: int = typer.Option(16, help="Sequences that are measured."),
    bos: str = typer.Option("tokenizer", help="tokenizer, always or never."),
    quick: bool = typer.Option(
        False, "--quick", help="Only claims that need no stopped planes."
    ),
) -> None:
    if text:
        rl.read_documents(text)  # raises for a missing file, before anything is written
    if not models:
        models = [str(RANDOM), *STEPS, "bundled:rope", *VARIANTS]
        text = [SAMPLE]
        random_weights(RANDOM)
    reports = REPORTS / "claims"
    reports.mkdir(parents=True, exist_ok=True)
    measure = ["--context", context, "--sequences", sequences, "--bos", bos]
    if quick:
        measure.append("--quick")
    for model in models:
        texts = (
            [] if model.startswith("bundled:") else [f"--text={path}" for path in text]
        )
        folder = reports / Path(model).name.replace(":", "-")
        if not (folder / "claims.csv").exists():
            ropelens("claims", model, *texts, *measure, "--out", folder)
    ropelens("claims", *ledgers(reports), "--out", reports / ALL)
    typer.echo(write_index(REPORTS))


def ledgers(reports: Path) -> list[Path]:
    """Folders with the claims of a model in one setting, in the order of models."""
    names = []
    for path in reports.glob("*/claims.csv"):
        name = path.parent.name
        if name != ALL and not name.endswith(SEVERAL_SETTINGS):
            names.append(name)
    return [reports / name for name in in_model_order(names)]


def random_weights(folder: Path) -> None:
    """Save the bundled architecture with the weights that it has before training."""
    model, tokenizer = rl.load("bundled")
    torch.manual_seed(0)
    type(model)(model.config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ropelens(*words: object) -> None:
    """Run a command. If it fails, it has printed the reason."""
    command = [sys.executable, "-m", "ropelens", *map(str, words)]
    code = subprocess.run(command).returncode
    if code:
        raise typer.Exit(code)


if __name__ == "__main__":
    run_script(main)
