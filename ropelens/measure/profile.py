"""A model and some tokens become a profile: labelled arrays that can be saved and shown."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import reduce
from importlib.metadata import version
from operator import add
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.errors import check_count
from ropelens.measure.batches import Progress, collect
from ropelens.measure.budget import budget_variables, fit_layers
from ropelens.measure.excerpt import (
    Excerpt,
    TokenNames,
    check_excerpts,
    check_names,
    chosen_excerpts,
    excerpt_variables,
    turn_alike,
)
from ropelens.measure.repeats import repeat_length, repeat_scores
from ropelens.measure.savepoint import begin_stage
from ropelens.measure.summary import described, summarize
from ropelens.measure.tokens import as_corpus
from ropelens.models.paths import at_home, check_document
from ropelens.models.processes import gather, shard
from ropelens.models.subject import Model, as_subject, stated_context, trained_context
from ropelens.models.texts import check_tokenizer, encode, tokenize
from ropelens.statistics.budget.surrogates import DRAWS
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.groups import Documents, count_documents
from ropelens.statistics.rows import ALL_ROWS, HowMany, rows_for
from ropelens.statistics.seeds import whole_seed
from ropelens.statistics.variables import STATISTICS, Statistic, check_new, named

NUMBERED = re.compile(r"(seed|step)-\d+")
"""Names of runs and checkpoints, within a study, that tell nothing alone."""


def profile(
    model: Model,
    tokens: Int[Tensor, "sequence position"] | str,
    *,
    lengths: Int[Tensor, " sequence"] | None = None,
    documents: Int[Tensor, " sequence"] | None = None,
    tokenizer: TokenNames | None = None,
    excerpts: Iterable[Tensor] = (),
    statistics: Sequence[Statistic] = (),
    sinks: Iterable[int] = (),
    surrogates: int = DRAWS,
    rows: HowMany = "auto",
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure how `model` uses its rotary frequencies on `tokens`.

    `model` is a transformers model or a TransformerLens `TransformerBridge`; it computes
    what it always does and is left as it was. `tokens` may be a text too, which `tokenizer`
    makes one sequence of, or several of 2,048 tokens (or what the model allows). They are
    padded on the right; of sequence s the first `lengths[s]` count (all, without `lengths`).
    `rows` of each sequence's attention are looked at: "all", a number drawn with `seed`
    (unbiased; for long contexts), or "auto": all of sequences of up to 2,048 tokens, 512 of
    longer ones. The bits of the attention budget, with labels and intervals, are of rows of
    their own, the same for any `rows`. `batch_size` sequences run together, by default as
    many as the memory takes. `documents[s]` numbers the document that sequence s was cut
    from, by which intervals resample; without it they speak of this text alone. `excerpts`
    are short sequences of tokens to look into, by default three pieces of the text on which
    heads choose their keys most sharply; `tokenizer` names their tokens. `statistics` are
    measured beside those that every profile has.
    `sinks` are ids of tokens that are sinks wherever they stand, beside position 0, the token
    that sequences begin with, and keys that are found to be. `surrogates` with frequencies in
    a random order are what the claim on wavelengths is held against. `progress` is
    called with the tokens done since, after each layer of each batch.

    Two passes over a sample come first: one of an excerpt and repeated tokens, one in which
    the models of the attention budget are fitted.

    Returns a dataset over layer, head, kv_head, frequency (0 turns fastest), offset_bin,
    group (of sequences, for the bootstrap) and draw (of surrogates; 0 is the model); every
    variable carries `long_name` and `units`. See docs/measures.md for definitions.

    Under an edit that makes heads of a layer rotate differently (what does head 3.5 attend to
    without plane 2?) every head is measured as it rotates; `head_wavelength` (layer, head,
    frequency) says how, and `wavelength` is that of the head that turns fastest in the plane.
    Where heads that share a key differ, each of the layer has a `kv_head` of its own.

    Raises `UnsupportedModel` for a model without RoPE or with hidden attention, and
    `BadArgument` for tokens, lengths, rows, or statistics that cannot be.
    """
    return profile_in_stages(
        model,
        tokens,
        lengths=lengths,
        documents=documents,
        tokenizer=tokenizer,
        excerpts=excerpts,
        statistics=statistics,
        sinks=sinks,
        surrogates=surrogates,
        rows=rows,
        seed=seed,
        batch_size=batch_size,
        stage=lambda what, **_: nullcontext(progress if what == MEASURING else None),
    )


MEASURING = "measuring"

OpenStage = Callable[..., AbstractContextManager[Progress | None]]
"""Opens a stage of the work, `what` with `total` and `unit`, as `ropelens.show_progress`."""


def profile_in_stages(
    model: Model,
    tokens: Int[Tensor, "sequence position"] | str,
    *,
    lengths: Int[Tensor, " sequence"] | None,
    documents: Int[Tensor, " sequence"] | None,
    tokenizer: TokenNames | None,
    excerpts: Iterable[Tensor] = (),
    statistics: Sequence[Statistic] = (),
    sinks: Iterable[int] = (),
    surrogates: int = DRAWS,
    rows: HowMany,
    seed: int,
    batch_size: int | None,
    stage: OpenStage,
) -> xr.Dataset:
    """What `profile` gives, each stage of it shown by `stage`."""
    subject, seed = as_subject(model), whole_seed(seed)
    if isinstance(tokens, str):
        tokens, lengths = _read(tokens, tokenizer, subject.model)
    check_names(tokenizer)
    text = as_corpus(
        subject.model,
        tokens,
        lengths,
        documents=documents,
        sinks=sinks,
        rows=rows,
        batch_size=batch_size,
    )
    rows = rows_for(rows, text.context)
    check_count("surrogates", surrogates)
    check_new(statistics)
    with stage("probing", total=1, unit="step"):
        planes = subject.planes(text.context)
        pieces = check_excerpts(subject.model.config, excerpts) or chosen_excerpts(
            subject, text, seed=seed
        )
        seen = [Excerpt.of(subject, piece, planes) for piece in pieces]
        alike = turn_alike(subject, planes, [len(piece) for piece in pieces])
        repeats = repeat_scores(
            subject,
            first_token=int(text.tokens[0, 0]),
            planes=planes,
            length=repeat_length(subject.model),
            seed=seed,
        )
    kept = begin_stage()
    fits, sums = kept.state or (None, None)
    if fits is None:
        own = len(shard(len(planes)))
        with stage("fitting the budget", total=own, unit="layers") as progress:
            fits = fit_layers(
                subject,
                text,
                planes=planes,
                surrogates=surrogates,
                seed=seed,
                progress=progress,
            )
        kept.save(lambda: (fits, None))
    chosen = shard(len(text))
    left = int(text.lengths[chosen.start : chosen.stop].sum()) - kept.tokens
    with stage(MEASURING, total=left, unit="tokens") as progress:
        sums = collect(
            subject,
            text,
            planes=planes,
            statistics=[*STATISTICS, *statistics],
            rows=rows,
            fits=fits,
            seed=seed,
            chosen=chosen,
            batch_size=batch_size,
            progress=kept.counting(progress),
            sums=sums,
            save=lambda sums: kept.save(lambda: (fits, sums)),
        )
    sums = reduce(add, gather(sums))
    dataset = summarize(sums, planes, extra=statistics)
    dataset = dataset.assign(budget_variables(sums, fits))
    scores = repeats.values
    for row in named(*scores):
        dataset[row.name] = xr.Variable(row.dims, scores[row.name], row.attrs)
    bits = dataset["total_bits"].values
    seen_back = [torch.arange(len(s.start)) - s.start for _, s in sorted(sums.layers.items())]
    dataset["farthest_offset"] = described(
        "layer",
        np.array([int(offset.max()) for offset in seen_back]),
        "farthest offset that a row of the layer sees",
        "token",
    )
    looked_into = excerpt_variables(seen, tokenizer, bits, alike=alike, planes=planes)
    dataset = dataset.assign(looked_into)
    dataset = dataset.set_coords("excerpt_token")
    dataset.attrs["kind"] = "profile"
    dataset.attrs |= describe_run(subject.model, text, documents, rows=rows, seed=seed)
    return dataset


def _read(
    text: str, tokenizer: Any, model: PreTrainedModel
) -> tuple[Int[Tensor, "sequence position"], Int[Tensor, " sequence"]]:
    """A text as sequences of the model's tokens, with their lengths."""
    check_document(text)
    check_tokenizer(tokenizer)
    bos, ids = encode(text, tokenizer)
    context = min(stated_context(model.config) or ALL_ROWS, ALL_ROWS, len(bos) + len(ids))
    read = tokenize([text], tokenizer, context=max(context, 2))
    return read.tokens, read.lengths


def describe_run(
    model: PreTrainedModel,
    text: Corpus,
    documents: Documents | None,
    *,
    rows: int | Literal["all"],
    seed: int,
) -> dict[str, str | int]:
    """What results say of the model and tokens that they were measured on: their `attrs`."""
    return {
        "model": model_name(model),
        "revision": str(model.config.to_dict().get("_commit_hash") or ""),
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": seed,
        "context": text.context,
        "trained_context": trained_context(model.config),
        "rows": rows,
        "sequences": len(text),
        "documents": count_documents(documents),  # 0 where it is not known
        "tokens": int(text.lengths.sum()),
        "tokens_sha256": fingerprint(text),
        "versions": json.dumps(versions()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def fingerprint(text: Corpus) -> str:
    """sha256, in hex, of the tokens that count: equal where two models read the same."""
    digest = hashlib.sha256()
    for row, length in zip(text.tokens.cpu().numpy(), text.lengths.tolist(), strict=True):
        digest.update(np.int64(length).tobytes() + row[:length].astype("<i8").tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of ropelens and of the libraries that a profile's numbers depend on."""
    names = ("ropelens", "torch", "transformers", "transformer-lens", "numpy", "xarray")
    return {name: version(name) for name in names}


def model_name(model: PreTrainedModel) -> str:
    """How results call a model; see `short_name`. One without a name by its class."""
    return short_name(str(model.config.name_or_path)) or type(model).__name__


def short_name(name: str) -> str:
    """How results call a model: a Hub id as it is, a folder by its name, not by its place.

    A run or a checkpoint of a study also by that of the folder above: "rope seed-0".
    """
    place = at_home(name)
    if not name or not place.exists():
        return name
    *above, last = (part for part in place.resolve().parts[1:] if part != "history")
    names = [last]
    while above and NUMBERED.fullmatch(names[0]):
        names.insert(0, above.pop())
    return " ".join(names)
