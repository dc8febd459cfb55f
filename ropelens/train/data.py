"""What runs learn from: a tokenizer trained once, and text tokenized once, in one folder.

Runs of a study share the folder; a run on its own has it inside. It holds data.json, the
tokenizer, valid.npy, and the arrays that data.json names as "stages", all of them uint16
[sequence, position].
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ropelens.checkpoints.files import fingerprint
from ropelens.errors import BadArgument, BadText, explained
from ropelens.runtime.folder import write_whole
from ropelens.text.documents import documents_sha256, read_documents
from ropelens.text.tokenize import pieces
from ropelens.train.settings import Settings

LEAST_VALID = 2  # sequences; an interval needs two
DATA = "data.json"
"""The file that says what the folder was filled with, written last."""

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
BOS, EOS = "<s>", "</s>"

Texts = tuple[list[str], list[str]]
"""Documents to learn from, and those held out."""


def say(line: str) -> None:
    """One plain line on stderr."""
    print(line, file=sys.stderr, flush=True)


def read_json(path: Path) -> dict[str, Any]:
    """The object that `write_json` wrote; BadArgument for anything else."""
    with explained(f"{path} cannot be read.", error=BadArgument):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def write_json(path: Path, value: Any) -> None:
    """`write_whole` for JSON."""
    write_whole(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str], *, between: str
) -> str:
    """The values of `names` that differ: "steps: 3, now 4", with `between` them ", now "."""
    parts = [
        f"{name}: {str(one.get(name))[:100]}{between}{str(other.get(name))[:100]}"
        for name in names
        if one.get(name) != other.get(name)
    ]
    return "; ".join(parts)


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], *, what: str) -> None:
    """Raise BadArgument where `now` differs from what was recorded `before`."""
    changed = differences(before, now, now, between=", now ")
    if changed:
        raise BadArgument(
            f"{what} was made with other settings.",
            seen=changed,
            hint="the same command as before to resume it, or another folder",
        )


def read_texts(text: Sequence[Path], valid: Sequence[Path], *, data: Path) -> Texts:
    """Read files and folders; warn where some text is both learnt from and held out.

    Without `text`, the folder `data` must have been filled before. Raises `BadText` without
    text, for text that is not UTF-8, and where all that is held out is also learnt from.
    """
    documents, held_out = read_documents(text), read_documents(valid)
    if not documents and not (data / DATA).exists():
        raise BadText("There is no text to train on.", hint="--text FILE")
    shared = len(set(documents) & set(held_out))
    if held_out and shared == len(set(held_out)):
        raise BadText("All of the validation text is also text to learn from.")
    if shared:
        warnings.warn(f"{shared:,} validation documents are also learnt from", stacklevel=2)
    return documents, held_out


def prepare_data(folder: Path, texts: Texts, settings: Settings) -> dict[str, Any]:
    """Fill `folder` from `texts`, once; returns what data.json says.

    The first process that needs the folder fills it, and the others wait. Raises `BadText` for
    too little text, `BadArgument` where the folder was filled from other text or its tokenizer
    was replaced.
    """
    facts: dict[str, Any] = {"vocabulary": settings.vocabulary, "context": settings.context}
    path = folder / DATA
    documents, held_out = texts
    if documents:
        facts["text_sha256"] = documents_sha256(documents)
        facts["valid_sha256"] = documents_sha256(held_out) if held_out else None
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not path.exists():
                _fill(folder, texts, settings)
                made = {"tokenizer_sha256": fingerprint(folder / TOKENIZER[0])}
                write_json(path, facts | made | {"stages": ["train.npy"]})
    record = read_json(path)
    facts["tokenizer_sha256"] = fingerprint(folder / TOKENIZER[0])
    require_same(record, facts, what=f"the data in {folder}")
    return record


def _fill(folder: Path, texts: Texts, settings: Settings) -> None:
    """Train the tokenizer, and write train.npy and valid.npy."""
    context = settings.context
    say("training a tokenizer")
    some = itertools.islice(texts[0], 100_000)
    tokenizer = train_tokenizer(some, vocabulary=settings.vocabulary, context=context)
    tokenizer.save_pretrained(folder)
    say("tokenizing the text")
    learnt, held_out = (sequences_of(part, tokenizer, context=context) for part in texts)
    if not texts[1]:  # the last 2 % are held out
        last = max(LEAST_VALID, round(len(learnt) * 0.02))
        learnt, held_out = learnt[:-last], learnt[-last:]
    for rows, file, least in (
        (learnt, "train.npy", settings.shape.batch),
        (held_out, "valid.npy", LEAST_VALID),
    ):
        if len(rows) < least:
            raise BadText(
                f"The text is too short at a context of {context:,} tokens.",
                seen=f"{len(rows):,} sequences for {file} of the {least:,} that are needed",
                hint="pass more text, or a smaller context",
            )
        np.save(folder / file, rows)
        say(f"{file}: {len(rows):,} sequences of {context:,} tokens")


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


def sequences_of(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerFast, *, context: int
) -> np.ndarray:
    """The tokens of `texts`, uint16 [sequence, context].

    The documents, each followed by a line end and EOS, form one stream that is cut every
    `context - 1` tokens; every sequence starts with BOS. The rest of the stream is dropped.
    """
    bpe, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    parts = [np.empty(0, np.uint16)]
    for text in texts:
        for piece in pieces(f"{text}\n"):
            parts.append(np.array(bpe.encode(piece, add_special_tokens=False).ids, np.uint16))
        parts.append(np.array([eos], np.uint16))
    stream = np.concatenate(parts)
    count = len(stream) // (context - 1)
    rows = np.full((count, context), tokenizer.bos_token_id, np.uint16)
    rows[:, 1:] = stream[: count * (context - 1)].reshape(count, context - 1)
    return rows


def copy_tokenizer(data: Path, folder: Path) -> None:
    """Put the tokenizer beside a model, so that the folder loads alone."""
    for name in TOKENIZER:
        shutil.copyfile(data / name, folder / name)


def training_stages(data: Path, *, batch: int, context: int) -> list[np.ndarray]:
    """The sequences to learn from, uint16 [sequence, position], one stage after another.

    Text is one stage, of sequences of `context` tokens. Tokens that were made before may have
    several, also of shorter sequences, if `context` is a multiple of their length. Each is cut
    to whole steps of `batch` x `context` tokens. Raises `BadArgument` if a stage fills none.
    """
    stages = []
    for name in read_json(data / DATA)["stages"]:
        rows = np.load(data / name, mmap_mode="r")
        in_step = batch * context // rows.shape[1]
        if context % rows.shape[1] or len(rows) < in_step:
            raise BadArgument(
                f"{data} has a stage that steps of {batch} x {context:,} tokens cannot read.",
                seen=f"{len(rows):,} sequences of {rows.shape[1]:,} tokens",
            )
        stages.append(rows[: len(rows) // in_step * in_step])
    return stages


def held_out_sequences(data: Path) -> np.ndarray:
    """The validation sequences, uint16 [sequence, context]."""
    return np.load(data / "valid.npy", mmap_mode="r")


def spread(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` of the rows (or all, if fewer), evenly from the first to the last.

    Documents follow one another, and differ in how hard they are.
    """
    at = np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)
    return rows[at]


def documents_of(rows: np.ndarray, data: Path) -> np.ndarray:
    """The document that each of `rows` begins in: the number of EOS in the rows before it.

    `rows` are sequences in the order of the stream, uint16 [sequence, context].
    """
    eos = Tokenizer.from_file(str(data / TOKENIZER[0])).token_to_id(EOS)
    ends = (rows == eos).sum(axis=1)
    return np.cumsum(ends) - ends
