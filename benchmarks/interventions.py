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


def overlaps(call: AttentionCall, planes: Planes) -> dict[str, np.ndarray]:
    """Sums [head, part] over the late rows of position, content, chance and weight."""
    group = call.query.shape[1] // call.key.shape[1]
    query = call.query.float() * call.scale
    place = torch.arange(call.key.shape[2])
    shared = planes if planes.inv_freq.ndim == 1 else planes.of_keys(call.key.shape[1])
    still = unrotate(call.key.float(), place, shared)
    rows = place >= EARLY * len(place)
    sees = call.visibility.sees().expand(len(query), -1, -1)
    keys = sees.clone()
    keys[..., 0] = False  # the first position is a sink

    def attention(keys: torch.Tensor) -> torch.Tensor:
        scores = call.squash(query @ keys.repeat_interleave(group, 1).mT)
        return scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1)

    def shares(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        weights = weights * keys[:, None]
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)

    def moved(weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return weights.gather(-1, index.expand(weights.shape))

    def summed(
        weight: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]
    ) -> np.ndarray:
        parts = [torch.minimum(*pair).sum(-1) * weight for pair in pairs]
        return torch.stack(
            [x[..., rows].sum((0, 2)) for x in (*parts, weight)], -1
        ).numpy()

    before = attention(call.key.float())
    sums = {}
    generator = torch.Generator().manual_seed(call.layer)
    for size in BLOCKS:
        number = (len(place) - 1) // size
        source = place.clone()
        inside = 1 + torch.arange(number * size).unflatten(0, (number, size))
        order = torch.randperm(number, generator=generator)
        source[1 : 1 + number * size] = inside[
            order
        ].flatten()  # contents at each position
        new = source.argsort()
        both = keys & moved(keys, new)
        first = shares(before, both)
        after = attention(unrotate(still[..., source, :], place, shared, sign=1))
        there, itself = (shares(moved(x, new), both) for x in (after, before))
        pairs = (first, shares(after, both)), (first, there), (first, itself)
        sums[f"blocks of {size} keys"] = summed(
            (before * both[:, None]).sum(-1), *pairs
        )
    for distance in DISTANCES:
        closer = (place + distance).clamp(max=len(place) - 1)
        behind = keys & (place <= place[:, None] - distance)
        after = shares(attention(unrotate(still, closer, shared, sign=1)), behind)
        near = shares(moved(before, closer), behind)
        same = shares(before, behind)
        weight = behind.any(-1)[:, None].expand(before.shape[:3]).float()
        sums[f"keys moved by {distance}"] = summed(
            weight, (near, after), (same, after), (near, same)
        )
    return sums


def scores(sums: np.ndarray) -> np.ndarray:
    """Score of each head from its sums [..., part]; NaN for even attention."""
    position, content, chance, mass = np.moveaxis(sums, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        position = position / mass
        content = content / mass
        chance = chance / mass
        return np.where(1 - chance < 0.05, np.nan, (position - content) / (1 - chance))


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
    cut = {"context": options.context, "sequences": options.sequences}
    text = rl.tokenize(rl.read_documents(options.text), tokenizer, **cut)
    profile = rl.profile(model, text, surrogates=0, progress=True)
    heads = rl.classify_heads(profile)
    place = heads["layer"].to_numpy(), heads["head"].to_numpy()
    total: dict[str, dict[int, np.ndarray]] = {}

    def see(call: AttentionCall, planes: Planes) -> None:
        for name, sums in overlaps(call, planes).items():
            layers = total.setdefault(name, {})
            layers[call.layer] = layers.get(call.layer, 0) + sums

    whole = text.ids[(text.lengths == options.context).nonzero().flatten()]
    with torch.no_grad(), rl.observe(model, see):
        for ids in whole:
            model(ids[None], use_cache=False)
    heads["single keys"] = heads["follow_score"]
    for name, layers in total.items():
        values = np.full((*profile["follow_score"].shape,), np.nan)
        for layer, sums in layers.items():
            values[layer, : len(sums)] = scores(sums)
        heads[name] = values[place]
    print(
        "| layers | intervention | labels that agree | rank correlation |\n|---|---|---|---|"
    )
    for kind, layers in layers_by_kind(profile).items():
        part = heads[heads["layer"].isin(layers)]
        for name in ("single keys", *total):
            print(f"| {kind} | {name} | {row_of(part, name)} |")
    opposed = heads[heads["opposed"].eq(True).fillna(False)]
    neither = heads[(heads["follows_position"] + heads["follows_content"] < 0.5)]
    for words, rows in (("opposed", opposed), ("follow neither", neither)):
        names = [f"{row.layer}.{row.head} ({row.label})" for row in rows.itertuples()]
        print(f"{words}: {', '.join(names) or 'none'}")
    print(heads.nlargest(5, "total_bits").round(3).T.to_string())


if __name__ == "__main__":
    main()
