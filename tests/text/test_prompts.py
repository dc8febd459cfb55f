"""Prompts: special tokens that a chat template wrote are read as special tokens."""

import pytest
import torch

import ropelens as rl
from ropelens.analysis.plan import plan_analysis
from ropelens.text.tokenize import encode

CHAT = "<s>the dog</s> ran"  # as a chat template writes it


@pytest.mark.parametrize("text", [CHAT, CHAT.removeprefix("<s>"), "</s> ran"])
def test_functions_read_special_tokens_in_a_prompt(text: str):
    model, tokenizer = rl.load("bundled")
    options = {"heads": "0.0", "tokenizer": tokenizer}
    bos = [] if text.startswith("<") else [tokenizer.bos_token_id]
    ids = torch.tensor(bos + tokenizer(text, add_special_tokens=False).input_ids)
    assert tokenizer.eos_token_id in ids
    assert rl.capture(model, text, **options).sizes["query"] == len(ids)
    plan = plan_analysis("bundled", None, rl.Options(prompts=[text]))
    assert torch.equal(plan.excerpts[0], ids)
    answers, logits = [], []
    for prompt in (text, ids):
        answers.append(rl.attribute_planes(model, prompt, "</s>", **options).answer)
        with rl.patch_planes(model, prompt, **options):
            logits.append(model(torch.arange(20)[None]).logits)
    assert answers[0] == answers[1]
    assert torch.equal(*logits)
    assert tokenizer.eos_token_id not in encode(text, tokenizer)[1]  # a document
