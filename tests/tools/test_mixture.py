"""The mixture is what its docstring says: checked on the documents, with no code of its own."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import Command, python
from scipy import stats

from ropelens.models.texts import read_documents

__all__ = ["python"]

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mixture  # noqa: E402

REACH = (8, 480)
LETTERS = mixture.Alphabet(lambda r: f"w{r.randrange(10**12)}", tokens=1.0)
"""Words that are hardly ever drawn twice."""


@pytest.fixture(scope="module")
def novel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    r = random.Random(0)
    words = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    folder = tmp_path_factory.mktemp("novel")
    for name in ("one.txt", "two.txt"):
        lines = [" ".join(r.choices(words, k=10)) for _ in range(3_000)]
        (folder / name).write_text("\n".join(lines))
    return folder


@pytest.fixture
def make(novel: Path, python: Command) -> Callable[..., Path]:
    """Make a mixture of the novel in a folder."""

    def run(out: Path, *options: str) -> Path:
        script = ROOT / "tools" / "mixture.py"
        assert python(script, novel, out, "--characters", "4e5", *options).code == 0
        return out

    return run


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_the_same_arguments_make_the_same_bytes(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    once, again, other = (
        make(tmp_path / name, "--seed", seed)
        for name, seed in (("once", "0"), ("again", "0"), ("other", "1"))
    )
    for name in ("prose.jsonl", "phrases.jsonl", "repeats.jsonl", "lists.jsonl"):
        assert (once / name).read_bytes() == (again / name).read_bytes()
        assert (once / name).read_bytes() != (other / name).read_bytes()


def test_shares_are_of_characters_and_ropelens_reads_the_documents(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    shares = {"prose": 0.25, "phrases": 0.3, "repeats": 0.2, "lists": 0.25}
    options = [word for kind, share in shares.items() for word in (f"--{kind}", str(share))]
    out = make(tmp_path / "out", *options)
    for kind, share in shares.items():
        documents = texts(out / f"{kind}.jsonl")
        characters = sum(map(len, documents))
        assert 0 <= characters - share * 4e5 <= len(documents[-1])
        assert read_documents([out / f"{kind}.jsonl"]) == documents


def test_prose_is_the_text_each_piece_once(
    novel: Path, make: Callable[..., Path], tmp_path: Path
) -> None:
    documents = read_documents([novel])
    found = texts(make(tmp_path / "out", "--prose", "9") / "prose.jsonl")
    assert len(set(found)) == len(found) >= 8
    assert all(any(piece in document for document in documents) for piece in found)
    assert sum(map(len, found)) + 2 * len(found) >= sum(map(len, documents))


def test_a_segment_comes_back_at_one_distance_and_nothing_else_does() -> None:
    for seed in range(200):
        words = mixture.repeated(random.Random(seed), LETTERS, REACH).split(" ")
        distance = words.index(words[0], 1)
        same = [a == b for a, b in zip(words, words[distance:], strict=False)]
        kept = same.index(False) if False in same else distance
        assert REACH[0] <= distance <= REACH[1]
        assert same == [i % distance < kept for i in range(len(same))]
        assert len(words) >= mixture.CONTEXT or len(words) == 2 * distance


def test_distances_are_log_uniform() -> None:
    r = random.Random(0)
    distances = []
    for _ in range(500):
        words = mixture.repeated(r, LETTERS, REACH).split(" ")
        distances.append(words.index(words[0], 1))
    law = stats.loguniform(*REACH)
    assert stats.kstest(distances, law.cdf).pvalue > 0.01


def test_a_phrase_is_told_by_its_first_word_and_comes_in_random_order() -> None:
    repeated = 0
    for seed in range(200):
        words = mixture.shuffled(random.Random(seed), LETTERS, REACH).split(" ")
        starts, at = [], 0
        follows: dict[str, list[str]] = {}
        length = next(n for n in range(2, 6) if _is_phrases(words, n))
        while at < len(words):
            phrase = words[at : at + length]
            assert follows.setdefault(phrase[0], phrase) == phrase
            starts.append(phrase[0])
            at += length
        repeated += sum(a == b for a, b in itertools.pairwise(starts)) > 0
        assert len(follows) * length <= REACH[1] + 5
        assert len(words) >= mixture.CONTEXT
    assert repeated > 100  # in one order a phrase would never follow itself


def _is_phrases(words: list[str], length: int) -> bool:
    """Whether cutting `words` every `length` words gives phrases that share no word."""
    phrases = {tuple(words[at : at + length]) for at in range(0, len(words), length)}
    return len({word for phrase in phrases for word in phrase}) == len(phrases) * length


def test_a_list_answers_each_of_its_keys_once() -> None:
    for seed in range(100):
        lines = mixture.listed(random.Random(seed), LETTERS).split("\n")
        told = dict(line.split(": ") for line in lines if ": " in line)
        asked = [line.split("? ") for line in lines if "? " in line]
        assert sorted(key for key, _ in asked) == sorted(told)
        assert all(told[key] == value for key, value in asked)
        assert len(told) + len(asked) == len(lines) >= 4
