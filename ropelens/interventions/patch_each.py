"""Patches of every head, layer or position, one at a time, in batches of runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from ropelens.arguments import public
from ropelens.interventions.patch import Source, plan_patch
from ropelens.interventions.plane_patch import PatchedPart, PlanePatch, PositionPairs
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.hooked_call import replace_outputs
from ropelens.model.intervention import (
    HeadInputs,
    HeadOutputs,
    Intervention,
    ReplacedOutputs,
)
from ropelens.model.live_model import LiveModel
from ropelens.profiles.finite import warn_unless_finite
from ropelens.profiles.gradients import (
    AnswerDefinition,
    Number,
    answer_number,
    value_of,
)
from ropelens.profiles.measurement import TOKENS_PER_BATCH, one_sequence
from ropelens.rope.select import ALL_HEADS, Selection
from ropelens.runtime.progress import ProgressOption, Stage, display_of
from ropelens.text.prompts import Prompt, token_names
from ropelens.text.text import Text

Over = Literal["head", "layer", "position"]
MOST_LOGITS = 2**26  # logits of a batch, if an answer needs the logits of all positions


@public
def patch_each(
    model: Model,
    text_or_tokens: Prompt,
    source: Source,
    answer: AnswerDefinition,
    *,
    over: Over = "head",
    heads: str = ALL_HEADS,
    planes: Selection | None = None,
    of: PatchedPart = "both",
    tokenizer: Any = None,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Patch every head, layer or position from another prompt, and measure the answer.

    Each run patches one head, all heads of one layer, or all heads of one layer at one
    position, always among `heads`. `attribute_planes` explains `text_or_tokens` and `answer`,
    and `patch_planes` the other arguments. The runs are batched. Returns a dataset:

    - `change` (layer, head), (layer) or (layer, position), in units of the answer: answer of
      the patched run minus `attrs["answer"]`. NaN if nothing is patched.
      `attrs["source_answer"]` is the answer to the source.
    - coordinate `token` (position): tokens of the prompt.

    `results.to_dataframe()` is a table, and `plot_effects(results)` a heat map. Raises the
    errors of `attribute_planes` and `patch_planes`.
    """
    live = as_live_model(model, tokenizer)
    tokenizer = tokenizer or live.tokenizer
    measurement = one_sequence(live, text_or_tokens, tokenizer)
    text = measurement.text
    source_text = one_sequence(live, source, tokenizer).text
    number = answer_number(answer, tokenizer, live.vocabulary)
    whole = plan_patch(
        measurement.rotation, source_text, planes=planes, heads=heads, of=of
    )
    indices = _patched_indices(whole, over, min(text.context, source_text.context))
    patches = [_part_of(whole, over, index) for index in indices]
    with display_of(progress)(Stage("patching", len(patches) * text.context)) as step:
        answers = patched_answers(live, text, number, patches, step)
    unpatched = answer_to(live, text, number)
    warn_unless_finite(
        measurement.runs(), live.model, {"change": answers, "answer": unpatched}
    )
    dataset = _table_of_changes(live, text, over)
    dataset["change"].values[tuple(np.array(indices).T)] = np.array(answers) - unpatched
    if over == "position":
        names = np.array(token_names(text.ids[0], tokenizer), dtype=object)
        dataset = dataset.assign_coords(token=("position", names))
    attrs = {
        "answer": unpatched,
        "over": over,
        "of": of,
        "source_answer": answer_to(live, source_text, number),
    }
    return dataset.assign_attrs(
        {"kind": "patches"} | measurement.result_attributes() | attrs
    )


def _patched_indices(whole: PlanePatch, over: Over, positions: int) -> list[list[int]]:
    """Indices of what each run patches: [layer, head], [layer] or [layer, position]."""
    if over == "head":
        return whole.chosen.nonzero().tolist()
    indices = []
    for layer in whole.chosen.any(1).nonzero()[:, 0].tolist():
        if over == "layer":
            indices.append([layer])
        else:
            indices += [[layer, position] for position in range(positions)]
    return indices


def _part_of(whole: PlanePatch, over: Over, index: list[int]) -> PlanePatch:
    """The part of the patch `whole` that one run applies."""
    layer = index[0]
    chosen = torch.zeros_like(whole.chosen)
    if over == "head":
        chosen[layer, index[1]] = True
    else:
        chosen[layer] = True
    pairs = whole.pairs
    if over == "position":
        position = torch.tensor(index[1:], dtype=torch.long, device="cpu")
        pairs = PositionPairs(position, position)
    return replace(whole, chosen=chosen & whole.chosen, pairs=pairs)


def _table_of_changes(live: LiveModel, text: Text, over: Over) -> xr.Dataset:
    """A dataset with the variable `change`, which is NaN."""
    sizes = {"layer": live.layers}
    if over == "head":
        sizes["head"] = live.heads
    if over == "position":
        sizes["position"] = text.context
    attrs = {
        "long_name": f"change of the answer if one {over} is patched",
        "units": "1",
    }
    change = np.full([*sizes.values()], np.nan)
    return xr.Dataset(
        {"change": ([*sizes], change, attrs)},
        {dim: range(size) for dim, size in sizes.items()},
    )


@torch.no_grad()
def answer_to(live: LiveModel, text: Text, number: Number) -> float:
    return float(value_of(live, text, number))


@torch.no_grad()
def patched_answers(
    live: LiveModel,
    text: Text,
    number: Number,
    patches: Sequence[PlanePatch],
    progress: Callable[[int], Any] = lambda _: None,
) -> list[float]:
    """The answer of one sequence under each of the patches, several of them in a batch."""
    size = TOKENS_PER_BATCH[live.device.type] // text.context
    if not number.last:
        size = min(size, MOST_LOGITS // (live.vocabulary * text.context))
    size = max(size, 1)
    answers: list[float] = []
    for start in range(0, len(patches), size):
        rows = RowPatches(patches[start : start + size])
        ids = text.ids.expand(len(rows.patches), -1)
        hidden = None
        if text.hidden is not None:
            hidden = text.hidden.expand(ids.shape)
        with live.intervene(rows):
            logits = live.forward(ids, hidden=hidden, last=number.last)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        answers += [float(number.of(of_row)) for of_row in logits]
        progress(ids.numel())
    return answers


@dataclass(frozen=True)
class RowPatches(Intervention):
    """Apply one patch to each sequence of a batch."""

    patches: Sequence[PlanePatch]

    def change_input(self, inputs: HeadInputs) -> Float[Tensor, "batch _ slot _"]:
        if not any(patch.chosen[inputs.layer].any() for patch in self.patches):
            return inputs.vectors
        vectors = self._rows(inputs.vectors)
        tokens = self._rows(inputs.tokens)
        positions = self._rows(inputs.positions)
        changed: list[Tensor] = []
        for row, patch in enumerate(self.patches):
            of_row = HeadInputs(
                inputs.layer, inputs.name, vectors[row], tokens[row], positions[row]
            )
            changed.append(patch.change_input(of_row))
        # One vector for each query head, if heads of a group differ in some row.
        heads = max(x.shape[1] for x in changed)
        return torch.cat(
            [x.repeat_interleave(heads // x.shape[1], dim=1) for x in changed]
        )

    def replace_output(self, outputs: HeadOutputs) -> ReplacedOutputs:
        output = self._rows(outputs.output)
        real = self._rows(outputs.real)
        tokens = self._rows(outputs.tokens)
        rows = [
            HeadOutputs(outputs.layer, output[row], real[row], tokens[row])
            for row in range(len(self.patches))
        ]
        changed = [
            replace_outputs([patch], of_row)
            for patch, of_row in zip(self.patches, rows, strict=True)
        ]
        all_heads = torch.ones(outputs.output.shape[2], dtype=torch.bool, device="cpu")
        return ReplacedOutputs(all_heads, torch.cat(changed))

    def _rows(self, table: Tensor) -> Sequence[Tensor]:
        """The rows of a table that has one row, or a row for each sequence."""
        return table.expand(len(self.patches), *table.shape[1:]).split(1)
