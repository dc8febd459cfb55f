"""Plan of a truncation sweep: how long its sequences are, and how many edits it tries."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from ropelens import config_facts
from ropelens.analysis.inputs import DEFAULT_CONTEXT, ModelSource
from ropelens.analysis.options import Options
from ropelens.analysis.workload import head_dim
from ropelens.checkpoints.load import Opened
from ropelens.interventions.cuts import PlaneSweep
from ropelens.interventions.measure_names import wanted_measures
from ropelens.measured_rotation.layer_kinds import stated_windows
from ropelens.rope.select import heads_by_layer
from ropelens.runtime.devices import free_bytes, pass_bytes
from ropelens.text.tokenize import PIECE, encode

LONG_SWEEP: Mapping[str, object] = {  # the default arguments for longer text
    "keep": (1, 0.75, 0.5, 0.25, 0),
    "controls": 1,
    "measures": ("loss", "induction", "change", "copying"),
}
LONG_SWEEP_TOKENS = 2**14  # of the text, if the number of sequences is not given
OPERATIONS = {"cpu": 8e14, "cuda": 1e17}  # of a sweep by default: about two hours
EDITS = 11  # of a sweep by default
CONTEXTS_COPIED = 11  # by an edit, in 8 draws of the farthest copies
MOST_PLANES = 512  # whose sets are counted for the plan


def context_of_sweep(options: Options, config: PreTrainedConfig) -> int:
    """The context that was asked for, or else the trained context."""
    return options.context or config_facts.stated_context(config) or DEFAULT_CONTEXT


def arguments_of_sweep(
    truncation: dict[str, Any], options: Options, config: PreTrainedConfig
) -> dict[str, Any]:
    """The arguments of `truncate`, with fewer edits by default if the text is long."""
    if context_of_sweep(options, config) <= DEFAULT_CONTEXT:
        return truncation
    return {**LONG_SWEEP, **truncation}


def options_of_sweep(
    options: Options, source: ModelSource, documents: Sequence[str]
) -> Options:
    """The options with the context of the sweep, and the number of long sequences.

    A trained context is halved until the sweep fits into two hours and memory.
    """
    context = context_of_sweep(options, source.config)
    if context <= DEFAULT_CONTEXT:
        return replace(options, context=context)
    if options.context is None:
        limits = SweepLimits.of(source, documents)
        while context > DEFAULT_CONTEXT and not limits.allow(context):
            context = max(context // 2, DEFAULT_CONTEXT)
    sequences = options.sequences or max(2, LONG_SWEEP_TOKENS // context)
    return replace(options, context=context, sequences=sequences)


@dataclass(frozen=True, kw_only=True)
class SweepLimits:
    """Limits of the context of a sweep: time, free memory, and the length of the text.

    A token takes `parameters` operations, and `width_of_scores` more for each key.
    """

    config: PreTrainedConfig
    device: torch.device
    parameters: int
    width_of_scores: int
    text_tokens: int

    @classmethod
    def of(cls, source: ModelSource, documents: Sequence[str]) -> "SweepLimits":
        config = source.config
        if isinstance(source, Opened):
            parameters = source.parameters
            device = source.devices[0]
        else:
            parameters = source.model.num_parameters()
            device = source.device
        hidden = config_facts.stated_number(config, "hidden_size", 1)
        layers = config_facts.stated_number(config, "num_hidden_layers", 1)
        text_tokens = 0
        for document in documents:
            ids = encode(document[:PIECE], source.tokenizer).ids
            text_tokens += len(ids)
        return cls(
            config=config,
            device=device,
            parameters=parameters,
            width_of_scores=hidden * layers,
            text_tokens=text_tokens,
        )

    def allow(self, context: int) -> bool:
        """Check the cost of all edits, each on 2 sequences or more and the farthest copies."""
        text = max(LONG_SWEEP_TOKENS, 2 * context)
        tokens = EDITS * (text + CONTEXTS_COPIED * context)
        operations = 2 * tokens * (self.parameters + self.width_of_scores * context)
        needed = pass_bytes(
            self.config,
            sequences=1,
            context=context,
            width=4,
            device=self.device.type,
        )
        in_time = operations < OPERATIONS[self.device.type]
        in_memory = needed < free_bytes(self.device)
        return in_time and in_memory and 2 * context <= self.text_tokens


def describe_sweep(sweep: PlaneSweep, config: PreTrainedConfig) -> str:
    """The work of a sweep. Raises the errors of `truncate`, as far as the config suffices."""
    edits = _count_edits(sweep, config)
    _check_heads(sweep, config)
    measures = sorted(wanted_measures(sweep.measures))
    trained = config_facts.stated_context(config) or "?"
    return f"about {edits} edits ({', '.join(measures)}), trained for {trained} tokens"


def _count_edits(sweep: PlaneSweep, config: PreTrainedConfig) -> int:
    """The number of edits if all planes of a kind of layers have their own wavelength."""
    ropes = config_facts.rope_parameters(config)
    rotated = min((rope.get("partial_rotary_factor") or 1 for rope in ropes), default=1)
    coordinates = int(head_dim(config) * rotated)
    planes = min(coordinates // 2, MOST_PLANES)
    wavelengths = {plane: 1.0 / (1 + plane) for plane in range(planes)}
    cuts = sweep.cuts({"all": [wavelengths]}, seed=0)
    edits = len({cut.stopped for cut in cuts}) - 1
    if sweep.heads is not None:
        return edits
    rotating = config_facts.attending_layers(config, turning=True)
    kinds = stated_kinds(config)
    return edits * max(1, len({kinds[layer] for layer in rotating}))


def _check_heads(sweep: PlaneSweep, config: PreTrainedConfig) -> None:
    """Raise `BadArgument` for heads that the model lacks, as far as its config states them."""
    layers = config_facts.stated_number(config, "num_hidden_layers", 0)
    heads = config_facts.stated_number(config, "num_attention_heads", 0)
    if sweep.heads is None or not (layers and heads):
        return
    if "-" in re.sub(r"[0-9]+-[0-9]+", "", sweep.heads):
        return  # such as full-2: only a measurement counts the kinds of one name
    able = torch.zeros(layers, heads, dtype=torch.bool, device="cpu")
    able[config_facts.attending_layers(config, turning=True)] = True
    heads_by_layer(sweep.heads, able, lambda: stated_kinds(config), doing="rotate")


def stated_kinds(config: PreTrainedConfig) -> list[str]:
    """Kind of each layer that the configuration states, with the names of a profile."""
    context = config_facts.stated_context(config) or DEFAULT_CONTEXT
    settings = config.get_text_config().to_dict()
    has_windows = bool(stated_windows(config.get_text_config(), context))
    attends = config_facts.attending_layers(config)
    rotates = config_facts.attending_layers(config, turning=True)
    kinds = []
    for layer, layer_type in enumerate(config_facts.layer_types(config)):
        mask = layer_type.removesuffix("_attention")
        if not settings.get("layer_types"):
            mask = "sliding"  # all layers have the window, if there is one
        if layer not in attends:
            kinds.append("recurrent")
        elif layer not in rotates:
            kinds.append("none")
        elif mask in ("sliding", "chunked") and has_windows:
            kinds.append(mask)
        else:
            kinds.append("full")
    return kinds
