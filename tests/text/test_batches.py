"""Padded and packed batches are measured as the same sequences alone."""

from collections.abc import Callable, Sequence
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
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BatchEncoding,
    DataCollatorWithFlattening,
    DynamicCache,
)

import ropelens as rl
from ropelens.attention.call import AttentionCall, attention_map
from ropelens.config_facts import slides
from ropelens.errors import BadArgument
from ropelens.model.as_live_model import as_live_model
from ropelens.text.batch_tokens import number_tokens
from ropelens.text.batches import split_batch

LENGTHS = [40, 23, 31]
FAMILIES = (
    "llama_gqa",
    "llama_yarn",
    "mistral_sliding",
    "mixtral",
    "qwen3",
    "gemma2",
    "gemma4",
    "gpt_oss",
    "phi3",
    "glm",
    "deepseek_v3",
    "gpt_neox",
)
BUDGETED = ("llama_gqa", "mistral_sliding", "gemma2", "gpt_oss")
SAME = (
    "q_norm",
    "k_norm",
    "selectivity",
    "offset_mass",
    "total_bits",
    "follows_content",
    "follows_position",
    "group_loss",
)
SEQUENCES = [
    torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(n))
    for n in LENGTHS
]
Encoding = dict[str, Tensor]


def right_padded() -> rl.Text:
    ids = pad_sequence(SEQUENCES, batch_first=True)
    return rl.Text(ids, lengths=LENGTHS)


def left_padded() -> BatchEncoding:
    ids = pad_sequence(SEQUENCES, batch_first=True, padding_side="left")
    real = [torch.ones(n, dtype=torch.long) for n in LENGTHS]
    mask = pad_sequence(real, batch_first=True, padding_side="left")
    return BatchEncoding({"input_ids": ids, "attention_mask": mask})


def packed_by_position() -> Encoding:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    ids = torch.cat(SEQUENCES)
    return {"input_ids": ids[None], "position_ids": positions[None]}


def packed_ids() -> Tensor:
    return torch.cat(SEQUENCES)[None]


def document_numbers() -> Tensor:
    return torch.repeat_interleave(torch.tensor(LENGTHS))[None]


def packed_by_document() -> rl.Text:
    return rl.Text(packed_ids(), documents=document_numbers())


def with_a_hole() -> Encoding:
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, 10:14] = 0
    mask[1, :5] = 0
    mask[1, 23] = 0
    ids = torch.stack([SEQUENCES[0], SEQUENCES[0].flip(0)])
    return {"input_ids": ids, "attention_mask": mask}


def with_gaps() -> BatchEncoding:
    """Gaps on the left and inside. Positions count tokens that are not masked.

    `generate` gives these positions.
    """
    ids = torch.zeros(3, 43, dtype=torch.long)
    mask = torch.zeros(3, 43, dtype=torch.long)
    for row, tokens in enumerate(SEQUENCES):
        begin = 40 - len(tokens)
        before_gap = torch.arange(begin, begin + 7)
        after_gap = torch.arange(begin + 10, 43)
        real = torch.cat([before_gap, after_gap])
        ids[row, real] = tokens
        mask[row, real] = 1
    positions = (mask.cumsum(1) - 1).where(mask == 1, 1)
    return BatchEncoding(
        {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    )


def profile(name: str, text: Any) -> xr.Dataset:
    if name in BUDGETED:
        return rl.profile(tiny(name), text, surrogates=0)
    return rl.profile(tiny(name), text, budget=False)


@cache
def alone(name: str) -> xr.Dataset:
    return profile(name, right_padded())


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:in packed rows this model gives")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "batch_of", [with_gaps, packed_by_position, packed_by_document]
)
def test_numbers_are_those_of_the_sequences_alone(
    batch_of: Callable[[], Any], name: str
):
    batch = batch_of()
    if batch_of is with_gaps and slides(as_live_model(tiny(name)).config, 41):
        with pytest.raises(BadArgument, match="windows of this model count"):
            profile(name, batch)
        return
    ours = profile(name, batch)
    expected = alone(name)
    for variable in SAME:
        if variable in expected:
            np.testing.assert_allclose(ours[variable], expected[variable], 1e-5, 1e-6)


def mean_at_offset(weights: Tensor, mask: Tensor, back: int) -> Tensor:
    """Mean attention [layer, head] on the key `back` positions before its row.

    It is over the rows that are real tokens, except the first, and have this real key.
    `weights` are [layer, sequence, head, row, key].
    """
    number = mask.cumsum(1) * mask  # 1 for the first real token, 0 for hidden ones
    count = mask.shape[1]
    rows = (number[:, back:] > 1 + back) & (number[:, : count - back] > back)
    on_key = weights.diagonal(-back, -2, -1).transpose(1, 2)
    return on_key[:, :, rows].mean(-1)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_mask_with_a_hole_is_measured_as_the_model_does_it(name: str):
    model = tiny(name)
    batch = with_a_hole()
    profile = rl.profile(model, batch, budget=False)
    losses = rl.evaluate(model, batch, measures=["loss"])["loss"]
    model.set_attn_implementation("eager")
    outputs = model(**batch, output_attentions=True, use_cache=False)
    weights = torch.stack(outputs.attentions)
    weights = weights / weights.sum(-1, keepdim=True)  # gpt-oss puts a rest on its sink
    mask = batch["attention_mask"]
    on_itself = mean_at_offset(weights, mask, 0)
    on_previous = mean_at_offset(weights, mask, 1)
    np.testing.assert_allclose(profile["self_mass"], on_itself, 1e-5, 1e-6)
    np.testing.assert_allclose(profile["previous_token"], on_previous, 1e-5, 1e-6)
    real = mask.bool()
    assert profile.attrs["tokens"] == int(real.sum())
    predicted = real[:, 1:] & real[:, :-1]
    following = batch["input_ids"][:, 1:]
    loss = cross_entropy(outputs.logits[:, :-1].mT, following, reduction="none")
    expected = (loss * predicted).sum(1) / predicted.sum(1)
    np.testing.assert_allclose(losses[0], expected, 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_step_on_a_cache_is_seen_as_the_model_does_it(name: str):
    """Prompts that are padded on the left, and two tokens behind them, one by one."""
    model = tiny(name)
    batch = left_padded()
    model.set_attn_implementation("eager")
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    cache = DynamicCache()
    seen: list[Tensor] = []

    def keep(call: AttentionCall, _: object) -> None:
        seen.append(attention_map(call))

    for begin, end in ((0, 38), (38, 39), (39, 40)):
        seen.clear()
        with rl.observe(model, keep):
            outputs = model(
                input_ids=ids[:, begin:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                output_attentions=True,
            )
        rows = mask[:, begin:end].bool()
        for ours, expected in zip(seen, outputs.attentions, strict=True):
            of_rows = ours.transpose(1, 2)[rows]
            expected_of_rows = expected.transpose(1, 2)[rows]
            torch.testing.assert_close(of_rows, expected_of_rows, rtol=0, atol=1e-5)


@torch.no_grad()
def test_attention_across_documents_is_measured_where_the_model_has_some():
    model = tiny("llama_gqa")
    words = "this model gives 4.% of its attention to other"
    with pytest.warns(UserWarning, match=words):
        profile = rl.profile(model, packed_by_document(), budget=False)
    outputs = model(packed_ids(), output_attentions=True)
    weights = torch.stack(outputs.attentions)
    number = document_numbers()[0]
    is_other = number[:, None] != number
    expected = float((weights * is_other).sum(-1)[..., 1:].mean())
    across = profile.attrs["attention_across_documents"]
    assert across == pytest.approx(expected, rel=1e-5)


def test_documents_that_transformers_keeps_apart_have_no_attention_across_them():
    profile = rl.profile(tiny("llama_gqa"), packed_by_position(), budget=False)
    assert "attention_across_documents" not in profile.attrs


@pytest.mark.parametrize("batch_of", [left_padded, packed_by_position, with_a_hole])
def test_an_analysis_takes_the_batches_that_a_profile_takes(
    batch_of: Callable[[], Any],
):
    model = tiny("llama_gqa", num_hidden_layers=1)
    batch = batch_of()
    analysis = rl.analyze(model, batch, rl.Options(surrogates=0))
    expected = rl.profile(model, batch, surrogates=0)
    for variable in SAME:
        ours = analysis.profile[variable]
        np.testing.assert_array_equal(ours, expected[variable])


def test_a_capture_is_of_the_tokens_that_the_mask_shows():
    model = tiny("llama_gqa")
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[:, :7] = 0
    padding = torch.zeros(7, dtype=torch.long)
    ids = torch.cat([padding, SEQUENCES[1]])[None]
    padded = {"input_ids": ids, "attention_mask": mask}
    seen = rl.capture(model, padded, heads="1.2")
    expected = rl.capture(model, SEQUENCES[1], heads="1.2")
    np.testing.assert_array_equal(seen["attention"], expected["attention"])


def test_a_capture_of_a_sequence_with_a_hole_is_the_attention_of_the_model():
    model = tiny("llama_gqa")
    one_sequence = {name: x[:1] for name, x in with_a_hole().items()}
    seen = rl.capture(model, one_sequence, heads="1.*", values=True, logits_of=[5])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**one_sequence, output_attentions=True, use_cache=False)
    expected = outputs.attentions[1][0]
    np.testing.assert_allclose(seen["attention"], expected, 1e-4, 1e-5)


def test_a_capture_of_several_sequences_is_refused():
    with pytest.raises(BadArgument, match="A capture takes one sequence"):
        rl.capture(tiny("llama_gqa"), left_padded())


@given(
    lengths=st.lists(st.integers(2, 6), min_size=1, max_size=5),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    packed=st.booleans(),
    data=st.data(),
)
def test_sequences_that_were_packed_and_padded_are_cut_again(
    lengths, before, after, packed, data
):
    total = sum(lengths)
    ids = torch.arange(before + total + after)[None]
    real = slice(before, before + total)
    sequences = ids[0, real].split(lengths)
    inside = [int(token) for sequence in sequences for token in sequence[1:-1]]
    masked = data.draw(st.sets(st.sampled_from(inside))) if inside else set()
    mask = torch.zeros_like(ids)
    mask[0, real] = 1
    mask[0, list(masked)] = 0
    documents = torch.zeros_like(ids)
    documents[0, real] = torch.repeat_interleave(torch.tensor(lengths))
    encoding = {"input_ids": ids, "attention_mask": mask}
    given_documents = documents
    if packed:
        encoding["position_ids"] = torch.zeros_like(ids)
        encoding["position_ids"][0, real] = torch.cat(
            [torch.arange(n) for n in lengths]
        )
        given_documents = None
    numbers = number_tokens(encoding, given_documents, None)
    assert torch.equal(numbers.sequence, (documents + 1) * mask)
    text = split_batch(encoding, given_documents)
    assert text.lengths.tolist() == lengths
    assert_sequences_are(text, sequences, masked)
    if text.documents is not None:
        assert text.documents.tolist() == list(range(len(lengths)))


def assert_sequences_are(
    text: rl.Text, sequences: Sequence[Tensor], masked: set[int]
) -> None:
    for number, sequence in enumerate(sequences):
        length = len(sequence)
        expected = [token in masked for token in sequence.tolist()]
        assert text.hidden[number, :length].tolist() == expected
        shown = ~torch.tensor(expected)
        assert torch.equal(text.ids[number, :length][shown], sequence[shown])


def test_a_text_does_not_change_with_the_arrays_that_it_was_built_from():
    arrays = {
        "ids": torch.randint(3, 96, (2, 30)),
        "documents": np.array([3, 4]),
        "lengths": torch.tensor([30, 20]),
        "hidden": torch.arange(60).view(2, 30) < 5,
    }
    text = rl.Text(**arrays)
    before = {name: getattr(text, name).clone() for name in arrays}
    for array in arrays.values():
        array[:] = 0
    for name, values in before.items():
        assert torch.equal(getattr(text, name), values)


IDS = torch.randint(3, 96, (2, 30), generator=torch.Generator().manual_seed(0))
COUNT = torch.arange(30)
REFUSED = {  # inputs next to input_ids, and words of the error
    "nothing to see": (
        {"attention_mask": torch.zeros_like(IDS)},
        "hides every token",
    ),
    "too few positions": (
        {"position_ids": torch.arange(29)[None]},
        "position_ids must have a number for each",
    ),
    "steps of 2": (
        {"position_ids": (COUNT * 2).expand(2, -1)},
        "must increase by 1 or begin anew",
    ),
    "steps of 0": (
        {"position_ids": (COUNT // 2).expand(2, -1)},
        "must increase by 1 or begin anew",
    ),
    "half steps": (
        {"position_ids": (COUNT / 2).expand(2, -1)},
        "must increase by 1 or begin anew",
    ),
    "images": (
        {"pixel_values": IDS},
        r"on token ids only.\n.*seen:  pixel_values\n",
    ),
    "types of tokens": (
        {"token_type_ids": IDS},
        r"on token ids only.\n.*seen:  token_type_ids\n",
    ),
    "embeddings": (
        {"inputs_embeds": IDS},
        r"on token ids only.\n.*seen:  inputs_embeds\n",
    ),
}


@pytest.mark.parametrize(("inputs", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_batch_that_is_not_a_text_is_refused(inputs: dict, words: str):
    batch = {"input_ids": IDS, **inputs}
    for measure in (rl.profile, rl.capture, rl.analyze):
        with pytest.raises(BadArgument, match=words):
            measure(tiny("llama_gqa"), batch)


def test_an_argument_that_a_batch_does_not_take_is_refused():
    words = "are only for plain token ids"
    with pytest.raises(BadArgument, match=words):
        rl.Text({"input_ids": IDS}, lengths=[30, 20])
    with pytest.raises(BadArgument, match=words):
        rl.Text({"input_ids": IDS}, hidden=torch.zeros_like(IDS))
    words = "one sequence without hidden tokens"
    patch = rl.patch_planes(tiny("llama_gqa"), with_a_hole(), heads="0.*")
    with pytest.raises(BadArgument, match=words), patch:
        pass


def test_labels_and_types_of_one_kind_of_token_are_ignored():
    ids = SEQUENCES[0][None]
    batch = {"input_ids": ids, "labels": ids, "token_type_ids": 0 * ids}
    rl.capture(tiny("llama_gqa"), batch)


def test_labels_that_leave_tokens_out_of_the_loss_are_named():
    """The first token of a sequence is no target, with or without a label."""
    ids = SEQUENCES[0][None]
    labels = ids.clone()
    labels[:, 0] = -100
    rl.capture(tiny("llama_gqa"), {"input_ids": ids, "labels": labels})  # no warning
    labels[:, :6] = -100
    left_out = f"labels are not read: 5 of {ids.shape[1] - 1} targets"
    with pytest.warns(UserWarning, match=left_out):
        rl.capture(tiny("llama_gqa"), {"input_ids": ids, "labels": labels})


def flattened(*, position_ids: bool) -> Any:
    """A batch of transformers' collator for packed rows, with all of its inputs."""
    collator = DataCollatorWithFlattening(
        return_position_ids=position_ids,
        return_flash_attn_kwargs=True,
        return_seq_idx=True,
    )
    return collator([{"input_ids": row.tolist()} for row in SEQUENCES[:2]])


def test_a_flattened_batch_is_divided_by_its_positions():
    batch = flattened(position_ids=True)
    losses = rl.evaluate(tiny("llama_gqa"), batch, edits={}, measures="loss")
    assert losses.sequence.size == 2


def test_a_flattened_batch_without_positions_is_refused():
    batch = flattened(position_ids=False)
    with pytest.raises(BadArgument, match="into its documents by pos") as refused:
        rl.evaluate(tiny("llama_gqa"), batch, edits={}, measures="loss")
    seen = "cu_seq_lens_k, cu_seq_lens_q, seq_idx without position_ids"
    assert refused.value.parts["seen"] == seen


def test_positions_must_begin_at_0_if_the_rotation_changes_with_them():
    late = {"input_ids": IDS, "position_ids": torch.arange(5, 35).expand_as(IDS)}
    rl.evaluate(tiny("llama_gqa"), late, measures="loss")
    changing = [
        families.tiny("Ministral3ForCausalLM"),
        families.tiny("Llama4ForCausalLM"),
        tiny("llama_longrope"),
        tiny("llama_dynamic"),
    ]
    for model in changing:
        with pytest.raises(BadArgument, match="Positions must begin at 0 in a model"):
            rl.evaluate(model, late, measures="loss")


@pytest.mark.parametrize("name", ["pad_token_id", "eos_token_id", "generation"])
def test_lengths_of_ids_that_begin_with_padding_are_refused(name: str):
    """Without an id for padding, tokenizers pad with the end of a text."""
    model = tiny("llama_gqa")
    model.config.pad_token_id = None
    model.config.eos_token_id = None
    if name == "generation":
        model.generation_config.eos_token_id = 0
    else:
        setattr(model.config, name, 0)
    ids = pad_sequence(SEQUENCES, batch_first=True, padding_side="left")
    text = rl.Text(ids, lengths=LENGTHS)
    for measure in (rl.profile, rl.truncate):
        with pytest.raises(BadArgument, match="sequence 1 begins with padding"):
            measure(model, text)
    if name != "pad_token_id":  # a text may begin with the end of another text
        end = torch.zeros_like(ids[:, :1])
        begins_with_end = torch.cat([end, ids.flip(1)], dim=1)
        rl.profile(model, rl.Text(begins_with_end, lengths=[20, 20, 20]), budget=False)


@pytest.mark.filterwarnings("ignore:in packed rows this model gives")
def test_padding_is_no_document():
    model = tiny("llama_gqa")
    model.config.pad_token_id = 0
    ids = pad(packed_ids(), (0, 9))
    documents = pad(document_numbers(), (0, 9))  # padding has the number of the first
    with pytest.raises(BadArgument, match="sequence 3 begins with padding"):
        rl.profile(model, rl.Text(ids, documents=documents))
    documents[:, sum(LENGTHS) :] = -1
    text = rl.Text(ids, documents=documents)
    q_norm = rl.profile(model, text, surrogates=0)["q_norm"]
    np.testing.assert_array_equal(q_norm, alone("llama_gqa")["q_norm"])
