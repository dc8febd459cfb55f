"""Plan of an analysis: the work and the memory, known before weights are read."""

import json
import math
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens import config_facts
from ropelens.analysis.options import Options
from ropelens.arguments import public
from ropelens.attention.exchange import DRAWS
from ropelens.budget.held_out import FOLD_ROWS, fitted_sequences, scored_rows
from ropelens.budget.surrogates import DRAWS as SURROGATES
from ropelens.checkpoints.bundled import check_text, sample_path, writer_of
from ropelens.checkpoints.identity import identity
from ropelens.checkpoints.load import Opened, open_checkpoint
from ropelens.checkpoints.names import short_name
from ropelens.interventions.cuts import PlaneSweep
from ropelens.interventions.truncation_table import wanted_measures
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.profiles.costs import OBSERVED, exchange_cost, fit_cost
from ropelens.profiles.excerpts import check_excerpts
from ropelens.profiles.measurement import check_ids, sequences_at_once
from ropelens.profiles.measures import find_statistics
from ropelens.profiles.token_sets import attention_on
from ropelens.rope.select import ALL_HEADS, heads_by_layer
from ropelens.runtime.devices import LIBRARIES, free_bytes, pass_bytes
from ropelens.schema import Statistic
from ropelens.text.documents import check_document, read_documents
from ropelens.text.rows import rows_for
from ropelens.text.text import Text
from ropelens.text.tokenize import (
    PIECE,
    encode,
    prompt_tokens,
    read_text,
    tokenize,
    warn_beyond,
)

DEFAULT_CONTEXT = 2048
LONG_SWEEP: dict[str, Any] = {"keep": (1, 0.75, 0.5, 0.25, 0), "controls": 1}
LONG_SWEEP |= {
    "measures": ("loss", "induction", "change", "copying")
}  # for longer text
OPERATIONS = {"cpu": 8e14, "cuda": 1e17}  # of a sweep by default: about two hours

GPU_COUNTS = {
    "sums": (106, 79),
    "scores": (237, 233),
    "exchanged keys": (38, 403),
    "fits": (4_079, 742),
    "surrogates": (1_932, 686),
}
"""GPU operations of a layer, for each batch or for the fits of all text, and bytes moved for
each row, key and head. Counted by `benchmarks/launches.py` (8B-like, 2,048 tokens)."""
PER_OPERATION, PER_BYTE = 1e-5, 1 / 3e12  # seconds that a GPU takes

Tokens = Text | Tensor | Mapping[str, Any]
TextSource = Path | str | Sequence[Path | str] | Tokens
ModelSource = Opened | LiveModel


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan to measure `source` on `text`; `arguments` are those of `analyze` as JSON."""

    source: ModelSource
    text: Text
    options: Options
    truncation: Mapping[str, Any] | None
    excerpts: list[Int[Tensor, " position"]]  # the prompts
    statistics: list[Statistic]
    arguments: dict[str, Any]
    batch_size: int | None
    facts: dict[str, str]  # the work on a checkpoint in words
    warnings: list[str]
    cost: float = 0.0  # tokens that pass the model plainly in the same time

    @cached_property
    def model(self) -> dict[str, str]:
        """The name of the model in results, and the fingerprint that identifies it."""
        if isinstance(self.source, Opened):
            name = short_name(self.source.checkpoint.name)
            return {"name": name, "fingerprint": identity(self.source)}
        self.source.forget_length()  # a buffer may depend on the text that ran before
        model = self.source.model
        name = short_name(str(model.config.name_or_path)) or self.source.class_name
        return {"name": name, "fingerprint": identity(model)}

    def read(self) -> LiveModel:
        """The model with its weights."""
        if isinstance(self.source, LiveModel):
            return self.source
        return as_live_model(self.source.read(), self.source.tokenizer)

    def seconds_per_token(self) -> float:
        """Time of a plain pass over one sequence, measured with the weights."""
        live, ids = self.read(), self.text.ids[:1]
        begin = time.perf_counter()
        with torch.no_grad():
            for _ in live.logits(ids):
                pass
        return (time.perf_counter() - begin) / ids.numel()

    def __str__(self) -> str:
        return "\n".join(f"{name:<7} {value}" for name, value in self.facts.items())


def plan_analysis(
    model: str | Path | Model,
    text: TextSource | None,
    options: Options,
    *,
    tokenizer: Any = None,
    truncation: Mapping[str, Any] | None = None,
    run: bool = True,
) -> Plan:
    """Return the plan that `analyze` runs for the same arguments; raises the same errors.

    If the plan is not for a `run`, this machine may lack a GPU.
    """
    if truncation is not None:
        truncation = {
            name: value for name, value in truncation.items() if value is not None
        }
        wanted_measures(public(PlaneSweep)(**truncation).measures)
    messages: list[str] = []
    source: ModelSource
    with keep_warnings(messages):
        names, documents = _documents(text, model)
        if not isinstance(model, (str, Path)):
            source = as_live_model(model, tokenizer)
        else:
            source = open_checkpoint(model, options, used=run)
            source = (
                source if tokenizer is None else replace(source, tokenizer=tokenizer)
            )
        tokenizer, config = source.tokenizer, source.config
        if truncation is not None and isinstance(documents, list):
            truncation, options = _fit_sweep(truncation, options, source, documents)
        sequences = _sequences(documents, source, options)
        paths = names["text"] or [sample_path(names["model"])]
        if writers := {writer_of(Path(path)) for path in paths} - {""}:
            origin = f"{sequences.source}, sampled from {', '.join(writers)}"
            sequences = replace(sequences, source=origin)
        prompts = [
            prompt_tokens(p, tokenizer, options.bos) for p in options.prompts or ()
        ]
        batch_size, facts, cost = options.batch_size, dict[str, str](), 0.0
        if isinstance(source, Opened):
            batch_size, facts, cost = _sizes(source, sequences, options)
        if truncation is not None:
            facts["sweep"] = _describe_sweep(PlaneSweep(**truncation), config)
    excerpts = check_excerpts(config, prompts)
    searched = [
        attention_on(sequences, w, tokenizer) for w in options.attention_on or ()
    ]
    own = {field.name: getattr(options, field.name) for field in fields(Options)}
    arguments = names | own | dict(truncation or {})
    return Plan(
        source=source,
        text=sequences,
        options=options,
        truncation=truncation,
        excerpts=excerpts,
        statistics=[*chain(*searched), *find_statistics(options.statistics or ())],
        arguments=json.loads(json.dumps(arguments, default=str)),
        batch_size=batch_size,
        facts=facts,
        warnings=messages,
        cost=cost,
    )


def _sizes(
    source: Opened, text: Text, options: Options
) -> tuple[int, dict[str, str], float]:
    """The batch size, the work in words, and the cost. Warns if the memory may not suffice."""
    config, devices, dtype = source.config, source.devices, source.torch_dtype
    (count, context), longest = text.ids.shape, text.context
    free = sum(map(free_bytes, devices))
    left = free - source.weight_bytes
    batch: Any = {
        "context": context,
        "width": dtype.itemsize,
        "device": devices[0].type,
    }
    batch["scores"] = (
        options.backend == "transformer-lens"
    )  # it keeps all scores of a layer
    size = options.batch_size or sequences_at_once(
        config, sequences=count, free=left // len(devices), **batch
    )
    largest = max(
        pass_bytes(config, sequences=min(size, count), **batch),
        pass_bytes(
            config, sequences=fitted_sequences(count, context), logits=False, **batch
        ),
    )
    bytes_used = source.weight_bytes + largest + LIBRARIES * (devices[0].type == "cpu")
    memory = f"about {bytes_used / 1e9:.1f} GB"
    memory += f" of {free / 1e9:.1f} GB free" * (free < sys.maxsize)
    if largest > left:
        remedy = "a smaller --context, --batch-size 1 or --dtype bfloat16 reduces it"
        warnings.warn(f"memory may not suffice: {memory}; {remedy}", stacklevel=3)
    shape, rows = config.get_text_config(), rows_for(options.rows, longest)
    heads = config_facts.stated_number(config, "num_attention_heads", 0)
    layers = len(config_facts.attending_layers(config))
    sizes = source.parameters, heads, _head_dim(config) // 2, longest
    fits = layers * fit_cost(*sizes, options.surrogates)
    rows_scored = (
        scored_rows(text) * count * (DRAWS if text.single_long_sequence else 1)
    )
    keys = layers * exchange_cost(source.parameters, heads, rows_scored, longest)
    precision = f"{options.quantize}, computed in " * (options.quantize is not None)
    precision += str(dtype).removeprefix("torch.")
    facts = {
        "model": f"{short_name(source.checkpoint.name)}, {shape.num_hidden_layers} layers x "
        f"{heads} heads, {source.parameters:,} parameters in {precision}",
        "tokens": f"{text.lengths.sum():,} tokens ({count:,} sequences of up to {longest:,})",
        "rows": "all rows" if rows == "all" else f"{rows:,} rows of each sequence",
        "batch": f"{size:,} sequence{'s' * (size > 1)} at a time, "
        f"{-(-count // size):,} batch{'es' * (count > size)}",
        "budget": f"fits and surrogates take as long as a plain pass of {fits:,.0f} tokens, "
        f"exchanged keys of {keys:,.0f}; in Python, rl.profile(..., budget=False) omits them",
        "memory": f"{memory} on {', '.join(map(str, devices))}",
    }
    added, observed = 0.3 * len(find_statistics(options.statistics or ())), 1 + OBSERVED
    if added:
        facts["added"] = f"statistics add {added:.1f} times the time of budget=False"
    if devices[0].type == "cuda":
        runs, share = -(-count // size), options.surrogates / SURROGATES
        scored, fitted = (runs, rows_scored), 2 * FOLD_ROWS
        summed = runs, count * (longest if rows == "all" else rows)
        work = summed, scored, scored, (1, fitted), (share, share * fitted)
        facts["gpu"] = _gpu_time(layers, heads * longest, work)
    return size, facts, (1 + added) * observed * int(text.lengths.sum()) + fits + keys


def _gpu_time(layers: int, row: int, work: Sequence[tuple[float, float]]) -> str:
    """Predicted time; `work` has the runs and rows of a stage, and `row` is keys x heads."""
    seconds = {
        name: layers
        * (runs * operations * PER_OPERATION + rows * row * moved * PER_BYTE)
        for (name, (operations, moved)), (runs, rows) in zip(
            GPU_COUNTS.items(), work, strict=True
        )
    }
    words = ", ".join(f"{name} {time:,.1f} s" for name, time in seconds.items())
    total = f"a profile takes at least {sum(seconds.values()):,.1f} s more than a plain pass"
    return f"{total} ({words}); predicted from counts of operations and bytes, not measured"


def _head_dim(config: PreTrainedConfig) -> int:
    heads = config_facts.stated_number(config, "num_attention_heads", 1)
    width = config.get_text_config().hidden_size
    return config_facts.stated_number(config, "head_dim", width // max(1, heads))


def _fit_sweep(
    truncation: Mapping[str, Any],
    options: Options,
    source: ModelSource,
    documents: list[str],
) -> tuple[Mapping[str, Any], Options]:
    """Arguments of a sweep, and options with the trained context, halved until it fits."""
    context = (
        options.context or config_facts.stated_context(source.config) or DEFAULT_CONTEXT
    )
    if context <= DEFAULT_CONTEXT:
        return truncation, replace(options, context=context)
    if isinstance(source, Opened):
        parameters, device = source.parameters, source.devices[0]
    else:
        parameters, device = source.model.num_parameters(), source.device
    config, sizes = source.config, ("hidden_size", "num_hidden_layers")
    scores = math.prod(config_facts.stated_number(config, size, 1) for size in sizes)

    def fits(context: int) -> bool:
        """Check the cost of 11 edits, each on 2 sequences or more and 8 farthest copies."""
        tokens = 11 * (max(2**14, 2 * context) + 11 * context)
        batch: dict[str, Any] = {"context": context, "width": 4, "device": device.type}
        in_time = 2 * tokens * (parameters + scores * context) < OPERATIONS[device.type]
        in_memory = pass_bytes(config, sequences=1, **batch) < free_bytes(device)
        return in_time and in_memory and 2 * context <= text_tokens

    if options.context is None:
        pieces = [encode(text[:PIECE], source.tokenizer)[1] for text in documents]
        text_tokens = sum(map(len, pieces))
        while context > DEFAULT_CONTEXT and not fits(context):
            context = max(context // 2, DEFAULT_CONTEXT)
    count = options.sequences or max(2, 2**14 // context)
    return {**LONG_SWEEP, **truncation}, replace(
        options, context=context, sequences=count
    )


def _describe_sweep(sweep: PlaneSweep, config: PreTrainedConfig) -> str:
    """The work of a sweep. Raises the errors of `truncate`, as far as the config suffices."""
    ropes = config_facts.rope_parameters(config)
    parts = [rope.get("partial_rotary_factor") or 1 for rope in ropes]
    planes = min(int(_head_dim(config) * min(parts, default=1)) // 2, 512)
    wavelengths = {plane: 1.0 / (1 + plane) for plane in range(planes)}
    cuts = sweep.cuts({"all": [wavelengths]}, seed=0)
    some = sweep.heads not in ("*", ALL_HEADS)
    kinds = 1 if some or sweep.layers is not None else len(ropes)
    edits = kinds * (len({cut.stopped for cut in cuts}) - 1)
    names = ("num_hidden_layers", "num_attention_heads")
    layers, heads = (config_facts.stated_number(config, name, 0) for name in names)
    by_kind = any(
        letter.isalpha() for letter in sweep.heads
    )  # known when the model runs
    if layers and heads and some and not by_kind:
        able = torch.zeros(layers, heads, dtype=torch.bool)
        able[config_facts.attending_layers(config, turning=True)] = True
        heads_by_layer(sweep.heads, able, doing="rotate")
    measures = ", ".join(sorted(wanted_measures(sweep.measures)))
    trained = config_facts.stated_context(config) or "?"
    return f"about {edits} edits ({measures}), trained for {trained} tokens"


def _documents(
    text: TextSource | None, model: str | Path | Model
) -> tuple[dict[str, Any], list[str] | Tokens]:
    """Names of model and text for run.json, and the documents (or the given tokens)."""
    name = str(model) if isinstance(model, (str, Path)) else type(model).__name__
    tokens = (Text, Tensor, Mapping)
    parts: list[Any] = (
        [text] if isinstance(text, (Path, str, *tokens)) else list(text or ())
    )
    check_text(name, parts)
    if isinstance(text, tokens):
        return {"model": name, "text": "tokens"}, text
    documents, names = [], []
    for part in parts:
        if isinstance(part, str):
            check_document(part)
            documents.append(part)
            names.append(f"a document of {len(part):,} characters")
        else:
            documents += read_documents([part])
            names.append(str(part))
    return {"model": name, "text": names}, documents or read_documents(
        [sample_path(name)]
    )


def _sequences(
    documents: list[str] | Tokens, source: ModelSource, options: Options
) -> Text:
    """The documents as tokens, cut to the context; given tokens are not cut."""
    config = source.config.get_text_config()
    if not isinstance(documents, list):
        text = read_text(documents, config=config)
        check_ids(text.ids, vocabulary=config.vocab_size)
        return replace(text, source=text.source or f"{len(text):,} sequences of tokens")
    maximum = config_facts.stated_context(source.config)
    context = options.context or min(maximum or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    warn_beyond(context, maximum)
    with warnings.catch_warnings():
        if (
            options.sequences is None
        ):  # no warning about fewer sequences than the default
            warnings.filterwarnings("ignore", message=".*were asked for")
        cut = {
            "context": context,
            "sequences": options.sequences or 64,
            "seed": options.seed,
        }
        text = tokenize(documents, source.tokenizer, bos=options.bos, **cut)
    check_ids(text.ids, vocabulary=config.vocab_size)
    return text


def this_command() -> str:
    """The shell command that runs this process again."""
    ropelens = Path(sys.argv[0]).name in ("ropelens", "__main__.py")
    return shlex.join(
        ["ropelens", *sys.argv[1:]] if ropelens else ["python", *sys.argv]
    )


@contextmanager
def keep_warnings(messages: list[str]) -> Iterator[None]:
    """Append the text of every warning in the block to `messages`, and show the warning."""
    with warnings.catch_warnings():  # restores `showwarning`
        show = warnings.showwarning

        def collect(message: Warning | str, *place: Any, **options: Any) -> None:
            messages.append(" ".join(str(message).split()))
            show(message, *place, **options)

        warnings.showwarning = collect
        yield
