"""One call measures a model: what it takes, what it gives, and how often it looks."""

import json
import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
import xarray as xr
from oracles.tiny import not_as_configured, tiny
from safetensors.torch import save_file
from tiny_checkpoints import identity_of, save_tiny, tiny_llama
from transformers import DbrxConfig, LlamaConfig

import ropelens as rl
from ropelens.analysis.answer import Answer, write_answer
from ropelens.analysis.plan import plan_analysis
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


def test_it_is_what_its_parts_give(analysis: rl.Analysis, checkpoint: Path):
    model, tokenizer = rl.load(checkpoint)
    read = rl.tokenize([WORDS.rstrip("\n")], tokenizer, context=64, seed=3)
    profile = rl.profile(model, read, tokenizer=tokenizer, seed=3, surrogates=2)
    xr.testing.assert_equal(analysis.profile, profile)
    pd.testing.assert_frame_equal(analysis.heads, rl.classify_heads(profile, seed=3))
    pairs = zip(read.ids.tolist(), read.lengths.tolist(), strict=True)
    decoded = "".join(tokenizer.decode(ids[1:length]) for ids, length in pairs).encode()
    tokens = int((read.lengths - 1).sum())
    assert analysis.profile.attrs["bytes_per_token"] == len(decoded) / tokens
    assert analysis.provenance["model"]["fingerprint"] == identity_of(checkpoint)
    assert analysis.provenance["text"]["fingerprint"] == read.documents_sha256


def test_models_documents_and_tokens_are_taken_alike(
    analysis: rl.Analysis, checkpoint: Path
):
    model, tokenizer = rl.load(checkpoint)
    read = rl.tokenize([WORDS], tokenizer, context=64)
    mask = torch.arange(64) < read.lengths[:, None]
    for text in (WORDS, [WORDS], read, {"input_ids": read.ids, "attention_mask": mask}):
        same = rl.analyze(model, text, FEW, tokenizer=tokenizer)
        xr.testing.assert_equal(same.profile, analysis.profile)
    assert same.provenance["model"]["fingerprint"] == identity(model)
    assert same.provenance["text"]["fingerprint"] is None
    assert same.provenance["arguments"]["model"] == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rows": 0}, r"rows must be .*, at least 1\.\s+seen:  int 0"),
        ({"prompts": "a text"}, r"prompts must be list\[str\].*\s+seen:  str 'a text'"),
        (
            {"backend": "jax"},
            r"backend must be .*'transformer-lens'.*\s+seen:  str 'jax'",
        ),
        ({"truncation": {"measures": ["loos"]}}, "There is no measure 'loos'"),
        ({"text": Path("none.txt")}, "none.txt does not exist"),
        ({"text": "story.txt"}, r"looks like a file(.|\n)*read_documents"),
        ({"text": 5}, "analyze: text must be"),
        ({"text": None}, "no/such/model needs a text"),
    ],
)
def test_mistakes_show_before_a_model_is_looked_for(
    given: dict[str, object], words: str
):
    call = partial(rl.analyze, "no/such/model", **({"text": WORDS} | given))
    with pytest.raises(rl.RopelensError, match=words):
        rl.Options(**given) if {*given} <= {"rows", "prompts", "backend"} else call()


def test_a_prompt_has_something_to_look_into(checkpoint: Path):
    with pytest.raises(
        rl.BadArgument, match="A prompt to look into must have 3 to 256 tokens"
    ):
        rl.analyze(checkpoint, WORDS, rl.Options(prompts=[WORDS, ""]))


def test_a_folder_is_read_as_it_was_saved(analysis: rl.Analysis, tmp_path: Path):
    page = analysis.save(tmp_path / "out")
    again = rl.open(tmp_path / "out")
    xr.testing.assert_equal(again.profile, analysis.profile)
    pd.testing.assert_frame_equal(again.heads, analysis.heads)
    assert again.report(tmp_path / "page.html").read_bytes() == page.read_bytes()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert again.provenance == record
    assert record["kind"] == "analysis"


def test_results_of_another_kind_are_not_lost(analysis: rl.Analysis, tmp_path: Path):
    answer = Answer(
        "Why?", ["Because."], {"A caption.": rl.plot_norms(analysis.profile)}
    )
    folder = write_answer(tmp_path / "why", analysis, answer).parent
    assert (folder.parent.name, folder.name) == ("why", "tiny")
    with pytest.raises(rl.RopelensError, match="holds the answer of an analysis: "):
        analysis.save(folder)
    record = json.loads((folder / "run.json").read_text())
    because, scope = record["findings"]
    assert (record["kind"], because) == ("answer", "Because.")
    assert scope.startswith("All text is from 1 document")
    assert scope == analysis.findings[-1]
    assert record["model"] == analysis.provenance["model"]


@not_as_configured
def test_results_of_another_live_model_are_not_replaced(
    checkpoint: Path, tmp_path: Path
):
    model, tokenizer = rl.load(checkpoint)
    analyses = []
    for _ in range(2):
        analyses.append(rl.analyze(model, WORDS, FEW, tokenizer=tokenizer))
        model.model.rotary_emb.inv_freq.neg_()
    for saved in (analyses[0], analyses[0]):
        saved.save(tmp_path / "out")
    with pytest.raises(rl.BadArgument, match="has results of another model, tiny"):
        analyses[1].save(tmp_path / "out")


def test_stages_are_shown(checkpoint: Path):
    shown: list[tuple[Stage, ...]] = []

    @contextmanager
    def progress(*stages: Stage):
        def advance(amount: int, stage: int = 0, note: str = "") -> None:
            stages[stage].done += amount

        yield advance
        shown.append(stages)

    rl.analyze(checkpoint, WORDS, FEW, truncation=SWEEP, progress=progress)
    assert [[stage.what for stage in stages] for stages in shown] == [
        *(["reading"], ["loading"], ["probing"], ["trying edits", "fitting budgets"]),
        *(["measuring", "probing", "fitting the budget"], ["labelling"]),
    ]
    together = [stage for stages in shown if len(stages) > 1 for stage in stages]
    assert [stage.done for stage in together] == [stage.total for stage in together]


@not_as_configured
def test_a_model_is_measured_anew_by_each_call(checkpoint: Path):
    """The planes are remembered within a call only: weights may change after it."""
    model, tokenizer = rl.load(checkpoint)
    before = rl.analyze(model, WORDS, FEW, tokenizer=tokenizer).profile["inv_freq"]
    with torch.no_grad():
        model.model.rotary_emb.inv_freq *= 0.5
        model.model.rotary_emb.original_inv_freq *= 0.5
    after = rl.analyze(model, WORDS, FEW, tokenizer=tokenizer).profile["inv_freq"]
    torch.testing.assert_close(
        torch.tensor(after.values), torch.tensor(before.values) / 2
    )


def test_a_plan_is_made_before_a_model_is_read(tmp_path: Path):
    model = save_tiny(tmp_path / "tiny")
    weights = {"a": torch.zeros(7, 10)}  # of which no model can be made
    save_file(weights, model / "model.safetensors")
    texts = [torch.randint(40, (6, context)) for context in (64, 2_049)]
    short, long = [plan_analysis(model, ids, rl.Options()) for ids in texts]
    assert (
        short.facts["model"] == "tiny, 2 layers x 4 heads, 18,080 parameters in float32"
    )
    assert short.facts["tokens"] == "384 tokens (6 sequences of up to 64)"
    assert (short.facts["rows"], short.batch_size) == ("all rows", 6)
    told = r"fits and surrogates take .* of ([\d,]+) tokens, .*budget=False"
    words = [re.match(told, plan.facts["budget"])[1] for plan in (short, long)]
    few, many = [int(number.replace(",", "")) for number in words]
    assert many / few == pytest.approx((2_049 + 4_000) / (64 + 4_000), rel=1e-3)
    more = plan_analysis(model, texts[0], rl.Options(statistics=("reversal",)))
    assert more.cost == pytest.approx(short.cost + 0.3 * (1 + OBSERVED) * 384)
    assert (long.facts["rows"], long.batch_size) == ("512 rows of each sequence", 1)


def test_a_plan_for_a_device_that_this_machine_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = rl.Options(device="cuda:99", batch_size=2)
    ids = torch.randint(40, (6, 64), generator=torch.Generator().manual_seed(0))
    planned = plan_analysis(save_tiny(tmp_path / "tiny"), ids, options, run=False)
    assert re.fullmatch(r"about [\d.]+ GB on cuda:99", planned.facts["memory"])
    assert not re.search(r"\d s\b", str(planned))  # nobody measured this device
    with pytest.raises(rl.BadArgument, match="The device 'cuda:99' does not exist"):
        plan_analysis(tmp_path / "tiny", ids, options)


def test_less_memory_makes_smaller_batches():
    config = tiny_llama().config
    config.intermediate_size = 100_000  # 0.6 GB a sequence
    given = {"sequences": 64, "context": 512, "width": 4, "device": "cpu"}
    found = [
        sequences_at_once(config, free=n * 10**9, **given) for n in (1_000, 7, 3, 0)
    ]
    assert found == [8, 4, 2, 1]
    few = pass_bytes(config, **given)
    config.vocab_size = 128_000
    assert (
        pass_bytes(config, **given) - few > 60e6
    )  # logits are counted, a piece of them


def test_unusual_configs_are_planned():
    single, pair = [
        pass_bytes(
            tiny("gemma4").config, sequences=n, context=16, width=4, device="cpu"
        )
        for n in (1, 2)
    ]
    assert single < pair
    usual = LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        num_hidden_layers=4,
        num_key_value_heads=1,
        intermediate_size=2_048,
        vocab_size=100,
    )
    own = DbrxConfig(d_model=512, n_heads=8, n_layers=4, vocab_size=100)
    given = {"sequences": 2, "context": 512, "width": 4, "device": "cpu"}
    assert pass_bytes(own, **given) == pass_bytes(usual, **given)


@pytest.mark.parametrize(
    ("operations", "context", "count"), [(1e13, 4000, 4), (1e7, 2048, 8)]
)
def test_a_sweep_is_as_long_as_time_allows(
    tmp_path, monkeypatch, operations, context, count
):
    monkeypatch.setattr("ropelens.analysis.sweep_plan.OPERATIONS", {"cpu": operations})
    model = save_tiny(tmp_path / "model", max_position_embeddings=4000)
    text = "a b c d " * 10_000
    made = plan_analysis(
        str(model), text, rl.Options(), truncation={"keep": None, "bands": 2}
    )
    assert made.text.ids.shape == (count, context)
    assert "trained for 4000 tokens" in str(made)
    assert made.truncation["keep"] == (1, 0.75, 0.5, 0.25, 0)
    assert "copying" in made.truncation["measures"]
    asked = rl.Options(context=128, sequences=3)
    made = plan_analysis(str(model), text, asked, truncation={"keep": [0.5]})
    assert made.text.ids.shape == (3, 128)
    assert made.truncation == {"keep": [0.5]}
    made = plan_analysis(
        str(model), text[:3200], rl.Options(sequences=1), truncation={}
    )
    assert made.text.ids.shape == (1, 2048)  # a sweep is no longer than its text
