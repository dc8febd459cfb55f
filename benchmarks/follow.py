"""Compare the labels of heads with what they follow when keys exchange their contents.

    python benchmarks/follow.py MODEL --text FILE_OR_FOLDER ... --context N ...
    python benchmarks/follow.py FOLDER_WITH_A_PROFILE

Measures every text at every context, or reads a saved profile. Prints one row for each of these
settings and each kind of layers: the positional
and semantic heads without and with the shared bits that exchanged keys assign, how many of them
agree with the sign of the score, and the rank correlation of the score with the positional
minus the content fraction, with its 95% interval over layers. Then it prints one row for each
pair of settings: how similar scores, fractions and labels are.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import xarray as xr
from scipy import stats

import ropelens as rl
from ropelens.budget.labels import label_heads
from ropelens.figures.inputs import head_grid
from ropelens.profiles.heads import fractions
from ropelens.profiles.kinds import layers_by_kind

DRAWS = 2000  # resamples of the layers
NAMED = ("positional", "semantic")
PARTS = ("positional_fraction", "content_fraction")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--context", type=int, action="append", default=[])
    parser.add_argument("--sequences", type=int, default=16)
    options = parser.parse_args()
    if not options.text:
        profile = rl.open(Path(options.model) / "profile.nc")
        print_rows(options.model, profile)
        return
    model, tokenizer = rl.load(options.model)
    measured = {}
    for path, context in itertools.product(options.text, options.context):
        text = rl.tokenize(
            rl.read_documents([path]),
            tokenizer,
            context=context,
            sequences=options.sequences,
        )
        setting = f"{path.stem}, {context} tokens"
        profile = rl.profile(model, text, surrogates=0)
        measured[setting] = numbers_of(profile)
        print_rows(setting, profile)
    for (first, one), (second, other) in itertools.combinations(measured.items(), 2):
        cells = pair_of(one, other)
        print(f"| {first}; {second} | {' | '.join(cells)} |")


def print_rows(setting: str, profile: xr.Dataset) -> None:
    """Print a row for the layers of each kind."""
    for kind, layers in layers_by_kind(profile).items():
        numbers = numbers_of(profile.isel(layer=layers))
        cells = row_of(numbers)
        print(f"| {setting} | {kind} | {' | '.join(cells)} |", flush=True)


def numbers_of(profile: xr.Dataset) -> dict[str, np.ndarray]:
    """Scores, fractions and labels [layer, head], before and after shared bits are assigned."""
    names = ("total", "sink", "position", "content", "interaction")
    bits = {name: profile[f"{name}_bits"].values for name in names}
    before = fractions(bits)
    heads = rl.classify_heads(profile)
    table = {}
    for name in ("label", "uncertain"):
        table[name] = head_grid(profile, heads, heads[name])
    for name in PARTS:
        table[name] = head_grid(profile, heads, heads[name]).astype(float)
    rows = float(profile["group_scored"].sum())
    return {
        "score": profile["follow_score"].values,
        "before": before[PARTS[0]] - before[PARTS[1]],
        "after": table[PARTS[0]] - table[PARTS[1]],
        "label_before": label_heads(bits, rows=rows),
        **table,
    }


def row_of(numbers: dict[str, np.ndarray]) -> list[str]:
    """Cells of a setting: counts, agreement and correlations before and after."""
    cells = []
    for when, label in (
        ("before", numbers["label_before"]),
        ("after", numbers["label"]),
    ):
        shown = np.isin(label, NAMED) & np.isfinite(numbers["score"])
        agree = np.where(
            label == "positional", numbers["score"] > 0, numbers["score"] < 0
        )
        counts = [str(np.count_nonzero(label == name)) for name in NAMED]
        agreeing = np.count_nonzero(agree & shown)
        cells += [
            " + ".join(counts),
            f"{agreeing} of {np.count_nonzero(shown)}",
            with_interval(numbers["score"], numbers[when], numbers["label"]),
        ]
    uncertain = [mark for mark in numbers["uncertain"].flat if mark is True]
    return [*cells, str(len(uncertain))]


def with_interval(score: np.ndarray, other: np.ndarray, label: np.ndarray) -> str:
    """Rank correlation over heads that choose keys, and its interval over layers."""
    chooses = np.isin(label, (*NAMED, "mixed"))

    def correlation(layers: np.ndarray) -> float:
        x = np.where(chooses, score, np.nan)[layers].ravel()
        y = np.where(chooses, other, np.nan)[layers].ravel()
        known = np.isfinite(x) & np.isfinite(y)
        return (
            stats.spearmanr(x[known], y[known]).statistic if known.sum() > 2 else np.nan
        )

    random = np.random.default_rng(0)
    count = len(score)
    resampled = random.integers(count, size=(DRAWS, count))
    draws = [correlation(layers) for layers in resampled]
    low, high = np.nanquantile(draws, [0.025, 0.975])
    measured = correlation(np.arange(count))
    return f"{measured:.2f} ({low:.2f} to {high:.2f})"


def pair_of(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """Cells of two settings: rank correlations, equal labels, and contradicting labels."""
    cells = []
    for name in ("score", "positional_fraction"):
        known = np.isfinite(one[name]) & np.isfinite(other[name])
        cells.append(
            f"{stats.spearmanr(one[name][known], other[name][known]).statistic:.2f}"
        )
    for name in ("label_before", "label"):
        cells.append(f"{(one[name] == other[name]).mean():.2f}")
    labels = np.stack([one["label"], other["label"]])
    positional, semantic = [(labels == name).any(0) for name in NAMED]
    contradicting = np.count_nonzero(positional & semantic)
    return [*cells, str(contradicting)]


if __name__ == "__main__":
    main()
