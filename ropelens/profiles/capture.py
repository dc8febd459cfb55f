"""Capture everything that some heads compute on one short sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from ropelens.arguments import Count, public
from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.model.output_projection import (
    LogitDirections,
    logit_directions,
    output_projections,
    weight_of,
)
from ropelens.profiles.captured_head import CapturedHead
from ropelens.profiles.finite import warn_unless_finite
from ropelens.profiles.measurement import Measurement, one_sequence
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, heads_by_layer
from ropelens.schema.capture import CAPTURE, CAPTURE_INDICES
from ropelens.schema.rows import Variable, labelled
from ropelens.text.prompts import Prompt, Token, TokenNames, token_id, token_names

# Variables without NaN, which other variables have if a query does not see a key.
FINITE = {"attention", "value_norm", "write_norm", "written_norm", "logit"}


@public
def capture(
    model: Model,
    text_or_tokens: Prompt | list[Prompt],
    *,
    heads: str = ALL_HEADS,
    tokenizer: TokenNames | None = None,
    runner_up: Count | None = None,
    values: bool = False,
    logits_of: Sequence[Token] = (),
    max_bytes: Count = 2**31,
) -> xr.Dataset:
    """Capture what some heads compute on one sequence, by plane and by pair of tokens.

    Parameters
    ----------
    model
        The model runs once, unmodified. Under `edit_rope` the capture shows the edited model,
        even if heads that share a key rotate differently, and under `silence_heads` the heads
        before they are silenced.
    text_or_tokens
        A string, token ids, a BatchEncoding or a `Text` of one sequence. A list of these adds a
        dimension `prompt`; shorter prompts end in NaN. The `tokenizer` reads special tokens in
        a string, such as "<|im_start|>", as special tokens, and puts its BOS first, unless the
        string begins with a special token.
    heads
        List of heads, such as "2.3,4.*" (layer.head). With grouped keys these are query heads.
    runner_up
        Position of a key. If it is given, contrasts compare each key with this key.
    values
        Whether to add the lengths of values and outputs.
    logits_of
        Tokens, as ids or as texts of one token, whose logits are attributed to keys.
    max_bytes
        Larger captures raise `BadArgument`. 12 heads of 64 planes and 500 tokens take 1.6 GB.

    Returns
    -------
    Dataset over `head` ("2.3", with the coordinates `layer` and `head_of_layer`), `query` and
    `key` (positions, with the texts `query_token` and `key_token`), `frequency` (0 rotates
    fastest; coordinates that RoPE does not rotate are the last frequency) and `part` (real and
    imaginary). Layers with fewer planes end in NaN.

    - `q_still` (head, query, frequency, part), `k_still` (head, key, frequency, part), in model
      units: query and key without their rotation. NaN for coordinates that do not rotate.
    - `q_norm` (head, query, frequency), `k_norm` (head, key, frequency), in model units. Each
      head has the keys that it reads.
    - `score` (head, query, key), in nats, before a soft-cap, and `contribution` (head,
      frequency, query, key), in nats: scale Re(q~ conj(k~) exp(i inv_freq (query - key))).
      Contributions sum over frequency to the score. NaN if the query does not see the key.
    - `contrast` (head, frequency, query, key), in nats: the contribution to this key minus the
      mean contribution to the other keys of the row, by attention. With `runner_up` it is minus
      the contribution to that key, and contrasts sum to log-odds.
    - `attention` (head, query, key), after the soft-cap; 0 if the key is not seen. Rows sum to
      less than 1 if a sink logit takes part.
    - with `values`, in model units: the lengths `value_norm` (head, key) of v, `write_norm`
      (head, key) of v W_O, and `written_norm` (head, query) of sum_j attention_ij v_j W_O.
    - `logit` (head, answer, query, key), with `logits_of`: attention_ij v_j W_O through the
      final norm, with its scale frozen, onto the unembedding of the answer, in units of the
      logits of the model before a cap. Constant factors on the way (Cohere, Granite) are
      included; `attrs["logit_factor"]` is the factor on all logits. The sum over keys is the
      direct effect of the head (Elhage et al. 2021, "A Mathematical Framework for Transformer
      Circuits").
    - coordinates `inv_freq` and `wavelength` (head, frequency), and `scale` (head).

    Raises `BadText` for a text of fewer than 3 tokens or the name of a file, and
    `UnsupportedModel` if a gate follows the heads (with `values`), a norm follows the output
    projection (with `logits_of`), or `profile` refuses the model. Warns if the attention or
    another result is not finite.
    """
    live = as_live_model(model, tokenizer)
    tokenizer = tokenizer or live.tokenizer
    if isinstance(text_or_tokens, list):
        prompts = text_or_tokens
    else:
        prompts = [text_or_tokens]
    if not prompts:
        raise BadArgument(
            "There is no prompt to capture.", hint="a list of one or more"
        )
    measurements = [one_sequence(live, prompt, tokenizer) for prompt in prompts]
    kinds = measurements[0].rotation.kind_names
    chosen = heads_by_layer(heads, live.attending_heads, kinds)
    tokens = [logits_of] if isinstance(logits_of, str) else logits_of
    wanted = Wanted(
        heads=[(layer, head) for layer, head in chosen.nonzero().tolist()],
        answers=[token_id(token, tokenizer, live.vocabulary) for token in tokens],
        values=values,
        runner_up=runner_up,
    )
    check_memory(wanted, measurements, max_bytes)
    captures = []
    for measurement in measurements:
        run = CaptureRun(measurement, wanted)
        text = measurement.text
        live.record_calls(text.ids, run.write_call, hidden=text.hidden)
        warn_unless_finite(measurement.runs(), live.model, run.finite_arrays())
        attrs = {"kind": "capture"} | measurement.result_attributes()
        if run.directions is not None:
            attrs["logit_factor"] = run.directions.logit_factor
        captures.append(run.dataset(tokenizer).assign_attrs(attrs))
    if isinstance(text_or_tokens, list):
        return concatenate(captures)
    return captures[0]


@dataclass(frozen=True)
class Wanted:
    """The contents of a capture: heads as (layer, head), and the ids of the answers."""

    heads: list[tuple[int, int]]
    answers: list[int]
    values: bool
    runner_up: int | None

    def variables(self) -> list[Variable]:
        """The variables of `CAPTURE` that are wanted; logits of answers need the values."""
        unwanted: set[str] = set()
        if not (self.values or self.answers):
            unwanted.update(("value_norm", "write_norm", "written_norm"))
        if not self.answers:
            unwanted.add("logit")
        return [variable for variable in CAPTURE if variable.name not in unwanted]

    def sizes(self, length: int, planes: Sequence[Planes]) -> dict[str, int]:
        """Sizes of the arrays by dim, for a text of `length` tokens."""
        return {
            "head": len(self.heads),
            "query": length,
            "key": length,
            "part": 2,
            "frequency": max(planes[layer].terms for layer, _ in self.heads),
            "answer": len(self.answers),
        }

    def shapes(self, sizes: dict[str, int]) -> dict[str, list[int]]:
        """Shape of the array of each variable, head first."""
        return {
            variable.name: [sizes[dim] for dim in variable.dims]
            for variable in self.variables()
        }


class CaptureRun:
    """Arrays of some heads, head first, and the pass of the model that fills them."""

    def __init__(self, measurement: Measurement, wanted: Wanted) -> None:
        live = measurement.live
        text = measurement.text
        self.text = text
        self.model_dtype = live.model.dtype
        self.planes = measurement.rotation.planes(text.context)
        self.heads = wanted.heads
        self.answers = wanted.answers
        self.runner_up = wanted.runner_up
        self.arrays: dict[str, Tensor] = {}
        sizes = wanted.sizes(text.context, self.planes)
        for name, shape in wanted.shapes(sizes).items():
            self.arrays[name] = torch.full(
                shape, torch.nan, dtype=array_dtype(live), device="cpu"
            )
        self.projections = {}
        if "write_norm" in self.arrays:
            self.projections = output_projections(live)
        self.directions: LogitDirections | None = None
        if self.answers:
            self.directions = logit_directions(
                live, self.projections, text.ids, self.answers, text.hidden
            )

    def write_call(self, call: AttentionCall) -> None:
        """Write the numbers of the chosen heads of a layer. Each layer has one call."""
        in_layer: dict[int, int] = {}  # the head by its index in the arrays
        for index, (layer, head) in enumerate(self.heads):
            if layer == call.layer:
                in_layer[index] = head
        if not in_layer:
            return
        count = call.query.shape[1]
        planes = self.planes[call.layer]
        inv_freq = planes.inv_freq.expand(count, -1)
        weight = self.output_weight(call)
        directions = None
        if self.directions is not None:
            directions = self.directions.of_layer(call.layer)
        for index, head in in_layer.items():
            # Views of the head, to which its numbers are written.
            arrays = {name: array[index] for name, array in self.arrays.items()}
            captured = CapturedHead(
                call, head, replace(planes, inv_freq=inv_freq[head])
            )
            captured.write_vectors(arrays)
            captured.write_scores(arrays, runner_up=self.runner_up)
            if weight is not None:
                captured.write_outputs(arrays, weight[:, head], directions)

    def output_weight(
        self, call: AttentionCall
    ) -> Float[Tensor, "hidden head feature"] | None:
        """Weights of the output projection of the layer by head, if they are needed."""
        if not self.projections:
            return None
        weight = weight_of(self.projections[call.layer], self.model_dtype)
        return weight.unflatten(1, (call.query.shape[1], -1))

    def finite_arrays(self) -> dict[str, Tensor]:
        """The arrays by name that have no NaN, except for a model that computes it."""
        names = self.arrays.keys() & FINITE
        return {name: self.arrays[name] for name in sorted(names)}

    def dataset(self, tokenizer: TokenNames | None) -> xr.Dataset:
        """The arrays with their labels, after the model has run."""
        length = self.text.context
        names = np.array(token_names(self.text.ids[0], tokenizer), dtype=object)
        indices = {
            "query": np.arange(length),
            "key": np.arange(length),
            "query_token": names,
            "key_token": names,
            "head": np.array([f"{layer}.{head}" for layer, head in self.heads]),
            "layer": np.array([layer for layer, _ in self.heads]),
            "head_of_layer": np.array([head for _, head in self.heads]),
        }
        if self.answers:
            answers = token_names(self.answers, tokenizer)
            indices["answer"] = np.array(answers, dtype=object)
        arrays = {name: array.numpy() for name, array in self.arrays.items()}
        dataset = xr.Dataset(
            labelled(arrays, CAPTURE), labelled(indices, CAPTURE_INDICES)
        )
        return dataset.set_coords(["inv_freq", "wavelength", "scale"])


def array_dtype(live: LiveModel) -> torch.dtype:
    """The dtype of captured arrays: float32, or the dtype of a model with more digits."""
    return torch.promote_types(live.model.dtype, torch.float32)


def check_memory(
    wanted: Wanted, measurements: Sequence[Measurement], max_bytes: int
) -> None:
    """Raise `BadArgument` if the captures, padded to the longest, exceed `max_bytes`."""
    longest = max(measurements, key=lambda measurement: measurement.text.context)
    length = longest.text.context
    sizes = wanted.sizes(length, longest.rotation.planes(length))
    shapes = wanted.shapes(sizes)
    numbers = sum(int(np.prod(shape)) for shape in shapes.values())
    prompts = len(measurements)
    total = prompts * numbers * array_dtype(longest.live).itemsize
    if total <= max_bytes:
        return
    seen = (
        f"{sizes['head']} heads, {sizes['query']:,} tokens, "
        f"{sizes['frequency']} frequencies"
    )
    if prompts > 1:
        seen = f"{prompts} prompts, {seen}"
    raise BadArgument(
        f"This capture takes {total:,} bytes, more than the {max_bytes:,} allowed.",
        seen=seen,
        hint=f"fewer heads, a shorter text, or max_bytes={total}",
    )


def concatenate(captures: Sequence[xr.Dataset]) -> xr.Dataset:
    """Concatenate captures along `prompt`, padded to the longest."""
    tokens = ("query_token", "key_token")
    together = xr.concat(
        [part.reset_coords(tokens) for part in captures],
        pd.RangeIndex(len(captures), name="prompt"),
        combine_attrs="drop_conflicts",
        coords="different",
        compat="equals",
        join="outer",
    )
    names = {name: together[name].fillna("") for name in tokens}
    return together.assign(names).set_coords(tokens)
