"""What a measurement will run and the memory it takes, known before weights are read."""

from __future__ import annotations

import json
import math
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.analysis.options import Options
from ropelens.attention.variables import Statistic
from ropelens.budget.held_out import fitted_sequences
from ropelens.checkpoints.bundled import check_text, sample_path, writer_of
from ropelens.checkpoints.load import Opened, open_checkpoint
from ropelens.checkpoints.names import short_name
from ropelens.config_facts import (
    attending_layers,
    rope_parameters,
    stated_context,
    stated_number,
)
from ropelens.interventions.truncate import KEEP
from ropelens.interventions.truncation_table import (
    ALL_MEASURES,
    DEFAULT_MEASURES,
    wanted_measures,
)
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.profiles.excerpts import check_excerpts
from ropelens.profiles.measurement import sequences_at_once
from ropelens.profiles.model_text import check_ids
from ropelens.profiles.passes import fit_cost
from ropelens.profiles.token_sets import attention_on
from ropelens.rope.select import heads_by_layer, plan_cuts
from ropelens.runtime.devices import LIBRARIES, free_bytes, pass_bytes
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

LONGEST_DEFAULT_CONTEXT = 2048

OF_LONG: dict[str, Any] = {"keep": (1, 0.75, 0.5, 0.25, 0), "controls": 1}
OF_LONG["measures"] = ("loss", "induction", "change", "copying")
"""What a sweep of text longer than `LONGEST_DEFAULT_CONTEXT` does by default."""

OPERATIONS = {"cpu": 8e14, "cuda": 1e17}
"""Floating-point operations of a sweep at most, by default: about two hours."""

Texts = Path | str | Sequence[Path | str] | Text | Tensor | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be measured: `source` on `text`.

    `excerpts` are the prompts as tokens, `statistics` those that `attention_on` asks for.
    `arguments` are those of `analyze` in JSON's types. `facts`, of a checkpoint, say in words
    what will run. `warnings` collects the texts of all warnings.
    """

    source: Opened | LiveModel
    text: Text
    options: Options
    truncation: Mapping[str, Any] | None
    excerpts: list[Int[Tensor, " position"]]
    statistics: list[Statistic]
    arguments: dict[str, Any]
    batch_size: int | None
    facts: dict[str, str]
    warnings: list[str]

    def __str__(self) -> str:
        return "\n".join(f"{name:<7} {value}" for name, value in self.facts.items())


def plan_analysis(
    model: str | Path | Model,
    text: Texts | None,
    options: Options,
    *,
    tokenizer: Any = None,
    truncation: Mapping[str, Any] | None = None,
) -> Plan:
    """What `analyze` with the same arguments will run; raises what it raises before that."""
    if truncation is not None:
        wanted_measures(truncation.get("measures") or DEFAULT_MEASURES)
    lines: list[str] = []
    with listed_warnings(lines):
        names, documents = _documents(text, model)
        source: Opened | LiveModel
        if not isinstance(model, (str, Path)):
            source = as_live_model(model, tokenizer)
        else:
            source = open_checkpoint(model, options)
            source = source if tokenizer is None else replace(source, tokenizer=tokenizer)
        tokenizer, config = source.tokenizer, source.config
        if truncation is not None and isinstance(documents, list):
            truncation, options = _sweep(truncation, options, source, documents)
        read = _sequences(documents, source, options)
        texts = names["text"] or [sample_path(names["model"].partition(":")[2] or "rope")]
        if writers := {writer_of(Path(path)) for path in texts} - {""}:
            read = replace(read, source=f"{read.source}, sampled from {', '.join(writers)}")
        prompts = options.prompts or ()
        excerpts = [prompt_tokens(prompt, tokenizer, options.bos) for prompt in prompts]
        batch_size, facts = options.batch_size, dict[str, str]()
        if isinstance(source, Opened):
            batch_size, facts = _sizes(source, read, options)
        if truncation is not None:
            measures = ", ".join(
                sorted(wanted_measures(truncation.get("measures") or ALL_MEASURES))
            )
            edits, trained = _count_edits(truncation, config), stated_context(config) or "?"
            facts["sweep"] = f"about {edits} edits ({measures}), trained for {trained} tokens"
    return Plan(
        source=source,
        text=read,
        options=options,
        truncation=truncation,
        excerpts=check_excerpts(config, excerpts),
        statistics=[
            statistic
            for what in options.attention_on or ()
            for statistic in attention_on(read, what, tokenizer)
        ],
        arguments=json.loads(
            json.dumps(names | asdict(options) | dict(truncation or {}), default=str)
        ),
        batch_size=batch_size,
        facts=facts,
        warnings=lines,
    )


def _sizes(source: Opened, read: Text, options: Options) -> tuple[int, dict[str, str]]:
    """Sequences that run together, and what will run in words; warns of too little memory."""
    config, devices, dtype = source.config, source.devices, source.torch_dtype
    (count, context), longest = read.ids.shape, int(read.lengths.max())
    free = sum(map(free_bytes, devices))
    left = free - source.weight_bytes
    batch: dict[str, Any] = {
        "context": context,
        "width": dtype.itemsize,
        "device": devices[0].type,
        "scores": options.backend == "transformer-lens",  # it makes all scores of a layer
    }
    size = options.batch_size or sequences_at_once(
        config, sequences=count, free=left // len(devices), **batch
    )
    largest = max(
        pass_bytes(config, sequences=min(size, count), **batch),
        pass_bytes(config, sequences=fitted_sequences(count, context), logits=False, **batch),
    )
    bytes_used = source.weight_bytes + largest + LIBRARIES * (devices[0].type == "cpu")
    memory = f"about {bytes_used / 1e9:.1f} GB of {free / 1e9:.1f} GB free"
    if largest > left:
        warnings.warn(
            f"memory may not suffice: {memory}; a smaller --context, --batch-size 1 or "
            "--dtype bfloat16 take less",
            stacklevel=3,
        )
    shape, rows = config.get_text_config(), rows_for(options.rows, longest)
    heads = stated_number(config, "num_attention_heads", 0)
    layers = len(attending_layers(config))
    sizes = (source.parameters, heads, _head_dim(config) // 2, longest)
    fits = layers * fit_cost(*sizes, options.surrogates)
    quantized = "" if options.quantize is None else f"{options.quantize}, computed in "
    facts = {
        "model": f"{short_name(source.checkpoint.name)}, {shape.num_hidden_layers} layers x "
        f"{heads} heads, {source.parameters:,} parameters in {quantized}"
        + str(dtype).removeprefix("torch."),
        "tokens": f"{read.lengths.sum():,} tokens ({count:,} sequences of up to {longest:,})",
        "rows": "all rows" if rows == "all" else f"{rows:,} rows of each sequence",
        "batch": f"{size:,} sequence{'s' * (size > 1)} at a time, "
        f"{-(-count // size):,} batch{'es' * (count > size)}",
        "budget": f"fits and surrogates take as long as a plain pass of {fits:,.0f} tokens; "
        "in Python, rl.profile(..., budget=False) leaves them out",
        "memory": f"{memory} on {', '.join(map(str, devices))}",
    }
    return size, facts


def _head_dim(config: PreTrainedConfig) -> int:
    heads = stated_number(config, "num_attention_heads", 1)
    whole = config.get_text_config().hidden_size
    return stated_number(config, "head_dim", whole // max(1, heads))


def _sweep(
    asked: Mapping[str, Any],
    options: Options,
    source: Opened | LiveModel,
    documents: Sequence[str],
) -> tuple[dict[str, Any], Options]:
    """The options of a sweep and of its text, which is as long as the trained context.

    Or half as long, a quarter, ..., as memory, time and the text allow.
    """
    asked = {name: value for name, value in asked.items() if value is not None}
    context = options.context or stated_context(source.config) or LONGEST_DEFAULT_CONTEXT
    if context <= LONGEST_DEFAULT_CONTEXT:
        return asked, replace(options, context=context)
    if isinstance(source, Opened):
        parameters, device = source.parameters, source.devices[0]
    else:
        parameters, device = source.model.num_parameters(), source.device
    config, sizes = source.config, ("hidden_size", "num_hidden_layers")
    scores = math.prod(stated_number(config, size, 1) for size in sizes)

    def fits(context: int) -> bool:
        """Of 11 edits, each with 2 sequences or more and 8 of the farthest copies."""
        tokens = 11 * (max(2**14, 2 * context) + 11 * context)
        one: dict[str, Any] = {"context": context, "width": 4, "device": device.type}
        in_time = 2 * tokens * (parameters + scores * context) < OPERATIONS[device.type]
        in_memory = pass_bytes(config, sequences=1, **one) < free_bytes(device)
        return in_time and in_memory and 2 * context <= held  # tokens of the text

    if options.context is None:
        held = sum(len(encode(text[:PIECE], source.tokenizer)[1]) for text in documents)
        while context > LONGEST_DEFAULT_CONTEXT and not fits(context):
            context = max(context // 2, LONGEST_DEFAULT_CONTEXT)
    count = options.sequences or max(2, 2**14 // context)
    return OF_LONG | asked, replace(options, context=context, sequences=count)


def _count_edits(asked: Mapping[str, Any], config: PreTrainedConfig) -> int:
    """Edits of a sweep; raises what `truncate` raises, as far as the config tells."""
    of: dict[str, Any] = {"keep": KEEP, "bands": 0, "controls": 3, "heads": "*"}
    of |= {"ends": ("slow", "fast")}
    of |= {name: value for name, value in asked.items() if value is not None}
    parts = [rope.get("partial_rotary_factor") or 1 for rope in rope_parameters(config)]
    turned = min(int(_head_dim(config) * min(parts, default=1)) // 2, 512)
    planes = {plane: 1.0 / (1 + plane) for plane in range(turned)}
    sets = {name: of[name] for name in ("keep", "bands", "controls", "ends")}
    cuts = {cut.stopped for cut in plan_cuts([planes], **sets, seed=0)}
    names = ("num_hidden_layers", "num_attention_heads")
    layers, count = (stated_number(config, name, 0) for name in names)
    if layers and count and of["heads"] != "*":
        turn = attending_layers(config, turning=True)
        heads_by_layer(of["heads"], shape=(layers, count), among=turn, doing="rotate")
    return len(cuts) - 1


def _documents(
    text: Texts | None, model: str | Path | Model
) -> tuple[dict[str, Any], list[str] | Text | Tensor | Mapping[str, Any]]:
    """Documents, or the tokens that are passed instead; before them what run.json calls them.

    There a model in memory goes by its class, and a document that was passed by its length.
    """
    name = str(model) if isinstance(model, (str, Path)) else type(model).__name__
    tokens = (Text, Tensor, Mapping)
    parts: list[Any] = [text] if isinstance(text, (Path, str, *tokens)) else list(text or ())
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
    if not parts:
        documents = read_documents([sample_path(name.partition(":")[2] or "rope")])
    return {"model": name, "text": names}, documents


def _sequences(
    documents: list[str] | Text | Tensor | Mapping[str, Any],
    source: Opened | LiveModel,
    options: Options,
) -> Text:
    """Documents as tokens of the model, cut to the context; tokens as they are."""
    config = source.config.get_text_config()
    if not isinstance(documents, list):
        read = read_text(documents, config=config)
        check_ids(read, vocabulary=config.vocab_size)
        source_sentence = f"{len(read):,} sequences of tokens"
        return read if read.source else replace(read, source=source_sentence)
    maximum = stated_context(source.config)
    context = options.context
    if context is None:
        context = min(maximum or LONGEST_DEFAULT_CONTEXT, LONGEST_DEFAULT_CONTEXT)
    warn_beyond(context, maximum)
    sample: dict[str, Any] = {"sequences": options.sequences or 64, "seed": options.seed}
    sample |= {"context": context, "bos": options.bos}
    with warnings.catch_warnings():
        if options.sequences is None:  # then fewer than the default are no surprise
            warnings.filterwarnings("ignore", message=".*were asked for")
        read = tokenize(documents, source.tokenizer, **sample)
    check_ids(read, vocabulary=config.vocab_size)
    return read


def this_command() -> str:
    """The command of a shell that runs this again."""
    own = Path(sys.argv[0]).name in ("ropelens", "__main__.py")
    return shlex.join(["ropelens", *sys.argv[1:]] if own else ["python", *sys.argv])


@contextmanager
def listed_warnings(lines: list[str]) -> Iterator[None]:
    """Add the texts of all warnings of the block to `lines`; they are shown as they come."""
    with warnings.catch_warnings():  # which restores `showwarning`
        show = warnings.showwarning

        def note(message: Warning | str, *place: Any, **more: Any) -> None:
            lines.append(" ".join(str(message).split()))
            show(message, *place, **more)

        warnings.showwarning = note
        yield
