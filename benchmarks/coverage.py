"""How often do 95 % intervals of a loss change hold the truth, when documents are drawn anew?

    python benchmarks/coverage.py [--corpora FOLDER] [--draws N] [--context N] [--each N]

Made up: of each draw so many documents of 8 sequences each, whose changes are normal and
alike within a document (intra-class correlation); the truth is 0. Real, with a FOLDER that
holds novels/train/*.txt or novels/valid/*.txt: the change of loss of the bundled checkpoint
under stop_slowest(0.25) and stop_fastest(0.25), in stretches of every novel; a pool of which
documents are drawn with replacement, each as it is, so that the truth is the mean of the pool.

"now" draws documents again (8 or more of them), "before" drew each sequence by itself. Of fewer
documents stretches are drawn, and results say that they speak of that text alone: as the rows
of 4 documents show, no interval then holds the truth of others as often as it says.

Takes a minute and a half of one CPU core with novels, 20 seconds without.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import ropelens as rl
from ropelens.statistics.groups import deal
from ropelens.statistics.intervals import paired_interval

SEQUENCES = 8
"""Sequences of a made-up document."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, help="holds novels/{train,valid}/*.txt")
    parser.add_argument("--draws", type=int, default=2000, help="draws of a row")
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--each", type=int, default=6, help="sequences of a novel")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    print("documents  alike   now  before   (made up: 95 % is right)")
    for documents in (4, 8, 16, 32):
        for alike in (0.0, 0.3, 0.5):
            report(documents, alike, made_up(documents, alike, options.draws, random))
    if options.corpora:
        group, weight, change = novels(options.corpora, options.context, options.each)
        for name, values in change.items():
            alike = correlation(values, group)
            print(f"{group.max() + 1} novels of up to {options.each} sequences: {name}")
            for documents in (4, 8, 16, 32):
                drawn = redrawn(documents, group, weight, values, options.draws, random)
                report(documents, alike, drawn)


def report(documents: int, alike: float, hits: np.ndarray) -> None:
    """One line: in what share of the draws either interval holds the truth."""
    now, before = hits.mean(axis=0)
    print(f"{documents:9} {alike:6.2f} {now:6.1%} {before:6.1%}", flush=True)


def holds(
    truth: float, change: np.ndarray, weight: np.ndarray, document: np.ndarray
) -> tuple[bool, bool]:
    """Whether the interval by group, as it is now, and that by sequence hold the truth."""
    group = deal(torch.from_numpy(document), len(document)).numpy()
    bounds = [paired_interval(change, weight, by)[1:] for by in (group, None)]
    now, before = (low <= truth <= high for low, high in bounds)
    return bool(now), bool(before)


def made_up(
    documents: int, alike: float, draws: int, random: np.random.Generator
) -> np.ndarray:
    """Two levels, normal: documents differ, and sequences within one; [draw, interval]."""
    document = np.repeat(np.arange(documents), SEQUENCES)
    shared = random.normal(size=(draws, documents, 1)) * alike**0.5
    own = random.normal(size=(draws, documents, SEQUENCES)) * (1 - alike) ** 0.5
    weight = np.ones(document.size)
    return np.array([holds(0.0, x.ravel(), weight, document) for x in shared + own])


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
        document = np.repeat(np.arange(documents), [len(own) for own in drawn])
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
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """The novel of every sequence, its predicted tokens and its changes of loss by edit."""
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
    group = np.repeat(np.arange(len(rows) // each), each)
    found = rl.evaluate(
        model,
        torch.stack(rows),
        documents=torch.from_numpy(group),
        edits={
            "slowest quarter stopped": rl.stop_slowest(0.25),
            "fastest quarter stopped": rl.stop_fastest(0.25),
        },
        measures=["loss"],
    )
    loss = found["loss"]
    names = found["edit"].values[1:].tolist()
    change = {name: (loss.sel(edit=name) - loss.sel(edit="none")).values for name in names}
    return group, found["predicted_tokens"].values.astype(float), change


if __name__ == "__main__":
    main()
