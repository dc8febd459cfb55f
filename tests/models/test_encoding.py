"""Padded and packed batches are measured as the same sequences alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.tiny import tiny
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.models.encoding import cut

LENGTHS = [40, 23, 31]
FAMILIES = (
    *("llama_gqa", "llama_yarn", "mistral_sliding", "mixtral", "gemma4", "gpt_oss"),
    *("deepseek_v3", "gpt_neox"),
)
SAME = ("q_norm", "k_norm", "selectivity", "offset_mass", "total_bits", "group_loss")
SEQUENCES = [
    torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS
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


def packed_by_document() -> dict[str, Any]:
    number = torch.repeat_interleave(torch.tensor(LENGTHS))[None]
    return {"tokens": torch.cat(SEQUENCES)[None], "documents": number}


@pytest.mark.filterwarnings("ignore:in packed rows this model gives")
@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_are_those_of_the_sequences_alone(name: str) -> None:
    model = tiny(name)
    alone = rl.profile(model, **right_padded(), surrogates=0)
    losses = rl.evaluate(model, **right_padded(), edits={}, measures=["loss"])["loss"]
    for held in (left_padded, packed_by_position, packed_by_document):
        found = rl.profile(model, **held(), surrogates=0)
        for variable in SAME:
            words = f"{variable}, {held.__name__}"
            np.testing.assert_allclose(
                found[variable], alone[variable], 1e-5, 1e-6, True, words
            )
        if held is not packed_by_document:
            ours = rl.evaluate(model, **held(), edits={}, measures=["loss"])["loss"]
            np.testing.assert_allclose(ours, losses, rtol=1e-5)


@torch.no_grad()
def test_attention_across_documents_is_measured_where_the_model_has_some() -> None:
    model, packed = tiny("llama_gqa"), packed_by_document()
    with pytest.warns(UserWarning, match="this model gives 4.% of its attention to other"):
        across = rl.profile(model, **packed, surrogates=0).attrs["attention_across_documents"]
    weights = torch.stack(model(packed["tokens"], output_attentions=True).attentions)
    number = packed["documents"][0]
    others = (weights * (number[:, None] != number)).sum(-1)[..., 1:].mean()
    assert across == pytest.approx(float(others), rel=1e-5)
    apart = rl.profile(model, **packed_by_position(), surrogates=0)  # transformers keeps them
    assert "attention_across_documents" not in apart.attrs


def test_an_analysis_takes_what_a_profile_takes() -> None:
    for held in (left_padded(), packed_by_position()):
        analysis = rl.analyze(tiny("llama_gqa"), held["tokens"], rl.Options(surrogates=0))
        profile = rl.profile(tiny("llama_gqa"), **held, surrogates=0)
        for variable in SAME:
            np.testing.assert_array_equal(analysis.profile[variable], profile[variable])


def test_a_capture_is_of_the_tokens_that_the_mask_shows() -> None:
    model, mask = tiny("llama_gqa"), torch.ones(1, 30, dtype=torch.long)
    mask[:, :7] = 0
    ids = torch.cat([torch.zeros(7, dtype=torch.long), SEQUENCES[1]])[None]
    seen = rl.capture(model, {"input_ids": ids, "attention_mask": mask}, heads="1.2")
    alone = rl.capture(model, SEQUENCES[1], heads="1.2")
    np.testing.assert_array_equal(seen["attention"], alone["attention"])
    with pytest.raises(BadArgument, match="One sequence"):
        rl.capture(model, left_padded()["tokens"])


@given(
    lengths=st.lists(st.integers(2, 6), min_size=1, max_size=5),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    packed=st.booleans(),
)
def test_what_was_packed_and_padded_is_cut_again(
    lengths: list[int], before: int, after: int, packed: bool
) -> None:
    total = sum(lengths)
    ids = torch.arange(before + total + after)[None]
    mask = ((ids >= before) & (ids < before + total)).long()
    place = torch.zeros_like(ids)
    place[0, before : before + total] = torch.cat([torch.arange(n) for n in lengths])
    numbers = torch.zeros_like(ids)
    numbers[0, before : before + total] = torch.repeat_interleave(torch.tensor(lengths))
    encoding = {"input_ids": ids, "attention_mask": mask}
    tokens, found, documents, number = cut(
        encoding | ({"position_ids": place} if packed else {}), None if packed else numbers
    )
    assert found.tolist() == lengths
    assert torch.equal(number, numbers + mask)
    assert torch.cat(
        [row[:n] for row, n in zip(tokens, lengths, strict=True)]
    ).tolist() == list(range(before, before + total))
    assert documents is None or documents.tolist() == list(range(len(lengths)))


def test_what_no_sequence_is_made_of_is_refused() -> None:
    model, ids = tiny("llama_gqa"), torch.randint(3, 96, (2, 30))
    hole = torch.ones_like(ids)
    hole[1, 10:12] = 0
    with pytest.raises(BadArgument, match="a mask with a hole in row 1"):
        rl.profile(model, {"input_ids": ids, "attention_mask": hole})
    with pytest.raises(BadArgument, match="lengths are of sequences"):
        rl.profile(model, {"input_ids": ids}, lengths=[30, 20])
    with pytest.raises(BadArgument, match="position_ids must have a number for each"):
        rl.profile(model, {"input_ids": ids, "position_ids": torch.arange(29)[None]})


def test_lengths_of_ids_that_begin_with_padding_are_refused() -> None:
    model = tiny("llama_gqa")
    model.config.pad_token_id = 0
    ids = pad_sequence(SEQUENCES, batch_first=True, padding_side="left")
    for measure in (rl.profile, rl.truncate):
        with pytest.raises(BadArgument, match="sequence 1 begins with padding"):
            measure(model, ids, lengths=LENGTHS)
