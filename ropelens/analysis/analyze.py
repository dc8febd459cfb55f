"""The main job: a model and some text go in, an `Analysis` comes out."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from ropelens.analysis.analysis import Analysis, earlier_analysis, with_sweep
from ropelens.analysis.options import Options
from ropelens.analysis.plan import Plan, Text, plan_analysis
from ropelens.analysis.record import arguments_of, record_of, this_command
from ropelens.errors import BadArgument, public
from ropelens.files.progress import ShowProgress, opening, silent
from ropelens.measure.heads import classify_heads
from ropelens.measure.measurement import versions
from ropelens.measure.profile import profile as measure
from ropelens.measure.savepoint import UNFINISHED, savepoint
from ropelens.measure.terms import MEASURES, wanted_measures
from ropelens.measure.truncate import truncate
from ropelens.models.bridge import bridge
from ropelens.models.checkpoint import fingerprint
from ropelens.models.device import explain_full_memory
from ropelens.models.processes import gather
from ropelens.models.subject import Model, as_subject

DEFAULT = Options()


@public
def analyze(
    model: str | Path | Model = "bundled",
    text: Text | None = None,
    options: Options = DEFAULT,
    *,
    tokenizer: Any = None,
    lengths: Int[Tensor, " sequence"] | None = None,
    truncation: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    progress: ShowProgress | None = None,
    announce: Callable[[Plan], None] | None = None,
) -> Analysis:
    """Measure a model on text: its profile, the labels of its heads, and how it came about.

    `model` is a name that `ropelens.load` takes; or a transformers model or a
    `TransformerBridge`, with its `tokenizer`. A tokenizer may also be a name, a folder or a
    Hub id, and replaces the one of a checkpoint.

    `text` is a `Path` of a file or folder, read as by `read_documents`; a `str`, which is a
    document; a list of both; or tokens: what `ropelens.tokenize` returns, or a tensor
    [sequence, position] with `lengths` as for `ropelens.profile`. Without text, a bundled
    checkpoint reads text that was sampled from it.

    `truncation` asks for a sweep too: the arguments keep, ends, bands, controls and measures
    of `ropelens.truncate`, {} for their defaults. It has the same sequences, rows and seed.

    `folder` is where the results will be saved. The measurement is saved there once a minute,
    so that the same call goes on after a kill; `Analysis.save` removes what is left of that.
    A sweep joins an analysis of the same weights and text in `folder`, whose profile is then
    not measured again. `progress` opens each stage of the work; `announce` is given the plan
    before weights are read.

    Raises `BadText` and `BadCheckpoint` for what cannot be read, and what `ropelens.load`,
    `profile` and `truncate` raise.
    """
    begin, show = time.perf_counter(), progress or silent
    if truncation is not None:
        wanted_measures(truncation.get("measures", MEASURES))
    arguments = arguments_of(model, text, options, tokenizer=tokenizer, truncation=truncation)
    with _listed_warnings() as lines:
        with opening(show, "reading"):
            plan = plan_analysis(model, text, options, tokenizer=tokenizer, lengths=lengths)
        if announce is not None:
            announce(plan)
        if not plan.fits:
            warnings.warn(
                f"about {plan.memory / 1e9:.1f} GB of memory may be too much for the "
                f"{plan.free / 1e9:.1f} GB that are free; a smaller --context, --batch-size 1 "
                "or --dtype bfloat16 take less",
                stacklevel=3,
            )
        source, read = plan.source, plan.text
        with opening(show, "loading"):
            subject = source.read()
            shown: Any = model if source.path is None else subject.model
            weights = None if source.path is None else fingerprint(source.path)
        loaded = time.perf_counter()
        full = explain_full_memory(
            "The measurement",
            seen=f"context {int(read.tokens.shape[1]):,}",
            attempt="a smaller --context, fewer --rows, --dtype bfloat16, or another --device",
        )
        common: dict[str, Any] = {
            "lengths": read.lengths,
            "documents": read.documents,
            "rows": plan.rows,
            "batch_size": plan.batch_size,
            "seed": options.seed,
            "progress": show,
        }
        with full, _saved_in(folder, plan, weights, arguments):
            swept = earlier = None
            if truncation is not None:
                swept = truncate(subject, read.tokens, **common, **truncation)
                earlier = _joined_by_sweep(folder, weights, read.fingerprint)
            if options.backend == "transformer-lens" and source.path is not None:
                shown = bridge(subject.model, source.tokenizer)
                subject = as_subject(shown, source.tokenizer)
            if earlier is None:
                profile = measure(
                    subject,
                    read.tokens,
                    tokenizer=source.tokenizer,
                    excerpts=plan.excerpts,
                    statistics=plan.statistics,
                    surrogates=options.surrogates,
                    **common,
                )
                with opening(show, "labelling"):
                    heads = classify_heads(profile, seed=options.seed)
            else:
                profile, heads = earlier.profile, earlier.heads
    facts = {
        "backend": options.backend,
        "text": read.source,
        "command": this_command(),
        "warnings": "\n".join(lines),
    }
    if source.revision is not None:
        facts["revision"] = source.revision
    for results in (profile if earlier is None else None, swept):
        if results is not None:
            results.attrs |= facts
    record = record_of(
        profile,
        heads,
        plan,
        kind="analysis" if swept is None else "truncation",
        arguments=arguments,
        model=subject,
        fingerprint=weights,
        warnings=lines,
        seconds={"load": loaded - begin, "measure": time.perf_counter() - loaded},
    )
    if earlier is not None and swept is not None:
        apart = record | {"command": facts["command"]}
        return with_sweep(replace(earlier, model=shown, sequences=read), swept, apart)
    return Analysis(profile, heads, record, swept, model=shown, sequences=read)


def _joined_by_sweep(
    folder: str | Path | None, weights: str | None, text: str
) -> Analysis | None:
    """The analysis in `folder` that a sweep joins; the same for all processes, or None.

    The profile that another sweep made for itself is measured anew.
    """
    earlier, joins = None if folder is None else earlier_analysis(Path(folder), weights), False
    if earlier is not None and text:
        apart = earlier.truncation is None or "sweep" in earlier.provenance
        joins = apart and earlier.provenance.get("text", {}).get("fingerprint") == text
    return earlier if all(gather(joins)) else None


def _saved_in(
    folder: str | Path | None,
    plan: Plan,
    weights: str | None,
    arguments: Mapping[str, Any],
) -> AbstractContextManager[None]:
    """The measurement is saved in `folder` under all that decides its numbers."""
    if folder is None:
        return nullcontext()
    if weights is None:
        raise BadArgument(
            "Only a model that is named can be measured with a folder.",
            means="one in memory has no files by which it is known again",
            attempt="its folder or Hub id, or no folder",
        )
    tokens = (plan.text.tokens, plan.text.lengths, plan.text.documents)
    key = {
        "weights": weights,
        "config": plan.source.config.to_dict(),
        "tokens": [None if of is None else _sha256(of) for of in tokens],
        "arguments": arguments,
        "device": ", ".join(map(str, plan.source.devices)),
        "versions": versions(),
    }
    return savepoint(Path(folder) / UNFINISHED, key)


def _sha256(numbers: Tensor) -> str:
    return hashlib.sha256(np.ascontiguousarray(numbers.cpu()).tobytes()).hexdigest()


@contextmanager
def _listed_warnings() -> Iterator[list[str]]:
    """The texts of all warnings of the block, which are shown as they come."""
    lines: list[str] = []
    with warnings.catch_warnings():  # which restores `showwarning`
        show = warnings.showwarning

        def note(message: Warning | str, *place: Any, **more: Any) -> None:
            lines.append(" ".join(str(message).split()))
            show(message, *place, **more)

        warnings.showwarning = note
        yield lines
