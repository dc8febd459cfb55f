"""One call measures a model: what it takes, what it gives, and how often it looks."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
import torch
import xarray as xr
from oracles.tiny import tiny
from safetensors.torch import save_file
from tiny_checkpoints import save_tiny, tiny_llama
from transformers import DbrxConfig, LlamaConfig

import ropelens as rl
from ropelens.analysis.plan import Plan
from ropelens.figures.style import COLORS
from ropelens.measure.batches import batch_bytes, sequences_at_once
from ropelens.models.checkpoint import fingerprint
from ropelens.models.tokens import check_tokens

WORDS = "the quick brown fox jumps over the lazy dog " * 20
SWEEP = {"keep": (0.5,), "controls": 1, "bands": 2}


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
    return rl.analyze(checkpoint, text, seed=3)


def test_it_is_what_its_parts_give(analysis: rl.Analysis, checkpoint: Path) -> None:
    model, tokenizer = rl.load(checkpoint)
    read = rl.tokenize([WORDS.rstrip("\n")], tokenizer, context=64, seed=3)
    profile = rl.profile(model, read.tokens, lengths=read.lengths, tokenizer=tokenizer, seed=3)
    xr.testing.assert_equal(analysis.profile, profile)
    pd.testing.assert_frame_equal(analysis.heads, rl.classify_heads(profile, seed=3))
    assert analysis.provenance["model"]["fingerprint"] == fingerprint(checkpoint)
    assert analysis.provenance["text"]["fingerprint"] == read.fingerprint


def test_names_and_models_paths_documents_and_tokens_are_taken_alike(
    analysis: rl.Analysis, checkpoint: Path
) -> None:
    model, tokenizer = rl.load(checkpoint)
    read = rl.tokenize([WORDS], tokenizer, context=64)
    given = {"tokenizer": tokenizer, "seed": 3}
    for same in (
        rl.analyze(model, WORDS, **given),
        rl.analyze(model, [WORDS], **given),
        rl.analyze(model, read, **given),
        rl.analyze(model, read.tokens, lengths=read.lengths, **given),
        rl.analyze(str(checkpoint), WORDS, seed=3),
    ):
        xr.testing.assert_equal(same.profile, analysis.profile)
    live = rl.analyze(model, read.tokens, lengths=read.lengths, **given).provenance
    assert live["model"]["fingerprint"] is None
    assert live["text"]["fingerprint"] is None
    assert live["arguments"]["model"] == "LlamaForCausalLM"


def test_what_cannot_be_meant_is_refused(checkpoint: Path, text: Path) -> None:
    with pytest.raises(rl.RopelensError, match="characters, and a file"):
        rl.analyze(checkpoint, str(text))
    with pytest.raises(rl.RopelensError, match="There is no text to run LlamaForCausalLM on"):
        rl.analyze(tiny_llama().eval())
    with pytest.raises(rl.RopelensError, match="There is no measure 'loos'"):
        rl.analyze("no/such/model", WORDS, truncation={"measures": ["loos"]})
    with pytest.raises(rl.RopelensError, match=r"no backend 'transformer_lens'"):
        rl.analyze(checkpoint, WORDS, backend="transformer_lens")
    with pytest.raises(rl.RopelensError, match="lengths are those of tokens"):
        rl.analyze(checkpoint, WORDS, lengths=torch.tensor([3]))


def test_a_plain_text_is_one_document(checkpoint: Path, tmp_path: Path) -> None:
    model, tokenizer = rl.load(checkpoint)
    one, listed = (rl.tokenize(text, tokenizer, context=64) for text in (WORDS, [WORDS]))
    assert torch.equal(one.tokens, listed.tokens)
    expected = rl.profile(
        model, one.tokens, lengths=one.lengths, tokenizer=tokenizer, surrogates=0
    )
    found = rl.profile(model, WORDS, tokenizer=tokenizer, surrogates=0)
    xr.testing.assert_equal(found, expected)
    assert rl.profile(model, "the fox", tokenizer=tokenizer, surrogates=0).attrs["tokens"] == 8
    with pytest.raises(rl.BadArgument, match="A text needs the tokenizer"):
        rl.profile(model, WORDS)
    for call in (
        lambda: rl.tokenize("story.txt", tokenizer, context=64),
        lambda: rl.profile(model, "story.txt", tokenizer=tokenizer),
        lambda: rl.capture(model, "story.txt", tokenizer=tokenizer),
        lambda: rl.analyze(model, "story.txt", tokenizer=tokenizer),
    ):
        with pytest.raises(rl.BadText, match=r"looks like a file(.|\n)*read_documents"):
            call()
    with pytest.raises(rl.BadText, match="and a file"):
        rl.capture(model, str(checkpoint), tokenizer=tokenizer)
    with pytest.raises(rl.BadArgument, match="tokens are ids, and this is a text"):
        check_tokens(WORDS, None, vocabulary=40)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 0}, "rows must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"context": 1}, "at least 2 tokens"),
        ({"sequences": 0}, "sequences is 0"),
        ({"truncation": {"keep": (2,)}}, "share"),
        ({"truncation": {"measures": ["loos"]}}, "There is no measure 'loos'"),
        ({"ids": "none.npy", "text": None}, "There are no token ids at none.npy"),
        ({"dtype": "float7"}, "There is no dtype"),
        ({"prompts": [3]}, r"prompts are texts in a list(.|\n)*seen:  \[3\]"),
        ({"prompts": [None]}, "prompts are texts in a list"),
        ({"prompts": None}, "prompts are texts in a list"),
        ({"prompts": b"abc"}, "prompts are texts in a list"),
        ({"attention_on": ["the", 3]}, "attention_on are texts in a list"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_looked_for(
    options: dict[str, object], words: str
) -> None:
    with pytest.raises(rl.RopelensError, match=words):
        rl.analyze("no/such/model", **({"text": WORDS} | options))


def test_one_text_needs_no_list(checkpoint: Path) -> None:
    options = {"context": 32, "sequences": 2}
    found, expected = (
        rl.analyze(checkpoint, WORDS, **options, prompts=prompts, attention_on=what)
        for prompts, what in (("the fox", "repeated"), (["the fox"], ["repeated"]))
    )
    xr.testing.assert_equal(found.profile, expected.profile)
    names = ("prompts", "attention_on")
    asked = [found.provenance["arguments"][name] for name in names]
    assert asked == [["the fox"], ["repeated"]]


def test_a_folder_is_read_as_it_was_saved(analysis: rl.Analysis, tmp_path: Path) -> None:
    page = analysis.save(tmp_path / "out")
    again = rl.open(tmp_path / "out")
    xr.testing.assert_equal(again.profile, analysis.profile)
    pd.testing.assert_frame_equal(again.heads, analysis.heads)
    assert again.report(tmp_path / "page.html").read_bytes() == page.read_bytes()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert again.provenance == record
    assert record["kind"] == "analysis"
    assert rl.write_index(tmp_path).exists()


def test_results_of_another_kind_are_not_lost(analysis: rl.Analysis, tmp_path: Path) -> None:
    answer = rl.Answer("Why?", ["Because."], {"A caption.": rl.plot_norms(analysis.profile)})
    folder = rl.write_answer(tmp_path / "why", analysis, answer).parent
    assert (folder.parent.name, folder.name) == ("why", "tiny")
    with pytest.raises(rl.RopelensError, match="holds the answer of an analysis; the page"):
        analysis.save(folder)
    record = json.loads((folder / "run.json").read_text())
    alone = "All text is from 1 document: numbers and intervals speak of this text alone"
    because, scope = record["findings"]
    assert (record["kind"], because) == ("answer", "Because.")
    assert scope == f"{alone}, not of other text like it."
    assert scope == analysis.provenance["findings"][-1]
    assert record["model"] == analysis.provenance["model"]


def test_it_shows_itself_and_no_token_or_name_harms(analysis: rl.Analysis) -> None:
    hostile = analysis.profile.assign_attrs(model="<script>")
    shown = rl.Analysis(hostile, analysis.heads, analysis.provenance)._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "Of 8 heads" in shown
    assert " here: " in shown  # the verdict of the claim
    svg = ElementTree.fromstring(shown[shown.index("<svg") : shown.index("</svg>") + 6])
    cells = svg.findall("{*}rect")
    assert len(cells) == 8
    for cell, (_, row) in zip(cells, analysis.heads.iterrows(), strict=True):
        assert cell.attrib["fill"] == COLORS[row["label"]]
        title = cell.findtext("{*}title") or ""
        assert title.startswith(f"{row['layer']}.{row['head']}: {row['label']}, ")
    table = ElementTree.fromstring(shown[shown.index("<table") : shown.index("</table>") + 8])
    assert sum(int(cell.text or 0) for cell in table.findall(".//td")) == 8
    worse = analysis.heads.assign(label=["</svg><script>", *analysis.heads["label"][1:]])
    shown = rl.Analysis(hostile, worse, analysis.provenance)._repr_html_()
    assert "<script>" not in shown
    assert repr(analysis).startswith("<Analysis of tiny: Of 8 heads, ")


def test_stages_are_told(checkpoint: Path) -> None:
    told: list[tuple[str, int, list[int]]] = []

    @contextmanager
    def progress(what: str, *, total: int, unit: str):
        done: list[int] = []
        yield done.append
        told.append((what, total, done))

    rl.analyze(checkpoint, WORDS, truncation=SWEEP, progress=progress)
    assert [what for what, _, _ in told] == [
        *("reading", "loading", "probing", "fitting budgets", "trying edits"),
        *("probing", "fitting the budget", "measuring", "labelling"),
    ]
    assert all(total == sum(done) for what, total, done in told if total > 1)
    assert all(set(done) == {1} for what, _, done in told if "fitting" in what)  # by layer


def test_measuring_moves_by_layer_within_a_batch() -> None:
    model, told = tiny_llama(num_hidden_layers=3).eval(), []
    tokens = torch.randint(40, (2, 50))
    rl.profile(model, tokens, surrogates=0, batch_size=2, progress=told.append)
    assert told == [25, 25, 25, 25]


def test_a_sweep_takes_one_probe_one_plan_and_one_summary(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def count(place: str) -> None:
        module, name = place.rsplit(".", 1)
        made = __import__(module, fromlist=[name]).__dict__[name]

        def counted(*args: object, **options: object) -> object:
            calls[name] += 1
            return made(*args, **options)

        monkeypatch.setattr(place, counted)

    for place in (
        "ropelens.models.rotation.probe_positions",
        "ropelens.measure.truncate.plan_cuts",
        *(
            f"ropelens.{module}.summarize_truncation"
            for module in (
                *("analysis.analysis", "report.truncation", "report.truncation_words"),
                *("figures.truncation", "figures.bands"),
            )
        ),
    ):
        count(place)
    rl.analyze(checkpoint, WORDS, truncation=SWEEP).save(tmp_path / "out")
    assert calls == {"probe_positions": 1, "plan_cuts": 1, "summarize_truncation": 1}


def test_a_model_is_measured_anew_after_the_call(checkpoint: Path) -> None:
    """The probe is remembered within a call alone: weights may change after it."""
    model, tokenizer = rl.load(checkpoint)
    before = rl.analyze(model, WORDS, tokenizer=tokenizer).profile["inv_freq"]
    with torch.no_grad():
        model.model.rotary_emb.inv_freq *= 0.5
        model.model.rotary_emb.original_inv_freq *= 0.5
    after = rl.analyze(model, WORDS, tokenizer=tokenizer).profile["inv_freq"]
    torch.testing.assert_close(torch.tensor(after.values), torch.tensor(before.values) / 2)


def test_what_runs_is_planned_before_a_model_is_read(checkpoint: Path) -> None:
    plans: list[Plan] = []

    def stop(plan: Plan) -> None:
        plans.append(plan)
        raise KeyboardInterrupt

    (checkpoint / "model.safetensors").rename(checkpoint / "kept")
    weights = {"a": torch.zeros(7, 10), "b": torch.zeros(7)}  # as many tensors as layers
    save_file(weights, checkpoint / "model.safetensors")
    try:
        for context in (64, 2_049):
            tokens = torch.randint(40, (6, context))
            with pytest.raises(KeyboardInterrupt):
                rl.analyze(checkpoint, tokens, announce=stop)
    finally:
        (checkpoint / "kept").replace(checkpoint / "model.safetensors")
    short, long = plans
    assert (short.layers, short.heads, short.tokens, short.parameters) == (2, 4, 384, 77)
    assert (short.rows, short.batch_size) == ("all", 6)
    assert (long.rows, long.batch_size) == (512, 1)
    assert "512 rows of each sequence, batches of 1, about " in long.line
    assert long.line.endswith("; time is known after the first batch")


def test_sampled_rows_of_long_sequences_are_the_default() -> None:
    model, tokens = tiny_llama(num_hidden_layers=1).eval(), torch.randint(40, (1, 2_049))
    assert rl.profile(model, tokens, surrogates=0).attrs["rows"] == 512
    assert rl.profile(model, tokens[:, :40], surrogates=0).attrs["rows"] == "all"


def test_less_memory_makes_smaller_batches() -> None:
    config = tiny_llama().config
    config.intermediate_size = 100_000  # 0.6 GB a sequence
    given = {"sequences": 64, "context": 512, "width": 4, "device": "cpu"}
    gigabytes = (1_000, 7, 3, 0)
    found = [sequences_at_once(config, free=n * 10**9, **given) for n in gigabytes]
    assert found == [8, 4, 2, 1]
    few, config.vocab_size = batch_bytes(config, **given), 128_000
    assert batch_bytes(config, **given) - few > 60e6  # logits are counted, a piece of them


def test_a_config_whose_layers_differ_can_be_planned() -> None:
    model = tiny("gemma4").eval()
    assert batch_bytes(
        model.config, sequences=1, context=16, width=4, device="cpu"
    ) < batch_bytes(model.config, sequences=2, context=16, width=4, device="cpu")


def test_a_config_with_names_of_its_own_is_planned_by_them() -> None:
    shape = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4}
    usual = LlamaConfig(**shape, num_key_value_heads=1, intermediate_size=2_048, vocab_size=100)
    own = DbrxConfig(d_model=512, n_heads=8, n_layers=4, vocab_size=100)
    given = {"sequences": 2, "context": 512, "width": 4, "device": "cpu"}
    assert batch_bytes(own, **given) == batch_bytes(usual, **given)
