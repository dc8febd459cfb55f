"""What a truncation sweep costs, beside as many plain evaluations of the model.

CPU time of one process, the better of two runs each, every measure on the same sequences. A
sweep that turned queries and keys for nothing, or ran the model once more than it must, would
show as a ratio above 1.

    python benchmarks/sweep.py [MODEL] [--text FILE] [--context N] [--rows N|all]

Takes about 2 minutes for the bundled checkpoint on one CPU core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import typer

import ropelens as rl

SAMPLE = Path(rl.__file__).parent / "bundled/rope/sample.jsonl"
CUTS = {"keep": (0.75, 0.5), "controls": 2}


def main(
    model: str = typer.Argument("bundled", help="A folder, a Hub id, or bundled."),
    text: list[Path] = typer.Option([], help="Text files or folders; else the bundled text."),
    context: int = typer.Option(512, help="Tokens a sequence."),
    sequences: int = typer.Option(8, help="Sequences, a sample."),
    rows: str = typer.Option("64", help="Rows of attention looked at: a number, or all."),
) -> None:
    loaded, tokenizer = rl.load(model)
    documents = rl.read_documents(text or [SAMPLE])
    chosen = rl.tokenize(documents, tokenizer, context=context, sequences=sequences)
    given = {"lengths": chosen.lengths, "rows": rows if rows == "all" else int(rows)}
    cuts = rl.truncate(loaded, chosen.tokens, measures="loss", **given, **CUTS)
    entries = len(set(cuts["planes"].values))
    plain = cpu_seconds(lambda: rl.evaluate(loaded, chosen.tokens, **given))
    sweep = cpu_seconds(lambda: rl.truncate(loaded, chosen.tokens, **given, **CUTS))
    typer.echo(
        f"{entries} entries: sweep {sweep:.1f} s, one evaluation {plain:.1f} s, "
        f"ratio to {entries} evaluations {sweep / (entries * plain):.2f}"
    )


def cpu_seconds(work: Callable[[], object]) -> float:
    """The least CPU time of two runs, in seconds, after one that does not count."""
    work()
    spent = []
    for _ in range(2):
        begin = time.process_time()
        work()
        spent.append(time.process_time() - begin)
    return min(spent)


if __name__ == "__main__":
    typer.run(main)
