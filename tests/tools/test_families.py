"""The table of model families is correct."""

import re
from contextlib import nullcontext

import families
import pytest

TABLE = dict(
    re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", families.PAGE.read_text(), re.M)
)

# Layers without position, latent attention, and a refusal of each kind.
SAMPLE = (
    *(
        "Cohere2ForCausalLM",
        "MiniCPM3ForCausalLM",
        "FalconForCausalLM",
        "DogeForCausalLM",
    ),
    *("HunYuanDenseV1ForCausalLM", "DeepseekV4ForCausalLM", "DiffLlamaForCausalLM"),
    "Dots3NoteForCausalLM",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_the_table_describes_a_class(name: str):
    row = families.row(name, "")
    assert not row.untried
    assert TABLE[name].startswith(row.rotation or row.refused.split(" Seen:")[0])


def test_enough_classes_are_supported_and_all_are_listed():
    page = families.PAGE.read_text()
    counts = re.findall(
        r"knows (\d+) .*? supports (\d+) .*? refuses (\d+),", page, re.S
    )
    rows, supported, refused = map(int, counts[0])
    assert supported >= 60
    assert supported + refused >= rows - 2
    assert len(TABLE) == rows
    parts = {
        part.partition("\n")[0]: part.count("\n| `") for part in page.split("\n## ")
    }
    assert [parts[title] for title in ("Supported", "Refused")] == [supported, refused]
    assert all(" " in result for result in TABLE.values())


def test_a_class_that_fails_is_not_supported(monkeypatch: pytest.MonkeyPatch):
    assert families.row("LlamaForCausalLM", "").rotation == "8 planes, half"
    monkeypatch.setitem(families.SPECIAL, "LlamaForCausalLM", {"hidden_size": 63})
    assert families.row("LlamaForCausalLM", "").untried
    monkeypatch.delitem(families.SPECIAL, "LlamaForCausalLM")
    monkeypatch.setattr(
        families.rl, "silence_heads", lambda model, heads: nullcontext()
    )
    with pytest.raises(AssertionError, match="silence does nothing"):
        families.row("LlamaForCausalLM", "")
