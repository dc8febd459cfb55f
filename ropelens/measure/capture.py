"""Inside heads on short sequences: some of them whole (`capture`), and a profile's excerpts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.errors import BadArgument, Count, UnsupportedModel, Whole, public
from ropelens.measure.measurement import Measurement
from ropelens.models.paths import check_document
from ropelens.models.subject import Model, Subject, as_subject, stated_context
from ropelens.models.texts import check_tokens, encode, prompt_tokens, warn_beyond
from ropelens.models.writing import logit_directions, output_projections
from ropelens.rope.planes import Planes, unrotate
from ropelens.rope.select import ALL_HEADS
from ropelens.statistics.call import AttentionCall, attention_map, write_head, write_values
from ropelens.statistics.rows import generator_of
from ropelens.statistics.variables import (
    AXES,
    CAPTURE,
    CAPTURE_INDICES,
    Variable,
    by_layer,
    labelled,
    stack,
)

LARGEST = 2**31
"""Bytes that a capture may take by default."""

COUNT, LENGTH = 3, 40
"""Excerpts of a profile, and their tokens, where none are given."""

LONGEST_EXCERPT = 256
CANDIDATES = 16
"""Pieces of the text that excerpts are chosen from."""

EXCERPT_WEIGHTS, EXCERPT_NUMBERS = 2**24, 2**20
"""Most attention weights, and numbers of queries, that a profile holds."""

Token = str | Whole
"""A token by its id, or by its text."""

Seen = TypeVar("Seen")


@runtime_checkable
class TokenNames(Protocol):
    """A tokenizer, as far as it names tokens; transformers' do."""

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


def look(
    subject: Subject,
    tokens: Int[Tensor, "sequence position"],
    see: Callable[[AttentionCall], Seen],
    *,
    hidden: Bool[Tensor, "sequence position"] | None = None,
) -> dict[int, Seen]:
    """What `see` makes of the call of each layer on short sequences."""
    layers: dict[int, Seen] = {}

    def keep(call: AttentionCall) -> None:
        layers[call.layer] = see(call)

    with torch.no_grad(), subject.observe(keep):
        subject.forward(tokens, last=1, hidden=hidden)
    subject.check_layers(set(layers))
    return {layer: layers[layer] for layer in sorted(layers)}


@public
def capture(
    model: Model,
    text_or_tokens: str
    | Integer[Tensor, " position"]
    | Integer[Tensor, "1 position"]
    | Mapping[str, Any],
    *,
    heads: str = ALL_HEADS,
    tokenizer: TokenNames | None = None,
    runner_up: Count | None = None,
    values: bool = False,
    logits_of: Sequence[Token] = (),
    max_bytes: Count = LARGEST,
) -> xr.Dataset:
    """All that some heads compute on one sequence, by plane and by pair of tokens.

    `text_or_tokens` is a text, which the model's `tokenizer` makes tokens of (behind its BOS,
    where it has one), its tokens, or a BatchEncoding of one sequence. `heads` is a list such as
    "2.3,4.*" (layer.head; with grouped keys, query heads). The model runs once, as it is: under
    `edit_rope` the capture is of the edited model, also where heads that share a key rotate
    differently; under `silence_heads`, of what heads compute before they are silenced.

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
    - `contrast` (head, frequency, query, key), nats: how hard each plane pushes toward the key.
      It is the contribution less that to the row's other keys, weighted by their attention, or
      to the key at the position `runner_up`, against which contrasts sum to the log-odds.
    - `attention` (head, query, key), after the soft-cap; 0 where the key is not seen. Rows sum
      to less than 1 where a sink logit takes part.
    - with `values`, in model units: `value_norm` (head, key); `write_norm` (head, key), the
      length of v W_O, which a head writes where it reads the key alone; `written_norm` (head,
      query), the length of what it writes, sum_j attention_ij v_j W_O.
    - `logit` (head, answer, query, key), with tokens `logits_of` (ids, or texts of one token):
      attention_ij v_j W_O through the final norm, its scale frozen, onto the unembedding of the
      answer. Its sum over keys is the head's direct part of the logit (Elhage et al. 2021, "A
      Mathematical Framework for Transformer Circuits"), before logits are scaled or capped.
    - coordinates `inv_freq` (rad/token), `wavelength` (tokens), both (head, frequency), and
      `scale` (head).

    Layers of fewer planes than others end in NaN.
    12 heads of 64 planes and 500 tokens take 1.6 GB. More than `max_bytes` is refused with
    `BadArgument`, before anything is allocated. Raises `BadText` for a text of fewer than 3
    tokens, or one that is the name of a file, `UnsupportedModel` where a gate stands behind the
    heads or, for `logits_of`, a norm, and what `profile` raises.
    """
    subject = as_subject(model, tokenizer)
    tokenizer = tokenizer or subject.tokenizer
    measurement = one_sequence(subject, text_or_tokens, tokenizer)
    text, length = measurement.text, measurement.text.context
    if runner_up is not None and runner_up >= length:
        raise BadArgument(f"There is no position {runner_up}.", seen=f"{length} tokens")
    chosen = subject.heads_of(heads)
    planes = subject.planes(length)
    asked = [logits_of] if isinstance(logits_of, str) else logits_of
    answers = [token_id(token, tokenizer, subject.vocabulary) for token in asked]
    projections = output_projections(subject) if values or answers else {}
    toward: list[Tensor] = []
    if answers:
        toward = [*logit_directions(subject, projections, text.tokens, answers, text.hidden)]
    places = {(layer, head): at for at, (layer, head) in enumerate(chosen.nonzero().tolist())}
    sizes = {
        "head": len(places),
        "query": length,
        "key": length,
        "frequency": max(planes[layer].terms for layer, _ in places),
        "part": 2,
        "answer": len(answers),
    }
    dtype = torch.promote_types(subject.model.dtype, torch.float32)
    unasked = () if projections else ("value_norm", "write_norm", "written_norm")
    unasked = unasked if answers else (*unasked, "logit")
    rows = [row for row in CAPTURE if row.name not in unasked]
    arrays = _allocate(rows, sizes, dtype, max_bytes=max_bytes)

    def see(call: AttentionCall) -> None:
        turning = planes[call.layer]
        inv_freq = turning.inv_freq.expand(subject.heads, -1)
        for head in chosen[call.layer].nonzero().flatten().tolist():
            into = {name: array[places[call.layer, head]] for name, array in arrays.items()}
            of_head = replace(turning, inv_freq=inv_freq[head])
            write_head(call, head, of_head, into, runner_up=runner_up)
            if projections:
                weight = projections[call.layer].weight.unflatten(1, (subject.heads, -1))
                write_values(call, head, weight[:, head].detach(), into, toward)

    look(subject, text.tokens, see, hidden=text.hidden)
    names = np.array(token_names(text.tokens[0], tokenizer), dtype=object)
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
    if answers:
        answer_names = token_names(torch.tensor(answers), tokenizer)
        indices["answer"] = np.array(answer_names, dtype=object)
    labels = labelled({name: array.numpy() for name, array in arrays.items()}, CAPTURE)
    dataset = xr.Dataset(labels, coords=labelled(indices, CAPTURE_INDICES))
    dataset.attrs = {"kind": "capture"} | measurement.facts
    return dataset.set_coords(["inv_freq", "wavelength", "scale"])


def one_sequence(
    subject: Subject, given: str | Tensor | Mapping[str, Any], tokenizer: TokenNames | None
) -> Measurement:
    """The one sequence that `capture` looks at."""
    if isinstance(given, str):
        check_document(given)
        given = prompt_tokens(given, tokenizer)
        warn_beyond(len(given), stated_context(subject.config))
    given = given if isinstance(given, Mapping) else torch.atleast_2d(given)
    measurement = Measurement.of(subject, given)
    if len(measurement.text) > 1:
        sequences = f"{len(measurement.text)} sequences"
        raise BadArgument("One sequence can be looked at.", seen=sequences)
    return measurement


def _allocate(
    rows: Sequence[Variable], sizes: dict[str, int], dtype: torch.dtype, *, max_bytes: int
) -> dict[str, Tensor]:
    """Arrays of NaN for the variables, head first; refused where they take too much memory."""
    shapes = {row.name: [sizes[dim] for dim in row.dims] for row in rows}
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize
    if total > max_bytes:
        raise BadArgument(
            f"This capture takes {total:,} bytes, more than the {max_bytes:,} allowed.",
            seen=f"{sizes['head']} heads, {sizes['query']:,} tokens, "
            f"{sizes['frequency']} frequencies",
            attempt=f"fewer heads, a shorter text, or max_bytes={total}",
        )
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}


def token_id(token: Token, tokenizer: TokenNames | None, vocabulary: int) -> int:
    """The id of a token; raises `BadArgument` where there is no such token."""
    if isinstance(token, str):
        _, ids = encode(token, tokenizer)
        if len(ids) != 1:
            raise BadArgument(f"{token!r} is not one token of the model.", seen=f"{len(ids)}")
        return ids[0]
    if not 0 <= token < vocabulary:
        raise BadArgument(f"The model has no token {token}.", seen=f"{vocabulary} tokens")
    return int(token)


def token_names(tokens: Iterable[Tensor], tokenizer: TokenNames | None) -> list[str]:
    """The text of each token as it stands inside a text, or its number without a tokenizer.

    Decoded behind itself: alone, many tokenizers drop the space that a token begins with.
    """
    if tokenizer is None:
        return [f"#{int(token)}" for token in tokens]
    pairs = [(tokenizer.decode([t]), tokenizer.decode([t, t])) for t in map(int, tokens)]
    return [str(twice)[len(alone) :] or str(alone) for alone, twice in pairs]


# excerpts of a profile


def read_excerpts(
    subject: Subject, pieces: Sequence[Int[Tensor, " position"]], planes: Sequence[Planes]
) -> dict[str, np.ndarray]:
    """What the heads compute on short sequences: arrays [excerpt, layer, ...], NaN at the end.

    `attention` and, without their rotation, queries and keys: the real parts of the `planes`,
    then the imaginary ones, then the coordinates that do not rotate. Queries are NaN where RoPE
    changes with the length, and the pieces turn otherwise than the whole text, as `planes`.
    """

    def see(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        attention, turning = attention_map(call)[0].float().cpu(), planes[call.layer]
        if not attention.isfinite().all():
            raise UnsupportedModel(
                f"{subject.kind} attends with numbers that are not finite.",
                seen=f"layer {call.layer}: NaN or infinity in its scores",
                attempt="dtype=torch.float32, or another checkpoint",
            )
        scale[call.layer] = float(call.scale)
        return attention, _still(call.query[0], turning), _still(call.key[0], turning)

    scale = np.full(subject.layers, np.nan)
    of_pieces = [look(subject, piece[None], see) for piece in pieces]
    attention, query, key = (
        stack(
            torch.from_numpy(by_layer({n: x[part] for n, x in of.items()}, subject.layers))
            for of in of_pieces
        ).astype(np.float32)
        for part in range(3)
    )
    for x in (query, key):  # to the 11 bits of a float16, which pack well, but of any size
        mantissa, exponent = np.frexp(x)
        np.ldexp((mantissa * 2048).round() / 2048, exponent, out=x)
    for length in {len(piece) for piece in pieces}:
        short = zip(subject.planes(length), planes, strict=True)
        if not all(torch.equal(one.inv_freq, whole.inv_freq) for one, whole in short):
            query[:] = np.nan
    return {"attention": attention, "query_still": query, "key_still": key, "scale": scale}


def _still(
    x: Float[Tensor, "head position coordinate"], planes: Planes
) -> Float[Tensor, "head position coordinate"]:
    """Queries or keys without their rotation; planes that turn clockwise are mirrored."""
    planes = planes.of_keys(len(x))
    still = unrotate(x.float(), torch.arange(x.shape[1]), planes).cpu()
    before, after = still[..., : planes.offset], still[..., planes.offset + planes.rotary_dim :]
    direction = torch.where(planes.inv_freq < 0, -1.0, 1.0)[..., None, :].cpu()
    mirrored = still[..., planes.second] * direction
    return torch.cat([still[..., planes.first], mirrored, before, after], dim=-1)


def chosen_excerpts(measurement: Measurement) -> list[Int[Tensor, " position"]]:
    """Pieces of the text on which heads choose their keys most sharply, the sharpest first.

    Of `CANDIDATES` pieces, drawn with the seed and each behind the token that all sequences
    begin with, those of the most bits: attention against even attention, the first key
    apart, summed over all heads and averaged over queries.
    """
    config, text = measurement.subject.config, measurement.text
    first = text.tokens[:, 0]
    # Such as BOS, without which models are lost; of one sequence it may be any word.
    alike = len(first) > 1 and bool((first == first[0]).all())
    begins = alike or int(first[0]) == measurement.subject.bos
    count = text.real.sum(1)
    length = min(LENGTH, _longest(config), int(count.max()))
    long = (count >= length).nonzero().flatten()
    generator = generator_of(measurement.seed, len(long))
    order = long[torch.randperm(len(long), generator=generator)].tolist()
    pieces = []
    for sequence in (order * CANDIDATES)[:CANDIDATES]:  # of few sequences several pieces each
        of_sequence = text.tokens[sequence][text.real[sequence].to(text.tokens.device)]
        free = len(of_sequence) - length
        start = int(torch.randint(free + 1, (), generator=generator))
        piece = of_sequence[start : start + length].clone()
        if begins:
            piece[0] = first[0]
        pieces.append(piece)
    candidates = torch.stack(pieces).unique(dim=0)

    def bits(call: AttentionCall) -> Float[Tensor, " piece"]:
        weights = attention_map(call)[..., 1:, 1:].double().cpu()
        keys = torch.arange(1, weights.shape[-1] + 1).double()[:, None]
        of_rest = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        return (weights * (of_rest * keys).clamp(min=1e-30).log2()).sum(-1).mean(-1).sum(-1)

    of_layers = look(measurement.subject, candidates, bits).values()
    total = sum(of_layers, torch.zeros(len(candidates)).double())
    return list(candidates[total.argsort(descending=True, stable=True)[:COUNT]])


def check_excerpts(
    config: PreTrainedConfig, excerpts: Iterable[Tensor]
) -> list[Int[Tensor, " position"]]:
    """Sequences to look into; refused where they are too long or not of the vocabulary."""
    config = config.get_text_config()
    checked = []
    for tokens in excerpts:
        (row,), _ = check_tokens(tokens[None], None, vocabulary=config.vocab_size)
        if len(row) > _longest(config):
            raise BadArgument(
                "A prompt is too long to look into.",
                seen=f"{len(row):,} tokens",
                means=f"a profile holds every head's attention: {_longest(config)} tokens at "
                "most in this model",
                attempt="a shorter one, or ropelens.capture for some of the heads",
            )
        checked.append(row)
    return checked


def _longest(config: PreTrainedConfig) -> int:
    heads = config.num_hidden_layers * config.num_attention_heads
    return min(LONGEST_EXCERPT, int((EXCERPT_WEIGHTS / heads) ** 0.5))


def excerpt_variables(
    excerpts: dict[str, np.ndarray],
    pieces: Sequence[Int[Tensor, " position"]],
    tokenizer: TokenNames | None,
    bits: Float[np.ndarray, "layer head"],
    planes: Sequence[Planes],
) -> dict[str, xr.Variable]:
    """The variables of what `read_excerpts` gave for `pieces`.

    Queries are those of the heads with the most `bits`, as many as fit; of others NaN. NaN too
    where an edit makes a head turn otherwise than the `wavelength` of its layer.
    """
    query = excerpts["query_still"]
    order = np.argsort(-np.nan_to_num(bits, nan=-np.inf), axis=None, kind="stable")
    sharpest = np.zeros(bits.size, bool)
    sharpest[order[: max(EXCERPT_NUMBERS // query[:, 0, 0].size, 1)]] = True
    speeds = [p.inv_freq.nan_to_num().abs().expand(bits.shape[1], -1) for p in planes]
    as_layer = np.stack([(speed == speed.amax(0)).all(-1).numpy() for speed in speeds])
    query[:, ~(sharpest.reshape(bits.shape) & as_layer)] = np.nan
    names = np.full((len(pieces), query.shape[3]), "", dtype=object)
    for row, piece in zip(names, pieces, strict=True):
        row[: len(piece)] = token_names(piece, tokenizer)
    values = excerpts | {
        "token": names,
        "length": np.array([len(piece) for piece in pieces]),
        "planes": np.array([layer.rotary_dim // 2 for layer in planes]),
    }
    return labelled({f"excerpt_{name}": of for name, of in values.items()}, AXES)
