"""User-defined statistics: the recipe of CONTRIBUTING, and rules for every row."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.recording import attention_calls
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.attention.variables import Statistic
from ropelens.errors import BadArgument
from ropelens.profiles.measures import MEASURES

ROOT = Path(__file__).parents[2]
LENGTHS = (40, 23, 31)
WANTED = [3, 5, 8, 13]


def recipe() -> str:
    """Code of the recipe in CONTRIBUTING."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.search(r"## A new statistic.*?```python\n(.*?)```", text, re.DOTALL)[1]


def attention_on(wanted: list[int]) -> Statistic:
    """Run the recipe and return its statistic."""
    names: dict[str, object] = {}
    exec(recipe(), names)
    return names["attention_on"](wanted)


@pytest.mark.parametrize(("name", "rows"), [("llama_gqa", 7), ("mistral_sliding", "all")])
def test_the_recipe_matches_dense_attention_on_a_set_of_tokens(name: str, rows: int | str):
    assert len(recipe().splitlines()) < 15
    model = tiny(name).double()
    tokens = random_tokens(sequences=3, length=40) % 17
    options = {"statistics": [attention_on(WANTED)], "rows": rows, "batch_size": 2}
    profile = rl.profile(model, rl.Text(tokens, lengths=LENGTHS), surrogates=0, **options)
    ours = profile["attention_on_set"]
    assert ours.dims == ("layer", "head")
    assert ours.attrs["units"] == "1"
    on = []
    for row, length in zip(tokens, LENGTHS, strict=True):
        calls, _ = attention_calls(model, row[:length])
        attention = torch.stack([call.attention for call in calls])
        on.append(attention[..., 1:, np.isin(row[:length], WANTED)].sum(-1))
    if rows == "all":
        true = torch.cat(on, dim=-1).mean(-1)
        np.testing.assert_allclose(ours, true, rtol=1e-6)
    heads = rl.classify_heads(profile)
    np.testing.assert_array_equal(heads["attention_on_set"], ours.values.ravel())
    assert heads.columns[-1] == "attention_on_set"


def test_functions_read_the_same_attention_in_any_order():
    """Sums by offset set the first key to 0, so they come after all functions."""
    tokens = random_tokens(sequences=2, length=30)

    def row(name: str, values, dims: tuple[str, ...] = (), over: str = "rows") -> Statistic:
        return Statistic(name, ("layer", "head", *dims), "1", name, values=values, over=over)

    more = [
        row("first", lambda block: (block.scores.softmax(-1) * block.attention).sum(-1)),
        row("twice", lambda block: 2 * block.attention, ("offset_bin",), "offsets"),
        row("on sinks", lambda block: block.sink_attention.sum(-1)),
        row("others", lambda block: (block.scores.exp() * (block.scores > -1e3)).sum(-1).log()),
        row("norm", lambda block: block.log_norm),
        row("last", lambda block: block.attention.square().sum(-1)),
        row("whole", lambda block: block.attention.sum(-1)),
    ]
    profile = rl.profile(tiny("gemma2").double(), tokens, statistics=more, surrogates=0)
    np.testing.assert_allclose(profile["first"], profile["last"])
    np.testing.assert_allclose(profile["whole"], 1)
    np.testing.assert_allclose(profile["on sinks"], profile["sink_mass"])
    np.testing.assert_allclose(profile["others"], profile["norm"])
    np.testing.assert_allclose(profile["twice"], 2 * profile["offset_mass"])


def wrong(*, name: str = "mine", **changes: object) -> Statistic:
    options = {"values": lambda block: block.attention.sum(-1)} | changes
    return Statistic(name, ("layer", "head"), "1", "a statistic", **options)


@pytest.mark.parametrize(
    ("statistics", "says", "seen"),
    [
        ([wrong(values=lambda block: block.attention.sum(-2))], "has no value", "30)"),
        ([wrong(over="offsets")], "has no value for every row", "a block has"),
        ([wrong(), wrong()], "There is a variable 'mine' already", ""),
    ],
)
def test_statistics_that_are_refused(statistics: list[Statistic], says: str, seen: str):
    tokens = random_tokens(sequences=1, length=30)
    with pytest.raises(BadArgument, match=says) as refused:
        rl.profile(tiny("llama_gqa"), tokens, statistics=statistics)
    assert seen in str(refused.value.parts.get("seen", ""))


def test_a_profile_has_the_variable_of_every_row():
    tokens = random_tokens(sequences=3, length=12)
    profile = rl.profile(tiny("llama_gqa"), tokens, surrogates=2)
    for row in MEASURES:
        assert (row.name in profile) == row.saved, row.name
        if row.saved:
            variable = profile[row.name]
            assert variable.dims == row.saved_dims
            assert variable.attrs == {"long_name": row.long_name, "units": row.units}
            # A model may have no sink except position 0.
            assert row.name == "found_sink" or np.isfinite(variable).any()


def test_the_reference_in_the_docs_matches_the_rows():
    """Run `python tools/reference.py` to update it."""
    namespace: dict[str, object] = {"__name__": "reference"}
    exec((ROOT / "tools" / "reference.py").read_text(), namespace)
    assert namespace["reference"]() in (ROOT / "docs" / "measures.md").read_text()
