"""A pass over the text that reads attention on tokens, and orders of keys with distance."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.block import Block
from ropelens.attention.distances import (
    distances_of,
    lead_of_keys,
    mean_by_bin,
    reverses,
    waves,
)
from ropelens.attention.sums import LayerMeans
from ropelens.claims.run_arrays import SETS, RunArrays
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.passes import collect
from ropelens.profiles.token_sets import shares_of
from ropelens.runtime.progress import ShowProgress, Stage
from ropelens.schema.rows import Statistic
from ropelens.text.prompts import TokenNames, token_names
from ropelens.text.text import Text

APOSTROPHE = "'"
MIN_TOKENS = 10  # fewer apostrophes decide nothing


@dataclass(frozen=True)
class AttentionRead:
    """Numbers that one pass over the text reads from attention.

    `reversals` are by number of the layer, for the planes in their order (order 0) and in 40
    random orders.
    """

    reversals: dict[int, Float[np.ndarray, "head order"]]
    apostrophes: RunArrays

    def reversals_in(
        self, layers: Int[np.ndarray, " layer"]
    ) -> Float[np.ndarray, "layer head order"]:
        return np.array([self.reversals[layer] for layer in layers])


@dataclass(frozen=True)
class TokenSets:
    """Sets of tokens, the tokens with an apostrophe first; or none, and the reason `why`."""

    sets: list[Int[Tensor, " _"]]
    why: str = ""


def read_attention(
    measurement: Measurement, tokenizer: TokenNames | None, progress: ShowProgress
) -> AttentionRead:
    """Read reversals in each layer, and the lead of the attention on apostrophes."""
    text = measurement.text
    token_sets = _token_sets(text, measurement.seed, tokenizer)
    shares = [
        shares_of(text.ids, tokens, str(number), "")
        for number, tokens in enumerate(token_sets.sets)
    ]
    reversal = Statistic(
        "reversals",
        dims=("layer", "head", "order"),
        units="1",
        long_name="",
        pool="ratio",
        values=partial(_reversal_by_order, seed=measurement.seed),
    )
    statistics = [reversal, *chain.from_iterable(shares)]
    planes = measurement.rotation.planes(text.context, alike=True)
    with progress(Stage("reading attention", int(text.real.sum()))) as advance:
        sums = collect(measurement, planes, statistics=statistics, progress=advance)
    means = {
        layer: LayerMeans(of_layer, sums, planes[layer], statistics)
        for layer, of_layer in sums.layers.items()
    }
    lead = RunArrays(
        arrays={"token_lead": _lead(shares, means.values())},
        objections={"apostrophes": token_sets.why},
    )
    reversals = {
        layer: reversal.value(of_layer).numpy() for layer, of_layer in means.items()
    }
    return AttentionRead(reversals=reversals, apostrophes=lead)


def _lead(
    shares: Sequence[tuple[Statistic, Statistic]], layers: Iterable[LayerMeans]
) -> Float[np.ndarray, "layer head set"]:
    """Attention on each set of tokens minus attention on its controls; NaN without sets."""
    if not shares:
        return np.full((1, 1, 1 + SETS), np.nan)
    leads = []
    for means in layers:
        leads.append([on.value(means) - control.value(means) for on, control in shares])
    return np.moveaxis(np.array(leads), 1, -1)


def _reversal_by_order(block: Block, *, seed: int) -> Tensor:
    """Mean of `uniform_reversal` over distances, with the planes in their and 40 other orders.

    Keys that are drawn by attention score high at their own distance, because attention uses
    the planes in their order. So they would reverse more in this order, also in random models.
    """
    lead = lead_of_keys(block, evenly=True)
    far = distances_of(block).far
    moved = waves(block, far)
    turning = block.planes.term_inv_freq.nonzero()[:, -1]
    random = np.random.default_rng(seed)
    means = []
    for number in range(1 + SETS):
        order = torch.arange(len(moved), device="cpu")
        if number > 0:
            order[turning] = turning[random.permutation(len(turning))]
        reversed_order = reverses(lead.terms, moved[order])
        means.append(mean_by_bin(block, reversed_order, lead.counts, len(far)))
    return torch.cat(means, dim=-1)


def _token_sets(text: Text, seed: int, tokenizer: TokenNames | None) -> TokenSets:
    """The tokens with an apostrophe, and random sets of words that are as frequent.

    Each set of words has, for each apostrophe token, a word of half to twice its frequency.
    """
    if tokenizer is None:
        return TokenSets([], "there is no tokenizer")
    ids, counts = text.ids[text.real].unique(return_counts=True)
    names = token_names(ids, tokenizer)
    is_apostrophe = torch.tensor(
        [APOSTROPHE in name for name in names], dtype=torch.bool, device="cpu"
    )
    is_word = torch.tensor(
        [name.strip().isalpha() for name in names], dtype=torch.bool, device="cpu"
    )
    total = int(counts[is_apostrophe].sum())
    if total < MIN_TOKENS:
        why = f"{total} tokens have an apostrophe; a verdict needs {MIN_TOKENS}"
        return TokenSets([], why)
    log_count = counts.float().log2()
    log_ratio = (log_count[is_apostrophe][:, None] - log_count).abs()
    similar = (log_ratio <= 1) & is_word  # [apostrophe, id]
    return TokenSets([ids[is_apostrophe], *_draw_words(ids, similar, seed)])


def _draw_words(
    ids: Int[Tensor, " id"], similar: Bool[Tensor, "apostrophe id"], seed: int
) -> list[Int[Tensor, " _"]]:
    """Up to 40 different sets with a similar word for each apostrophe."""
    if not similar.any(1).all():
        return []
    random = np.random.default_rng(seed)
    sets: dict[tuple[int, ...], None] = {}
    for _ in range(10 * SETS):
        words = {int(random.choice(ids[of_apostrophe])) for of_apostrophe in similar}
        sets[tuple(sorted(words))] = None
    return [
        torch.tensor(words, dtype=torch.long, device="cpu") for words in [*sets][:SETS]
    ]
