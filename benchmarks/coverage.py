"""How often do 95 % intervals hold the truth, when documents or layers are drawn anew?

    python benchmarks/coverage.py [--corpora FOLDER] [--draws N] [--profiles N]

Without a FOLDER, made up. Changes of loss: so many documents of 8 sequences each, normal and
alike within a document (intra-class correlation); the truth is 0. Rank correlations: so many
layers of 6 heads, two normal numbers a head, alike within a layer.

With a FOLDER that holds novels/train/*.txt or novels/valid/*.txt: the bundled checkpoint on
stretches of every novel, a pool of which documents are drawn with replacement, each as it is.
The change of loss under stop(Slowest(0.25)) and stop(Fastest(0.25)), whose truth is the mean of
the pool; with --profiles also the rank correlation of the claim, whose truth is the draws'
mean. Every draw fits its own models.

"now" draws documents again (8 or more of them) and jackknifes layers; "before" drew each
sequence by itself, and layers with replacement. Of fewer documents stretches are drawn, and
results say that they speak of that text alone: as the rows of 4 documents show, no interval
then holds the truth of others as often as it says.

Takes a minute and a half of one CPU core with novels, 20 seconds without, and 6 seconds a
profile.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.claims.arrays import head_arrays
from ropelens.claims.heads import judge_wavelengths
from ropelens.claims.numbers import rank_correlation
from ropelens.intervals import paired_interval
from ropelens.text.text import assign_groups

SEQUENCES = 8
"""Sequences of a made-up document."""

PROFILED = 16, 4
"""Documents of a profile, and sequences of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, help="holds novels/{train,valid}/*.txt")
    parser.add_argument("--draws", type=int, default=2000, help="draws of a row")
    parser.add_argument("--profiles", type=int, default=0, help="draws that are profiled")
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--each", type=int, default=6, help="sequences of a novel")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    print("change of loss, made up (95 % is right)")
    print("documents  alike   now  before")
    for documents in (4, 8, 16, 32):
        for alike in (0.0, 0.3, 0.5):
            report(documents, alike, made_up(documents, alike, options.draws, random))
    print("rank correlation of -0.68, made up\n   layers  alike   now  before")
    for layers in (4, 6, 12, 32):
        for alike in (0.0, 0.5):
            report(layers, alike, correlated(layers, alike, options.draws // 4, random))
    if options.corpora:
        model, tokens, group = novels(options.corpora, options.context, options.each)
        weight, change = changes_of_loss(model, tokens, group)
        for name, values in change.items():
            alike = correlation(values, group)
            print(f"{group.max() + 1} novels of up to {options.each} sequences: {name}")
            for documents in (4, 8, 16, 32):
                drawn = redrawn(documents, group, weight, values, options.draws, random)
                report(documents, alike, drawn)
        if options.profiles:
            profiled(model, tokens, group, options.profiles, random)


def report(documents: int, alike: float, hits: np.ndarray) -> None:
    """One line: in what share of the draws either interval holds the truth."""
    now, before = hits.mean(axis=0)
    print(f"{documents:9} {alike:6.2f} {now:6.1%} {before:6.1%}", flush=True)


def holds(
    truth: float, change: np.ndarray, weight: np.ndarray, document: np.ndarray
) -> tuple[bool, bool]:
    """Whether the interval by group, as it is now, and that by sequence hold the truth."""
    group = assign_groups(torch.from_numpy(document), len(document)).numpy()
    bounds = [paired_interval(change, weight, by)[1:] for by in (group, None)]
    now, before = (low <= truth <= high for low, high in bounds)
    return bool(now), bool(before)


def made_up(
    documents: int, alike: float, draws: int, random: np.random.Generator
) -> np.ndarray:
    """Two levels, normal: documents differ, and sequences within one; [draw, interval]."""
    document = np.repeat(np.arange(documents), SEQUENCES)
    shared = random.normal(size=(draws, documents, 1)) * alike**0.5
    noise = random.normal(size=(draws, documents, SEQUENCES)) * (1 - alike) ** 0.5
    weight = np.ones(document.size)
    return np.array([holds(0.0, x.ravel(), weight, document) for x in shared + noise])


def correlated(
    layers: int, alike: float, draws: int, random: np.random.Generator
) -> np.ndarray:
    """Layers of 6 heads, two normal numbers a head that correlate by -0.7; [draw, interval]."""
    mix, truth = np.linalg.cholesky([[1, -0.7], [-0.7, 1]]), 6 / np.pi * np.arcsin(-0.7 / 2)
    hits = []
    for _ in range(draws):
        shared, noise = random.normal(size=(2, layers, 1)), random.normal(size=(2, layers, 6))
        x, y = np.einsum("ij,jlh->ilh", mix, alike**0.5 * shared + (1 - alike) ** 0.5 * noise)
        claim = judge_wavelengths(head_arrays(x[None], y[None]))
        picks = random.integers(layers, size=(200, layers))
        redrawn = [rank_correlation(x[pick].ravel(), y[pick].ravel()) for pick in picks]
        low, high = np.quantile(redrawn, [0.025, 0.975])
        hits.append((claim["low"] <= truth <= claim["high"], low <= truth <= high))
    return np.array(hits)


def redrawn(
    documents: int,
    group: np.ndarray,
    weight: np.ndarray,
    change: np.ndarray,
    draws: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Documents of a pool, drawn with replacement; [draw, interval]."""
    members = [np.flatnonzero(group == number) for number in range(group.max() + 1)]
    truth = float((weight * change).sum() / weight.sum())
    hits = []
    for _ in range(draws):
        drawn = [members[number] for number in random.integers(len(members), size=documents)]
        at = np.concatenate(drawn)
        document = np.repeat(np.arange(documents), [len(sequences) for sequences in drawn])
        hits.append(holds(truth, change[at], weight[at], document))
    return np.array(hits)


def correlation(change: np.ndarray, group: np.ndarray) -> float:
    """The intra-class correlation, from the mean squares between and within documents."""
    parts = [change[group == number] for number in range(group.max() + 1)]
    size = np.mean([len(part) for part in parts])
    means = np.array([part.mean() for part in parts])
    between = size * means.var(ddof=1)
    within = np.mean([part.var(ddof=1) for part in parts])
    return float((between - within) / (between + (size - 1) * within))


def novels(
    corpora: Path, context: int, each: int
) -> tuple[PreTrainedModel, torch.Tensor, np.ndarray]:
    """The bundled checkpoint, and stretches of every novel: their tokens and its number."""
    model, tokenizer = rl.load("bundled")
    rows: list[torch.Tensor] = []
    for path in sorted((corpora / "novels").glob("*/*.txt")):
        # Stretches spread over the novel, so that no file is tokenized whole.
        text = path.read_text(encoding="utf-8")
        for begin in np.linspace(0, max(0, len(text) - 8 * context), each + 2)[1:-1]:
            stretch = text[int(begin) :][: 8 * context]
            ids = tokenizer(stretch, add_special_tokens=False, verbose=False)["input_ids"]
            cut = [tokenizer.bos_token_id, *ids][:context]
            assert len(cut) == context, path
            rows.append(torch.tensor(cut))
    return model, torch.stack(rows), np.repeat(np.arange(len(rows) // each), each)


def changes_of_loss(
    model: PreTrainedModel, tokens: torch.Tensor, group: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The predicted tokens of every sequence, and its changes of loss by edit."""
    evaluated = rl.evaluate(
        model,
        tokens,
        documents=torch.from_numpy(group),
        edits={
            "slowest quarter stopped": rl.stop_slowest(0.25),
            "fastest quarter stopped": rl.stop(rl.Fastest(0.25)),
        },
        measures=["loss"],
    )
    loss = evaluated["loss"]
    names = evaluated["edit"].values[1:].tolist()
    change = {name: (loss.sel(edit=name) - loss.sel(edit="none")).values for name in names}
    return evaluated["predicted_tokens"].values.astype(float), change


def profiled(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    group: np.ndarray,
    draws: int,
    random: np.random.Generator,
) -> None:
    """Profiles of documents drawn with replacement: rank correlations."""
    documents, each = PROFILED
    members = [np.flatnonzero(group == number)[:each] for number in range(group.max() + 1)]
    claims = []
    for draw in range(draws):
        picks = random.integers(len(members), size=documents)
        some = tokens[np.concatenate([members[number] for number in picks])]
        document = torch.from_numpy(np.repeat(np.arange(documents), each))
        profile = rl.profile(model, some, documents=document, surrogates=0, seed=draw)
        claims.append(rl.classify_heads(profile, resamples=0).attrs["claim"])
    print(f"{documents} novels of {each} sequences, {draws} draws")
    rho = np.array([claim["rank_correlation"] for claim in claims])
    mean, sd = rho.mean(), rho.std()
    covered = np.mean([claim["low"] <= mean <= claim["high"] for claim in claims])
    print(f"rank correlation {mean:+.2f}, sd {sd:.2f} over draws: {covered:.1%}")


if __name__ == "__main__":
    main()
