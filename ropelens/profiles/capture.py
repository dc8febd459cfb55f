"""Capture everything that some heads compute on one short sequence."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from ropelens.arguments import Count, public
from ropelens.attention.call import AttentionCall, attention_map
from ropelens.attention.formulas import contrasts
from ropelens.errors import BadArgument
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.model.output_projection import (
    logit_directions,
    output_projections,
    weight_of,
)
from ropelens.profiles.measurement import Measurement
from ropelens.rope.planes import Planes, unrotate
from ropelens.rope.select import ALL_HEADS, heads_by_layer
from ropelens.schema import CAPTURE, CAPTURE_INDICES, Variable, labelled
from ropelens.text.documents import check_document
from ropelens.text.prompts import Prompt, Token, TokenNames, token_id, token_names
from ropelens.text.tokenize import prompt_tokens, warn_beyond


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
      final norm, with its scale frozen, onto the unembedding of the answer. The sum over keys
      is the direct effect of the head (Elhage et al. 2021, "A Mathematical Framework for
      Transformer Circuits"), before logits are scaled or capped.
    - coordinates `inv_freq` and `wavelength` (head, frequency), and `scale` (head).

    Raises `BadText` for a text of fewer than 3 tokens or the name of a file, and
    `UnsupportedModel` if a gate follows the heads (with `values`), a norm follows the output
    projection (with `logits_of`), or `profile` refuses the model.
    """
    live = as_live_model(model, tokenizer)
    tokenizer = tokenizer or live.tokenizer
    if text_or_tokens == []:
        raise BadArgument(
            "There is no prompt to capture.", hint="a list of one or more"
        )
    options: dict[str, Any] = {"runner_up": runner_up}
    if isinstance(text_or_tokens, list):
        options |= {"heads": heads, "tokenizer": tokenizer, "values": values}
        options |= {
            "logits_of": logits_of,
            "max_bytes": max_bytes // len(text_or_tokens),
        }
        return _concatenate(
            [capture(live, prompt, **options) for prompt in text_or_tokens]
        )
    measurement = one_sequence(live, text_or_tokens, tokenizer)
    text, length = measurement.text, measurement.text.context
    rotation = measurement.rotation
    chosen = heads_by_layer(heads, live.attending_heads, rotation.kind_names)
    planes = rotation.planes(length)
    answer_tokens = [logits_of] if isinstance(logits_of, str) else logits_of
    answers = [token_id(token, tokenizer, live.vocabulary) for token in answer_tokens]
    places = chosen.nonzero().tolist()
    sizes = {"head": len(places), "query": length, "key": length, "part": 2}
    sizes["frequency"] = max(planes[layer].terms for layer, _ in places)
    sizes["answer"] = len(answers)
    unasked = (
        set() if values or answers else {"value_norm", "write_norm", "written_norm"}
    )
    unasked |= set() if answers else {"logit"}
    rows = [row for row in CAPTURE if row.name not in unasked]
    dtype = torch.promote_types(live.model.dtype, torch.float32)
    arrays = _allocate(rows, sizes, dtype, max_bytes=max_bytes)
    projections = output_projections(live) if "write_norm" in arrays else {}
    if answers:
        options["toward"] = logit_directions(
            live, projections, text.ids, answers, text.hidden
        )

    def see(call: AttentionCall) -> None:
        count = call.query.shape[1]  # heads of the layer
        inv_freq = planes[call.layer].inv_freq.expand(count, -1)
        if projections:
            weight = weight_of(projections[call.layer], live.model.dtype)
            weight = weight.unflatten(1, (count, -1))
        for place, (layer, head) in enumerate(places):
            if layer == call.layer:
                into = {name: array[place] for name, array in arrays.items()}
                of_head = replace(planes[layer], inv_freq=inv_freq[head])
                options["projection"] = weight[:, head] if projections else None
                write_head(call, head, of_head, into, **options)

    live.record_calls(text.ids, see, hidden=text.hidden)
    names = np.array(token_names(text.ids[0], tokenizer), dtype=object)
    indices = {"query": np.arange(length), "key": np.arange(length)}
    indices |= {"query_token": names, "key_token": names}
    indices["head"] = np.array([f"{layer}.{head}" for layer, head in places])
    indices["layer"], indices["head_of_layer"] = np.array(places).T
    if answers:
        indices["answer"] = np.array(token_names(answers, tokenizer), dtype=object)
    labels = labelled({name: array.numpy() for name, array in arrays.items()}, CAPTURE)
    attrs = {"kind": "capture"} | measurement.attributes
    dataset = xr.Dataset(labels, labelled(indices, CAPTURE_INDICES), attrs)
    return dataset.set_coords(["inv_freq", "wavelength", "scale"])


def write_head(
    call: AttentionCall,
    head: int,
    planes: Planes,
    into: Mapping[str, Tensor],
    *,
    runner_up: int | None = None,
    projection: Float[Tensor, "hidden feature"] | None = None,
    toward: Iterable[Float[Tensor, "query hidden"]] = (),
) -> None:
    """Write the vectors of one query head by plane, and all terms of its scores, to `into`.

    With the output `projection`, also write the lengths of v, v W_O and A v W_O, and the
    component of A v W_O in each direction of `toward`.
    """
    call = call.of_heads(torch.tensor([head]))
    attention, terms = attention_map(call)[0, 0], planes.terms
    q, k = (x[0, 0].to(attention.dtype) for x in (call.query, call.key))
    term_of, hidden = planes.term_of, ~call.visibility.sees()[0].to(q.device)

    def scores(chosen: Bool[Tensor, " coordinate"]) -> Float[Tensor, "query key"]:
        return (call.scale * q[:, chosen] @ k[:, chosen].mT).masked_fill(
            hidden, torch.nan
        )

    for side, x in (("q", q), ("k", k)):
        into[f"{side}_norm"][:, :terms] = planes.norms(x)
        still = unrotate(x, torch.arange(len(x)), planes)
        by_plane = into[f"{side}_still"][:, : len(planes.inv_freq)]
        by_plane[..., 0], by_plane[..., 1] = (
            still[:, planes.first],
            still[:, planes.second],
        )
    into["score"].copy_(scores(term_of >= 0))
    for term in range(terms):
        into["contribution"][term].copy_(scores(term_of == term))
    into["attention"].copy_(attention)
    contrast = contrasts(into["contribution"], into["attention"], runner_up=runner_up)
    into["contrast"].copy_(contrast)
    into["inv_freq"][:terms] = planes.term_inv_freq
    into["wavelength"][:terms] = planes.wavelength
    into["scale"].fill_(call.scale)
    if projection is None:
        return
    value = call.value[0, 0].to(attention)
    written = value @ projection.to(attention).mT
    into["value_norm"].copy_(torch.linalg.vector_norm(value, dim=-1))
    into["write_norm"].copy_(torch.linalg.vector_norm(written, dim=-1))
    into["written_norm"].copy_(torch.linalg.vector_norm(attention @ written, dim=-1))
    for index, direction in enumerate(toward):
        into["logit"][index].copy_(attention * (direction.to(attention) @ written.mT))


def _concatenate(captures: Sequence[xr.Dataset]) -> xr.Dataset:
    """Concatenate captures along `prompt`, padded to the longest."""
    tokens = ("query_token", "key_token")
    options: Any = {"coords": "different", "compat": "equals", "join": "outer"}
    prompts = pd.RangeIndex(len(captures), name="prompt")
    parts = [part.reset_coords(tokens) for part in captures]
    together = xr.concat(parts, prompts, combine_attrs="drop_conflicts", **options)
    names = {name: together[name].fillna("") for name in tokens}
    return together.assign(names).set_coords(tokens)


def one_sequence(
    live: LiveModel, given: Prompt, tokenizer: TokenNames | None
) -> Measurement:
    """Return a measurement of one sequence; raise `BadArgument` for several."""
    if isinstance(given, str):
        check_document(given)
        given = prompt_tokens(given, tokenizer)
        warn_beyond(len(given), live.trained)
    given = torch.atleast_2d(given) if isinstance(given, Tensor) else given
    measurement = Measurement.of(live, given)
    if (count := len(measurement.text)) > 1:
        raise BadArgument("A capture takes one sequence.", seen=f"{count} sequences")
    return measurement


def _allocate(
    rows: Sequence[Variable],
    sizes: dict[str, int],
    dtype: torch.dtype,
    *,
    max_bytes: int,
) -> dict[str, Tensor]:
    """Arrays of NaN for the variables, head first. Raise `BadArgument` above `max_bytes`."""
    shapes = {row.name: [sizes[dim] for dim in row.dims] for row in rows}
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize
    if total > max_bytes:
        what = (
            f"This capture takes {total:,} bytes, more than the {max_bytes:,} allowed."
        )
        seen = "{head} heads, {query:,} tokens, {frequency} frequencies".format(**sizes)
        hint = f"fewer heads, a shorter text, or max_bytes={total}"
        raise BadArgument(what, seen=seen, hint=hint)
    return {
        name: torch.full(shape, torch.nan, dtype=dtype)
        for name, shape in shapes.items()
    }
