"""Files of token ids become sequences to measure on, without any tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ropelens.errors import BadText, words_of
from ropelens.models.paths import check_ids_file
from ropelens.models.texts import Sequences, cut_and_sample

LARGEST_ID = 2**31


def read_ids(
    path: str | Path, *, context: int, sequences: int | None = None, seed: int = 0
) -> Sequences:
    """The token ids in a file, cut into sequences of `context` tokens or shorter ones.

    A `.npy` file holds whole numbers [sequence, position], or one sequence of them; a `.txt`
    file a sequence a line, ids apart by spaces or commas. Nothing is added, not even a BOS, and
    nothing is unpickled. What is left of fewer than 2 tokens is dropped. `sequences=N` keeps
    a random N, as for `tokenize`.

    Raises BadText for a file that is not there, of another kind, or holds no ids.
    """
    path = Path(path)
    check_ids_file(path)
    rows = READERS[path.suffix](path)
    pieces = [list(row.split(context)) for row in rows]
    pieces = [[piece for piece in row if len(piece) >= 2] for row in pieces]
    if not any(pieces):
        raise BadText(f"{path} holds no sequence of 2 tokens or more.")
    tokens, lengths, _ = cut_and_sample(pieces, sequences, seed)
    total = sum(map(len, pieces))
    source = f"{len(tokens):,} of {total:,} sequences of token ids, up to {context:,} each"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Sequences(tokens, lengths, digest, source)


def _read_array(path: Path) -> list[Int[Tensor, " position"]]:
    try:
        ids = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise BadText(
            f"{path} cannot be read.",
            seen=words_of(error),
            attempt="numpy.save of an array of whole numbers",
        ) from error
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise BadText(
            f"{path} holds no token ids.",
            seen=f"{ids.dtype} of shape {ids.shape}",
            attempt="whole numbers [sequence, position]",
        )
    _check_ids(path, ids)
    return list(torch.from_numpy(np.atleast_2d(ids).astype(np.int64)))


def _read_lines(path: Path) -> list[Int[Tensor, " position"]]:
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        parts = line.replace(",", " ").split()
        if not all(part.isascii() and part.isdigit() and len(part) < 11 for part in parts):
            raise BadText(
                f"Line {number} of {path} holds no token ids.",
                seen=f"it starts {line[:40]!r}",
                attempt="whole numbers apart by spaces, a line a sequence; text goes to --text",
            )
        rows.append(np.array(parts, dtype=np.int64))
        _check_ids(path, rows[-1])
    return [torch.from_numpy(row) for row in rows if len(row)]


def _check_ids(path: Path, ids: np.ndarray) -> None:
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < LARGEST_ID):
        raise BadText(
            f"{path} holds numbers that are no token ids.", seen=f"{ids.min()} to {ids.max()}"
        )


READERS = {".npy": _read_array, ".txt": _read_lines}
