"""Inside some heads on one text: queries, keys, scores and weights, by plane and by pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import xarray as xr
from jaxtyping import Integer
from torch import Tensor

from ropelens.errors import BadArgument, Count, public
from ropelens.measure.excerpt import TokenNames, name_token
from ropelens.measure.measurement import Measurement
from ropelens.models.paths import check_document
from ropelens.models.rotation import edited_planes
from ropelens.models.subject import Model, Subject, as_subject, stated_context
from ropelens.models.texts import prompt_tokens, warn_beyond
from ropelens.rope.select import ALL_HEADS, heads_by_layer
from ropelens.statistics.call import AttentionCall, write_head
from ropelens.statistics.variables import CAPTURE, CAPTURE_INDICES, labelled

LARGEST = 2**30
"""Bytes that a capture may take by default."""


@public
def capture(
    model: Model,
    text_or_tokens: str | Integer[Tensor, " position"] | Integer[Tensor, "1 position"],
    *,
    heads: str = ALL_HEADS,
    tokenizer: TokenNames | None = None,
    values: bool = False,
    max_bytes: Count = LARGEST,
) -> xr.Dataset:
    """All that some heads compute on one sequence, by plane and by pair of tokens.

    `text_or_tokens` is a text, which the model's `tokenizer` makes tokens of (behind its BOS,
    where it has one), or the tokens. `heads` is a list such as "2.3,4.*" (layer.head;
    with grouped keys, query heads). The model runs once, as it is: under `edit_rope` the
    capture is of the edited model, also where heads that share a key rotate differently;
    under `silence_heads`, of what heads compute before they are silenced.

    Returns a dataset over `head` ("2.3", with `layer` and `head_of_layer` beside it), `query`
    and `key` (positions; `query_token` and `key_token` are their texts, or "#17" without a
    tokenizer), `frequency` (0 turns fastest; coordinates that RoPE leaves alone are the last
    one) and `part` (a plane's two coordinates, real and imaginary):

    - `q_still` (head, query, frequency, part), `k_still` (head, key, frequency, part), model
      units: query and key without their rotation; NaN for the rest that does not rotate.
    - `q_norm` (head, query, frequency), `k_norm` (head, key, frequency), model units. Each head
      has the keys that it reads, also where several read the same.
    - `score` (head, query, key), nats, before a soft-cap, and `contribution` (head,
      frequency, query, key), nats: what each plane adds to it,
      scale Re(q~ conj(k~) exp(i inv_freq (query - key))). Contributions sum over frequency
      to the score. NaN where the query does not see the key.
    - `attention` (head, query, key), after the soft-cap; 0 where the key is not seen. Rows sum
      to less than 1 where a sink logit takes part.
    - `value_norm` (head, key), model units, with `values`.
    - coordinates `inv_freq` (rad/token), `wavelength` (tokens), both (head, frequency), and
      `scale` (head).

    Layers of fewer planes than others end in NaN. Numbers are float32, of a float64 model
    float64. `ropelens.save` and `to_netcdf` write it.

    The arrays take heads x tokens^2 x (frequencies + 2) numbers and a little more: 12 heads of
    64 planes and 500 tokens 0.8 GB. More than `max_bytes` is refused before anything is
    allocated; the forward pass itself is not counted.

    Raises `BadArgument` for heads that do not exist, tokens out of range, a text without a
    tokenizer, or too much memory; `BadText` for a text of fewer than 3 tokens, or one that is
    the name of a file; `UnsupportedModel` as `profile` does.
    """
    subject = as_subject(model, tokenizer)
    tokenizer = tokenizer or subject.tokenizer
    measurement = _read(subject, text_or_tokens, tokenizer)
    tokens, length = measurement.text.tokens, measurement.text.context
    shape = {"layers": subject.layers, "heads_of_layer": subject.heads}
    chosen = heads_by_layer(heads, **shape)
    planes = [layer.planes for layer in subject.rotations(length)]
    places = {(layer, head): at for at, (layer, head) in enumerate(chosen.nonzero().tolist())}
    sizes = {
        "head": len(places),
        "query": length,
        "key": length,
        "frequency": max(planes[layer].terms for layer, _ in places),
        "part": 2,
    }
    dtype = torch.promote_types(subject.model.dtype, torch.float32)
    arrays = _allocate(sizes, dtype, values=values, max_bytes=max_bytes)
    seen: set[int] = set()

    def see(call: AttentionCall) -> None:
        layer, by_itself = call.layer, planes[call.layer]
        seen.add(layer)
        inv_freq = edited_planes(subject.open_edit, layer, by_itself, length=length).inv_freq
        inv_freq = inv_freq.expand(subject.heads, -1)
        for number in chosen[layer].nonzero().flatten().tolist():
            into = {name: array[places[layer, number]] for name, array in arrays.items()}
            turning = replace(by_itself, inv_freq=inv_freq[number])
            write_head(call, number, turning, into)

    with torch.no_grad(), subject.observe(see):
        subject.forward(tokens, last=1)
    subject.check_layers(seen)
    names = np.array([name_token(tokenizer, int(t)) for t in tokens[0]], dtype=object)
    layer, number = (np.array(column) for column in zip(*places, strict=True))
    indices = {
        "head": np.array([f"{layer}.{head}" for layer, head in places]),
        "layer": layer,
        "head_of_layer": number,
        "query": np.arange(length),
        "key": np.arange(length),
        "query_token": names,
        "key_token": names,
    }
    labels = labelled({name: array.numpy() for name, array in arrays.items()}, CAPTURE)
    dataset = xr.Dataset(labels, coords=labelled(indices, CAPTURE_INDICES))
    dataset.attrs = {"kind": "capture"} | measurement.facts
    return dataset.set_coords(["inv_freq", "wavelength", "scale"])


def _read(
    subject: Subject, text_or_tokens: str | Tensor, tokenizer: TokenNames | None
) -> Measurement:
    """The one sequence that is looked at."""
    if not isinstance(text_or_tokens, str):
        return Measurement.of(subject, torch.atleast_2d(text_or_tokens))
    check_document(text_or_tokens)
    tokens = prompt_tokens(text_or_tokens, tokenizer)
    warn_beyond(len(tokens), stated_context(subject.config))
    return Measurement.of(subject, tokens[None])


def _allocate(
    sizes: dict[str, int], dtype: torch.dtype, *, values: bool, max_bytes: int
) -> dict[str, Tensor]:
    """Arrays of NaN for the variables, head first; refused where they take too much memory."""
    shapes = {
        row.name: [sizes[dim] for dim in row.dims]
        for row in CAPTURE
        if values or row.name != "value_norm"
    }
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize
    if total > max_bytes:
        raise BadArgument(
            f"This capture takes {total:,} bytes, more than the {max_bytes:,} allowed.",
            seen=f"{sizes['head']} heads, {sizes['query']:,} tokens, "
            f"{sizes['frequency']} frequencies",
            attempt=f"fewer heads, a shorter text, or max_bytes={total}",
        )
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}
