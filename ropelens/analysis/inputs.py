"""What an analysis is made from: a model up to its weights, and the tokens that it reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from ropelens.analysis.plan import Source
from ropelens.errors import BadArgument
from ropelens.measure.excerpt import check_excerpts
from ropelens.measure.token_sets import attention_on
from ropelens.models.bundled import sample_path
from ropelens.models.checkpoint import load_tokenizer
from ropelens.models.load import open_checkpoint
from ropelens.models.loading import Loading
from ropelens.models.paths import check_document, check_has_text, check_ids_file
from ropelens.models.subject import stated_context
from ropelens.models.texts import (
    Sequences,
    check_context,
    check_vocabulary,
    prompt_tokens,
    read_documents,
    tokenize,
)
from ropelens.models.tokens import check_tokens, read_ids
from ropelens.statistics.variables import Statistic

LONGEST_DEFAULT_CONTEXT = 2048
DEFAULT_SEQUENCES = 64
OPTIONS_OF_LOAD = (
    *("dtype", "device", "device_map", "quantize"),
    *("revision", "local_files_only", "trust_remote_code"),
)

Text = Path | str | Sequence[Path | str] | Sequences | Int[Tensor, "sequence position"]
Material = list[str] | Sequences | Int[Tensor, "sequence position"] | Path


@dataclass(frozen=True)
class Inputs:
    """What is measured on which tokens; `excerpts` to look into, statistics beside ours."""

    source: Source
    read: Sequences
    excerpts: list[Int[Tensor, " position"]]
    searched: list[Statistic]


def read_inputs(
    model: str | Path | nn.Module,
    material: Material,
    *,
    lengths: Int[Tensor, " sequence"] | None,
    tokenizer: Any,
    arguments: Mapping[str, Any],
) -> Inputs:
    """All that is read before weights are, by the `arguments` of `ropelens.analyze`."""
    source = _source(model, tokenizer, arguments)
    chosen = {name: arguments[name] for name in ("context", "sequences", "seed")}
    read = _sequences(material, lengths, source, **chosen)
    excerpts = [prompt_tokens(prompt, source.tokenizer) for prompt in arguments["prompts"]]
    check_excerpts(source.config, excerpts)
    searched = [
        row
        for what in arguments["attention_on"]
        for row in attention_on(read.tokens, what, source.tokenizer)
    ]
    return Inputs(source, read, excerpts, searched)


def texts_of(given: object, what: str) -> list[str]:
    """Short texts in a list; one by itself is a list of it. `BadArgument` for other things."""
    texts: list[Any] = [given]
    if isinstance(given, Iterable) and not isinstance(given, str):
        texts = list(given)
    if not all(isinstance(text, str) for text in texts):
        raise BadArgument(
            f"{what} are texts in a list.", seen=repr(given)[:80], attempt=f'{what}=["..."]'
        )
    return texts


def material_of(
    text: Text | None, model: str | Path | nn.Module, ids: str | Path | None
) -> Material:
    """Documents, or what was passed in their place: tokens, or a file of their ids."""
    if ids is not None:
        if text is not None and not (isinstance(text, list) and not text):
            raise BadArgument(
                "Both text and token ids are given.", attempt="one of --text and --ids"
            )
        check_ids_file(Path(ids))
        return Path(ids)
    if isinstance(text, np.ndarray):
        return torch.from_numpy(text)
    if isinstance(text, (Sequences, Tensor)):
        return text
    if text is None or not text:
        name = type(model).__name__ if isinstance(model, nn.Module) else str(model)
        check_has_text(name)
        return read_documents([sample_path(name.partition(":")[2] or "rope")])
    parts = [text] if isinstance(text, (Path, str)) or not isinstance(text, Iterable) else text
    documents = []
    for part in parts:
        if not isinstance(part, (Path, str)):
            raise BadArgument(
                "The text is a document, a Path, a list of these, or tokens.",
                seen=repr(part)[:80],
            )
        if isinstance(part, str):
            check_document(part)
        documents += read_documents([part]) if isinstance(part, Path) else [part]
    return documents


def _source(
    model: str | Path | nn.Module, tokenizer: Any, arguments: Mapping[str, Any]
) -> Source:
    """What is to be measured, up to its weights."""
    if isinstance(tokenizer, (str, Path)):
        options = {name: arguments[name] for name in ("local_files_only", "trust_remote_code")}
        tokenizer = load_tokenizer(tokenizer, Loading(**options))
    if isinstance(model, nn.Module):
        return Source.of_model(model, tokenizer)
    loading = Loading(**{name: arguments[name] for name in OPTIONS_OF_LOAD})
    opened = open_checkpoint(model, loading)
    return Source.of_checkpoint(opened, tokenizer)


def _sequences(
    material: Material,
    lengths: Int[Tensor, " sequence"] | None,
    source: Source,
    context: int | None,
    sequences: int | None,
    seed: int,
) -> Sequences:
    """Documents as tokens of the model, cut to the context; tokens as they are."""
    if lengths is not None and not isinstance(material, Tensor):
        raise BadArgument("lengths are those of tokens; text has its own.")
    if isinstance(material, Sequences):
        return material
    vocabulary = source.config.get_text_config().vocab_size
    if isinstance(material, Tensor):
        tokens, lengths = check_tokens(material, lengths, vocabulary=vocabulary)
        return Sequences(tokens, lengths, "", f"{len(tokens):,} sequences of tokens")
    maximum = stated_context(source.config)
    if context is None:
        context = min(maximum or LONGEST_DEFAULT_CONTEXT, LONGEST_DEFAULT_CONTEXT)
    check_context(context, maximum)
    chosen: dict[str, Any] = {
        "context": context,
        "sequences": DEFAULT_SEQUENCES if sequences is None else sequences,
        "seed": seed,
    }
    with warnings.catch_warnings():
        if sequences is None:  # then fewer than the default are no surprise
            warnings.filterwarnings("ignore", message=".*were asked for")
        if isinstance(material, Path):
            found = read_ids(material, **chosen)
        else:
            found = tokenize(material, source.tokenizer, **chosen)
    if isinstance(material, Path):
        tokens, lengths = check_tokens(found.tokens, found.lengths, vocabulary=vocabulary)
        return replace(found, tokens=tokens, lengths=lengths)
    check_vocabulary(found, vocabulary=vocabulary)
    return found
