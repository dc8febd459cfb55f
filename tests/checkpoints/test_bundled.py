"""The checkpoints that come with ropelens."""

import functools
import json
import math
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ropelens.checkpoints.bundled import BUNDLED, bundled_path, sample_path
from ropelens.checkpoints.load import open_checkpoint
from ropelens.checkpoints.load_options import Loading

# Written for this test, in the style of the training text.
PASSAGE = """\
The old gentleman put down his hat upon the table, and looked at her for a long time without
speaking. "You have been very good to me, my dear," he said at last, "and I shall not forget
it; but I am afraid that I must go away to London in the morning." She did not answer him. The
fire had burned low, and there was no sound in the room but the ticking of the clock upon the
wall. "Will you come back again?" she asked, in a low voice, and her hand trembled a little.
"""

FINISHED = [name for name in BUNDLED if "-step-" not in name]
COPIERS = ["rope", "p-rope-0.75", "p-rope-0.25"]


@pytest.fixture(scope="module", params=list(BUNDLED))
def bundled(request: pytest.FixtureRequest) -> Path:
    return bundled_path(request.param)


def test_tied_weights_count_once():
    planned = open_checkpoint("bundled", Loading())
    assert planned.parameters == planned.read().num_parameters()


def test_bundled_is_small_and_described(bundled: Path):
    assert sum(p.stat().st_size for p in bundled.rglob("*")) <= 6_000_000
    card = (bundled / "README.md").read_text()
    assert "public-domain" in card
    assert "license: mit" in card
    assert "/work" not in card


@pytest.mark.parametrize("name", FINISHED)
def test_bundled_predicts_and_writes(name: str):
    bundled = bundled_path(name)
    model = AutoModelForCausalLM.from_pretrained(
        bundled, dtype="float32", local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(bundled, local_files_only=True)
    assert sum(p.numel() for p in model.parameters()) > 2_000_000
    assert model.config.head_dim == 32
    turning = int((model.model.rotary_emb.inv_freq != 0).sum())
    assert f"{turning} of 16 planes turn" in (bundled / "README.md").read_text()
    tokens = tokenizer(PASSAGE, return_tensors="pt").input_ids
    # 1.6 million of 13 million training tokens were prose.
    share = 0.56 if name in COPIERS else 0.68
    assert model(input_ids=tokens, labels=tokens).loss < share * math.log(len(tokenizer))
    written = model.generate(tokens[:, :20], max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert written.shape == (1, 40)
    assert tokenizer.decode(written[0, 20:]).strip()


@functools.cache
def bundled_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(bundled_path(), local_files_only=True)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80))
def test_bundled_tokenizer_gives_text_back(text: str):
    tokenizer = bundled_tokenizer()
    assume(not any(special in text for special in tokenizer.all_special_tokens))
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_bundled_sample_is_one_context_a_document(bundled: Path):
    tokenizer = AutoTokenizer.from_pretrained(bundled, local_files_only=True)
    lines = sample_path(bundled.name).read_text(encoding="utf-8").splitlines()
    lengths = [len(tokenizer(json.loads(line)["text"]).input_ids) for line in lines]
    assert len(lengths) >= 48
    assert set(lengths) == {512}
