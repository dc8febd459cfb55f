"""Documents become a memory-mapped array of sequences, by a tokenizer trained on them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ropelens.errors import BadArgument, words_of
from ropelens.models.texts import pieces

BOS, EOS = "<s>", "</s>"
AGAIN = "remove {}: ropelens train makes it again, the same from the same text"
SMALLEST_VOCABULARY = 256 + 2  # every byte, BOS and EOS


def train_tokenizer(
    texts: Iterable[str], *, vocabulary: int, context: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens that puts BOS first.

    Byte-level: any text encodes, and decodes to itself. Source: Radford et al. 2019
    (GPT-2), whose splitting into words this uses.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    bpe.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, bpe.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def write_sequences(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    *,
    context: int,
    most: int | None = None,
) -> int:
    """Write the tokens of `texts` to `path`, a .npy of uint16 [sequence, context]; how many.

    The documents, each followed by a line end and EOS, form one stream that is cut every
    `context - 1` tokens; every sequence starts with BOS. What is left of the stream is
    dropped, and documents past `most` sequences are not read. The file appears whole or
    not at all, and never has to fit into memory.
    """
    bpe = tokenizer.backend_tokenizer
    body = context - 1
    aside = path.with_suffix(".partial")
    rest = np.empty(0, dtype=np.uint16)
    count = 0
    with aside.open("wb") as file:
        _write_header(file, (0, context))
        for text in texts:
            parts = [rest]
            for piece in pieces(f"{text}\n"):
                ids = bpe.encode(piece, add_special_tokens=False).ids
                parts.append(np.array(ids, np.uint16))
            rest = np.concatenate([*parts, np.array([tokenizer.eos_token_id], np.uint16)])
            whole = len(rest) // body
            rows = np.full((whole, context), tokenizer.bos_token_id, dtype=np.uint16)
            rows[:, 1:] = rest[: whole * body].reshape(whole, body)
            file.write(rows.data)  # which says why it cannot, as tofile does not
            rest, count = rest[whole * body :], count + whole
            if most is not None and count >= most:
                break
        file.seek(0)
        _write_header(file, (count, context))  # as long as before: numpy leaves room
    aside.replace(path)
    return count


def _write_header(file: BinaryIO, shape: tuple[int, int]) -> None:
    header = {"descr": "<u2", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def documents_of(rows: np.ndarray, tokenizer: Path) -> np.ndarray:
    """Which document each of `rows` begins in: the number of EOS in the rows before it.

    `rows` are sequences in the order of the stream, uint16 [sequence, context]; `tokenizer` is
    the file of the tokenizer that wrote them.
    """
    ends = (rows == Tokenizer.from_file(str(tokenizer)).token_to_id(EOS)).sum(axis=1)
    return np.cumsum(ends) - ends


def open_sequences(path: Path) -> np.ndarray:
    """The tokens at `path`, uint16 [sequence, context], read from disk as they are used.

    Raises:
        BadArgument: the file is not there, or not whole.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadArgument(
            f"{path} is damaged.",
            seen=words_of(error),
            attempt=AGAIN.format(path.parent),
        ) from error
