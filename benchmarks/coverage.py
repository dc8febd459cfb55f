"""How often do 95 % intervals contain the truth, if documents or layers are drawn repeatedly?

    python benchmarks/coverage.py [--corpora FOLDER] [--draws N] [--profiles N]

Without a FOLDER the data are synthetic. Changes of loss: documents of 8 normal numbers each
that are alike within a document (intra-class correlation); the truth is 0. Rank correlations:
layers of 6 heads with two normal numbers per head that are alike within a layer.

A FOLDER holds novels/train/*.txt or novels/valid/*.txt. The bundled checkpoint reads stretches
of every novel, and documents are drawn from this pool with replacement. Changes of loss are
measured under stop(Slowest(0.25)) and stop(Fastest(0.25)); the truth is the mean of the pool.
With --profiles, the rank correlation of the claim is measured as well; the truth is the mean of
the draws. Every draw fits its own models.

"groups" is the interval of ropelens: it resamples documents (if there are 8 or more) and
jackknifes layers. "single" resamples each sequence by itself, or layers with replacement. With
fewer documents, stretches are resampled, and results state that they hold only for that text:
the rows of 4 documents show that no interval then contains the truth of other texts as often as
it should.

Takes a minute and a half of one CPU core with novels, 20 seconds without, and 6 seconds for
each profile.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.budget.labels import Thresholds
from ropelens.claims.classify import judge_wavelengths
from ropelens.claims.numbers import rank_correlation
from ropelens.intervals import paired_interval
from ropelens.text.text import assign_groups

SEQUENCES = 8
"""Sequences of a synthetic document."""

PROFILED = 16, 4
"""Number of documents of a profile, and of sequences per document."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, help="holds novels/{train,valid}/*.txt")
    parser.add_argument(
        "--draws", type=int, default=2000, help="number of draws for each row"
    )
    parser.add_argument(
        "--profiles", type=int, default=0, help="number of draws that are profiled"
    )
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--each", type=int, default=6, help="sequences of a novel")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    print("change of loss, synthetic (95 % is right)")
    print("documents  alike groups single")
    for documents in (4, 8, 16, 32):
        for alike in (0.0, 0.3, 0.5):
            hits = synthetic(documents, alike, options.draws, random)
            report(documents, alike, hits)
    print("rank correlation of -0.68, synthetic\n   layers  alike groups single")
    for layers in (4, 6, 12, 32):
        for alike in (0.0, 0.5):
            hits = correlated(layers, alike, options.draws // 4, random)
            report(layers, alike, hits)
    if options.corpora:
        model, text = novels(options.corpora, options.context, options.each)
        group = text.documents.numpy()
        weight, change = changes_of_loss(model, text)
        for name, values in change.items():
            pool = Pool(change=values, weight=weight, group=group)
            alike = correlation(values, group)
            print(f"{group.max() + 1} novels of up to {options.each} sequences: {name}")
            for documents in (4, 8, 16, 32):
                hits = redrawn(pool, documents, options.draws, random)
                report(documents, alike, hits)
        if options.profiles:
            profiled(model, text, options.profiles, random)


def report(documents: int, alike: float, hits: np.ndarray) -> None:
    """Print the share of the draws in which each interval contains the truth."""
    groups, single = hits.mean(axis=0)
    print(f"{documents:9} {alike:6.2f} {groups:6.1%} {single:6.1%}", flush=True)


def holds(
    truth: float, change: np.ndarray, weight: np.ndarray, document: np.ndarray
) -> tuple[bool, bool]:
    """Whether the interval over groups and the interval over sequences contain the truth."""
    group = assign_groups(torch.from_numpy(document), len(document)).numpy()
    bounds = [paired_interval(change, weight, units)[1:] for units in (group, None)]
    groups, single = [bool(low <= truth <= high) for low, high in bounds]
    return groups, single


def synthetic(
    documents: int, alike: float, draws: int, random: np.random.Generator
) -> np.ndarray:
    """Normal numbers: documents differ, and sequences within a document; [draw, interval]."""
    document = np.repeat(np.arange(documents), SEQUENCES)
    shared = random.normal(size=(draws, documents, 1)) * alike**0.5
    noise = random.normal(size=(draws, documents, SEQUENCES)) * (1 - alike) ** 0.5
    weight = np.ones(document.size)
    hits = []
    for drawn in shared + noise:
        change = drawn.ravel()
        hits.append(holds(0.0, change, weight, document))
    return np.array(hits)


def correlated(
    layers: int, alike: float, draws: int, random: np.random.Generator
) -> np.ndarray:
    """Layers of 6 heads, with two normal numbers that correlate by -0.7; [draw, interval]."""
    mix = np.linalg.cholesky([[1, -0.7], [-0.7, 1]])
    truth = 6 / np.pi * np.arcsin(-0.7 / 2)
    rows = np.array([float(Thresholds.rows)])
    hits = []
    for _ in range(draws):
        shared = alike**0.5 * random.normal(size=(2, layers, 1))
        noise = (1 - alike) ** 0.5 * random.normal(size=(2, layers, 6))
        x, y = np.einsum("ij,jlh->ilh", mix, shared + noise)
        numbers = np.stack([x, y], axis=-1)[..., None]
        claim = judge_wavelengths({"head_numbers": numbers, "scored_rows": rows})
        low, high = interval_over_layers(x, y, random)
        in_claim = claim["low"] <= truth <= claim["high"]
        in_redrawn = low <= truth <= high
        hits.append((in_claim, in_redrawn))
    return np.array(hits)


def interval_over_layers(
    x: np.ndarray, y: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Interval of a rank correlation, from layers that are drawn with replacement."""
    layers = len(x)
    correlations = []
    for drawn in random.integers(layers, size=(200, layers)):
        drawn_x = x[drawn].ravel()
        drawn_y = y[drawn].ravel()
        correlations.append(rank_correlation(drawn_x, drawn_y))
    return np.quantile(correlations, [0.025, 0.975])


def members_of(group: np.ndarray) -> list[np.ndarray]:
    """Numbers of the sequences of each document."""
    documents = group.max() + 1
    return [np.flatnonzero(group == number) for number in range(documents)]


@dataclass(frozen=True, eq=False)
class Pool:
    """Changes of loss of some sequences, their weights, and their documents."""

    change: np.ndarray
    weight: np.ndarray
    group: np.ndarray

    def mean(self) -> float:
        return float((self.weight * self.change).sum() / self.weight.sum())


def redrawn(
    pool: Pool, documents: int, draws: int, random: np.random.Generator
) -> np.ndarray:
    """Draw documents of a pool with replacement; [draw, interval]."""
    members = members_of(pool.group)
    truth = pool.mean()
    hits = []
    for _ in range(draws):
        picks = random.integers(len(members), size=documents)
        drawn = [members[number] for number in picks]
        sizes = [len(sequences) for sequences in drawn]
        rows = np.concatenate(drawn)
        document = np.repeat(np.arange(documents), sizes)
        hits.append(holds(truth, pool.change[rows], pool.weight[rows], document))
    return np.array(hits)


def correlation(change: np.ndarray, group: np.ndarray) -> float:
    """The intra-class correlation, from the mean squares between and within documents."""
    changes = [change[sequences] for sequences in members_of(group)]
    sizes = [len(of_document) for of_document in changes]
    size = np.mean(sizes)
    means = [of_document.mean() for of_document in changes]
    variances = [of_document.var(ddof=1) for of_document in changes]
    between = size * np.array(means).var(ddof=1)
    within = np.mean(variances)
    return float((between - within) / (between + (size - 1) * within))


def novels(corpora: Path, context: int, count: int) -> tuple[PreTrainedModel, rl.Text]:
    """The bundled checkpoint, and a text of stretches of every novel."""
    model, tokenizer = rl.load("bundled")
    sequences: list[torch.Tensor] = []
    for path in sorted((corpora / "novels").glob("*/*.txt")):
        novel = path.read_text(encoding="utf-8")
        for stretch in stretches_of(novel, 8 * context, count):
            encoded = tokenizer(stretch, add_special_tokens=False, verbose=False)
            ids = [tokenizer.bos_token_id, *encoded["input_ids"]][:context]
            assert len(ids) == context, path
            sequences.append(torch.tensor(ids))
    number_of_novels = len(sequences) // count
    documents = torch.arange(number_of_novels).repeat_interleave(count)
    return model, rl.Text(torch.stack(sequences), documents=documents)


def stretches_of(novel: str, length: int, count: int) -> list[str]:
    """Stretches that are spread over a novel; tokenizing whole files would take long."""
    last = max(0, len(novel) - length)
    begins = np.linspace(0, last, count + 2)[1:-1].astype(int)
    return [novel[begin : begin + length] for begin in begins]


def changes_of_loss(
    model: PreTrainedModel, text: rl.Text
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Number of predicted tokens of every sequence, and its changes of loss by edit."""
    edits = {
        "slowest quarter stopped": rl.stop_slowest(0.25),
        "fastest quarter stopped": rl.stop(rl.Fastest(0.25)),
    }
    evaluated = rl.evaluate(model, text, edits=edits, measures=["loss"])
    loss = evaluated["loss"]
    names = evaluated["edit"].values[1:].tolist()
    unedited = loss.sel(edit="none")
    change = {name: (loss.sel(edit=name) - unedited).values for name in names}
    return evaluated["predicted_tokens"].values.astype(float), change


def profiled(
    model: PreTrainedModel, text: rl.Text, draws: int, random: np.random.Generator
) -> None:
    """Rank correlations of profiles of documents that are drawn with replacement."""
    documents, count = PROFILED
    members = [sequences[:count] for sequences in members_of(text.documents.numpy())]
    claims = []
    for draw in range(draws):
        picks = random.integers(len(members), size=documents)
        sequences = np.concatenate([members[number] for number in picks])
        numbers = np.repeat(np.arange(documents), count)
        drawn = rl.Text(text.ids[sequences], documents=numbers)
        profile = rl.profile(model, drawn, surrogates=0, seed=draw)
        heads = rl.classify_heads(profile, resamples=0)
        claims.append(heads.attrs["claim"])
    print(f"{documents} novels of {count} sequences, {draws} draws")
    rho = np.array([claim["rank_correlation"] for claim in claims])
    mean = rho.mean()
    sd = rho.std()
    covered = np.mean([claim["low"] <= mean <= claim["high"] for claim in claims])
    print(f"rank correlation {mean:+.2f}, sd {sd:.2f} over draws: {covered:.1%}")


if __name__ == "__main__":
    main()
