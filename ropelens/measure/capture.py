"""Inside some heads on one text: queries, keys, scores and weights, by plane and by pair."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropelens.errors import BadArgument
from ropelens.measure.excerpt import check_attention, check_names, name_token
from ropelens.measure.profile import describe_run
from ropelens.measure.summary import described
from ropelens.measure.tokens import as_corpus
from ropelens.models.paths import check_document
from ropelens.models.rotation import inv_freq_by_head
from ropelens.models.subject import as_subject, stated_context
from ropelens.models.texts import check_context, prompt_tokens
from ropelens.models.tokens import integers
from ropelens.rope.select import ALL_HEADS, heads_by_layer
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.head import Head

LARGEST = 2**30
"""Bytes that a capture may take, unless it is told otherwise."""

QUERY, KEY, PAIR = ("head", "query"), ("head", "key"), ("head", "query", "key")
VARIABLES = {
    "q_still": ((*QUERY, "frequency", "part"), "query, its rotation taken off", "1"),
    "k_still": ((*KEY, "frequency", "part"), "key, its rotation taken off", "1"),
    "q_norm": ((*QUERY, "frequency"), "length of the query in the plane", "1"),
    "k_norm": ((*KEY, "frequency"), "length of the key in the plane", "1"),
    "score": (PAIR, "score of the key, before a soft-cap", "nat"),
    "contribution": (("head", "frequency", "query", "key"), "what a plane adds to it", "nat"),
    "attention": (PAIR, "attention of the query on the key", "1"),
    "value_norm": (KEY, "length of the value", "1"),
    "inv_freq": (("head", "frequency"), "angular frequency; negative: clockwise", "rad/token"),
    "wavelength": (("head", "frequency"), "tokens per turn", "token"),
    "scale": (("head",), "scale of the scores", "1"),
}
"""What a capture holds, as `Head.write` fills it: dims, long name, unit."""


def capture(
    model: nn.Module,
    text_or_tokens: str | Int[Tensor, " position"] | Int[Tensor, "1 position"],
    *,
    heads: str = ALL_HEADS,
    tokenizer: Any = None,
    values: bool = False,
    max_bytes: int = LARGEST,
) -> xr.Dataset:
    """All that some heads compute on one sequence, by plane and by pair of tokens.

    `text_or_tokens` is a text, which the model's `tokenizer` makes tokens of (with its BOS in
    front, where it has one), or the tokens. `heads` is a list such as "2.3,4.*" (layer.head;
    with grouped keys, query heads). The model runs once, as it is: under `edit_rope` what is
    captured is that of the edited model, also where heads that share a key rotate
    differently; under `silence_heads`, what heads compute before they are silenced.

    Returns a dataset over `head` ("2.3", with `layer` and `head_of_layer` beside it), `query`
    and `key` (positions; `query_token` and `key_token` are their texts, or "#17" without a
    tokenizer), `frequency` (0 turns fastest; coordinates that RoPE leaves alone are the last
    one) and `part` (a plane's two coordinates, real and imaginary):

    - `q_still` (head, query, frequency, part), `k_still` (head, key, frequency, part), model
      units: query and key with their rotation taken off; NaN for the rest that does not rotate.
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
    64 planes and 500 tokens 0.8 GB. That is counted before anything is allocated, and refused
    beyond `max_bytes` (1 GiB by default); the forward pass itself is not counted.

    `model` is a transformers model or a TransformerLens `TransformerBridge`. Raises
    `BadArgument` for heads that do not exist, tokens out of range, more than one sequence, a
    text without a tokenizer, or too much memory; `BadText` for a text of fewer than 3
    tokens, or one that is the name of a file; `UnsupportedModel` as `profile` does.
    """
    subject = as_subject(model)
    check_names(tokenizer)
    text = _corpus(subject.model, text_or_tokens, tokenizer)
    tokens, length = text.tokens, text.context
    config = subject.config
    chosen = heads_by_layer(
        heads, layers=config.num_hidden_layers, heads_of_layer=config.num_attention_heads
    )
    planes = [layer.planes for layer in subject.rotations(length)]
    places = {(layer, head): at for at, (layer, head) in enumerate(chosen.nonzero().tolist())}
    sizes = {
        "head": len(places),
        "query": length,
        "key": length,
        "frequency": max(planes[layer].terms for layer, _ in places),
        "part": 2,
    }
    arrays = _allocate(
        [name for name in VARIABLES if values or name != "value_norm"],
        sizes,
        torch.promote_types(subject.model.dtype, torch.float32),
        max_bytes=max_bytes,
    )
    seen: set[int] = set()

    def see(call: AttentionCall) -> None:
        layer, own = call.layer, planes[call.layer]
        seen.add(layer)
        inv_freq = inv_freq_by_head(subject.open_edit, layer, own, length=length)
        inv_freq = inv_freq.expand(chosen.shape[1], -1)
        for head in chosen[layer].nonzero().flatten().tolist():
            found = Head.of(call, head, replace(own, inv_freq=inv_freq[head]))
            found.write({name: array[places[layer, head]] for name, array in arrays.items()})
            check_attention(subject.model, {layer: found.residual()})

    with torch.no_grad(), subject.observe(see):
        subject.forward(tokens, last=1)
    subject.check_layers(seen)
    dataset = _label(arrays, list(places), [name_token(tokenizer, int(t)) for t in tokens[0]])
    facts = describe_run(subject.model, text, None, rows="all", seed=0)
    return dataset.assign_attrs({"kind": "capture", **facts})


def _corpus(model: PreTrainedModel, text_or_tokens: str | Tensor, tokenizer: Any) -> Corpus:
    """The one sequence that is looked at."""
    if not isinstance(text_or_tokens, str):
        tokens = integers(text_or_tokens, "tokens")
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        corpus = as_corpus(model, tokens, None)
        if len(corpus) > 1:
            raise BadArgument(
                "A capture is of one sequence.",
                seen=f"{len(corpus)} sequences",
                attempt="one at a time: tokens[0]",
            )
        return corpus
    check_document(text_or_tokens)
    corpus = as_corpus(model, prompt_tokens(text_or_tokens, tokenizer)[None], None)
    check_context(corpus.context, stated_context(model.config))
    return corpus


def _allocate(
    names: list[str], sizes: dict[str, int], dtype: torch.dtype, *, max_bytes: int
) -> dict[str, Tensor]:
    """Arrays of NaN for the variables, head first; refused where they take too much memory."""
    if not isinstance(max_bytes, Real) or not max_bytes >= 0:
        raise BadArgument(
            "max_bytes is a number of bytes.", seen=repr(max_bytes), attempt="max_bytes=2**30"
        )
    shapes = {name: [sizes[dim] for dim in VARIABLES[name][0]] for name in names}
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize
    if total > max_bytes:
        raise BadArgument(
            f"This capture takes {total:,} bytes, more than the {max_bytes:,} allowed.",
            seen=f"{sizes['head']} heads, {sizes['query']:,} tokens, "
            f"{sizes['frequency']} frequencies",
            attempt=f"fewer heads, a shorter text, or max_bytes={total}",
        )
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}


def _label(
    arrays: dict[str, Tensor], heads: list[tuple[int, int]], names: list[str]
) -> xr.Dataset:
    """The arrays with their names, units and coordinates."""
    labelled = {
        name: described(VARIABLES[name][0], array.numpy(), *VARIABLES[name][1:])
        for name, array in arrays.items()
    }
    layer, number = (np.array(column) for column in zip(*heads, strict=True))
    named = np.array([f"{layer}.{head}" for layer, head in heads])
    text, position = np.array(names, dtype=object), np.arange(len(names))
    return xr.Dataset(
        labelled,
        coords={
            "head": described("head", named, "layer.head", ""),
            "layer": described("head", layer, "layer of the head", ""),
            "head_of_layer": described("head", number, "number of the head in its layer", ""),
            "query": described("query", position, "position of the query", "token"),
            "key": described("key", position, "position of the key", "token"),
            "query_token": described("query", text, "token of the query", ""),
            "key_token": described("key", text, "token of the key", ""),
        },
    ).set_coords(["inv_freq", "wavelength", "scale"])
