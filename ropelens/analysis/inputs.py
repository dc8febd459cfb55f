"""The model and the text of an analysis: names, documents and sequences."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ropelens import config_facts
from ropelens.analysis.options import Options
from ropelens.arguments import IN_WORDS
from ropelens.checkpoints.bundled import check_text, sample_path, writer_of
from ropelens.checkpoints.load import Opened, open_checkpoint
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.profiles.checked_text import check_ids
from ropelens.text.documents import check_document, read_documents
from ropelens.text.strings import list_documents
from ropelens.text.text import Text
from ropelens.text.tokenize import read_text, tokenize, warn_beyond

DEFAULT_CONTEXT = 2048
DEFAULT_SEQUENCES = 64

Tokens = Text | Tensor | Mapping[str, Any]
TextSource = Path | str | Iterable[Any] | Tokens
IN_WORDS[TextSource] = (
    "a Path of a file or folder, a string, several of them, or tokens such as a Text"
)
ModelSource = Opened | LiveModel


@dataclass(frozen=True, kw_only=True)
class GivenText:
    """Documents, or tokens that are cut already.

    `names` are for run.json. `writers` are the bundled checkpoints from which documents were
    sampled.
    """

    names: list[str] | str
    content: list[str] | Tokens
    writers: list[str]


def name_of_model(model: str | Path | Model) -> str:
    """The name of the model in the arguments of run.json."""
    return str(model) if isinstance(model, (str, Path)) else type(model).__name__


def open_source(
    model: str | Path | Model, options: Options, *, tokenizer: Any, run: bool
) -> ModelSource:
    """The checkpoint without its weights, or the live model. A `run` needs the device."""
    if not isinstance(model, (str, Path)):
        return as_live_model(model, tokenizer)
    opened = open_checkpoint(model, options, used=run)
    return opened if tokenizer is None else replace(opened, tokenizer=tokenizer)


def read_given_text(text: TextSource | None, model: str | Path | Model) -> GivenText:
    """Read the documents; without `text`, the sample of a bundled checkpoint."""
    name = name_of_model(model)
    if isinstance(text, (Text, Tensor, Mapping)):
        return GivenText(names="tokens", content=text, writers=[])
    if text is None:
        parts: list[Any] = []
    elif isinstance(text, (Path, str)):
        parts = [text]
    else:
        parts = list_documents(text, types=(str, Path))
    check_text(name, parts)
    documents: list[str] = []
    names: list[str] = []
    files: list[Path] = []
    for part in parts:
        if isinstance(part, str):
            check_document(part)
            documents.append(part)
            names.append(f"a document of {len(part):,} characters")
        else:
            documents += read_documents([part])
            names.append(str(part))
            files.append(part)
    if not parts:
        files = [sample_path(name)]
        documents = read_documents(files)
    writers = dict.fromkeys(writer_of(file) for file in files)
    return GivenText(
        names=names,
        content=documents,
        writers=[writer for writer in writers if writer],
    )


def cut_into_sequences(given: GivenText, source: ModelSource, options: Options) -> Text:
    """The sequences that the model reads. Given tokens are not cut again."""
    config = source.config.get_text_config()
    if isinstance(given.content, list):
        text = _tokenize_documents(given.content, source, options)
    else:
        text = read_text(given.content, config=config)
        text = replace(text, source=text.source or f"{len(text):,} sequences of tokens")
    check_ids(text.ids, vocabulary=config.vocab_size)
    if given.writers:
        origin = f"{text.source}, sampled from {', '.join(given.writers)}"
        text = replace(text, source=origin)
    return text


def _tokenize_documents(
    documents: list[str], source: ModelSource, options: Options
) -> Text:
    maximum = config_facts.stated_context(source.config)
    context = options.context or min(maximum or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    warn_beyond(context, maximum)
    with warnings.catch_warnings():
        if options.sequences is None:  # fewer than the default need no warning
            warnings.filterwarnings("ignore", message=".*were asked for")
        return tokenize(
            documents,
            source.tokenizer,
            context=context,
            sequences=options.sequences or DEFAULT_SEQUENCES,
            seed=options.seed,
            bos=options.bos,
        )
