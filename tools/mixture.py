"""Make the tokens that teach a small model to copy, stage by stage.

    python tools/mixture.py TEXT VALID OUT [--recipe copying] [--seed 0] [--share 1.0]

`TEXT` and `VALID` are text files or folders, as `ropelens train` reads them. `OUT` becomes a
folder for `ropelens train --tokens`: a tokenizer trained on `TEXT`, an array of sequences for
each stage below, valid.npy (only prose, from `VALID`), and data.json, which records how they
were made. The same arguments make the same bytes. `--share` makes this share of every stage.

A sequence is BOS and one document:

prose    A stretch of the text.
phrases  Phrases of 2 to 5 words that repeat in random order. No distance is certain, so
         only a model that looks up the word after the previous occurrence can predict the next.
repeats  A segment that comes back at one distance, log-uniform from 4 tokens to two thirds of
         the sequence. In half of the documents it fills the distance. Otherwise new words are
         between the segment and its return.
needles  Prose with phrases of 3 to 5 tokens hidden in it, each two or three times.
lists    Lines of a key of one or two words and a value, then all lines again in another order,
         as often as the sequence allows. The number of lines is log-uniform.

Words are tokens, drawn at random: only the document itself predicts them. A document draws from
a pool of the most frequent tokens of the text. The size of the pool is log-uniform between the
limits of the stage. In a small pool words repeat often, and copying is learnt there first.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from transformers import PreTrainedTokenizerFast

from ropelens.runtime.records import write_json
from ropelens.train.data import DATA, copy_tokenizer, prepare_data, read_texts
from ropelens.train.settings import Settings

HIDDEN = 40  # smallest number of tokens of prose for each hidden needle
COUNTED = 4_000  # sequences of the text in which tokens are counted


@dataclass(frozen=True)
class Stage:
    """`tokens` in sequences of `length`; `shares` are the shares of each kind of document.

    `pool` is the smallest and the largest number of words from which a document draws.
    `phrases` is the largest number of different phrases in a document.
    """

    tokens: float
    length: int
    pool: tuple[int, int]
    phrases: int
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Recipe:
    """Stages for a model of this `size`, which reads sequences of `context` tokens."""

    size: str
    vocabulary: int
    context: int
    stages: tuple[Stage, ...]


RECIPES = {
    "bundled": Recipe(
        size="mini",
        vocabulary=1024,
        context=512,
        stages=(
            Stage(1.5e6, 64, (60, 60), 8, {"phrases": 1.0}),
            Stage(8e6, 64, (40, 600), 8, {"phrases": 1.0}),
            Stage(
                3.5e6,
                512,
                (130, 1000),
                80,
                {
                    "prose": 0.45,
                    "phrases": 0.2,
                    "repeats": 0.1,
                    "needles": 0.15,
                    "lists": 0.1,
                },
            ),
        ),
    ),
    "copying": Recipe(
        size="micro",
        vocabulary=512,
        context=256,
        stages=(
            Stage(0.8e6, 16, (60, 60), 2, {"phrases": 1.0}),
            Stage(2.7e6, 64, (60, 500), 4, {"phrases": 1.0}),
            Stage(
                2e6,
                256,
                (60, 500),
                40,
                {
                    "prose": 0.4,
                    "phrases": 0.2,
                    "repeats": 0.1,
                    "needles": 0.2,
                    "lists": 0.1,
                },
            ),
        ),
    ),
}


@dataclass(frozen=True)
class Text:
    """Sources of documents: `prose` [sequence, position], and `words` by falling frequency."""

    prose: np.ndarray
    words: np.ndarray
    line_end: int


@dataclass(frozen=True)
class Maker:
    """Makes the documents of a stage: the tokens of one sequence without its BOS."""

    text: Text
    stage: Stage
    random: np.random.Generator

    @property
    def room(self) -> int:
        return self.stage.length - 1

    def sequences(self, count: int) -> np.ndarray:
        """uint16 [sequence, position]: BOS and a document; its kind is drawn by `shares`."""
        shares = np.array(list(self.stage.shares.values()))
        rows = np.zeros((count, self.stage.length), dtype=np.uint16)  # BOS is 0
        names = list(self.stage.shares)
        drawn = self.random.choice(len(shares), count, p=shares)
        for row, number in zip(rows, drawn, strict=True):
            make = KINDS[names[number]]
            row[1:] = make(self)[: self.room]
        return rows

    def between(self, least: float, most: float) -> int:
        """An integer from `least` to `most` with a uniform logarithm."""
        low = np.log(least)
        high = np.log(most + 1)
        return int(np.exp(self.random.uniform(low, high)))

    def pool(self) -> np.ndarray:
        return self.text.words[: self.between(*self.stage.pool)]

    def prose(self, tokens: int) -> np.ndarray:
        row = self.text.prose[self.random.integers(len(self.text.prose))]
        start = self.random.integers(1, len(row) - tokens + 1)
        return row[start : start + tokens]


def prose(make: Maker) -> np.ndarray:
    return make.prose(make.room)


def phrases(make: Maker) -> np.ndarray:
    words = make.pool()
    length = int(make.random.integers(2, 6))
    count = min(make.between(2, make.stage.phrases), len(words) // length)
    drawn = make.random.permutation(words)[: count * length].reshape(count, length)
    return drawn[make.random.integers(count, size=make.room // length + 1)].ravel()


def repeats(make: Maker) -> np.ndarray:
    words = make.pool()
    distance = make.between(4, make.room * 2 // 3)
    segment = distance
    if make.random.random() >= 0.5:
        segment = int(make.random.integers(2, distance + 1))
    rounds = make.room // distance + 1
    drawn = make.random.choice(words, (rounds, distance))
    drawn[:, :segment] = drawn[0, :segment]
    return drawn.ravel()


def needles(make: Maker) -> np.ndarray:
    words = make.random.permutation(make.text.words)
    hidden = []
    start = 0
    for _ in range(make.between(1, make.room // HIDDEN)):
        length = int(make.random.integers(3, 6))
        times = int(make.random.integers(2, 4))
        hidden += [words[start : start + length]] * times
        start += length
    tokens = sum(len(needle) for needle in hidden)
    around = make.prose(make.room - tokens)
    places = make.random.integers(len(around) + 1, size=len(hidden))
    places.sort()
    first, *others = np.split(around, places)
    parts = [first]
    for needle, stretch in zip(
        make.random.permutation(len(hidden)), others, strict=True
    ):
        parts += [hidden[needle], stretch]
    return np.concatenate(parts)


def lists(make: Maker) -> np.ndarray:
    key = int(make.random.integers(1, 3))
    line = key + 2
    words = make.random.permutation(make.pool())
    count = min(make.between(2, make.room // 2 // line), len(words) // (key + 1))
    keys = words[: count * key].reshape(count, key)
    values = words[count * key :][:count]
    pairs = np.column_stack([keys, values, np.full(count, make.text.line_end)])
    rounds = make.room // pairs.size + 1
    return np.concatenate(
        [pairs[make.random.permutation(count)].ravel() for _ in range(rounds)]
    )


KINDS: Mapping[str, Callable[[Maker], np.ndarray]] = {
    kind.__name__: kind for kind in (prose, phrases, repeats, needles, lists)
}


def main(
    text: Annotated[Path, typer.Argument(help="Text to draw from.")],
    valid: Annotated[Path, typer.Argument(help="Text to validate on.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    recipe: Annotated[str, typer.Option(help="copying, or bundled.")] = "copying",
    seed: Annotated[int, typer.Option(help="Decides every random draw.")] = 0,
    share: Annotated[float, typer.Option(help="Share of every stage to make.")] = 1.0,
) -> None:
    chosen = RECIPES[recipe]
    settings = Settings(
        vocabulary=chosen.vocabulary, context=chosen.context, size=chosen.size
    )
    texts = read_texts([text], [valid], data=out / "prose")
    record = prepare_data(out / "prose", texts, settings)
    source = text_of(out / "prose")
    copy_tokenizer(out / "prose", out)
    (out / "valid.npy").write_bytes((out / "prose" / "valid.npy").read_bytes())
    made = {}
    for number, stage in enumerate(chosen.stages, start=1):
        maker = Maker(source, stage, np.random.default_rng([seed, number]))
        rows = maker.sequences(round(stage.tokens * share) // stage.length)
        name = f"stage-{number}.npy"
        np.save(out / name, rows)
        made[name] = dataclasses.asdict(stage) | {
            "sequences": len(rows),
            "sha256": hashlib.sha256(rows).hexdigest(),
        }
        typer.echo(f"{name}: {len(rows):,} sequences of {stage.length} tokens")
    # Written last, so that a folder with data.json is complete.
    write_json(
        out / DATA, record | {"stages": list(made), "mixture": made, "seed": seed}
    )


def text_of(folder: Path) -> Text:
    """The text of a folder that `prepare_data` filled, and its words."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    rows = np.load(folder / "train.npy", mmap_mode="r")
    counts = np.bincount(rows[:COUNTED].ravel(), minlength=len(tokenizer))
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    (line_end,) = tokenizer.encode("\n", add_special_tokens=False)
    special.add(line_end)
    ranked = np.argsort(-counts, kind="stable").astype(np.uint16)
    words = ranked[~np.isin(ranked, list(special))]
    return Text(rows, words, line_end)


if __name__ == "__main__":
    typer.run(main)
