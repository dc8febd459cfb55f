"""Cost of a truncation sweep, compared with the same number of plain evaluations of the model.

Prints CPU time of one process, the better of two runs each, with every measure on the same
sequences. The ratio is above 1 if a sweep rotates queries and keys without need, or runs the
model too often.

    python benchmarks/sweep.py [MODEL] [--text FILE] [--context N] [--rows N|all]

Takes about 2 minutes for the bundled checkpoint on one CPU core.
"""

import time
from collections.abc import Callable
from pathlib import Path

import typer

import ropelens as rl

SAMPLE = Path(rl.__file__).parent / "bundled/rope/sample.jsonl"
KEEP = (0.75, 0.5)


def main(
    model: str = typer.Argument("bundled", help="A folder, a Hub id, or bundled."),
    text: list[Path] = typer.Option(
        [], help="Text files or folders; by default the bundled text."
    ),
    context: int = typer.Option(512, help="Tokens per sequence."),
    sequences: int = typer.Option(8, help="Number of sequences, drawn at random."),
    rows: str = typer.Option(
        "64", help="Rows of attention to measure: a number, or all."
    ),
) -> None:
    loaded, tokenizer = rl.load(model)
    documents = rl.read_documents(text or [SAMPLE])
    sample = rl.tokenize(documents, tokenizer, context=context, sequences=sequences)
    count = rows if rows == "all" else int(rows)
    cuts = rl.truncate(
        loaded, sample, measures="loss", rows=count, keep=KEEP, controls=2
    )
    entries = len(set(cuts["planes"].values))
    plain = cpu_seconds(lambda: rl.evaluate(loaded, sample, rows=count))
    sweep = cpu_seconds(
        lambda: rl.truncate(loaded, sample, rows=count, keep=KEEP, controls=2)
    )
    typer.echo(
        f"{entries} entries: sweep {sweep:.1f} s, one evaluation {plain:.1f} s, "
        f"ratio to {entries} evaluations {sweep / (entries * plain):.2f}"
    )


def cpu_seconds(work: Callable[[], object]) -> float:
    """The smaller CPU time of two runs, in seconds, after a run that does not count."""
    work()
    spent = []
    for _ in range(2):
        begin = time.process_time()
        work()
        spent.append(time.process_time() - begin)
    return min(spent)


if __name__ == "__main__":
    typer.run(main)
