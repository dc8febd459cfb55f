"""Write text in which passages come back, so that a model can profit from copying.

    python tools/copies.py NOVELS OUT [--seed 0]

Reads the text files in the folder NOVELS, and writes files with the same names to the folder
OUT. After every 20 to 40 words of a text, a passage of 10 to 30 of the last 40 words is written
again, word for word, between blank lines. Two fifths of the words are copies, and nearly always
a context of 512 tokens also contains the passage that they repeat. The same arguments make the
same bytes.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ropelens.commands.terminal import run_script
from ropelens.errors import BadText, explained
from ropelens.runtime.folder import write_whole

BETWEEN = (20, 40)  # words of the text between two copies
PASSAGE = (10, 30)  # words of a copy
BACK = 40  # words, in which the passage is


def main(
    novels: Annotated[Path, typer.Argument(help="Folder of text files.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    seed: Annotated[int, typer.Option(help="Decides every random draw.")] = 0,
) -> None:
    files = sorted(novels.glob("*.txt"))
    if not files:
        raise typer.BadParameter(f"{novels} has no file that ends in .txt")
    if out.resolve() == novels.resolve():
        raise typer.BadParameter("OUT is the folder NOVELS, whose files would be lost")
    for number, file in enumerate(files):
        random = np.random.default_rng([seed, number])
        with explained(f"{file} cannot be read.", "text in UTF-8", error=BadText):
            text = file.read_text("utf-8")
        write_whole(out / file.name, with_copies(text, random))
    typer.echo(f"{len(files)} files in {out}")


def with_copies(text: str, random: np.random.Generator) -> str:
    """The words of a text, with a copy of a passage after every few sentences."""
    words = text.split(" ")
    parts = []
    start = 0
    while start < len(words):
        stop = start + int(random.integers(*BETWEEN, endpoint=True))
        parts.append(" ".join(words[start:stop]))
        length = int(random.integers(*PASSAGE, endpoint=True))
        end = min(stop, len(words))
        if end > length:
            earliest = max(0, end - BACK)
            first = int(random.integers(earliest, end - length, endpoint=True))
            passage = " ".join(words[first : first + length])
            parts.append(f"\n\n{passage}\n\n")
        start = stop
    return " ".join(parts)


if __name__ == "__main__":
    run_script(main)
