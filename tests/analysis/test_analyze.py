"""Arguments and results of one call that measures a model, and how often it measures."""

import json
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from oracles.tiny import not_as_configured, tiny
from safetensors.torch import save_file
from tiny_checkpoints import identity_of, save_tiny, tiny_llama
from transformers import (
    DbrxConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

import ropelens as rl
from ropelens.analysis.answer import Answer, comparison_folder, write_answer
from ropelens.analysis.plan import Plan, plan_analysis
from ropelens.analysis.saved_numbers import saved_key
from ropelens.checkpoints.identity import identity
from ropelens.profiles.costs import OBSERVED
from ropelens.profiles.measurement import sequences_at_once
from ropelens.runtime.devices import pass_bytes
from ropelens.runtime.progress import Stage

WORDS = "the quick brown fox jumps over the lazy dog " * 20
SWEEP = {"keep": (0.5,), "ends": ["slow"], "controls": 0}
FEW = rl.Options(seed=3, surrogates=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(WORDS)
    return path


@pytest.fixture(scope="module")
def analysis(checkpoint: Path, text: Path) -> rl.Analysis:
    return rl.analyze(checkpoint, text, FEW)


def number_of_bytes(text: rl.Text, tokenizer: PreTrainedTokenizerBase) -> int:
    """Bytes of the decoded sequences, without BOS and padding."""
    number = 0
    for ids, length in zip(text.ids.tolist(), text.lengths.tolist(), strict=True):
        decoded = tokenizer.decode(ids[1:length])
        number += len(decoded.encode())
    return number


def test_it_is_what_its_parts_give(analysis: rl.Analysis, checkpoint: Path):
    model, tokenizer = rl.load(checkpoint)
    text = rl.tokenize([WORDS.rstrip("\n")], tokenizer, context=64, seed=3)
    profile = rl.profile(model, text, tokenizer=tokenizer, seed=3, surrogates=2)
    xr.testing.assert_equal(analysis.profile, profile)
    heads = rl.classify_heads(profile, seed=3)
    pd.testing.assert_frame_equal(analysis.heads, heads)

    tokens = int((text.lengths - 1).sum())
    expected = number_of_bytes(text, tokenizer) / tokens
    assert analysis.profile.attrs["bytes_per_token"] == expected
    assert analysis.provenance["model"]["fingerprint"] == identity_of(checkpoint)
    of_text = analysis.provenance["text"]
    assert of_text["fingerprint"] == text.fingerprint == profile.attrs["tokens_sha256"]
    assert of_text["documents_sha256"] == text.documents_sha256


def test_models_documents_and_tokens_are_taken_alike(
    analysis: rl.Analysis, checkpoint: Path
):
    model, tokenizer = rl.load(checkpoint)
    tokens = rl.tokenize([WORDS], tokenizer, context=64)
    mask = torch.arange(64) < tokens.lengths[:, None]
    batch = {"input_ids": tokens.ids, "attention_mask": mask}
    for text in (WORDS, [WORDS], tokens, batch):
        same = rl.analyze(model, text, FEW, tokenizer=tokenizer)
        xr.testing.assert_equal(same.profile, analysis.profile)
    of_batch = same.provenance
    assert of_batch["model"]["fingerprint"] == identity(model)
    assert of_batch["text"]["fingerprint"] == tokens.fingerprint
    assert of_batch["text"]["documents_sha256"] is None
    assert of_batch["arguments"]["model"] == "LlamaForCausalLM"


def test_the_text_of_an_earlier_record_is_known_by_its_documents():
    earlier = {"text": {"fingerprint": "of the documents"}}
    assert saved_key(earlier)["text"] == "of the documents"
    of_both = {"fingerprint": "of the tokens", "documents_sha256": "of the documents"}
    assert saved_key({"text": of_both})["text"] == "of the documents"
    of_tokens = {"fingerprint": "of the tokens", "documents_sha256": None}
    assert saved_key({"text": of_tokens})["text"] is None


def analyze_missing(text: object = WORDS, **arguments: object) -> rl.Analysis:
    return rl.analyze("no/such/model", text, **arguments)


@dataclass(frozen=True)
class Mistake:
    """A call with a mistake, and words of the error."""

    name: str
    call: Callable[[], object]
    words: str


MISTAKES = [
    Mistake(
        "rows",
        lambda: rl.Options(rows=0),
        r"rows must be .*, at least 1\.\s+seen:  int 0",
    ),
    Mistake(
        "prompts",
        lambda: rl.Options(prompts="a text"),
        r"prompts must be list\[str\].*\s+seen:  str 'a text'",
    ),
    Mistake(
        "backend",
        lambda: rl.Options(backend="jax"),
        r"backend must be .*'transformer-lens'.*\s+seen:  str 'jax'",
    ),
    Mistake(
        "measure",
        lambda: analyze_missing(truncation={"measures": ["loos"]}),
        "There is no measure 'loos'",
    ),
    Mistake(
        "missing path",
        lambda: analyze_missing(Path("none.txt")),
        "none.txt does not exist",
    ),
    Mistake(
        "name of a file",
        lambda: analyze_missing("story.txt"),
        r"looks like a file(.|\n)*read_documents",
    ),
    Mistake(
        "number",
        lambda: analyze_missing(5),
        "analyze: text must be",
    ),
    Mistake(
        "no text",
        lambda: analyze_missing(None),
        "no/such/model needs a text",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistakes_show_before_a_model_is_looked_for(mistake: Mistake):
    with pytest.raises(rl.RopelensError, match=mistake.words):
        mistake.call()


def test_a_prompt_has_something_to_look_into(checkpoint: Path):
    options = rl.Options(prompts=[WORDS, ""])
    words = "A prompt to look into must have 3 to 256 tokens"
    with pytest.raises(rl.BadArgument, match=words):
        rl.analyze(checkpoint, WORDS, options)


def test_a_folder_is_read_as_it_was_saved(analysis: rl.Analysis, tmp_path: Path):
    folder = tmp_path / "out"
    page = analysis.save(folder)
    again = rl.open(folder)
    xr.testing.assert_equal(again.profile, analysis.profile)
    pd.testing.assert_frame_equal(again.heads, analysis.heads)
    page_again = again.report(tmp_path / "page.html")
    assert page_again.read_bytes() == page.read_bytes()
    record = json.loads((folder / "run.json").read_text())
    assert again.provenance == record
    assert record["kind"] == "analysis"


def test_results_of_another_kind_are_not_lost(analysis: rl.Analysis, tmp_path: Path):
    figures = {"A caption.": rl.plot_norms(analysis.profile)}
    answer = Answer("Why?", ["Because."], figures)
    folder = write_answer(tmp_path / "why", analysis, answer).parent
    assert folder == tmp_path / "why" / "tiny"
    with pytest.raises(rl.RopelensError, match="holds the answer of an analysis: "):
        analysis.save(folder)

    record = json.loads((folder / "run.json").read_text())
    because, scope = record["findings"]
    assert record["kind"] == "answer"
    assert because == "Because."
    assert scope.startswith("All text is from 1 document")
    assert scope == analysis.findings[-1]
    assert record["model"] == analysis.provenance["model"]


def test_the_profile_of_an_answer_has_seven_digits_and_no_excerpts(
    analysis: rl.Analysis, tmp_path
):
    page = write_answer(tmp_path, analysis, Answer("Why?", ["Because."]))
    saved = rl.open(page.parent / "profile.nc")
    excerpts = [name for name in analysis.profile.variables if "excerpt" in str(name)]
    assert excerpts
    assert not [name for name in saved.variables if "excerpt" in str(name)]
    exact = analysis.profile["q_norm"]
    assert saved["q_norm"].dtype == np.float32
    xr.testing.assert_identical(saved["q_norm"].variable, exact.variable.astype("f4"))
    wavelength = analysis.profile["wavelength"]
    xr.testing.assert_identical(saved["wavelength"].variable, wavelength.variable)
    assert rl.classify_heads(saved)["label"].equals(analysis.heads["label"])


def test_an_answer_about_another_text_does_not_replace_the_first(
    analysis: rl.Analysis, tmp_path: Path
):
    answer = Answer("Why?", ["Because."])
    first = write_answer(tmp_path, analysis, answer)
    kept = first.read_bytes()
    arguments = {**analysis.provenance["arguments"], "text": ["other.txt"]}
    provenance = {**analysis.provenance, "arguments": arguments}
    other = replace(analysis, provenance=provenance)
    again = Answer("Why?", ["For another reason."])
    assert write_answer(tmp_path, other, again).parent.name == "tiny-2"
    assert write_answer(tmp_path, other, again).parent.name == "tiny-2"
    assert first.read_bytes() == kept
    assert write_answer(tmp_path, analysis, again) == first


def test_a_comparison_of_other_runs_gets_another_folder(tmp_path: Path):
    runs = xr.Dataset(coords={"entry": ["a"], "fingerprint": ("entry", ["1"])})
    runs.attrs.update(versions="{}", model="a")
    folder = tmp_path / "study"
    assert comparison_folder(folder, runs) == folder
    folder.mkdir()
    record = {"kind": "comparison", "fingerprints": {"a": "1"}}
    (folder / "run.json").write_text(json.dumps(record))
    assert comparison_folder(folder, runs) == folder
    others = runs.assign_coords(fingerprint=("entry", ["2"]))
    assert comparison_folder(folder, others) == tmp_path / "study-2"


@not_as_configured
def test_results_of_another_live_model_are_not_replaced(
    checkpoint: Path, tmp_path: Path
):
    model, tokenizer = rl.load(checkpoint)
    analysis = rl.analyze(model, WORDS, FEW, tokenizer=tokenizer)
    model.model.rotary_emb.inv_freq.neg_()
    of_another_model = rl.analyze(model, WORDS, FEW, tokenizer=tokenizer)
    analysis.save(tmp_path / "out")
    analysis.save(tmp_path / "out")  # results of the same model are replaced
    with pytest.raises(rl.BadArgument, match="has results of another model, tiny"):
        of_another_model.save(tmp_path / "out")


def test_stages_are_shown(checkpoint: Path):
    shown: list[tuple[Stage, ...]] = []

    @contextmanager
    def progress(*stages: Stage):
        def advance(amount: int, stage: int = 0, note: str = "") -> None:
            stages[stage].done += amount

        yield advance
        shown.append(stages)

    rl.analyze(checkpoint, WORDS, FEW, truncation=SWEEP, progress=progress)
    names = [[stage.what for stage in stages] for stages in shown]
    assert names == [
        ["reading"],
        ["loading"],
        ["probing"],
        ["trying edits", "fitting budgets"],
        ["measuring", "probing", "fitting the budget"],
        ["labelling"],
    ]
    for stages in shown:
        if len(stages) > 1:
            for stage in stages:
                assert stage.done == stage.total


@not_as_configured
def test_a_model_is_measured_anew_by_each_call(checkpoint: Path):
    """The planes are remembered within a call only: weights may change after it."""
    model, tokenizer = rl.load(checkpoint)
    before = rl.analyze(model, WORDS, FEW, tokenizer=tokenizer).profile["inv_freq"]
    with torch.no_grad():
        model.model.rotary_emb.inv_freq *= 0.5
        model.model.rotary_emb.original_inv_freq *= 0.5
    after = rl.analyze(model, WORDS, FEW, tokenizer=tokenizer).profile["inv_freq"]
    actual = torch.tensor(after.values)
    expected = torch.tensor(before.values) / 2
    torch.testing.assert_close(actual, expected)


def tokens_of_the_budget(plan: Plan) -> int:
    """Tokens for which a plan promises the work of fits and surrogates."""
    words = r"fits and surrogates take .* of ([\d,]+) tokens, .*budget=False"
    match = re.match(words, plan.facts["budget"])
    assert match is not None
    return int(match[1].replace(",", ""))


def test_a_plan_is_made_before_a_model_is_read(tmp_path: Path):
    model = save_tiny(tmp_path / "tiny")
    not_of_a_model = {"a": torch.zeros(7, 10)}
    save_file(not_of_a_model, model / "model.safetensors")
    short_text = torch.randint(40, (6, 64))
    long_text = torch.randint(40, (6, 2_049))
    short = plan_analysis(model, short_text, rl.Options())
    long = plan_analysis(model, long_text, rl.Options())

    expected = "tiny, 2 layers x 4 heads, 18,080 parameters in float32"
    assert short.facts["model"] == expected
    assert short.facts["tokens"] == "384 tokens (6 sequences of up to 64)"
    assert short.facts["rows"] == "all rows"
    assert short.batch_size == 6
    assert long.facts["rows"] == "512 rows of each sequence"
    assert long.batch_size == 1

    ratio = tokens_of_the_budget(long) / tokens_of_the_budget(short)
    expected_ratio = (2_049 + 4_000) / (64 + 4_000)
    assert ratio == pytest.approx(expected_ratio, rel=1e-3)

    options = rl.Options(statistics=("reversal",))
    with_reversal = plan_analysis(model, short_text, options)
    expected_cost = short.cost + 0.3 * (1 + OBSERVED) * 384
    assert with_reversal.cost == pytest.approx(expected_cost)


def test_a_plan_for_a_device_that_this_machine_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = rl.Options(device="cuda:99", batch_size=2)
    ids = torch.randint(40, (6, 64), generator=torch.Generator().manual_seed(0))
    model = save_tiny(tmp_path / "tiny")
    planned = plan_analysis(model, ids, options, run=False)
    assert re.fullmatch(r"about [\d.]+ GB on cuda:99", planned.facts["memory"])
    assert not re.search(r"\d s\b", str(planned))  # nobody measured this device
    with pytest.raises(rl.BadArgument, match="The device 'cuda:99' does not exist"):
        plan_analysis(model, ids, options)


def bytes_of_a_pass(config: PreTrainedConfig, *, sequences: int, context: int) -> int:
    """Memory of a pass on the CPU in float32."""
    return pass_bytes(
        config, sequences=sequences, context=context, width=4, device="cpu"
    )


def test_less_memory_makes_smaller_batches():
    config = tiny_llama().config
    config.intermediate_size = 100_000  # 0.6 GB a sequence
    sizes = []
    for gigabytes in (1_000, 7, 3, 0):
        size = sequences_at_once(
            config,
            sequences=64,
            context=512,
            width=4,
            device="cpu",
            free=gigabytes * 10**9,
        )
        sizes.append(size)
    assert sizes == [8, 4, 2, 1]

    few_words = bytes_of_a_pass(config, sequences=64, context=512)
    config.vocab_size = 128_000
    many_words = bytes_of_a_pass(config, sequences=64, context=512)
    # Some of the logits are counted.
    assert many_words - few_words > 60e6


def test_unusual_configs_are_planned():
    gemma = tiny("gemma4").config
    single = bytes_of_a_pass(gemma, sequences=1, context=16)
    pair = bytes_of_a_pass(gemma, sequences=2, context=16)
    assert single < pair

    usual = LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        num_hidden_layers=4,
        num_key_value_heads=1,
        intermediate_size=2_048,
        vocab_size=100,
    )
    unusual = DbrxConfig(d_model=512, n_heads=8, n_layers=4, vocab_size=100)
    actual = bytes_of_a_pass(unusual, sequences=2, context=512)
    expected = bytes_of_a_pass(usual, sequences=2, context=512)
    assert actual == expected


@pytest.mark.parametrize(
    ("operations", "context", "count"), [(1e13, 4000, 4), (1e7, 2048, 8)]
)
def test_a_sweep_is_as_long_as_time_allows(
    tmp_path, monkeypatch, operations, context, count
):
    monkeypatch.setattr("ropelens.analysis.sweep_plan.OPERATIONS", {"cpu": operations})
    model = str(save_tiny(tmp_path / "model", max_position_embeddings=4000))
    text = "a b c d " * 10_000
    sweep = {"keep": None, "bands": 2}
    plan = plan_analysis(model, text, rl.Options(), truncation=sweep)
    assert plan.text.ids.shape == (count, context)
    assert "trained for 4000 tokens" in str(plan)
    assert plan.truncation["keep"] == (1, 0.75, 0.5, 0.25, 0)
    assert "copying" in plan.truncation["measures"]

    options = rl.Options(context=128, sequences=3)
    as_asked = plan_analysis(model, text, options, truncation={"keep": [0.5]})
    assert as_asked.text.ids.shape == (3, 128)
    assert as_asked.truncation == {"keep": [0.5]}

    one_sequence = rl.Options(sequences=1)
    short = plan_analysis(model, text[:3200], one_sequence, truncation={})
    # A sweep is not longer than its text.
    assert short.text.ids.shape == (1, 2048)
