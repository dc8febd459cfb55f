"""Which part of the text is held out for validation."""

import json
from pathlib import Path

import numpy as np
import pytest
from trained import OPTIONS, story
from transformers import PreTrainedTokenizerFast

from ropelens.train.data import prepare_data, read_texts
from ropelens.train.held_out import Split, Tokens, hold_out
from ropelens.train.settings import Settings

END = 1  # EOS, the last token of each document


def documents(lengths: list[int]) -> list[Tokens]:
    """Documents of these lengths. The tokens of a document are its number plus 10."""
    made = []
    for number, length in enumerate(lengths):
        tokens = np.full(length, number + 10, np.uint16)
        tokens[-1] = END
        made.append(tokens)
    return made


def numbers_of(tokens: list[Tokens]) -> list[int]:
    """The numbers of the documents that the parts belong to."""
    return [int(part[0]) - 10 for part in tokens]


def held_share(split: Split) -> float:
    held = sum(map(len, split.validation))
    return held / (held + sum(map(len, split.training)))


@pytest.mark.parametrize("count", [80, 100, 400, 5000])
def test_many_documents_are_held_out_whole_from_the_whole_text(count: int):
    given = documents([300] * count)
    split = hold_out(given, least=62)
    held = numbers_of(split.validation)
    assert sorted(held + numbers_of(split.training)) == list(range(count))
    assert {len(document) for document in split.validation} == {300}
    assert len(held) == max(8, count / 50)
    assert held[0] == 0
    assert held[-1] == count - 1
    assert max(np.diff(held)) <= count / (len(held) - 1) + 1
    assert split.validated_on == f"{len(held)} whole documents of {count:,}"


FEW = {
    "one": [20_000],
    "two": [3_000, 900],
    "fewer than 80": [500] * 79,
    "a novel next to notes": [100_000, *[20] * 200],
    "a novel that would be held out": [*[20] * 200, 100_000],
}


@pytest.mark.parametrize("lengths", FEW.values(), ids=FEW.keys())
def test_few_documents_are_held_out_in_parts_of_each(lengths: list[int]):
    split = hold_out(documents(lengths), least=62)
    assert numbers_of(split.training) == list(range(len(lengths)))
    assert len(split.validation) == len(lengths)
    for part, rest, length in zip(
        split.validation, split.training, lengths, strict=True
    ):
        assert part[-1] == rest[-1] == END
        assert len(part) + len(rest) == length + 1
        assert len(part) == pytest.approx(0.02 * length, abs=1)
    assert held_share(split) == pytest.approx(0.02, abs=0.005)
    assert "the last 2.0% of" in split.validated_on


def test_a_short_text_gives_the_validation_what_it_needs():
    split = hold_out(documents([200, 100]), least=62)
    assert sum(map(len, split.validation)) >= 62
    assert split.validated_on == "the last 20.7% of each of 2 documents"


def test_a_folder_is_not_validated_on_its_last_file_only(tmp_path: Path):
    books = tmp_path / "books"
    books.mkdir()
    (books / "a.txt").write_text(story(400))
    (books / "b.txt").write_text("zzzz qqqq xxxx. " * 1500)
    data = tmp_path / "data"
    record = prepare_data(data, read_texts([books], [], data=data), Settings(**OPTIONS))
    written = json.loads((data / "data.json").read_text())
    assert record["validation"] == written["validation"]
    assert "of each of 2 documents" in record["validation"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(data)
    held_out = tokenizer.batch_decode(np.load(data / "valid.npy"))
    assert any("good day" in text for text in held_out)
    assert any("zzzz qqqq" in text for text in held_out)
    other = tmp_path / "c.txt"
    other.write_text(story(90))
    texts = read_texts([books], [other], data=tmp_path / "other")
    record = prepare_data(tmp_path / "other", texts, Settings(**OPTIONS))
    assert record["validation"] == "documents of --valid"
