"""Two engines, one set of sums: flex attention, run eagerly, against blocks of scores."""

from __future__ import annotations

import pytest
import torch
from observed import observed_calls
from oracles.tiny import random_tokens, tiny
from same import assert_alike

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.measure import chunks
from ropelens.statistics import flex
from ropelens.statistics.attention import sum_attention
from ropelens.statistics.rows import all_rows, sample_rows
from ropelens.statistics.sinks import known_sinks
from ropelens.statistics.variables import STATISTICS

TOKENS = torch.as_tensor(random_tokens(sequences=3, length=40))
LENGTHS = torch.tensor([40, 23, 31])


@pytest.mark.parametrize(
    ("family", "sampled"),
    [
        ("llama_gqa", False),
        ("gemma2", True),  # a sliding window, a soft-cap
        ("gpt_oss", False),  # a sliding window, sink logits
    ],
)
def test_both_engines_give_the_same_sums(family: str, sampled: bool) -> None:
    rows = sample_rows(LENGTHS, count=9, seed=0) if sampled else all_rows(LENGTHS)
    sinks = known_sinks(TOKENS, beginning=None, named=TOKENS[0, [5, 11]].tolist())
    for call, planes in observed_calls(tiny(family), TOKENS):
        given = {"tokens": TOKENS, "sinks": sinks, "statistics": STATISTICS}
        expected = sum_attention(call, rows, planes, **given)
        found = sum_attention(call, rows, planes, engine="flex", **given)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(
                found[name], values, rtol=0, atol=1e-5 * float(values.abs().max()), msg=name
            )


def test_a_profile_by_flex_attention_makes_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for statistics of one's own, which may read every score; also of chunks."""
    own = rl.attention_on(TOKENS, "repeated")
    asked = {"lengths": LENGTHS, "rows": 9, "surrogates": 0, "statistics": own}
    model = tiny("llama_gqa")
    blocks = rl.profile(model, TOKENS, **asked)
    seen: list[int] = []
    init = flex.FlexBlock.__init__

    def counted(self: flex.FlexBlock, *args: object) -> None:
        init(self, *args)
        seen.append(self.call.layer)

    monkeypatch.setattr(flex.FlexBlock, "__init__", counted)
    monkeypatch.setattr(chunks, "ONE_PASS", 23)
    found = rl.profile(model, TOKENS, engine="flex", **asked)
    assert seen == [0, 1]
    assert "attention_on_repeated" in found
    assert_alike(found, blocks)


def test_an_engine_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadArgument, match=r"(?s)no engine 'fast'.*blocks, flex"):
        rl.profile(tiny("llama_gqa"), TOKENS, engine="fast")
