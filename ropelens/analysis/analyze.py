"""The main job: a model and some text go in, an `Analysis` comes out."""

from __future__ import annotations

import shlex
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xarray as xr
from jaxtyping import Int
from torch import Tensor, nn

from ropelens.analysis.analysis import Analysis
from ropelens.analysis.cache import kept_in
from ropelens.analysis.inputs import Text, material_of, read_inputs
from ropelens.analysis.noted import noted_warnings
from ropelens.analysis.plan import Plan, plan_analysis
from ropelens.analysis.provenance import arguments_of, provenance
from ropelens.analysis.standing import joined_by_sweep
from ropelens.errors import BadArgument
from ropelens.files.progress import ShowProgress, opening, silent
from ropelens.measure.heads import classify_heads
from ropelens.measure.profile import profile_in_stages
from ropelens.measure.tokens import check_rows
from ropelens.measure.truncate import check_truncation, plan_truncation
from ropelens.models.bridge import bridge
from ropelens.models.checkpoint import fingerprint
from ropelens.models.device import DeviceMap
from ropelens.models.memory import explain_full_memory
from ropelens.models.subject import as_subject
from ropelens.models.texts import Sequences, check_context
from ropelens.statistics.rows import HowMany

BACKENDS = ("hf", "transformer-lens")


def analyze(
    model: str | Path | nn.Module = "bundled",
    text: Text | None = None,
    *,
    lengths: Int[Tensor, " sequence"] | None = None,
    tokenizer: Any = None,
    ids: str | Path | None = None,
    prompts: str | Sequence[str] = (),
    attention_on: str | Sequence[str] = (),
    context: int | None = None,
    sequences: int | None = None,
    rows: HowMany = "auto",
    batch_size: int | None = None,
    seed: int = 0,
    truncation: Mapping[str, Any] | None = None,
    standing: str | Path | None = None,
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
    `batch_size` sequences run together, by default as many as the memory takes. `prompts` are
    texts to look into (a `str` is one), token by token, of up to 256 tokens each; without,
    pieces of the text.
    `attention_on` are tokens ("'", "punctuation", "repeated") that heads are searched by: how
    much attention each gives them (see `ropelens.attention_on`).

    `truncation` asks for a sweep too: options of `ropelens.truncate` (keep, ends, bands,
    controls, measures), {} for its defaults; it sees the same sequences, rows and seed. The
    profile is then not measured where the folder `standing` has an analysis of the same
    weights and text: that one stands.
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
    if backend not in BACKENDS:
        raise BadArgument(f"There is no backend {backend!r}.", attempt=" or ".join(BACKENDS))
    if context is not None:
        check_context(context)
    if truncation is not None:
        check_truncation(**truncation)
    begin = time.perf_counter()
    material = material_of(text, model, ids)
    show = progress or silent
    with noted_warnings() as noted:
        with opening(show, "reading"):
            inputs = read_inputs(
                model, material, lengths=lengths, tokenizer=tokenizer, arguments=arguments
            )
        source, read = inputs.source, inputs.read
        eager = backend == "transformer-lens"
        plan = plan_analysis(source, read, rows=rows, batch_size=batch_size, eager=eager)
        if announce is not None:
            announce(plan)
        if not plan.fits:
            warnings.warn(
                f"about {plan.memory / 1e9:.1f} GB of memory may be too much for the "
                f"{plan.free / 1e9:.1f} GB that are free; a smaller --context, --batch-size 1 "
                "or --dtype bfloat16 take less",
                stacklevel=2,
            )
        noted.show()
        with opening(show, "loading"):
            subject = source.read()
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
            swept = held = None
            if truncation is not None:
                swept = _sweep(subject, read, plan, truncation, seed=seed, show=show)
                held = joined_by_sweep(standing, weights=digest, text=read.fingerprint or None)
            if eager and subject is not model:
                subject = bridge(as_subject(subject).model, source.tokenizer)
            if held is not None:
                measured, heads = held.profile, held.heads
            else:
                measured = profile_in_stages(
                    subject,
                    read.tokens,
                    lengths=read.lengths,
                    documents=read.documents,
                    tokenizer=source.tokenizer,
                    excerpts=inputs.excerpts,
                    statistics=inputs.searched,
                    rows=plan.rows,
                    batch_size=plan.batch_size,
                    seed=seed,
                    stage=show,
                )
                with opening(show, "labelling"):
                    heads = classify_heads(measured, seed=seed)
    facts = {
        "backend": backend,
        "text": read.source,
        "command": shlex.join(["python", *sys.argv]) if command is None else command,
        "warnings": "\n".join(noted.lines),
    }
    if source.revision is not None:
        facts["revision"] = source.revision
    for results in (measured if held is None else None, swept):
        if results is not None:
            results.attrs |= facts
    record = provenance(
        measured,
        heads,
        as_subject(subject).model,
        plan,
        kind="analysis" if swept is None else "truncation",
        arguments=arguments,
        digests={"model": digest, "text": read.fingerprint or None},
        warnings=noted.lines,
        seconds={"load": loaded - begin, "measure": time.perf_counter() - loaded},
    )
    return Analysis(measured, heads, record, swept, model=subject, sequences=read)


def _sweep(
    model: nn.Module,
    read: Sequences,
    plan: Plan,
    options: Mapping[str, Any],
    *,
    seed: int,
    show: ShowProgress,
) -> xr.Dataset:
    """What stopping planes costs on the tokens of the plan."""
    with opening(show, "probing"):
        sweep = plan_truncation(model, seed=seed, **options)
    return sweep.measure(
        model,
        read.tokens,
        lengths=read.lengths,
        documents=read.documents,
        rows=plan.rows,
        batch_size=plan.batch_size,
        stage=show,
    )
