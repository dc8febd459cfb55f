"""The table of model families is correct."""

import re
from contextlib import AbstractContextManager, nullcontext

import families
import pytest
from oracles.versions import skip_before

LINE_OF_TABLE = re.compile(r"^\| `(\w+)` \| .*? \| (.*) \|$", re.M)
COUNTS = re.compile(r"knows (\d+) .*? supports (\d+) .*? refuses (\d+),", re.S)
PAGE = families.PAGE.read_text()
TABLE = dict(LINE_OF_TABLE.findall(PAGE))

# Layers without position, latent attention, and a refusal of each kind.
SAMPLE = (
    "Cohere2ForCausalLM",
    "MiniCPM3ForCausalLM",
    "FalconForCausalLM",
    "DogeForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "DeepseekV4ForCausalLM",
    "DiffLlamaForCausalLM",
    "Dots3NoteForCausalLM",
)


SINCE = {
    "MiniCPM3ForCausalLM": "5.13",
    "DeepseekV4ForCausalLM": "5.8",
    "DiffLlamaForCausalLM": "5.13",
    "Dots3NoteForCausalLM": "5.23",
}
"""The first version of transformers with the class as the table describes it."""


@pytest.mark.parametrize("name", SAMPLE)
def test_the_table_describes_a_class(name: str):
    first = SINCE.get(name)
    if first is not None:
        skip_before("transformers", first, f"has no {name} as in the table")
    result = families.row(name, "")
    assert not result.untried
    expected = result.rotation or result.refused.split(" Seen:")[0]
    assert TABLE[name].startswith(expected)


def lines_of_sections(page: str) -> dict[str, int]:
    """Number of lines of the table in each section of the page, by its title."""
    sections = page.split("\n## ")
    return {section.partition("\n")[0]: section.count("\n| `") for section in sections}


def test_enough_classes_are_supported_and_all_are_listed():
    counts = COUNTS.search(PAGE)
    assert counts is not None
    known, supported, refused = map(int, counts.groups())
    assert supported >= 60
    assert supported + refused >= known - 2
    assert len(TABLE) == known
    lines = lines_of_sections(PAGE)
    assert lines["Supported"] == supported
    assert lines["Refused"] == refused
    assert all(" " in result for result in TABLE.values())


def do_nothing(model: object, heads: object) -> AbstractContextManager:
    return nullcontext()


def test_a_class_that_fails_is_not_supported(monkeypatch: pytest.MonkeyPatch):
    name = "LlamaForCausalLM"
    assert families.row(name, "").rotation == "8 planes, half"
    monkeypatch.setitem(families.SPECIAL, name, {"hidden_size": 63})
    assert families.row(name, "").untried
    monkeypatch.delitem(families.SPECIAL, name)
    monkeypatch.setattr(families.rl, "silence_heads", do_nothing)
    with pytest.raises(AssertionError, match="silence does nothing"):
        families.row(name, "")
