"""Documents as datasets, pandas and arrow return them, and values that are not strings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import ropelens as rl
from ropelens.analysis.plan import plan_analysis
from ropelens.errors import BadArgument, BadText

STORIES = ["Once there was a cat. " * 9, "The dog slept by the fire. " * 9]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return rl.load("bundled")[1]


COLUMNS = {
    "tuple": tuple,
    "iterator": iter,
    "Series": pd.Series,
    "Series of objects": lambda stories: pd.Series(stories, dtype=object),
    "Series with other index": lambda stories: pd.Series(stories, index=[7, 7]),
    "array": np.array,
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS.keys())
def test_columns_are_documents(column: Callable[[list[str]], Any], tokenizer: Any):
    expected = rl.tokenize(STORIES, tokenizer, context=32)
    text = rl.tokenize(column(STORIES), tokenizer, context=32)
    assert text.fingerprint == expected.fingerprint
    assert text.documents_sha256 == expected.documents_sha256


def test_columns_of_datasets_and_arrow_are_documents(tokenizer: Any):
    arrow = pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": STORIES})
    expected = rl.tokenize(STORIES, tokenizer, context=32)
    columns = [
        dataset["text"],
        dataset.to_iterable_dataset()["text"],
        arrow.array(STORIES),
        arrow.chunked_array([STORIES[:1], STORIES[1:]]),
        pd.Series(STORIES, dtype="string[pyarrow]"),
    ]
    for column in columns:
        text = rl.tokenize(column, tokenizer, context=32)
        assert text.documents_sha256 == expected.documents_sha256


ROWS = [{"text": story} for story in STORIES]
NOT_STRINGS = [
    ([*STORIES, None], "NoneType at index 2", "isinstance(text, str)"),
    ([*STORIES, float("nan")], "float at index 2: nan", "isinstance(text, str)"),
    (pd.Series([None, *STORIES]), "at index 0", "isinstance(text, str)"),
    ([*STORIES, pd.NA], "NAType at index 2", "isinstance(text, str)"),
    (ROWS, "dict at index 0", '[row["text"] for row in documents]'),
    ([Path("a.txt")], "Path at index 0: ", "rl.read_documents"),
    ([*STORIES, b"cat"], "bytes at index 2: b'cat'", "document.decode()"),
    ([STORIES], "list at index 0", "strings"),
    (torch.ones(2, 3), "Tensor at index 0", "rl.Text"),
    (pd.DataFrame(ROWS), "DataFrame of 'text'", 'documents["text"]'),
    ({"train": ROWS}, "dict of 'train'", "documents[SPLIT]['text']"),
    (7, "int 7", "a list, an iterator, or a column"),
]


@pytest.mark.parametrize(("documents", "seen", "words"), NOT_STRINGS)
def test_other_values_are_refused_with_their_type_and_index(
    documents: Any, seen: str, words: str, tokenizer: Any
):
    with pytest.raises(BadArgument) as refused:
        rl.tokenize(documents, tokenizer, context=32)
    assert seen in str(refused.value)
    assert words in str(refused.value)


def test_analyze_takes_a_column_and_names_what_is_not_a_string():
    options = rl.Options(context=16, sequences=2, surrogates=0)
    listed = plan_analysis("bundled", STORIES, options)
    of_column = rl.analyze("bundled", pd.Series(STORIES), options)
    assert of_column.profile.attrs["tokens_sha256"] == listed.text.fingerprint
    with pytest.raises(BadArgument, match="NoneType at index 1"):
        rl.analyze("bundled", [STORIES[0], None], options)


def test_text_with_nul_characters_is_refused(tokenizer: Any):
    words = "contains NUL characters"
    strange = f"{STORIES[0]}\0{STORIES[1]}"
    model = rl.load("bundled")[0]
    with pytest.raises(BadText, match=words):
        rl.tokenize([strange], tokenizer, context=32)
    with pytest.raises(BadText, match=words):
        rl.capture(model, strange, heads="0.0", tokenizer=tokenizer)
    with pytest.raises(BadText, match=words):
        rl.analyze("bundled", STORIES, rl.Options(context=16, prompts=["a\0b"]))
