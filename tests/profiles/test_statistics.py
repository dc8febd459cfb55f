"""Statistics of users, attention on sets of tokens, and rules for every row."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.recording import attention_calls
from oracles.tiny import random_tokens, tiny

import ropelens as rl
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
    assert (ours.dims, ours.attrs["units"]) == (("layer", "head"), "1")
    on = []
    for row, length in zip(tokens, LENGTHS, strict=True):
        calls, _ = attention_calls(model, row[:length])
        attention = torch.stack([call.attention for call in calls])
        on.append(attention[..., 1:, np.isin(row[:length], WANTED)].sum(-1))
    if rows == "all":
        np.testing.assert_allclose(ours, torch.cat(on, dim=-1).mean(-1), rtol=1e-6)
    heads = rl.classify_heads(profile)
    np.testing.assert_array_equal(heads["attention_on_set"], ours.values.ravel())
    assert heads.columns[-1] == "attention_on_set"


def test_functions_read_the_same_attention_in_any_order():
    """Sums by offset set the first key to 0, so they come after all functions."""
    tokens = random_tokens(sequences=2, length=30)

    def row(
        name: str, values, dims: tuple[str, ...] = (), over: str = "rows"
    ) -> Statistic:
        return Statistic(
            name, ("layer", "head", *dims), "1", name, values=values, over=over
        )

    more = [
        row(
            "first", lambda block: (block.scores.softmax(-1) * block.attention).sum(-1)
        ),
        row("twice", lambda block: 2 * block.attention, ("offset_bin",), "offsets"),
        row("on sinks", lambda block: block.sink_attention.sum(-1)),
        row(
            "others",
            lambda block: (block.scores.exp() * (block.scores > -1e3)).sum(-1).log(),
        ),
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


BY_PLANE = replace(wrong(column="score"), dims=("layer", "head", "frequency"))


@pytest.mark.parametrize(
    ("statistics", "says", "seen"),
    [
        ([wrong(values=lambda block: block.attention.sum(-2))], "has no value", "30)"),
        ([wrong(over="offsets")], "has no value for every row", "a block has"),
        ([wrong(), wrong()], "There is a variable 'mine' already", ""),
        ([wrong(name="inv_freq")], "There is a variable 'inv_freq' already", ""),
        ([wrong(name="a/b")], "A file cannot have a variable 'a/b'", ""),
        ([BY_PLANE], "heads.csv cannot have a column 'mine'", "frequency"),
    ],
)
def test_statistics_that_are_refused(statistics: list[Statistic], says: str, seen: str):
    tokens = random_tokens(sequences=1, length=30)
    with pytest.raises(BadArgument, match=says) as refused:
        rl.profile(tiny("llama_gqa"), tokens, statistics=statistics)
    assert seen in str(refused.value.parts.get("seen", ""))


def test_dims_of_a_statistic_may_be_a_list():
    of_heads = replace(wrong(column="score"), dims=["layer", "head"])
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


TEXTS = ["the", " the", "The", "'", "'s", " ...", "_", "12", "\n", "’", "$", "other"]


class Names:
    """A tokenizer with the tokens `TEXTS`. It drops a leading space of a text."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(TEXTS[token] for token in token_ids).removeprefix(" ")


def find_tokens(tokens: torch.Tensor, what: str | list[str]) -> torch.Tensor:
    word = what.removeprefix(AFTER) if isinstance(what, str) else what
    ids = None if word == "repeated" else ids_of(tokens, word, Names())
    return mark_tokens(tokens, ids, after=word != what)


def matching(what: str | list[str]) -> list[str]:
    among = find_tokens(torch.arange(len(TEXTS))[None], what)[0]
    return [text for text, yes in zip(TEXTS, among.tolist(), strict=True) if yes]


def test_tokens_are_found_by_their_text_and_by_class():
    assert matching("the") == ["the", " the"]
    assert matching(["'", "'s", "’"]) == ["'", "'s", "’"]
    assert matching("\n") == ["\n"]
    assert matching("punctuation") == ["'", " ...", "_", "’"]
    assert matching(["punctuation"]) == matching("rope") == []
    assert matching("*'*") == ["'", "'s"]
    assert [matching(x) for x in ("newline", "digits")] == [["\n"], ["12"]]
    assert matching("capital") == ["The"]
    after = find_tokens(torch.tensor([[3, 0, 4, 4], [0, 2, 3, 3]]), "after:*'*")
    assert after.int().tolist() == [[0, 1, 0, 1], [0, 0, 0, 1]]
    again = find_tokens(
        torch.tensor([[4, 2, 4, 4, 7, 2], [7, 4, 1, 0, 3, 0]]), "repeated"
    )
    assert again.int().tolist() == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1]]


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
    rows = torch.stack(model(**text, output_attentions=True).attentions)[:, 0, :, 12:]
    expected = rows[..., 12].sum(-1) / rows[..., 1:].sum((-2, -1))
    np.testing.assert_allclose(profile["attention_on_repeated"], expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_attention_on_tokens_matches_dense_attention(name: str):
    model = tiny(name).double()
    tokens = random_tokens(sequences=1, length=40) % len(TEXTS)
    sets = {
        "apostrophe_or_apostrophe_s": ["'", "'s"],
        "after_any_apostrophe": "after:*'*",
    }
    sets["repeated"] = "repeated"
    chosen = [rl.attention_on(tokens, what, Names()) for what in sets.values()]
    statistics = [row for rows in chosen for row in rows]
    measurement = Measurement.of(model, tokens, sinks=[4])
    planes = measurement.rotation.planes(40)
    sums = collect(measurement, planes, statistics=statistics)
    calls, _ = attention_calls(model, tokens[0])
    count = tokens[0].bincount()[tokens].double().log2()
    apart = measurement.text.sinks[0, 0] == 0
    assert not apart[tokens[0] == 4].any()
    for name_of, what in sets.items():
        on = find_tokens(tokens, what)
        weights = {"attention": on[0].double(), "control": controls(on, count)[0]}
        for layer, call in enumerate(calls):
            key = call.key.repeat_interleave(len(call.query) // len(call.key), dim=0)
            score = call.scale * call.query @ key.mT
            attention = (
                score.masked_fill(~call.visible, -torch.inf).softmax(-1).double()
            )
            rows = [i for i in range(1, 40) if (call.visible[i] & on[0] & apart).any()]
            total = (attention[:, rows] * apart).sum((1, 2))
            seen = call.visible[rows].double() @ (on[0] & apart).double()
            for kind, weight in weights.items():
                part = (attention[:, rows] @ (weight * apart)).sum(1)
                others = call.visible[rows].double() @ (weight * apart)
                expected = part / total * seen.sum() / others.sum()
                (row,) = [
                    row for row in statistics if row.name == f"{kind}_on_{name_of}"
                ]
                means = LayerMeans(sums.layers[layer], sums, planes[layer], statistics)
                np.testing.assert_allclose(row.value(means), expected, atol=1e-6)
    profile = rl.profile(model, tokens, statistics=statistics, surrogates=0)
    table = rl.classify_heads(profile, resamples=0)
    assert "attention_on_repeated" in table
    assert "control_on_repeated" not in table
    most, *_ = attention_sentences(profile)
    lead = (
        profile["attention_on_apostrophe_or_apostrophe_s"] - profile[statistics[1].name]
    )
    layer, head = np.unravel_index(lead.values.argmax(), lead.shape)
    assert most.startswith(
        f"Head {layer}.{head} attends most to tokens ' or 's. In rows"
    )


def test_controls_are_near_and_equally_frequent():
    count = torch.tensor([[9, 1, 8, 4, 3, 8, 1, 1, 8, 2]]).double()
    on = torch.zeros(1, 10, dtype=torch.bool)
    on[0, 5] = True
    (weight,) = controls(on, count.log2()).tolist()
    assert {n: x for n, x in enumerate(weight) if x} == {2: 0.5, 8: 0.5}
    on[0, 8] = True  # a target is not a control, nor is the first token
    (weight,) = controls(on, count.log2()).tolist()
    assert {n: x for n, x in enumerate(weight) if x} == {2: 1.0, 9: 1.0}
    assert sum(weight) == 2 * on.sum() / 2


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("", "There is no token ''"),
        (3, "attention_on: what must be"),
        ("rope", "There is no token 'rope' in this text"),
        ("after:after:repeated", "There is no token 'after:after:repeated'"),
    ],
)
def test_unknown_tokens_are_refused(what: object, words: str):
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(BadArgument, match=words):
        rl.attention_on(tokens, what, Names())
    with pytest.raises(BadArgument, match=r"There is no token [^$]*try:   tokenizer="):
        rl.attention_on(tokens, "'")
