"""Compare the labels of heads with three interventions at the attention call.

    python benchmarks/interventions.py MODEL --text FILE --context N [--sequences N]

- Single keys exchange their contents (the scores of a profile).
- Blocks of 8, 16 and 32 keys exchange their contents before rotation (after Urrutia et al.
  2025).
- All keys of a row move closer by the same distance t, for t of 1, 8 and 64 tokens. Keys that
  would be ahead of the row are hidden.

The score of a head is (position - content) / (1 - chance). `position` is the overlap of the
attention of a row before and after at the same positions or distances, `content` the overlap on
the same contents, and `chance` the overlap of the attention before with itself in both places.
Prints a row for each intervention and kind of layers: how many positional and semantic heads
have a score with the sign of their label, with a 95% interval of this share over layers; and
the rank correlation of the score with the positional minus the content fraction. Then it
lists the heads whose label and score disagree, those that follow neither, and the
five heads with the most bits.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.profiles.kinds import layers_by_kind
from ropelens.rope.planes import Planes, unrotate

BLOCKS = (8, 16, 32)
DISTANCES = (1, 8, 64)
DRAWS = 2000  # resamples of the layers
EARLY = 1 / 3  # share of a sequence whose rows have too few keys


class ReadRows:
    """The rows of an attention call, which read keys as they are or with other contents."""

    def __init__(self, call: AttentionCall, planes: Planes) -> None:
        self.call = call
        self.group = call.query.shape[1] // call.key.shape[1]
        self.query = call.query.float() * call.scale
        self.place = torch.arange(call.key.shape[2])
        self.planes = planes
        if planes.inv_freq.ndim > 1:
            self.planes = planes.of_keys(call.key.shape[1])
        self.still = unrotate(call.key.float(), self.place, self.planes)
        self.is_late = self.place >= EARLY * len(self.place)
        self.sees = call.visibility.sees().expand(len(self.query), -1, -1)
        self.keys = self.sees.clone()
        self.keys[..., 0] = False  # the first position is a sink

    def attention(self, keys: torch.Tensor) -> torch.Tensor:
        keys = keys.repeat_interleave(self.group, 1)
        scores = self.call.squash(self.query @ keys.mT)
        return scores.masked_fill(~self.sees[:, None], -torch.inf).softmax(-1)

    def rotated(self, still: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return unrotate(still, places, self.planes, sign=1)

    def sums(
        self, weight: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]
    ) -> np.ndarray:
        """Sums over the late rows of the overlap of each pair, and of the weight."""
        parts = []
        for one, other in pairs:
            overlap = torch.minimum(one, other).sum(-1)
            parts.append(overlap * weight)
        parts.append(weight)
        late = [part[..., self.is_late].sum((0, 2)) for part in parts]
        return torch.stack(late, -1).numpy()


def shares(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    weights = weights * keys[:, None]
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def moved(weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return weights.gather(-1, index.expand(weights.shape))


def overlaps(call: AttentionCall, planes: Planes) -> dict[str, np.ndarray]:
    """Sums [head, part] over the late rows of position, content, chance and weight."""
    rows = ReadRows(call, planes)
    before = rows.attention(call.key.float())
    generator = torch.Generator().manual_seed(call.layer)
    sums = {}
    for size in BLOCKS:
        source = exchanged_blocks(len(rows.place), size, generator)
        sums[f"blocks of {size} keys"] = sums_of_exchange(rows, before, source)
    for distance in DISTANCES:
        sums[f"keys moved by {distance}"] = sums_of_move(rows, before, distance)
    return sums


def exchanged_blocks(
    length: int, size: int, generator: torch.Generator
) -> torch.Tensor:
    """The position from which each position gets its contents. Position 0 keeps its own."""
    number = (length - 1) // size
    inside = 1 + torch.arange(number * size).unflatten(0, (number, size))
    order = torch.randperm(number, generator=generator)
    source = torch.arange(length)
    source[1 : 1 + number * size] = inside[order].flatten()
    return source


def sums_of_exchange(
    rows: ReadRows, before: torch.Tensor, source: torch.Tensor
) -> np.ndarray:
    new = source.argsort()
    both = rows.keys & moved(rows.keys, new)
    exchanged = rows.rotated(rows.still[..., source, :], rows.place)
    after = rows.attention(exchanged)
    first = shares(before, both)
    same_place = shares(after, both)
    same_content = shares(moved(after, new), both)
    by_chance = shares(moved(before, new), both)
    weight = (before * both[:, None]).sum(-1)
    return rows.sums(
        weight, (first, same_place), (first, same_content), (first, by_chance)
    )


def sums_of_move(rows: ReadRows, before: torch.Tensor, distance: int) -> np.ndarray:
    place = rows.place
    closer = (place + distance).clamp(max=len(place) - 1)
    behind = rows.keys & (place <= place[:, None] - distance)
    after = shares(rows.attention(rows.rotated(rows.still, closer)), behind)
    same_place = shares(moved(before, closer), behind)
    same_content = shares(before, behind)
    weight = behind.any(-1)[:, None].expand(before.shape[:3]).float()
    return rows.sums(
        weight, (same_place, after), (same_content, after), (same_place, same_content)
    )


def scores(sums: np.ndarray) -> np.ndarray:
    """Score of each head from its sums [..., part]; NaN for even attention."""
    position, content, chance, mass = np.moveaxis(sums, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        beyond_chance = 1 - chance / mass
        score = (position / mass - content / mass) / beyond_chance
    return np.where(beyond_chance < 0.05, np.nan, score)


def row_of(heads: pd.DataFrame, column: str) -> str:
    """Cells of one intervention: agreement with labels, and the rank correlation."""
    named = heads[
        heads["label"].isin(["positional", "semantic"]) & heads[column].notna()
    ]
    agree = (named[column] > 0) == (named["label"] == "positional")
    by_layer = agree.groupby(named["layer"]).agg(["sum", "size"]).to_numpy()
    random = np.random.default_rng(0)
    drawn = by_layer[random.integers(len(by_layer), size=(DRAWS, len(by_layer)))].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    known = heads[
        heads[column].notna() & heads["label"].isin(["positional", "semantic", "mixed"])
    ]
    difference = known["positional_fraction"] - known["content_fraction"]
    rho = stats.spearmanr(known[column], difference).statistic
    share = f"{agree.sum()} of {len(agree)} ({low:.0%} to {high:.0%})"
    return f"{share} | {rho:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--sequences", type=int, default=16)
    options = parser.parse_args()
    model, tokenizer = rl.load(options.model)
    text = rl.tokenize(
        rl.read_documents(options.text),
        tokenizer,
        context=options.context,
        sequences=options.sequences,
    )
    profile = rl.profile(model, text, surrogates=0, progress=True)
    heads = rl.classify_heads(profile)
    heads["single keys"] = heads["follow_score"]
    whole = text.ids[(text.lengths == options.context).nonzero().flatten()]
    interventions = sum_overlaps(model, whole)
    for name, by_layer in interventions.items():
        values = np.full(profile["follow_score"].shape, np.nan)
        for layer, sums in by_layer.items():
            values[layer, : len(sums)] = scores(sums)
        heads[name] = values[heads["layer"].to_numpy(), heads["head"].to_numpy()]
    print("| layers | intervention | labels that agree | rank correlation |")
    print("|---|---|---|---|")
    for kind, layers in layers_by_kind(profile).items():
        part = heads[heads["layer"].isin(layers)]
        for name in ("single keys", *interventions):
            print(f"| {kind} | {name} | {row_of(part, name)} |")
    opposed = heads[heads["opposed"].eq(True).fillna(False)]
    neither = heads[heads["follows_position"] + heads["follows_content"] < 0.5]
    print(f"opposed: {named(opposed)}")
    print(f"follow neither: {named(neither)}")
    print(heads.nlargest(5, "total_bits").round(3).T.to_string())


def sum_overlaps(
    model: torch.nn.Module, sequences: torch.Tensor
) -> dict[str, dict[int, np.ndarray]]:
    """`overlaps` of each intervention and layer, summed over the sequences."""
    total: dict[str, dict[int, np.ndarray]] = {}

    def add(call: AttentionCall, planes: Planes) -> None:
        for name, sums in overlaps(call, planes).items():
            layers = total.setdefault(name, {})
            layers[call.layer] = layers.get(call.layer, 0) + sums

    with torch.no_grad(), rl.observe(model, add):
        for ids in sequences:
            model(ids[None], use_cache=False)
    return total


def named(heads: pd.DataFrame) -> str:
    names = [f"{row.layer}.{row.head} ({row.label})" for row in heads.itertuples()]
    return ", ".join(names) or "none"


if __name__ == "__main__":
    main()
