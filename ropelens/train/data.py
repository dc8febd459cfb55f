"""What runs learn from: a tokenizer trained once, and text tokenized once, in one folder.

Runs of a study share the folder; a run on its own has it inside.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ropelens.errors import BadArgument, BadText, words_of
from ropelens.files.folder import make_folder, write_whole
from ropelens.models.texts import fingerprint_of, pieces, read_documents
from ropelens.train.record import read_json, require_same, say, write_json
from ropelens.train.settings import Settings

VALID_SHARE = 0.02
"""Share of the sequences that is held out where there is no validation text."""
LEAST_VALID = 2  # sequences; an interval needs two
DATA = "data.json"
"""The file that says what the folder was filled with, written last."""

TOKENIZER_DOCUMENTS = 100_000  # that it is trained on at most
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
BOS, EOS = "<s>", "</s>"


@dataclass(frozen=True)
class Source:
    """Files or folders of text; `valid` is held out of training.

    Or `tokens`, a folder of tokens that were made before: data.json, a tokenizer, valid.npy,
    and the arrays that data.json names as "stages", uint16 [sequence, position].
    """

    text: tuple[Path, ...] = ()
    valid: tuple[Path, ...] = ()
    tokens: Path | None = None


Texts = tuple[list[str], list[str]]
"""Documents to learn from, and those held out."""


def read_texts(source: Source) -> Texts:
    """Read the files of `source`; warn where some text is both learnt from and held out.

    Raises:
        BadText: no such text, not UTF-8, or all that is held out is also learnt from.
    """
    if source.tokens is not None:
        return [], []
    documents, held_out = read_documents(source.text), read_documents(source.valid)
    learnt = set(documents)
    shared = sum(text in learnt for text in held_out)
    if held_out and shared == len(held_out):
        raise BadText("All of the validation text is also text to learn from.")
    if shared:
        warnings.warn(
            f"{shared:,} of {len(held_out):,} validation documents are also learnt from",
            stacklevel=2,
        )
    return documents, held_out


def prepare_data(
    folder: Path, source: Source, texts: Texts, settings: Settings
) -> dict[str, Any]:
    """Fill `folder` from the `texts` of `source`, once; returns what data.json says.

    The first process that needs the folder fills it, and the others wait.

    Raises:
        BadText: too little text.
        BadArgument: the folder cannot be made, or was filled from other text, or its tokenizer
            was replaced.
    """
    facts = {name: getattr(settings, name) for name in ("vocabulary", "context")}
    path = folder / DATA
    if source.tokens is None:
        documents, held_out = texts
        facts["text_sha256"] = fingerprint_of(documents)
        facts["valid_sha256"] = fingerprint_of(held_out) if held_out else None
        make_folder(folder)
        begun = any((folder / name).exists() for name in (DATA, ".lock"))
        if not begun and any(folder.iterdir()):
            raise BadArgument(
                f"{folder} holds files that are not of a run; the tokens would mix with them.",
                attempt="another --out",
            )
        with FileLock(folder / ".lock"):
            if not path.exists():
                _fill(folder, texts, settings)
                write_json(path, facts | {"tokenizer_sha256": _tokenizer_sha256(folder)})
    record = read_json(path)
    facts["tokenizer_sha256"] = _tokenizer_sha256(folder)
    require_same(record, facts, what=f"the data in {folder}")
    return record


def _fill(folder: Path, texts: Texts, settings: Settings) -> None:
    """Train the tokenizer, write the arrays of tokens, and check that they are enough."""
    documents, held_out = texts
    context = settings.context
    say("training a tokenizer")
    some = itertools.islice(documents, TOKENIZER_DOCUMENTS)
    tokenizer = train_tokenizer(some, vocabulary=settings.vocabulary, context=context)
    tokenizer.save_pretrained(folder)
    say("tokenizing the text")
    count = write_sequences(documents, tokenizer, folder / "train.npy", context=context)
    apart = 0 if held_out else _share_of_validation(count)
    _require("text", count, settings.size.batch + apart, context)
    say(f"train: {count - apart:,} sequences of {context:,} tokens")
    if held_out:
        apart = write_sequences(held_out, tokenizer, folder / "valid.npy", context=context)
        _require("validation text", apart, LEAST_VALID, context)
    say(f"valid: {apart:,} sequences of {context:,} tokens")


def _require(what: str, count: int, least: int, context: int) -> None:
    """Raise BadText for fewer than `least` sequences."""
    if count < least:
        raise BadText(
            f"The {what} is too short at a context of {context:,} tokens.",
            seen=f"{count:,} sequences of the {least:,} that are needed",
            attempt="pass more text, or a smaller context",
        )


def _share_of_validation(count: int) -> int:
    """How many of `count` sequences are held out where there is no validation text."""
    return max(LEAST_VALID, round(count * VALID_SHARE))


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
    texts: Iterable[str], tokenizer: PreTrainedTokenizerFast, path: Path, *, context: int
) -> int:
    """Write the tokens of `texts` to `path`, a .npy of uint16 [sequence, context]; how many.

    The documents, each followed by a line end and EOS, form one stream that is cut every
    `context - 1` tokens; every sequence starts with BOS. The rest of the stream is dropped.
    """
    bpe, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    parts = [np.empty(0, np.uint16)]
    for text in texts:
        for piece in pieces(f"{text}\n"):
            ids = bpe.encode(piece, add_special_tokens=False).ids
            parts.append(np.array(ids, np.uint16))
        parts.append(np.array([eos], np.uint16))
    stream = np.concatenate(parts)
    count = len(stream) // (context - 1)
    rows = np.full((count, context), tokenizer.bos_token_id, np.uint16)
    rows[:, 1:] = stream[: count * (context - 1)].reshape(count, context - 1)
    content = io.BytesIO()
    np.save(content, rows)
    write_whole(path, content.getbuffer())
    return count


def open_sequences(path: Path) -> np.ndarray:
    """The tokens at `path`, uint16 [sequence, context], read from disk as they are used."""
    with _explain_damage(path):
        return np.load(path, mmap_mode="r", allow_pickle=False)


def _tokenizer_sha256(folder: Path) -> str:
    with _explain_damage(folder / TOKENIZER[0]):
        return hashlib.sha256((folder / TOKENIZER[0]).read_bytes()).hexdigest()


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, EOFError) as error:
        again = f"remove {path.parent}: ropelens train makes the same again"
        raise BadArgument(f"{path} is damaged.", seen=words_of(error), attempt=again) from error


def copy_tokenizer(data: Path, folder: Path) -> None:
    """Put the tokenizer beside a model, so that the folder loads alone."""
    for name in TOKENIZER:
        shutil.copyfile(data / name, folder / name)


def spread(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` of the rows (or all, if fewer), evenly from the first to the last.

    Documents follow one another, and differ in how hard they are.
    """
    at = np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)
    return rows[at]


def training_stages(data: Path, *, batch: int, context: int) -> list[np.ndarray]:
    """The sequences to learn from, uint16 [sequence, position], one stage after another.

    Text is one stage, of sequences of `context` tokens. Tokens that were made before may have
    several, also of shorter sequences, if `context` is a multiple of their length. Each is cut
    to whole steps of `batch` x `context` tokens.

    Raises:
        BadArgument: an array is missing or damaged, or fills no step.
    """
    record = read_json(data / DATA)
    stages = [open_sequences(data / name) for name in record.get("stages", ["train.npy"])]
    if record["valid_sha256"] is None:
        stages = [rows[: -_share_of_validation(len(rows))] for rows in stages]
    in_step = [batch * context // rows.shape[1] for rows in stages]
    for rows, count in zip(stages, in_step, strict=True):
        if context % rows.shape[1] or len(rows) < count:
            raise BadArgument(
                f"{data} has a stage that steps of {batch} x {context:,} tokens cannot read.",
                seen=f"{len(rows):,} sequences of {rows.shape[1]:,} tokens",
            )
    return [rows[: len(rows) // n * n] for rows, n in zip(stages, in_step, strict=True)]


def held_out_sequences(data: Path) -> np.ndarray:
    """The validation sequences, uint16 [sequence, context]."""
    if read_json(data / DATA)["valid_sha256"] is not None:
        return open_sequences(data / "valid.npy")
    rows = open_sequences(data / "train.npy")
    return rows[-_share_of_validation(len(rows)) :]


def documents_of(rows: np.ndarray, data: Path) -> np.ndarray:
    """The document that each of `rows` begins in: the number of EOS in the rows before it.

    `rows` are sequences in the order of the stream, uint16 [sequence, context].
    """
    eos = Tokenizer.from_file(str(data / TOKENIZER[0])).token_to_id(EOS)
    ends = (rows == eos).sum(axis=1)
    return np.cumsum(ends) - ends
