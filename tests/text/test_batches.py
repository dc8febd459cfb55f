"""Padded and packed batches are measured as the same sequences alone."""

from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from oracles.tiny import tiny
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding, DynamicCache

import ropelens as rl
from ropelens.attention.call import attention_map
from ropelens.config_facts import slides
from ropelens.errors import BadArgument
from ropelens.model.as_live_model import as_live_model
from ropelens.text.batch_tokens import number_tokens
from ropelens.text.batches import split_batch

LENGTHS = [40, 23, 31]
FAMILIES = (
    *(
        "llama_gqa",
        "llama_yarn",
        "mistral_sliding",
        "mixtral",
        "qwen3",
        "gemma2",
        "gemma4",
    ),
    *("gpt_oss", "phi3", "glm", "deepseek_v3", "gpt_neox"),
)
BUDGETED = ("llama_gqa", "mistral_sliding", "gemma2", "gpt_oss")
SAME = (
    "q_norm",
    "k_norm",
    "selectivity",
    "offset_mass",
    "total_bits",
    "follows_content",
)
SAME += ("follows_position", "group_loss")
SEQUENCES = [
    torch.randint(3, 96, (n,), generator=torch.manual_seed(n)) for n in LENGTHS
]


def right_padded() -> dict[str, Any]:
    return {"tokens": pad_sequence(SEQUENCES, batch_first=True), "lengths": LENGTHS}


def left_padded() -> dict[str, Any]:
    ids = pad_sequence(SEQUENCES, batch_first=True, padding_side="left")
    real = [torch.ones(n, dtype=torch.long) for n in LENGTHS]
    mask = pad_sequence(real, batch_first=True, padding_side="left")
    return {"tokens": BatchEncoding({"input_ids": ids, "attention_mask": mask})}


def packed_by_position() -> dict[str, Any]:
    place = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"tokens": {"input_ids": torch.cat(SEQUENCES)[None], "position_ids": place}}


def text_of(given: dict[str, Any]) -> Any:
    given = dict(given)
    tokens = given.pop("tokens")
    return rl.Text(tokens, **given) if given else tokens


def packed_by_document() -> dict[str, Any]:
    number = torch.repeat_interleave(torch.tensor(LENGTHS))[None]
    return {"tokens": torch.cat(SEQUENCES)[None], "documents": number}


def with_a_hole() -> dict[str, Any]:
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, 10:14] = mask[1, :5] = mask[1, 23] = 0
    ids = torch.stack([SEQUENCES[0], SEQUENCES[0].flip(0)])
    return {"input_ids": ids, "attention_mask": mask}


def with_gaps() -> dict[str, Any]:
    """On the left and inside; the positions that `generate` gives: without what is masked."""
    ids, mask = torch.zeros(2, 3, 43, dtype=torch.long)
    for row, tokens in enumerate(SEQUENCES):
        at = (
            torch.cat([torch.arange(7), torch.arange(10, len(tokens) + 3)])
            + 40
            - len(tokens)
        )
        ids[row, at] = tokens
        mask[row, at] = 1
    place = (mask.cumsum(1) - 1).where(mask == 1, 1)
    held = {"input_ids": ids, "attention_mask": mask, "position_ids": place}
    return {"tokens": BatchEncoding(held)}


def profile(name: str, given: dict[str, Any]) -> xr.Dataset:
    options = {"surrogates": 0} if name in BUDGETED else {"budget": False}
    return rl.profile(tiny(name), text_of(given), **options)


@cache
def alone(name: str) -> xr.Dataset:
    return profile(name, right_padded())


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:in packed rows this model gives")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("held", [with_gaps, packed_by_position, packed_by_document])
def test_numbers_are_those_of_the_sequences_alone(held: Any, name: str):
    if held is with_gaps and slides(as_live_model(tiny(name)).config, 41):
        with pytest.raises(BadArgument, match="windows of this model count"):
            profile(name, held())
        return
    batch = profile(name, held())
    expected = alone(name)
    for variable in (x for x in SAME if x in expected):
        np.testing.assert_allclose(batch[variable], expected[variable], 1e-5, 1e-6)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_mask_with_a_hole_is_measured_as_the_model_does_it(name: str):
    model = tiny(name)
    held = with_a_hole()
    profile = rl.profile(model, held, budget=False)
    losses = rl.evaluate(model, held, measures=["loss"])["loss"]
    model.set_attn_implementation("eager")
    result = model(**held, output_attentions=True, use_cache=False)
    real = held["attention_mask"].bool()
    weights = torch.stack(result.attentions, dim=2).transpose(
        0, 1
    )  # [head, sequence, layer]
    weights = weights / weights.sum(
        -1, keepdim=True
    )  # less what gpt-oss puts on its sink
    number = real.cumsum(1) * real
    for variable, back in (("self_mass", 0), ("previous_token", 1)):
        of_rows = weights.diagonal(-back, -2, -1).transpose(1, 2).transpose(0, 1)
        rows = (number[:, back:] > 1 + back) & (number[:, : 40 - back] > back)
        expected = of_rows[:, :, rows].mean(-1)
        np.testing.assert_allclose(profile[variable], expected, 1e-5, 1e-6)
    predicted = real[:, 1:] & real[:, :-1]
    every = cross_entropy(
        result.logits[:, :-1].mT, held["input_ids"][:, 1:], reduction="none"
    )
    expected = (every * predicted).sum(1) / predicted.sum(1)
    np.testing.assert_allclose(losses[0], expected, 1e-5)
    assert profile.attrs["tokens"] == int(real.sum())


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_step_on_a_cache_is_seen_as_the_model_does_it(name: str):
    """Prompts that are padded on the left, and two tokens behind them, one by one."""
    model = tiny(name)
    given = left_padded()["tokens"]
    model.set_attn_implementation("eager")
    ids = given["input_ids"]
    mask = given["attention_mask"]
    cache = DynamicCache()
    for begin, end in ((0, 38), (38, 39), (39, 40)):
        seen: list[torch.Tensor] = []
        with rl.observe(model, lambda call, _: seen.append(attention_map(call))):  # noqa: B023
            result = model(
                input_ids=ids[:, begin:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                output_attentions=True,
            )
        rows = mask[:, begin:end].bool()
        for ours, true in zip(seen, result.attentions, strict=True):
            ours, true = [x.transpose(1, 2)[rows] for x in (ours, true)]
            torch.testing.assert_close(ours, true, rtol=0, atol=1e-5)


@torch.no_grad()
def test_attention_across_documents_is_measured_where_the_model_has_some():
    model = tiny("llama_gqa")
    packed = packed_by_document()
    with pytest.warns(
        UserWarning, match="this model gives 4.% of its attention to other"
    ):
        attrs = rl.profile(model, text_of(packed), budget=False).attrs
    weights = torch.stack(model(packed["tokens"], output_attentions=True).attentions)
    number = packed["documents"][0]
    others = (weights * (number[:, None] != number)).sum(-1)[..., 1:].mean()
    assert attrs["attention_across_documents"] == pytest.approx(float(others), rel=1e-5)
    apart = rl.profile(model, text_of(packed_by_position()), budget=False)
    assert "attention_across_documents" not in apart.attrs, (
        "transformers keeps them apart"
    )


def test_an_analysis_takes_what_a_profile_takes():
    model = tiny("llama_gqa", num_hidden_layers=1)
    for held in (left_padded(), packed_by_position(), {"tokens": with_a_hole()}):
        analysis = rl.analyze(model, held["tokens"], rl.Options(surrogates=0))
        expected = rl.profile(model, text_of(held), surrogates=0)
        for variable in SAME:
            np.testing.assert_array_equal(
                analysis.profile[variable], expected[variable]
            )


def test_a_capture_is_of_the_tokens_that_the_mask_shows():
    model = tiny("llama_gqa")
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[:, :7] = 0
    ids = torch.cat([torch.zeros(7, dtype=torch.long), SEQUENCES[1]])[None]
    seen = rl.capture(model, {"input_ids": ids, "attention_mask": mask}, heads="1.2")
    alone = rl.capture(model, SEQUENCES[1], heads="1.2")
    np.testing.assert_array_equal(seen["attention"], alone["attention"])
    held = {name: x[:1] for name, x in with_a_hole().items()}
    seen = rl.capture(model, held, heads="1.*", values=True, logits_of=[5])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        result = model(**held, output_attentions=True, use_cache=False)
    np.testing.assert_allclose(seen["attention"], result.attentions[1][0], 1e-4, 1e-5)
    with pytest.raises(BadArgument, match="A capture takes one sequence"):
        rl.capture(model, left_padded()["tokens"])


@given(
    lengths=st.lists(st.integers(2, 6), min_size=1, max_size=5),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    packed=st.booleans(),
    data=st.data(),
)
def test_what_was_packed_and_padded_is_cut_again(lengths, before, after, packed, data):
    total = sum(lengths)
    ids = torch.arange(before + total + after)[None]
    mask = ((ids >= before) & (ids < before + total)).long()
    parts = torch.arange(before, before + total).split(lengths)
    inside = [int(token) for part in parts for token in part[1:-1]]
    masked = data.draw(st.sets(st.sampled_from(inside))) if inside else set()
    mask[0, [*masked]] = 0
    place = torch.zeros_like(ids)
    numbers = torch.zeros_like(ids)
    place[0, before : before + total] = torch.cat([torch.arange(n) for n in lengths])
    numbers[0, before : before + total] = torch.repeat_interleave(torch.tensor(lengths))
    encoding = {"input_ids": ids, "attention_mask": mask}
    batch = (
        encoding | ({"position_ids": place} if packed else {}),
        None if packed else numbers,
    )
    split = split_batch(*batch)
    number = number_tokens(*batch, None).sequence
    tokens = split.ids
    hidden = split.hidden
    documents = split.documents
    assert split.lengths.tolist() == lengths
    assert torch.equal(number, (numbers + (place >= 0)) * mask)
    for n, part in enumerate(parts):
        expected = [token in masked for token in part.tolist()]
        assert hidden[n, : len(part)].tolist() == expected
        real = ~torch.tensor(expected)
        assert torch.equal(tokens[n, : len(part)][real], part[real])
    assert documents is None or documents.tolist() == list(range(len(lengths)))


def test_a_text_does_not_change_with_the_arrays_that_it_was_built_from():
    arrays = {"ids": torch.randint(3, 96, (2, 30)), "documents": np.array([3, 4])}
    arrays["lengths"] = torch.tensor([30, 20])
    arrays["hidden"] = torch.arange(60).view(2, 30) < 5
    text = rl.Text(**arrays)
    fields = {name: getattr(text, name).clone() for name in arrays}
    for array in arrays.values():
        array[:] = 0
    assert all(
        torch.equal(getattr(text, name), field) for name, field in fields.items()
    )


IDS = torch.randint(3, 96, (2, 30))
REFUSED = [  # inputs next to input_ids, and words of the error
    ({"attention_mask": torch.zeros_like(IDS)}, "hides every token"),
    (
        {"position_ids": torch.arange(29)[None]},
        "position_ids must have a number for each",
    ),
    *(
        ({"position_ids": x.expand(2, -1)}, "must increase by 1 or begin anew")
        for x in (torch.arange(30) * 2, torch.arange(30) // 2, torch.arange(30) / 2)
    ),
    *(
        ({name: IDS}, rf"on token ids only.\n.*seen:  {name}\n")
        for name in ("pixel_values", "token_type_ids", "inputs_embeds")
    ),
]


@pytest.mark.parametrize(("inputs", "words"), REFUSED)
def test_a_batch_that_is_not_a_text_is_refused(inputs: dict, words: str):
    for measure in (rl.profile, rl.capture, rl.analyze):
        with pytest.raises(BadArgument, match=words):
            measure(tiny("llama_gqa"), {"input_ids": IDS} | inputs)


def test_an_argument_that_a_batch_does_not_take_is_refused():
    for name, value in (("lengths", [30, 20]), ("hidden", torch.zeros_like(IDS))):
        with pytest.raises(BadArgument, match="are only for plain token ids"):
            rl.Text({"input_ids": IDS}, **{name: value})
    with pytest.raises(BadArgument, match="one sequence without hidden tokens"):
        rl.patch_planes(tiny("llama_gqa"), with_a_hole(), heads="0.*").__enter__()
    ignored = {"input_ids": SEQUENCES[0][None], "labels": SEQUENCES[0][None]}
    rl.capture(tiny("llama_gqa"), ignored | {"token_type_ids": 0 * SEQUENCES[0][None]})


def test_positions_must_begin_at_0_if_the_rotation_changes_with_them():
    late = {"input_ids": IDS, "position_ids": torch.arange(5, 35).expand_as(IDS)}
    rl.evaluate(tiny("llama_gqa"), late, measures="loss")
    changing = [
        families.tiny(f"{name}ForCausalLM") for name in ("Ministral3", "Llama4")
    ]
    for model in (*changing, tiny("llama_longrope"), tiny("llama_dynamic")):
        with pytest.raises(BadArgument, match="Positions must begin at 0 in a model"):
            rl.evaluate(model, late, measures="loss")


@pytest.mark.parametrize("name", ["pad_token_id", "eos_token_id", "generation"])
def test_lengths_of_ids_that_begin_with_padding_are_refused(name: str):
    """Without an id for padding, tokenizers pad with the end of a text."""
    model = tiny("llama_gqa")
    model.config.pad_token_id = model.config.eos_token_id = None
    of = model.generation_config if name == "generation" else model.config
    setattr(of, "eos_token_id" if name == "generation" else name, 0)
    ids = pad_sequence(SEQUENCES, batch_first=True, padding_side="left")
    for measure in (rl.profile, rl.truncate):
        with pytest.raises(BadArgument, match="sequence 1 begins with padding"):
            measure(model, rl.Text(ids, lengths=LENGTHS))
    begun = torch.cat(
        [torch.zeros_like(ids[:, :1]), ids.flip(1)], 1
    )  # with an end of a text
    if name != "pad_token_id":
        rl.profile(model, rl.Text(begun, lengths=[20, 20, 20]), budget=False)


@pytest.mark.filterwarnings("ignore:in packed rows this model gives")
def test_padding_is_no_document():
    model = tiny("llama_gqa")
    held = packed_by_document()
    held = {name: torch.nn.functional.pad(x, (0, 9)) for name, x in held.items()}
    model.config.pad_token_id = 0
    with pytest.raises(BadArgument, match="sequence 3 begins with padding"):
        rl.profile(model, text_of(held))
    held["documents"][held["documents"] == 0] = -1
    held["documents"][0, :40] = 0
    q_norm = rl.profile(model, text_of(held), surrogates=0)["q_norm"]
    np.testing.assert_array_equal(q_norm, alone("llama_gqa")["q_norm"])
