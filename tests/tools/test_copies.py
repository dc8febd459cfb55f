"""Tests of the text in which passages come back."""

import copies
import numpy as np
import pytest
import typer

from ropelens.errors import BadText

WORDS = [f"w{number}" for number in range(3000)]  # each word once


def test_copies_are_passages_of_the_last_words():
    written = copies.with_copies(" ".join(WORDS), np.random.default_rng(0)).split()
    newest = -1
    passages = []
    length = 0
    for word in written:
        number = int(word.removeprefix("w"))
        if number <= newest:
            assert newest - number < copies.BACK
            length += 1
            continue
        assert number == newest + 1  # nothing is lost
        newest = number
        if length:
            passages.append(length)
            length = 0
    assert newest == len(WORDS) - 1
    assert min(passages) >= copies.PASSAGE[0]
    assert max(passages) <= copies.PASSAGE[1]
    assert 0.35 < sum(passages) / len(written) < 0.45


def test_the_same_arguments_make_the_same_files(tmp_path):
    novels = tmp_path / "novels"
    novels.mkdir()
    (novels / "one.txt").write_text(" ".join(WORDS))
    for name in ("first", "second"):
        copies.main(novels, tmp_path / name)
    first = (tmp_path / "first" / "one.txt").read_text()
    assert (tmp_path / "second" / "one.txt").read_text() == first
    with pytest.raises(typer.BadParameter, match="has no file"):
        copies.main(tmp_path, tmp_path / "third")


def test_bad_texts_are_refused_and_stay(tmp_path):
    text = tmp_path / "one.txt"
    text.write_bytes(b"caf\xe9")
    with pytest.raises(typer.BadParameter, match="would be lost"):
        copies.main(tmp_path, tmp_path / ".")
    with pytest.raises(BadText, match=r"one\.txt cannot be read") as refused:
        copies.main(tmp_path, tmp_path / "out")
    assert "text in UTF-8" in str(refused.value)
    assert text.read_bytes() == b"caf\xe9"
