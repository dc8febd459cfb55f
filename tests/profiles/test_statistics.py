"""Statistics of users, attention on sets of tokens, and rules for every row."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.recording import AttentionCall, attention_calls
from oracles.tiny import random_tokens, tiny
from torch import Tensor
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.attention.block import Block
from ropelens.attention.sums import LayerMeans
from ropelens.errors import BadArgument
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.measures import MEASURES
from ropelens.profiles.passes import collect
from ropelens.profiles.token_sets import AFTER, controls, ids_of, mark_tokens
from ropelens.report.sentences.profile import attention_sentences
from ropelens.schema.rows import Statistic

ROOT = Path(__file__).parents[2]
LENGTHS = (40, 23, 31)
WANTED = [3, 5, 8, 13]


def recipe() -> str:
    text = (ROOT / "docs/recipes.md").read_text()
    return re.search(r"## A new statistic.*?```python\n(.*?)```", text, re.DOTALL)[1]


def attention_on(wanted: list[int]) -> Statistic:
    names: dict[str, object] = {}
    exec(recipe(), names)
    return names["attention_on"](wanted)


def dense_attention_on(
    model: PreTrainedModel, tokens: Tensor, wanted: list[int]
) -> Tensor:
    """Mean attention [layer, head] on these tokens, over all rows except the first."""
    on = []
    for sequence, length in zip(tokens, LENGTHS, strict=True):
        ids = sequence[:length]
        calls, _ = attention_calls(model, ids)
        attention = torch.stack([call.attention for call in calls])
        is_wanted = np.isin(ids, wanted)
        on.append(attention[..., 1:, is_wanted].sum(-1))
    return torch.cat(on, dim=-1).mean(-1)


@pytest.mark.parametrize(
    ("name", "rows"), [("llama_gqa", 7), ("mistral_sliding", "all")]
)
def test_the_recipe_matches_dense_attention_on_a_set_of_tokens(
    name: str, rows: int | str
):
    assert len(recipe().splitlines()) < 15
    model = tiny(name).double()
    tokens = random_tokens(sequences=3, length=40) % 17
    profile = rl.profile(
        model,
        rl.Text(tokens, lengths=LENGTHS),
        surrogates=0,
        statistics=[attention_on(WANTED)],
        rows=rows,
        batch_size=2,
    )
    ours = profile["attention_on_set"]
    assert ours.dims == ("layer", "head")
    assert ours.attrs["units"] == "1"
    if rows == "all":
        expected = dense_attention_on(model, tokens, WANTED)
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
    heads = rl.classify_heads(profile)
    np.testing.assert_array_equal(heads["attention_on_set"], ours.values.ravel())
    assert heads.columns[-1] == "attention_on_set"


def by_row(name: str, values: Callable[[Block], Tensor]) -> Statistic:
    return Statistic(name, ("layer", "head"), "1", name, values=values)


def own_softmax(block: Block) -> Tensor:
    return (block.scores.softmax(-1) * block.attention).sum(-1)


def log_sum_of_scores(block: Block) -> Tensor:
    is_seen = block.scores > -1e3
    return (block.scores.exp() * is_seen).sum(-1).log()


def test_functions_read_the_same_attention_in_any_order():
    """Sums by offset set the first key to 0, so they come after all functions."""
    by_offset = Statistic(
        "twice",
        ("layer", "head", "offset_bin"),
        "1",
        "twice",
        values=lambda block: 2 * block.attention,
        over="offsets",
    )
    statistics = [
        by_row("first", own_softmax),
        by_offset,
        by_row("on sinks", lambda block: block.sink_attention.sum(-1)),
        by_row("others", log_sum_of_scores),
        by_row("norm", lambda block: block.log_norm),
        by_row("last", lambda block: block.attention.square().sum(-1)),
        by_row("whole", lambda block: block.attention.sum(-1)),
    ]
    profile = rl.profile(
        tiny("gemma2").double(),
        random_tokens(sequences=2, length=30),
        statistics=statistics,
        surrogates=0,
    )
    np.testing.assert_allclose(profile["first"], profile["last"])
    np.testing.assert_allclose(profile["whole"], 1)
    np.testing.assert_allclose(profile["on sinks"], profile["sink_mass"])
    np.testing.assert_allclose(profile["others"], profile["norm"])
    np.testing.assert_allclose(profile["twice"], 2 * profile["offset_mass"])


MINE = Statistic(
    "mine",
    ("layer", "head"),
    "1",
    "a statistic",
    values=lambda block: block.attention.sum(-1),
)
BY_QUERY = replace(MINE, values=lambda block: block.attention.sum(-2))
BY_PLANE = replace(MINE, column="score", dims=("layer", "head", "frequency"))


@pytest.mark.parametrize(
    ("statistics", "says", "seen"),
    [
        ([BY_QUERY], "has no value", "30)"),
        ([replace(MINE, over="offsets")], "has no value for every row", "a block has"),
        ([MINE, MINE], "There is a variable 'mine' already", ""),
        (
            [replace(MINE, name="inv_freq")],
            "There is a variable 'inv_freq' already",
            "",
        ),
        ([replace(MINE, name="a/b")], "A file cannot have a variable 'a/b'", ""),
        ([BY_PLANE], "heads.csv cannot have a column 'mine'", "frequency"),
    ],
)
def test_statistics_that_are_refused(statistics: list[Statistic], says: str, seen: str):
    tokens = random_tokens(sequences=1, length=30)
    with pytest.raises(BadArgument, match=says) as refused:
        rl.profile(tiny("llama_gqa"), tokens, statistics=statistics)
    assert seen in str(refused.value.parts.get("seen", ""))


def test_dims_of_a_statistic_may_be_a_list():
    of_heads = replace(MINE, column="score", dims=["layer", "head"])
    profile = rl.profile(
        tiny("llama_gqa"),
        random_tokens(sequences=1, length=30),
        statistics=[of_heads],
        budget=False,
    )
    assert profile["mine"].dims == ("layer", "head")


def test_a_profile_has_the_variable_of_every_row():
    profile = rl.profile(
        tiny("llama_gqa"), random_tokens(sequences=3, length=12), surrogates=2
    )
    for measure in MEASURES:
        assert (measure.name in profile) == measure.saved, measure.name
    for measure in MEASURES:
        if not measure.saved:
            continue
        variable = profile[measure.name]
        assert variable.dims == measure.saved_dims
        assert variable.attrs["long_name"] == measure.long_name
        assert variable.attrs["units"] == measure.units
        assert set(variable.attrs) == {"long_name", "units"}
        if measure.name != "found_sink":  # a model may have no sink except position 0
            assert np.isfinite(variable).any()


def test_the_reference_in_the_docs_matches_the_measures():
    """Run `python tools/reference.py` to update it."""
    namespace: dict[str, object] = {"__name__": "reference"}
    exec((ROOT / "tools" / "reference.py").read_text(), namespace)
    expected = namespace["reference"]()
    assert expected in (ROOT / "docs" / "measures.md").read_text()


TEXTS = ["the", " the", "The", "'", "'s", " ...", "_", "12", "\n", "’", "$", "other"]


class Names:
    """A tokenizer with the tokens `TEXTS`. It drops a leading space of a text."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(TEXTS[token] for token in token_ids).removeprefix(" ")


def find_tokens(tokens: Tensor, name: str | list[str]) -> Tensor:
    """Marks [sequence, position] of the tokens that `rl.attention_on` finds."""
    word = name.removeprefix(AFTER) if isinstance(name, str) else name
    ids = None if word == "repeated" else ids_of(tokens, word, Names())
    return mark_tokens(tokens, ids, after=word != name)


def matching(name: str | list[str]) -> list[str]:
    marks = find_tokens(torch.arange(len(TEXTS))[None], name)
    return [TEXTS[token] for token in marks[0].nonzero().flatten().tolist()]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("the", ["the", " the"]),
        (["'", "'s", "’"], ["'", "'s", "’"]),
        ("\n", ["\n"]),
        ("punctuation", ["'", " ...", "_", "’"]),
        (["punctuation"], []),
        ("rope", []),
        ("*'*", ["'", "'s"]),
        ("newline", ["\n"]),
        ("digits", ["12"]),
        ("capital", ["The"]),
    ],
    ids=repr,
)
def test_tokens_are_found_by_their_text_and_by_class(
    name: str | list[str], expected: list[str]
):
    assert matching(name) == expected


def test_tokens_are_found_after_other_tokens():
    tokens = torch.tensor([[3, 0, 4, 4], [0, 2, 3, 3]])
    marks = find_tokens(tokens, "after:*'*")
    assert marks.int().tolist() == [[0, 1, 0, 1], [0, 0, 0, 1]]


def test_tokens_that_the_sequence_had_before_are_repeated():
    tokens = torch.tensor([[4, 2, 4, 4, 7, 2], [7, 4, 1, 0, 3, 0]])
    marks = find_tokens(tokens, "repeated")
    assert marks.int().tolist() == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1]]


@torch.no_grad()
def test_a_token_whose_only_copy_is_hidden_is_not_repeated():
    ids = torch.arange(3, 23)[None]
    mask = torch.ones(1, 20, dtype=torch.long)
    ids[0, 12] = ids[0, 9] = ids[0, 5]
    ids[0, 15] = ids[0, 7]
    mask[0, 7] = 0
    mask[0, 5] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    model = tiny("llama_gqa")
    profile = rl.profile(
        model, text, statistics=rl.attention_on(ids, "repeated"), budget=False
    )
    model.set_attn_implementation("eager")
    outputs = model(**text, output_attentions=True)
    attention = torch.stack(outputs.attentions)[:, 0]
    rows = attention[:, :, 12:]  # they see the repeated token, at position 12
    expected = rows[..., 12].sum(-1) / rows[..., 1:].sum((-2, -1))
    np.testing.assert_allclose(profile["attention_on_repeated"], expected, rtol=1e-4)


SETS: dict[str, str | list[str]] = {
    "apostrophe_or_apostrophe_s": ["'", "'s"],
    "after_any_apostrophe": "after:*'*",
    "repeated": "repeated",
}


def statistics_of_sets(tokens: Tensor) -> dict[str, Statistic]:
    statistics = {}
    for tokens_of_set in SETS.values():
        for statistic in rl.attention_on(tokens, tokens_of_set, Names()):
            statistics[statistic.name] = statistic
    return statistics


def expected_attention_on(
    call: AttentionCall, *, on: Tensor, weight: Tensor, not_sink: Tensor
) -> Tensor:
    """Weighted attention [head] of the rows that see a key of the set, by dense attention.

    It is a share of the attention except on sinks, in units of the weights that a row sees.
    `on`, `weight` and `not_sink` have a value for each key.
    """
    group = len(call.query) // len(call.key)
    key = call.key.repeat_interleave(group, dim=0)
    score = call.scale * call.query @ key.mT
    attention = score.masked_fill(~call.visible, -torch.inf).softmax(-1).double()
    rows = [i for i in range(1, 40) if (call.visible[i] & on & not_sink).any()]
    visible = call.visible[rows].double()
    total = (attention[:, rows] * not_sink).sum((1, 2))
    weighted = (attention[:, rows] @ (weight * not_sink)).sum(1)
    keys_of_set = visible @ (on & not_sink).double()
    keys_by_weight = visible @ (weight * not_sink)
    return weighted / total * keys_of_set.sum() / keys_by_weight.sum()


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
@pytest.mark.parametrize("name_of_set", SETS)
def test_attention_on_tokens_matches_dense_attention(name: str, name_of_set: str):
    model = tiny(name).double()
    tokens = random_tokens(sequences=1, length=40) % len(TEXTS)
    statistics = statistics_of_sets(tokens)
    measurement = Measurement.of(model, tokens, sinks=[4])
    not_sink = measurement.text.sinks[0, 0] == 0
    assert not not_sink[tokens[0] == 4].any()
    means_of_layers = layer_means(measurement, list(statistics.values()))
    on = find_tokens(tokens, SETS[name_of_set])
    log_count = tokens[0].bincount()[tokens].double().log2()
    weights = {"attention": on[0].double(), "control": controls(on, log_count)[0]}
    calls, _ = attention_calls(model, tokens[0])
    for call, means in zip(calls, means_of_layers, strict=True):
        for measure, weight in weights.items():
            expected = expected_attention_on(
                call, on=on[0], weight=weight, not_sink=not_sink
            )
            ours = statistics[f"{measure}_on_{name_of_set}"].value(means)
            np.testing.assert_allclose(ours, expected, atol=1e-6)


def layer_means(
    measurement: Measurement, statistics: list[Statistic]
) -> list[LayerMeans]:
    planes = measurement.rotation.planes(40)
    sums = collect(measurement, planes, statistics=statistics)
    means = []
    for layer in sorted(sums.layers):
        of_layer = sums.layers[layer]
        means.append(LayerMeans(of_layer, sums, planes[layer], statistics))
    return means


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_attention_on_tokens_is_in_the_table_and_in_a_sentence(name: str):
    tokens = random_tokens(sequences=1, length=40) % len(TEXTS)
    statistics = statistics_of_sets(tokens)
    profile = rl.profile(
        tiny(name).double(), tokens, statistics=[*statistics.values()], surrogates=0
    )
    table = rl.classify_heads(profile, resamples=0)
    assert "attention_on_repeated" in table
    assert "control_on_repeated" not in table
    apostrophes = "apostrophe_or_apostrophe_s"
    lead = profile[f"attention_on_{apostrophes}"] - profile[f"control_on_{apostrophes}"]
    layer, head = np.unravel_index(lead.values.argmax(), lead.shape)
    most, *_ = attention_sentences(profile)
    head_of_set = f"Head {layer}.{head} attends most to tokens ' or 's. In rows"
    assert most.startswith(head_of_set)


def test_controls_are_near_and_equally_frequent():
    count = torch.tensor([[9, 1, 8, 4, 3, 8, 1, 1, 8, 2]]).double()
    on = torch.zeros(1, 10, dtype=torch.bool)
    on[0, 5] = True
    (weight,) = controls(on, count.log2())
    assert weight.tolist() == [0, 0, 0.5, 0, 0, 0, 0, 0, 0.5, 0]
    on[0, 8] = True  # a target is not a control, nor is the first token
    (weight,) = controls(on, count.log2())
    assert weight.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "There is no token ''"),
        (3, "attention_on: what must be"),
        ("rope", "There is no token 'rope' in this text"),
        ("after:after:repeated", "There is no token 'after:after:repeated'"),
    ],
)
def test_unknown_tokens_are_refused(name: object, words: str):
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(BadArgument, match=words):
        rl.attention_on(tokens, name, Names())
    with pytest.raises(BadArgument, match=r"There is no token [^$]*try:   tokenizer="):
        rl.attention_on(tokens, "'")
