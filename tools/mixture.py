"""Make text that is meant to teach a small model to copy: prose, and words that come again.

    python tools/mixture.py TEXT OUT [--prose 0.5] [--phrases 0.3] [--repeats 0.1] [--lists 0.1]
        [--characters 30e6] [--nearest 8] [--farthest 480] [--seed 0]

`TEXT` is a text file or folder, as `ropelens train` reads it. `OUT` gets four files of
documents, one a line under "text", and `mixture.json`, which says how they were made:

prose.jsonl    The text itself, cut at line ends into pieces of some 20,000 characters, in
               random order.
phrases.jsonl  Phrases of 2 to 5 words that come again and again in random order. A phrase
               returns after so many words on average, but no distance is certain, so only who
               looks up what followed the same word before can tell the next one.
repeats.jsonl  A segment of words that comes back at one distance. In half of the documents the
               segment fills the distance; in the others new words stand between it and its
               return.
lists.jsonl    Lines of "key: value", then the keys again in another order: "key? value". The
               number of lines is log-uniform from 2 to what a context of 512 tokens holds.

Distances are log-uniform from `--nearest` to `--farthest` tokens. Words are drawn at random, so
that nothing but the document itself predicts them. A document draws all of its words from one
alphabet: the 300 most frequent words of the text (a token each), all words of the text (a few
tokens each), or single characters.

A share is one of characters. Distances are counted in words, at so many tokens a word as a
vocabulary of 1,024 tokens gives. Documents stand apart in their files. `ropelens train` joins
them, with its end-of-text token between, to one stream that it cuts into contexts, so that a
context may begin in the middle of a document.

The same arguments make the same bytes.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ropelens.models.texts import read_documents

CONTEXT = 512  # tokens
PIECE = 20_000  # characters of a document of prose
CHARACTERS = [chr(c) for c in range(0x21, 0x7F)]


@dataclass(frozen=True)
class Alphabet:
    """Where the words of a document come from.

    `draw` gives one random word. `tokens` is how many tokens a word has about.
    """

    draw: Callable[[random.Random], str]
    tokens: float


def main(
    text: Annotated[Path, typer.Argument(help="Text file or folder to draw from.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    prose: Annotated[float, typer.Option(help="Share of prose, in characters.")] = 0.5,
    phrases: Annotated[float, typer.Option(help="Share of phrases in random order.")] = 0.3,
    repeats: Annotated[float, typer.Option(help="Share of repeated segments.")] = 0.1,
    lists: Annotated[float, typer.Option(help="Share of lists with questions.")] = 0.1,
    characters: Annotated[float, typer.Option(help="Characters in all.")] = 30e6,
    nearest: Annotated[float, typer.Option(help="Least tokens to an earlier copy.")] = 8,
    farthest: Annotated[float, typer.Option(help="Most tokens to an earlier copy.")] = 480,
    seed: Annotated[int, typer.Option(help="Decides every random draw.")] = 0,
) -> None:
    documents = read_documents([text])
    alphabets, reach = alphabets_of(documents), (nearest, farthest)
    kinds = {
        "prose": (prose, lambda r: pieces(documents, r)),
        "phrases": (phrases, lambda r: endless(r, alphabets, partial(shuffled, reach=reach))),
        "repeats": (repeats, lambda r: endless(r, alphabets, partial(repeated, reach=reach))),
        "lists": (lists, lambda r: endless(r, alphabets, listed)),
    }
    out.mkdir(parents=True, exist_ok=True)
    for kind, (share, make) in kinds.items():
        # A kind is the same whatever the others are.
        texts = make(random.Random(f"{seed} {kind}"))
        write(out / f"{kind}.jsonl", texts, characters=share * characters)
    shares = {kind: share for kind, (share, _) in kinds.items()}
    record = {"shares": shares, "reach": reach, "characters": characters, "seed": seed}
    (out / "mixture.json").write_text(json.dumps(record, indent=2) + "\n")


def write(path: Path, texts: Iterator[str], *, characters: float) -> None:
    """Write `texts` to `path`, a line each, until they have `characters` characters."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < characters and (text := next(texts, None)) is not None:
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text)


def pieces(documents: Sequence[str], r: random.Random) -> Iterator[str]:
    """`documents` cut at line ends into pieces of about `PIECE` characters, each once."""
    cut: list[str] = []
    for document in documents:
        start = 0
        while start < len(document):
            stop = document.find("\n", start + PIECE)
            stop = len(document) if stop < 0 else stop
            cut.append(document[start:stop].strip("\n"))
            start = stop + 1
    r.shuffle(cut)
    return iter(cut)


def alphabets_of(documents: Sequence[str]) -> dict[Alphabet, float]:
    """The alphabets of `documents`, and how often a document is made of each."""
    counts = Counter(
        word for document in documents for word in re.findall("[a-z]+", document.lower())
    )
    ranked = sorted(counts, key=lambda w: (-counts[w], w))
    return {
        Alphabet(lambda r: r.choice(ranked[:300]), tokens=1.0): 0.8,
        Alphabet(lambda r: r.choice(ranked), tokens=3.5): 0.1,
        Alphabet(lambda r: r.choice(CHARACTERS), tokens=1.0): 0.1,
    }


def endless(
    r: random.Random,
    alphabets: dict[Alphabet, float],
    make: Callable[[random.Random, Alphabet], str],
) -> Iterator[str]:
    """Documents by `make`, each of an alphabet drawn by its weight."""
    while True:
        (alphabet,) = r.choices(list(alphabets), weights=list(alphabets.values()))
        yield make(r, alphabet)


def log_uniform(r: random.Random, low: float, high: float) -> float:
    """A number of [low, high] whose logarithm is uniform."""
    return math.exp(r.uniform(math.log(low), math.log(high)))


def repeated(r: random.Random, alphabet: Alphabet, reach: tuple[float, float]) -> str:
    """A segment of words that comes back at one distance, for a context or longer."""
    distance = max(2, round(log_uniform(r, *reach) / alphabet.tokens))
    kept = distance if r.random() < 0.5 else r.randint(2, distance)
    segment = [alphabet.draw(r) for _ in range(kept)]
    returns = max(2, math.ceil(CONTEXT / alphabet.tokens / distance))
    words: list[str] = []
    for _ in range(returns):
        words += segment
        words += [alphabet.draw(r) for _ in range(distance - kept)]
    return " ".join(words)


def shuffled(r: random.Random, alphabet: Alphabet, reach: tuple[float, float]) -> str:
    """Phrases of 2 to 5 words that come again and again in random order, for a context."""
    length = r.randint(2, 5)
    distance = log_uniform(r, *reach) / alphabet.tokens
    count = max(2, round(distance / length))
    phrases = [[alphabet.draw(r) for _ in range(length)] for _ in range(count)]
    words: list[str] = []
    while len(words) < CONTEXT / alphabet.tokens:
        words += r.choice(phrases)
    return " ".join(words)


def listed(r: random.Random, alphabet: Alphabet) -> str:
    """Lines of "key: value", all keys different, then each key again with its value."""
    line = 2 * alphabet.tokens + 2  # tokens, with the colon and the line end
    most = max(2, CONTEXT / 2 / line)
    values = {}
    for _ in range(round(log_uniform(r, 2, most))):
        values[alphabet.draw(r)] = alphabet.draw(r)
    asked = r.sample(list(values), len(values))
    told = [f"{key}: {value}" for key, value in values.items()]
    return "\n".join([*told, *(f"{key}? {values[key]}" for key in asked)])


if __name__ == "__main__":
    typer.run(main)
