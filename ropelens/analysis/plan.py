"""Plan of an analysis: inputs and work, which are known before weights are read."""

import json
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ropelens.analysis.inputs import (
    GivenText,
    ModelSource,
    TextSource,
    cut_into_sequences,
    name_of_model,
    open_source,
    read_given_text,
)
from ropelens.analysis.options import Options
from ropelens.analysis.sweep_plan import (
    arguments_of_sweep,
    describe_sweep,
    options_of_sweep,
)
from ropelens.analysis.workload import Workload
from ropelens.arguments import public
from ropelens.checkpoints.identity import identity
from ropelens.checkpoints.load import Opened
from ropelens.checkpoints.names import short_name
from ropelens.interventions.cuts import PlaneSweep
from ropelens.interventions.measure_names import wanted_measures
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.bridge import BridgeModel
from ropelens.model.live_model import LiveModel
from ropelens.profiles.excerpt_choice import check_excerpts
from ropelens.profiles.measurement import versions
from ropelens.profiles.measures import find_statistics
from ropelens.profiles.token_sets import attention_on
from ropelens.runtime.keys import Key
from ropelens.schema.rows import Statistic
from ropelens.text.text import Text
from ropelens.text.tokenize import prompt_tokens


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

    @property
    def key(self) -> Key:
        """The key of the results; `saved_key` reads it from a run.json."""
        return Key(
            {
                "model": self.model["fingerprint"],
                "text": self.text.documents_sha256,
                "arguments": self.arguments,
                "versions": self.versions,
            }
        )

    @property
    def is_bridged(self) -> bool:
        """Whether TransformerLens runs the model."""
        is_bridge = isinstance(self.source, BridgeModel)
        return is_bridge or self.options.uses_bridge

    @property
    def versions(self) -> dict[str, str]:
        """The versions on which the numbers depend."""
        return versions(bridged=self.is_bridged)

    def read(self) -> LiveModel:
        """The model with its weights."""
        if isinstance(self.source, LiveModel):
            return self.source
        return as_live_model(self.source.read(), self.source.tokenizer)

    def seconds_per_token(self) -> float:
        """Time of a plain pass over one sequence, measured with the weights."""
        live = self.read()
        ids = self.text.ids[:1]
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
    sweep = None if truncation is None else _check_sweep_arguments(truncation)
    messages: list[str] = []
    with keep_warnings(messages):
        given = read_given_text(text, model)
        source = open_source(model, options, tokenizer=tokenizer, run=run)
        if sweep is not None and isinstance(given.content, list):
            sweep = arguments_of_sweep(sweep, options, source.config)
            options = options_of_sweep(options, source, given.content)
        sequences = cut_into_sequences(given, source, options)
        prompts = [
            prompt_tokens(prompt, source.tokenizer, options.bos)
            for prompt in options.prompts or ()
        ]
        batch_size = options.batch_size
        facts: dict[str, str] = {}
        cost = 0.0
        if isinstance(source, Opened):
            workload = Workload(source=source, text=sequences, options=options)
            _warn_of_memory(workload)
            batch_size = workload.batch_size
            facts = workload.facts
            cost = workload.cost
        if sweep is not None:
            facts["sweep"] = describe_sweep(PlaneSweep(**sweep), source.config)
    return Plan(
        source=source,
        text=sequences,
        options=options,
        truncation=sweep,
        excerpts=check_excerpts(source.config, prompts),
        statistics=_statistics(sequences, options, source.tokenizer),
        arguments=_arguments(model, given, options, sweep or {}),
        batch_size=batch_size,
        facts=facts,
        warnings=messages,
        cost=cost,
    )


def _check_sweep_arguments(truncation: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `truncate` that are given; raises `BadArgument` if one is wrong."""
    given = {name: value for name, value in truncation.items() if value is not None}
    sweep = public(PlaneSweep)(**given)
    wanted_measures(sweep.measures)
    return given


def _warn_of_memory(workload: Workload) -> None:
    if shortage := workload.memory_shortage:
        warnings.warn(shortage, stacklevel=4)


def _statistics(text: Text, options: Options, tokenizer: Any) -> list[Statistic]:
    """The statistics that the options add to a profile."""
    statistics: list[Statistic] = []
    for tokens in options.attention_on or ():
        statistics += attention_on(text, tokens, tokenizer)
    return statistics + find_statistics(options.statistics or ())


def _arguments(
    model: str | Path | Model,
    given: GivenText,
    options: Options,
    sweep: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of `analyze` for run.json, without further options of a command."""
    arguments = {
        "model": name_of_model(model),
        "text": given.names,
        **{option.name: getattr(options, option.name) for option in fields(Options)},
        **sweep,
    }
    return json.loads(json.dumps(arguments, default=str))


@contextmanager
def keep_warnings(messages: list[str]) -> Iterator[None]:
    """Append the text of every warning in the block to `messages`, and show the warning."""
    with warnings.catch_warnings():  # restores `showwarning`
        show = warnings.showwarning

        def collect(message: Warning | str, *place: Any, **options: Any) -> None:
            words = str(message).split()
            messages.append(" ".join(words))
            show(message, *place, **options)

        warnings.showwarning = collect
        yield
