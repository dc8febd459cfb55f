"""Before a measurement, the chosen beginning of sequences is compared with the other one."""

import warnings
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch

import ropelens as rl
from ropelens.analysis.beginning import warn_of_beginning
from ropelens.analysis.plan import plan_analysis
from ropelens.model.as_live_model import as_live_model
from ropelens.text.text import Text
from ropelens.text.tokenize import Bos

FEW = rl.Options(context=64, sequences=6, surrogates=0)
SKIPPED = 8
COMPARED = 32


@cache
def bundled() -> rl.Analysis:
    return rl.analyze("bundled", options=FEW)


def mean_loss(rows: torch.Tensor, begin: list[int]) -> float:
    """Mean loss of transformers on the tokens after the first eight of each row."""
    tokens = torch.cat([torch.tensor(begin).expand(len(rows), -1).long(), rows], dim=1)
    with torch.no_grad():
        log_probabilities = bundled().model(tokens).logits[:, :-1].log_softmax(-1)
    losses = -log_probabilities.gather(-1, tokens[:, 1:, None])[..., 0]
    return float(losses[:, len(begin) + SKIPPED - 1 :].mean())


def messages(text: Text, bos: Bos) -> list[str]:
    live = as_live_model(bundled().model, bundled().tokenizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_beginning(live, text, bos=bos)
    return [str(warning.message) for warning in caught]


def test_a_better_beginning_is_named_with_both_losses():
    documents = [
        str(number) + " The old man lived by the sea. " * 40 for number in range(5)
    ]
    text = rl.tokenize(documents, bundled().tokenizer, context=64, bos="never")
    (message,) = messages(text, "never")
    rows = text.ids[text.lengths >= SKIPPED + COMPARED][:4, : SKIPPED + COMPARED]
    better, worse = (mean_loss(rows, begin) for begin in ([0], []))
    assert message == (
        "each sequence begins with the text, and the model predicts the text better if it "
        f"begins with <s>: {better:.2f} instead of {worse:.2f} nats/token on 4 short "
        "sequences (--bos always)"
    )


@pytest.mark.parametrize("bos", ["tokenizer", "always"])
def test_the_better_beginning_gives_no_warning(bos: Bos):
    assert messages(bundled().text, bos) == []


def test_tokens_that_were_given_are_not_compared():
    ids = bundled().text.ids[:, 1:]
    assert messages(Text(ids), "never") == []
    assert messages(bundled().text, "never") == []  # it begins with BOS


@pytest.mark.parametrize("bos", ["always", "never"])
def test_a_bos_that_the_model_does_not_know_is_not_compared(bos: Bos):
    tokenizer = deepcopy(bundled().tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<new>"})
    live = as_live_model(bundled().model, tokenizer)
    assert tokenizer.bos_token_id >= live.vocabulary
    text = rl.tokenize(
        "The old man lived by the sea. " * 40, tokenizer, context=64, bos=bos
    )
    warn_of_beginning(live, text, bos=bos)


def page_of(analysis: rl.Analysis, folder: Path) -> str:
    analysis.report(folder / "page.html")
    return (folder / "page.html").read_text()


def test_the_page_states_the_beginning_and_repeats_the_warning(tmp_path: Path):
    options = rl.Options(context=64, sequences=6, surrogates=0, bos="never")
    with pytest.warns(UserWarning, match="better if it begins with <s>"):
        analysis = rl.analyze("bundled", options=options)
    assert analysis.profile.attrs["beginning"] == "begins with the text"
    assert analysis.provenance["text"]["beginning"] == "begins with the text"
    page = page_of(analysis, tmp_path)
    assert "<span>begins with the text</span>" in page
    assert "better if it begins with &lt;s&gt;" in page
    assert "<span>begins with &lt;s&gt;</span>" in page_of(bundled(), tmp_path)


def test_the_comparison_costs_a_hundredth_of_a_profile():
    for context in (256, 512):
        options = rl.Options(context=context, sequences=32)
        plan = plan_analysis("bundled", None, options)
        compared = SKIPPED + max(COMPARED, context // 16)
        # Four sequences are read with each beginning.
        assert 8 * compared <= 0.01 * plan.cost
