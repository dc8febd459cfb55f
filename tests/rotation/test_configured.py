"""Warnings if a live model rotates differently from its configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
from oracles.tiny import tiny
from transformers import LlamaConfig, LlamaForCausalLM

import ropelens as rl

LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}


def llama(**more: object) -> LlamaForCausalLM:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes | more)).eval()


def test_a_rotary_module_that_ignores_its_configuration() -> None:
    model = llama(rope_parameters=LLAMA3)
    model.model.rotary_emb = llama().model.rotary_emb
    words = r"layer 0: the frequencies differ from its configuration: plane 3 rotates by"
    with pytest.warns(UserWarning, match=words):
        rl.measure_rope(model)


def test_a_buffer_that_was_rounded() -> None:
    model = llama()
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()
    with pytest.warns(UserWarning, match="rounded to half precision: plane"):
        rl.measure_rope(model)


def test_a_share_of_planes_that_the_family_does_not_read() -> None:
    with pytest.warns(UserWarning, match="asks for 8 rotated coordinates .* rotates 16"):
        rl.measure_rope(llama(partial_rotary_factor=0.5))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rotary_dim", 8, "rotary_dim 8, but 16 coordinates rotate"),
        ("rotary_pct", 0.5, "rotary_pct 0.5, but 16 coordinates rotate"),
        ("no_rope_layers", [1, 0], "no_rope_layers, but these layers rotate"),
        ("rope_interleave", True, "rope_interleave, a key of other families"),
        ("rotary_emb_base", 500, "rotary_emb_base 500, unlike the base"),
    ],
)
def test_a_key_that_the_family_does_not_read(name: str, value: Any, words: str) -> None:
    with pytest.warns(UserWarning, match=f"has a key that the model does not read: {words}"):
        rl.measure_rope(llama(**{name: value}))
    neox = {"rotary_pct": 0.25, "rotary_emb_base": 500}  # a family that reads these keys
    rl.measure_rope(tiny("gpt_neox", **neox))
    rl.measure_rope(tiny("deepseek_v3", rope_interleave=True))


def test_a_base_that_differs_from_rope_parameters(tmp_path: Path) -> None:
    """transformers drops this base when it reads the file."""
    llama().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 5e5}))
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="rope_theta 500000, unlike the base"):
        rl.measure_rope(model)
