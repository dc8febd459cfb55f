"""Training data: a folder that the runs of a study share.

It contains data.json, the tokenizer, valid.npy, and the arrays that data.json lists as
"stages". All arrays are uint16 [sequence, position], or uint32 for large vocabularies.
"""

import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ropelens.checkpoints.files import sha256_of
from ropelens.errors import BadArgument, BadText, explained
from ropelens.runtime.keys import Key
from ropelens.runtime.records import log_line, read_json, write_json
from ropelens.text.documents import documents_sha256, read_documents
from ropelens.text.tokenize import pieces, text_tokens
from ropelens.train.held_out import Split, Tokens, hold_out
from ropelens.train.run_folder import LOCK
from ropelens.train.settings import Settings

LEAST_VALID = 2  # validation sequences; an interval needs two
DATA = "data.json"  # the file that describes the data; it is written last
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
BOS = "<s>"
EOS = "</s>"
MOST_IN_16_BITS = 1 << 16  # tokens of a vocabulary


@dataclass(frozen=True)
class Documents:
    """Documents for the training, and for the validation.

    Without documents for the validation, some of the training text is held out; see `hold_out`.
    """

    training: list[str]
    validation: list[str]


def read_texts(text: Sequence[Path], valid: Sequence[Path], *, data: Path) -> Documents:
    """Read files and folders. Without `text`, the folder `data` must contain data."""
    training = read_documents(text)
    validation = read_documents(valid)
    hint = "--text FILE, which --valid FILE must not repeat"
    if not training and not (data / DATA).exists():
        raise BadText("Text to train on is missing.", hint=hint)
    different = set(validation)
    shared = len(set(training) & different)
    if different and shared == len(different):
        fault = "All validation documents are also training documents."
        raise BadText(fault, hint=hint)
    if shared:
        warnings.warn(
            f"{shared:,} validation documents are also used to train", stacklevel=2
        )
    return Documents(training=training, validation=validation)


def prepare_data(folder: Path, texts: Documents, settings: Settings) -> dict[str, Any]:
    """Create the data in `folder` from `texts` if needed; return the contents of data.json."""
    key = _key_of_data(texts, settings)
    path = folder / DATA
    if texts.training:
        require_own_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / LOCK):
            if not path.exists():
                validated_on = _write_data(folder, texts, settings)
                tokenizer_sha256 = sha256_of(folder / TOKENIZER[0])
                written = {
                    "tokenizer_sha256": tokenizer_sha256,
                    "stages": ["train.npy"],
                    "validation": validated_on,
                }
                write_json(path, key | written)
    record = read_json(path)
    key["tokenizer_sha256"] = sha256_of(folder / TOKENIZER[0])
    Key(key).require(record, what=f"the data in {folder}")
    return record


def require_own_folder(folder: Path) -> None:
    """Raise `BadArgument` if a folder for data holds other files, which would be replaced.

    A process that was stopped while it wrote data leaves a lock.
    """
    if not folder.exists() or (folder / DATA).exists() or (folder / LOCK).exists():
        return
    names = sorted(file.name for file in folder.iterdir())
    if names:
        raise BadArgument(
            f"{folder} is for tokens, but holds other files.",
            seen=", ".join(names[:3]),
            hint="another --out",
        )


def _key_of_data(texts: Documents, settings: Settings) -> dict[str, Any]:
    """The settings that determine the data, and the fingerprints of the texts if known."""
    sizes = {"vocabulary": settings.vocabulary, "context": settings.context}
    if not texts.training:
        return dict(sizes)
    validation = texts.validation
    return {
        **sizes,
        "text_sha256": documents_sha256(texts.training),
        "valid_sha256": documents_sha256(validation) if validation else None,
    }


def _write_data(folder: Path, texts: Documents, settings: Settings) -> str:
    """Train the tokenizer, write train.npy and valid.npy, and return words for the latter."""
    context = settings.context
    log_line("training a tokenizer")
    tokenizer = train_tokenizer(
        texts.training[:100_000], vocabulary=settings.vocabulary, context=context
    )
    tokenizer.save_pretrained(folder)
    log_line("tokenizing the text")
    split = _split(texts, tokenizer, context=context)
    begin = [tokenizer.bos_token_id]
    training = cut_stream(split.training, begin=begin, context=context)
    validation = cut_stream(split.validation, begin=begin, context=context)
    write_sequences(folder / "train.npy", training, least=settings.shape.batch)
    write_sequences(folder / "valid.npy", validation, least=LEAST_VALID)
    log_line(f"validation: {split.validated_on}")
    return split.validated_on


def _split(
    texts: Documents, tokenizer: PreTrainedTokenizerFast, *, context: int
) -> Split:
    """The tokens of the training and of the validation."""
    training = tokens_of(_lines(texts.training), tokenizer)
    if not texts.validation:
        return hold_out(training, least=LEAST_VALID * (context - 1))
    validation = tokens_of(_lines(texts.validation), tokenizer)
    return Split(training, validation, validated_on="documents of --valid")


def _lines(texts: Sequence[str]) -> Iterator[str]:
    """The texts with an end of the last line, which a model learns to expect before EOS."""
    return (f"{text}\n" for text in texts)


def write_sequences(path: Path, sequences: np.ndarray, *, least: int) -> None:
    """Write an array [sequence, position]; raises `BadText` for fewer than `least` rows."""
    require_sequences(path.name, sequences, least=least)
    with explained(f"{path} cannot be written.", error=BadArgument):
        np.save(path, sequences)
    count, context = sequences.shape
    log_line(f"{path.name}: {count:,} sequences of {context:,} tokens")


def require_sequences(name: str, sequences: np.ndarray, *, least: int) -> None:
    """Raise `BadText` for fewer than `least` sequences, with the tokens that they need."""
    count, context = sequences.shape
    if count < least:
        raise BadText(
            f"The text is too short at a context of {context:,} tokens.",
            seen=f"{count:,} sequences for {name}, which needs {least:,} "
            f"({least * context:,} tokens)",
            hint="more text, or a smaller context",
        )


def train_tokenizer(
    texts: Iterable[str], *, vocabulary: int, context: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocabulary` tokens, which adds BOS.

    Text is split into words as in Radford et al. 2019 (GPT-2), and decoding restores it.
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
    bpe.train_from_iterator(chain.from_iterable(map(pieces, texts)), trainer)
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


def tokens_of(texts: Iterable[str], tokenizer: Any) -> list[Tokens]:
    """Tokens of each document, and its end of text if the tokenizer has one."""
    end = tokenizer.eos_token_id
    after = [] if end is None else [end]
    ids_of_words = tokenizer.get_vocab().values()  # they may have gaps
    dtype = token_dtype(1 + max(ids_of_words))
    documents = []
    for text in texts:
        ids = [*text_tokens(text, tokenizer), *after]
        documents.append(np.array(ids, dtype))
    return documents


def token_dtype(vocabulary: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds the ids of a vocabulary."""
    return np.uint16 if vocabulary <= MOST_IN_16_BITS else np.uint32


def cut_stream(
    documents: Sequence[Tokens], *, begin: Sequence[int], context: int
) -> np.ndarray:
    """Sequences of the documents [sequence, context], in the type of their tokens.

    All documents form one stream. Each sequence has the special tokens `begin`, and then
    tokens of the stream. An incomplete last sequence is dropped.
    """
    stream = np.concatenate([*documents]) if documents else np.empty(0, np.uint16)
    body = context - len(begin)
    count = len(stream) // body
    rows = np.empty((count, context), stream.dtype)
    rows[:, : len(begin)] = begin
    rows[:, len(begin) :] = stream[: count * body].reshape(count, body)
    return rows


def copy_tokenizer(data: Path, folder: Path) -> None:
    for name in TOKENIZER:
        shutil.copyfile(data / name, folder / name)


def training_stages(data: Path, *, batch: int, context: int) -> list[np.ndarray]:
    """The training sequences of each stage [sequence, position].

    Text has one stage, and prepared tokens can have several. A stage is cut to complete steps
    of `batch` x `context` tokens, and the length of its sequences must divide `context`.
    """
    stages = []
    for name in read_json(data / DATA)["stages"]:
        rows = np.load(data / name, mmap_mode="r")
        in_step = batch * context // rows.shape[1]
        if context % rows.shape[1] or len(rows) < in_step:
            raise BadArgument(
                f"{data} has a stage that does not fit steps of "
                f"{batch} x {context:,} tokens.",
                seen=f"{len(rows):,} sequences of {rows.shape[1]:,} tokens",
                hint="a context that is a multiple of their length, or more tokens",
            )
        steps = len(rows) // in_step
        stages.append(rows[: steps * in_step])
    return stages


def held_out_sequences(data: Path) -> np.ndarray:
    """Validation sequences [sequence, context]."""
    return np.load(data / "valid.npy", mmap_mode="r")


def spread(rows: np.ndarray, count: int) -> np.ndarray:
    """Select at most `count` rows at even distances, so that they cover all documents."""
    places = np.linspace(0, len(rows) - 1, min(count, len(rows)))
    return rows[places.round().astype(int)]


def documents_of(rows: np.ndarray, data: Path) -> np.ndarray:
    """Index of the document in which each of the `rows` begins; they follow each other."""
    eos = Tokenizer.from_file(str(data / TOKENIZER[0])).token_to_id(EOS)
    ends = (rows == eos).sum(axis=1)
    return np.cumsum(ends) - ends
