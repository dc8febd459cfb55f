"""How much each plane of each head does for an answer, by the gradient of its scores.

A score is a sum of contributions c_f, a plane each. The gradient of an answer times c_f, summed
over pairs of tokens, is the gradient along a gate on the plane's queries, which is how it is
computed here: one backward pass, and no attention matrix. Softmax ignores what all keys of a
row share, and so does the gradient: its sum over the keys of a row is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int, Integer
from scipy.stats import spearmanr
from torch import Tensor

from ropelens.edit.patch import Patch, Source, places_of, take
from ropelens.edit.rope import drop, stack_edits
from ropelens.errors import BadArgument, Count, Positive, public
from ropelens.measure.capture import Token, one_sequence, token_id
from ropelens.models.doorway import Side
from ropelens.models.subject import Model, Subject, as_subject
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, PlaneNumbers
from ropelens.statistics.call import AttentionCall, attention_map
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.variables import ATTRIBUTION, labelled, stack

Answer = Token | tuple[Token, Token] | Callable[[Tensor], Tensor]


@public
def attribute_planes(
    model: Model,
    text_or_tokens: str
    | Integer[Tensor, " position"]
    | Integer[Tensor, "1 position"]
    | Mapping[str, Any],
    answer: Answer,
    *,
    heads: str = ALL_HEADS,
    pairs: str = "",
    steps: Positive = 1,
    check: Count = 0,
    source: Source | None = None,
    tokenizer: Any = None,
) -> xr.Dataset:
    """What each plane of each head adds to an answer, over (layer, head, frequency).

    `answer` is a token, whose logit at the last position counts; two, of which the second's
    logit is taken off; or a function of the logits [position, token] that gives one number.
    Tokens are ids, or texts of one token each. `text_or_tokens` is as `capture` takes it. The
    model runs as it is, under the edits, silences and patches that are open.

    - `attribution` (layer, head, frequency), in units of the answer: its gradient times the
      plane's contribution to the scores, summed over all pairs of tokens. To first order it is
      what the answer loses when the plane is dropped. The rest that RoPE leaves alone is the
      last frequency. NaN for heads that are not in `heads`.
    - `pair_attribution` (pair_head, frequency, query, key), with `pairs`, a list of heads: the
      same for each pair of tokens, NaN where the query does not see the key.
    - `dropped` (layer, head, frequency), with `check=N`: the change of the answer when that
      plane alone is dropped (`drop`), for the N planes of the largest attribution and N others,
      drawn at random; NaN elsewhere. `attrs["rank_correlation"]` is that of `attribution` with
      -`dropped` over the random ones, `attrs["worst"]` the largest difference of all.
    - `patched`, with `check` and another prompt as `source`: the change when that plane alone
      takes its queries and keys from there (`patch_planes`), for the same planes.
      `attrs["source_answer"]` is the answer to that prompt. A `check` of more planes than
      there are scans all of `heads`.
    - coordinates `inv_freq` (rad/token), `wavelength` (tokens), both (layer, frequency).
    - `attrs["answer"]`, and with more than one step `attrs["answer_without"]`.

    `steps` integrates the gradient while the scores of `heads` grow from 0 to what they are
    (integrated gradients: Sundararajan et al. 2017, arXiv 1703.01365). Attributions then sum to
    `answer` - `answer_without`, the answer with even attention in these heads. One step is the
    gradient where the model stands, which misses what is saturated.

    Memory is that of a backward pass over one sequence. Raises `BadArgument` for heads or
    tokens that do not exist and an answer that is not one number, and what `capture` raises.
    """
    subject = as_subject(model, tokenizer)
    measurement = one_sequence(subject, text_or_tokens, tokenizer or subject.tokenizer)
    text = measurement.text
    chosen = subject.heads_of(heads)
    planes = subject.planes(text.context)
    number = _number_of(answer, tokenizer or subject.tokenizer, subject.vocabulary)

    answer_of = partial(_answer, subject, text, number)
    facts: dict[str, Any] = {"answer": answer_of()}
    looked_at = subject.heads_of(pairs) if pairs else torch.zeros_like(chosen)

    sizes = [1.0] if steps == 1 else [(step + 0.5) / steps for step in range(steps)]
    total: list[Any] = [0.0] * len(planes)
    by_pair: list[Any] = [0.0] * int(looked_at.sum())
    for size in sizes:
        gates = [torch.full((subject.heads, at.terms), size) for at in planes]
        along, of_pairs = _gradients(subject, text, number, gates, chosen, planes, looked_at)
        total = [t + g / steps for t, g in zip(total, along, strict=True)]
        by_pair = [t + g / size / steps for t, g in zip(by_pair, of_pairs, strict=True)]
    attribution = stack(
        t.where(of[:, None], torch.nan) for t, of in zip(total, chosen, strict=True)
    )
    values = {
        "attribution": attribution,
        "inv_freq": stack(torch.atleast_2d(at.term_inv_freq)[0] for at in planes),
        "wavelength": stack(torch.atleast_2d(at.wavelength)[0] for at in planes),
    }
    if pairs:
        names = [f"{layer}.{head}" for layer, head in looked_at.nonzero().tolist()]
        values |= {"pair_attribution": stack(by_pair), "pair_head": np.array(names)}
    if steps > 1:
        none = [torch.zeros_like(of_layer) for of_layer in total]
        with subject.patch(_gated(none, chosen, planes)):
            facts["answer_without"] = answer_of()
    if check:
        places, others = _checked(subject, attribution, check)

        def dropping(plane: PlaneNumbers, heads: str) -> AbstractContextManager[None]:
            return subject.edit(stack_edits(subject, [drop(plane, heads=heads)]))

        dropped = _answers(places, attribution.shape, answer_of, dropping) - facts["answer"]
        values["dropped"] = dropped
        facts["worst"] = float(np.nanmax(np.abs(attribution + dropped)))
        if len(others) > 2:
            ranks = spearmanr(attribution.flat[others], -dropped.flat[others])
            facts["rank_correlation"] = float(ranks.statistic)
    if check and source is not None:
        other = one_sequence(subject, source, tokenizer or subject.tokenizer).text
        patching = _patching(subject, other, chosen)
        patched = _answers(places, attribution.shape, answer_of, patching)
        values["patched"] = patched - facts["answer"]
        facts["source_answer"] = _answer(subject, other, number)
    indices = {"layer": range(subject.layers), "head": range(subject.heads)}
    dataset = xr.Dataset(labelled(values, ATTRIBUTION), coords=indices)
    dataset.attrs = {"kind": "attribution", "steps": steps} | measurement.facts | facts
    return dataset.set_coords(["inv_freq", "wavelength"])


def _gradients(
    subject: Subject,
    text: Corpus,
    number: Callable[[Tensor], Tensor],
    gates: Sequence[Tensor],
    chosen: Bool[Tensor, "layer head"],
    planes: Sequence[Planes],
    looked_at: Bool[Tensor, "layer head"],
) -> tuple[Sequence[Tensor], list[Tensor]]:
    """The gradient of the answer along the `gates`, and of the heads looked at by pair."""
    opened = [gate.requires_grad_() for gate in gates]
    calls: dict[int, AttentionCall] = {}
    outputs: dict[int, Tensor] = {}

    def see(call: AttentionCall) -> None:
        if looked_at[call.layer].any():
            calls[call.layer] = call

    def note(layer: int, output: Tensor, real: Tensor, *, past: int) -> None:
        if looked_at[layer].any():
            outputs[layer] = output

    gated = subject.patch(_gated(opened, chosen, planes))
    with torch.enable_grad(), gated, subject.observe(see), subject.silence(note):
        value = number(_logits(subject, text))
    wanted = [*opened, *outputs.values()]
    gradients = torch.autograd.grad(value, wanted, materialize_grads=True)
    of_output = dict(zip(outputs, gradients[len(opened) :], strict=True))
    of_pairs = [
        _by_pair(calls[layer], head, planes[layer], of_output[layer])
        for layer, head in looked_at.nonzero().tolist()
    ]
    return gradients[: len(opened)], of_pairs


def _patching(
    subject: Subject, source: Corpus, chosen: Bool[Tensor, "layer head"]
) -> Callable[[PlaneNumbers, str], AbstractContextManager[None]]:
    """Blocks in which a plane alone is patched from `source`, which runs once for all."""
    rotations = [layer.planes for layer in subject.rotations()]
    taken = take(subject, source.tokens, chosen, rotations, hidden=source.hidden)
    places = places_of(None, taken.length)

    def patching(plane: PlaneNumbers, heads: str) -> AbstractContextManager[None]:
        of = subject.heads_of(heads)
        return subject.patch(Patch(subject, of, rotations, plane, "both", places, taken))

    return patching


def _logits(subject: Subject, text: Corpus) -> Float[Tensor, "position token"]:
    logits = subject.forward(text.tokens, hidden=text.hidden)[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _gated(gates: Sequence[Tensor], chosen: Tensor, planes: Sequence[Planes]) -> Any:
    """A patch that multiplies the planes of queries of the chosen heads by their gates."""

    def gate(layer: int, side: Side, x: Tensor, places: range, positions: Tensor) -> Tensor:
        if side != "query":
            return x
        of_layer = gates[layer].where(chosen[layer][:, None], 1.0)
        return x * of_layer[:, planes[layer].term_of][:, None].to(x)

    return gate


def _by_pair(
    call: AttentionCall, head: int, planes: Planes, of_output: Tensor
) -> Float[Tensor, "term query key"]:
    """The gradient of each score of a head times its contributions, by plane.

    With attention A, outputs o = A v and g the answer's gradient by o, the gradient of a score
    is A (g . v - g . o).
    """
    call = call.of_heads(torch.tensor([head]))
    attention = attention_map(call)[0, 0]
    q, k, v = (x[0, 0].to(attention) for x in (call.query, call.key, call.value))
    g, output = of_output[0, :, head].to(attention), call.output[0, :, 0].to(attention)
    slope = attention * (g @ v.mT - (g * output).sum(-1, keepdim=True))
    if call.softcap is not None:
        slope = slope * (1 - (call.scale * q @ k.mT / call.softcap).tanh().square())
    slope = slope.masked_fill(~call.seen_by(torch.arange(len(q)))[0].to(q.device), torch.nan)
    parts = planes.sum_coordinates(call.scale * q[:, None] * k)
    return (slope[..., None] * parts).movedim(-1, 0)


def _number_of(
    answer: Answer, tokenizer: Any, vocabulary: int
) -> Callable[[Float[Tensor, "position token"]], Float[Tensor, ""]]:
    """The answer as a function of the logits."""
    if callable(answer):
        return answer
    pair = answer if isinstance(answer, tuple) else (answer,)
    ids = [token_id(token, tokenizer, vocabulary) for token in pair]

    def number(logits: Float[Tensor, "position token"]) -> Float[Tensor, ""]:
        return logits[-1, ids[0]] - (logits[-1, ids[1]] if len(ids) > 1 else 0)

    return number


@torch.no_grad()
def _answer(subject: Subject, text: Corpus, number: Callable[[Tensor], Tensor]) -> float:
    value = number(_logits(subject, text))
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise BadArgument("answer must give one number for the logits [position, token].")
    return float(value)


def _checked(
    subject: Subject, attribution: Float[np.ndarray, "layer head frequency"], check: int
) -> tuple[Int[np.ndarray, " place"], Int[np.ndarray, " other"]]:
    """Flat places of the planes of the largest attribution and of others; the others alone."""
    count = [len(at.planes.inv_freq) for at in subject.rotations()]
    rotates = np.arange(attribution.shape[-1]) < np.array(count)[:, None, None]
    places = np.flatnonzero(np.isfinite(attribution) & rotates)
    order = places[np.argsort(-np.abs(attribution.flat[places]), kind="stable")]
    others = np.random.default_rng(0).permutation(order[check:])[:check]
    return np.concatenate([order[:check], others]), others


def _answers(
    places: Int[np.ndarray, " place"],
    shape: tuple[int, ...],
    answer: Callable[[], float],
    block: Callable[[PlaneNumbers, str], AbstractContextManager[None]],
) -> Float[np.ndarray, "layer head frequency"]:
    """The answer with each of these planes changed alone; NaN elsewhere."""
    answers = np.full(shape, np.nan)
    for layer, head, plane in zip(*np.unravel_index(places, shape), strict=True):
        with block(PlaneNumbers((int(plane),)), f"{layer}.{head}"):
            answers[layer, head, plane] = answer()
    return answers
