"""The main job: a model and some text go in, an `Analysis` comes out."""

from __future__ import annotations

import math
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr
from jaxtyping import Int
from torch import Tensor, nn

from ropelens.analysis.analysis import Analysis
from ropelens.analysis.cache import kept_in
from ropelens.analysis.machine import machine
from ropelens.analysis.plan import Plan, Source, plan_analysis
from ropelens.errors import BadArgument
from ropelens.files.progress import ShowProgress, opening, silent
from ropelens.measure.excerpt import check_excerpts
from ropelens.measure.heads import classify_heads
from ropelens.measure.profile import profile_in_stages
from ropelens.measure.token_sets import attention_on as tokens_of
from ropelens.measure.tokens import check_rows
from ropelens.measure.truncate import check_truncation, plan_truncation
from ropelens.models.bridge import bridge
from ropelens.models.bundled import sample_path
from ropelens.models.checkpoint import fingerprint
from ropelens.models.device import DeviceMap
from ropelens.models.ids import read_ids
from ropelens.models.load import load_tokenizer, open_checkpoint
from ropelens.models.memory import explain_full_memory
from ropelens.models.paths import check_document, check_has_text, check_ids_file
from ropelens.models.rotation import one_probe
from ropelens.models.subject import as_subject, stated_context
from ropelens.models.texts import (
    Sequences,
    check_context,
    check_vocabulary,
    prompt_tokens,
    read_documents,
    tokenize,
)
from ropelens.models.tokens import check_tokens
from ropelens.report.words import describe_attention_on, describe_heads, scope
from ropelens.statistics.flex import check_engine
from ropelens.statistics.rows import HowMany

LONGEST_DEFAULT_CONTEXT = 2048
DEFAULT_SEQUENCES = 64

Text = Path | str | Sequence[Path | str] | Sequences | Int[Tensor, "sequence position"]
Material = list[str] | Sequences | Int[Tensor, "sequence position"] | Path


def analyze(
    model: str | Path | nn.Module = "bundled",
    text: Text | None = None,
    *,
    lengths: Int[Tensor, " sequence"] | None = None,
    tokenizer: Any = None,
    ids: str | Path | None = None,
    prompts: Sequence[str] = (),
    attention_on: Sequence[str] = (),
    context: int | None = None,
    sequences: int | None = None,
    rows: HowMany = "auto",
    batch_size: int | None = None,
    engine: str = "blocks",
    seed: int = 0,
    truncation: Mapping[str, Any] | None = None,
    device: str = "auto",
    device_map: DeviceMap | None = None,
    quantize: str | None = None,
    dtype: str = "float32",
    backend: str = "hf",
    revision: str | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
    cache: str | Path | None = None,
    progress: ShowProgress | None = None,
    announce: Callable[[Plan], None] | None = None,
    command: str | None = None,
) -> Analysis:
    """Measure a model on text: the profile, the labels of its heads, and how it came about.

    `model` names what `ropelens.load` loads (with `device`, `device_map`, `quantize`,
    `dtype`, `revision`, `local_files_only` and `trust_remote_code`, and run by `backend`, "hf"
    or "transformer-lens"); or it is a transformers model or a `TransformerBridge`, with its
    `tokenizer`. A `tokenizer` may also be named, a folder or a Hub id; it stands in for the
    checkpoint's own.

    `text` is what to measure on. A `Path` is a file or folder, read as `read_documents`
    does; a `str` is a document; both may stand in a list. Tokens are what
    `ropelens.tokenize` gives, or a tensor [sequence, position] with `lengths` as for
    `ropelens.profile`. In its place `ids` names a file of token ids, which need no tokenizer:
    .npy (whole numbers [sequence, position]) or .txt (a line a sequence). None is text sampled
    from a bundled checkpoint. Documents and ids are cut
    into sequences of `context` tokens (by default as many as the model allows, up to 2,048),
    of which a random sample of `sequences` is kept (by default up to 64). `rows` of
    each sequence's attention are looked at: "all", a number drawn with `seed`, or "auto": all
    of sequences of up to 2,048 tokens, 512 of longer ones (see `ropelens.profile`).
    `batch_size` sequences run together, by default as many as the memory takes; `engine` sums
    the profile's attention (see `ropelens.profile`). `prompts` are
    texts to look into, token by token, of up to 256 tokens each; without, pieces of the text.
    `attention_on` are tokens ("'", "punctuation", "repeated") that heads are searched by: how
    much attention each gives them (see `ropelens.attention_on`).

    `truncation` asks for a sweep too: options of `ropelens.truncate` (keep, ends, bands,
    controls, measures), {} for its defaults; it sees the same sequences, rows and seed.
    What is measured is kept in the folder `cache` once a minute, so that the same call goes on
    where it was stopped, even by a kill; delete the folder when the analysis is saved.
    `progress` is called for each stage, as `ropelens.show_progress` is. `announce` is given
    the plan, what would run and the memory that it takes, before weights are read. `command`
    is what a shell would be told to do the same again; None is the script that runs.

    Raises `BadText` and `BadCheckpoint` for what cannot be read, and what `ropelens.load`,
    `profile` and `truncate` raise.
    """
    arguments = arguments_of(locals())  # while the parameters are the only names
    check_rows(rows, batch_size)  # all that can be told before a model is loaded
    check_engine(engine)
    if context is not None:
        check_context(context)
    if sequences is not None and sequences < 1:
        raise BadArgument(f"sequences is {sequences}; at least 1 is needed.")
    if truncation is not None:
        check_truncation(**truncation)
    begin = time.perf_counter()
    material = _material(text, model, ids)
    show = progress or silent
    with _noted_warnings() as noted, one_probe():
        with opening(show, "reading"):
            source = _source(model, tokenizer, arguments)
            read = _sequences(material, lengths, source, context, sequences, seed)
            looked = [prompt_tokens(prompt, source.tokenizer) for prompt in prompts]
            check_excerpts(source.config, looked)
            searched = [tokens_of(read.tokens, what, source.tokenizer) for what in attention_on]
        eager = backend == "transformer-lens"
        plan = plan_analysis(source, read, rows=rows, batch_size=batch_size, eager=eager)
        if announce is not None:
            announce(plan)
        noted.show()
        with opening(show, "loading"):
            subject, tokenizer = source.read(), source.tokenizer
            digest = None if source.path is None else fingerprint(source.path)
        loaded = time.perf_counter()
        with (
            explain_full_memory(
                "The measurement",
                seen=f"context {int(read.tokens.shape[1]):,}",
                attempt="a smaller --context, fewer --rows, --dtype bfloat16, or another "
                "--device",
            ),
            kept_in(cache, source, digest, read, arguments),
        ):
            swept = None
            if truncation is not None:
                with opening(show, "probing"):
                    sweep = plan_truncation(subject, seed=seed, **truncation)
                swept = sweep.measure(
                    subject,
                    read.tokens,
                    lengths=read.lengths,
                    documents=read.documents,
                    rows=plan.rows,
                    batch_size=plan.batch_size,
                    stage=show,
                )
            if backend == "transformer-lens" and subject is not model:
                subject = bridge(as_subject(subject).model, tokenizer)
            measured = profile_in_stages(
                subject,
                read.tokens,
                lengths=read.lengths,
                documents=read.documents,
                tokenizer=tokenizer,
                excerpts=looked,
                statistics=[row for rows_of in searched for row in rows_of],
                rows=plan.rows,
                batch_size=plan.batch_size,
                engine=engine,
                seed=seed,
                stage=show,
            )
            with opening(show, "labelling"):
                heads = classify_heads(measured, seed=seed)
    seconds = {"load": loaded - begin, "measure": time.perf_counter() - loaded}
    facts = {
        "backend": backend,
        "text": read.source,
        "command": shlex.join(["python", *sys.argv]) if command is None else command,
        "warnings": "\n".join(noted.lines),
    }
    if source.revision is not None:
        facts["revision"] = source.revision
    for results in (measured, swept):
        if results is not None:
            results.attrs |= facts
    network = as_subject(subject).model
    findings = [*describe_heads(heads), *describe_attention_on(measured), scope(measured.attrs)]
    provenance = {
        "kind": "analysis" if swept is None else "truncation",
        "command": facts["command"],
        "findings": [line for line in findings if line],
        "arguments": arguments,
        "model": {
            "name": measured.attrs["model"],
            "revision": measured.attrs["revision"],
            "class": type(network).__name__,
            "fingerprint": digest,
        },
        "text": {"source": read.source, "fingerprint": read.fingerprint or None},
        **_numbers(measured, heads),
        "batch_size": plan.batch_size,
        "bf16_speed": plan.bf16_speed,
        "warnings": noted.lines,
        **machine(network),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }
    return Analysis(measured, heads, provenance, swept, model=subject, sequences=read)


OPTIONS_OF_LOAD = (
    *("dtype", "device", "device_map", "quantize"),
    *("revision", "local_files_only", "trust_remote_code"),
)


def arguments_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `analyze` was asked for, in JSON's types."""
    left_out = (
        "lengths",
        "tokenizer",
        "truncation",
        "cache",
        "progress",
        "announce",
        "command",
    )
    arguments = {name: value for name, value in given.items() if name not in left_out}
    model, text = given["model"], given["text"]
    arguments["model"] = type(model).__name__ if isinstance(model, nn.Module) else str(model)
    for name in ("tokenizer", "ids"):
        value = given[name]
        arguments[name] = str(value) if isinstance(value, (str, Path)) else None
    for name in ("prompts", "attention_on"):
        arguments[name] = list(given[name])
    arguments["text"] = "tokens"
    if text is None or isinstance(text, (Path, str, Sequence)):
        parts = [text] if isinstance(text, (Path, str)) else text or []
        arguments["text"] = [
            str(part) if isinstance(part, Path) else f"a document of {len(part):,} characters"
            for part in parts
        ]
    return arguments | dict(given.get("truncation") or {})


def _material(
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
    if isinstance(text, (Sequences, Tensor)):
        return text
    if text is None or not text:
        name = type(model).__name__ if isinstance(model, nn.Module) else str(model)
        check_has_text(name)
        return read_documents([sample_path(name.partition(":")[2] or "rope")])
    documents = []
    for part in [text] if isinstance(text, (Path, str)) else text:
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
        tokenizer = load_tokenizer(tokenizer, **options)
    if isinstance(model, nn.Module):
        return Source.of_model(model, tokenizer)
    opened = open_checkpoint(model, **{name: arguments[name] for name in OPTIONS_OF_LOAD})
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


class _Noted:
    """The texts of all warnings; they are shown as they come once `show` was called."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._show = warnings.showwarning
        self._held: list[tuple[Any, ...]] | None = []

    def note(self, message: Warning | str, *place: Any, **more: Any) -> None:
        """Keep a warning, and show it or hold it back."""
        self.lines.append(" ".join(str(message).split()))
        if self._held is None:
            self._show(message, *place, **more)
        else:
            self._held.append((message, place, more))

    def show(self) -> None:
        """Show those that were held back, and from now on all."""
        held, self._held = self._held or [], None
        for message, place, more in held:
            self._show(message, *place, **more)


@contextmanager
def _noted_warnings() -> Iterator[_Noted]:
    """All warnings of the block, held back until its plan is told."""
    with warnings.catch_warnings():  # which puts `showwarning` back
        noted = _Noted()
        warnings.showwarning = noted.note
        try:
            yield noted
        finally:
            noted.show()


def _numbers(measured: xr.Dataset, heads: pd.DataFrame) -> dict[str, Any]:
    """What was measured, in short, in JSON's types: null for a number that is unknown."""
    attrs = measured.attrs
    counts = ("seed", "context", "sequences", "documents", "tokens")
    numbers = {name: int(attrs[name]) for name in counts}
    return numbers | {
        "rows": attrs["rows"],
        "dtype": attrs["dtype"],
        "loss": _known(attrs["loss"]),
        "loss_se": _known(attrs["loss_se"]),
        "labels": heads["label"].value_counts().to_dict(),
        "thresholds": heads.attrs["thresholds"],
        "claim": {name: _known(value) for name, value in heads.attrs["claim"].items()},
        "created": attrs["created"],
    }


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
