"""Kinds of layers come from masks and rotations that were measured."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from oracles.recording import attention_calls
from oracles.tiny import COMMON
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ropelens as rl
from ropelens.analysis.sweep_plan import stated_kinds
from ropelens.errors import BadArgument
from ropelens.profiles.kinds import layers_by_kind

WINDOW = 12
SIZES = COMMON | {"head_dim": 16, "num_hidden_layers": 6}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
STATES = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
}
GEMMA3 = Path("models/gemma3-270m")
TOKENS = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))


def gemma3() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SIZES, sliding_window=WINDOW)
    ).eval()


def three_rotations() -> hf.PreTrainedModel:
    """A Llama whose layers get positions from rotary modules of three bases."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, initializer_range=0.3)).eval()
    for number, layer in enumerate(model.model.layers):
        config = hf.LlamaConfig(**SIZES, rope_theta=[1e4, 1e5, 1e6][number % 3])
        layer.own_rope = LlamaRotaryEmbedding(config)

        def turn(layer: torch.nn.Module, args: tuple, kwargs: dict) -> tuple:
            own = layer.own_rope(args[0], kwargs["position_ids"])
            return args, kwargs | {"position_embeddings": own}

        layer.register_forward_pre_hook(turn, with_kwargs=True)
    return model


CONFIGS = {
    "gemma3": (
        hf.Gemma3TextConfig,
        {"sliding_window": WINDOW},
        ["sliding"] * 5 + ["full"],
    ),
    "mistral": (hf.MistralConfig, {"sliding_window": WINDOW}, ["sliding"] * 6),
    "qwen2": (
        hf.Qwen2Config,
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
        ["full"] * 2 + ["sliding"] * 4,
    ),
    "llama4": (
        hf.Llama4TextConfig,
        {
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
        },
        (["chunked"] * 3 + ["none"]) * 2,
    ),
    "smollm3": (hf.SmolLM3Config, {}, (["full"] * 3 + ["none"]) * 2),
    "qwen3_next": (
        hf.Qwen3NextConfig,
        {**EXPERTS, **STATES, "linear_value_head_dim": 16, "decoder_sparse_step": 99},
        (["recurrent"] * 3 + ["full"]) * 2,
    ),
    "lfm2": (hf.Lfm2Config, {"layer_types": ["conv", "full_attention"] * 3}, None),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_kinds_of_layers_follow_masks_and_rotations(name: str):
    config, changes, kinds = CONFIGS[name]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config(**SIZES | changes)).eval()
    rope = rl.measure_rope(model)
    kinds = kinds or ["recurrent", "full"] * 3
    assert rope["layer_type"].values.tolist() == kinds[:6]
    assert stated_kinds(model.config) == kinds[:6]
    windows = rope["reach"].values[np.isin(rope["layer_type"], ["sliding", "chunked"])]
    assert (windows == WINDOW).all()
    full = rope["reach"].values[rope["layer_type"] == "full"]
    assert (full == model.config.max_position_embeddings).all()


def test_layers_with_other_rotations_are_other_kinds_without_names_in_the_configuration():
    model = three_rotations()
    assert getattr(model.config, "layer_types", None) is None
    with pytest.warns(UserWarning, match="frequencies differ from its configuration"):
        profile = rl.profile(model, TOKENS, budget=False)
    assert layers_by_kind(profile) == {
        "full": [0, 3],
        "full-2": [1, 4],
        "full-3": [2, 5],
    }
    np.testing.assert_allclose(profile["base"], [1e4, 1e5, 1e6] * 2, rtol=1e-4)


def test_kinds_do_not_depend_on_the_names_or_the_length_of_the_text():
    profile = rl.profile(gemma3(), TOKENS[:, :8], surrogates=0)
    kinds = {"sliding": [0, 1, 2, 3, 4], "full": [5]}
    assert layers_by_kind(profile) == kinds  # the text is shorter than the window
    table = rl.classify_heads(profile)
    rows = table.drop_duplicates("layer_type")[["layer_type", "reach", "base"]]
    assert rows.values.tolist() == [["sliding", WINDOW, 1e4], ["full", 8192, 1e6]]


def test_edits_of_a_kind_of_layers_equal_edits_of_its_layers():
    model = gemma3()
    slowest = rl.Slowest(0.5)
    plain = model(TOKENS).logits
    logits = []
    named = [rl.stop(slowest, heads=heads) for heads in ("full.*", "5.*")]
    for edit in (rl.stop_slowest(0.5, heads="full.*"), *named):
        with rl.edit_rope(model, edit):
            logits.append(model(TOKENS).logits)
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[2])
    assert not torch.equal(plain, logits[0])
    with pytest.raises(BadArgument, match=r"(?s)no head 'chunked.\*'.*sliding, full"):
        rl.edit_rope(model, rl.drop(slowest, heads="chunked.*")).__enter__()


def test_a_sweep_stops_the_planes_of_one_kind_after_the_other():
    model = gemma3()
    sweep = rl.truncate(
        model, TOKENS, bands=2, keep=[1, 0.5], controls=1, measures=["loss"]
    )
    assert list(dict.fromkeys(sweep["layers"].values)) == ["all", "sliding", "full"]
    longest = {
        "sliding": 2 * np.pi * 1e4 ** (7 / 8),
        "full": 2 * np.pi * 1e6 ** (7 / 8),
    }
    for kind, wavelength in longest.items():
        of_kind = sweep.isel(edit=(sweep["layers"] == kind).values)
        slow = of_kind.isel(edit=(of_kind["kind"] == "slow").values)
        np.testing.assert_allclose(
            slow["wavelength_high"].values, [wavelength], rtol=1e-5
        )
        assert (of_kind["planes_stopped"] > 0).all()
        alone = rl.truncate(
            model,
            TOKENS,
            bands=2,
            heads=f"{kind}.*",
            keep=[1, 0.5],
            controls=1,
            measures=["loss"],
        )
        names = [f"{kind} {name}" for name in alone["edit"].values[1:]]
        np.testing.assert_array_equal(alone["loss"][1:], sweep["loss"].sel(edit=names))
    together = rl.truncate(
        model, TOKENS, heads="*.*", keep=[1, 0.5], controls=1, measures=["loss"]
    )
    assert set(together["layers"].values) == {"all"}
    assert (
        together["mean_loss"][1] - sweep["mean_loss"].sel(edit="full slow 0.5")
    ) != 0


def test_bands_of_some_heads_stop_planes_of_their_own_layers():
    sweep = rl.truncate(gemma3(), TOKENS, heads="5.*", keep=(), bands=3, controls=0)
    assert (sweep["planes_stopped"][1:] > 0).all()
    np.testing.assert_allclose(
        sweep["wavelength_high"].max(), 2 * np.pi * 1e6 ** (7 / 8)
    )


@pytest.mark.skipif(not GEMMA3.exists(), reason="Gemma 3 is missing; run make gemma3")
@pytest.mark.thorough
def test_gemma_3_270m_agrees_with_plain_transformers():
    model, _ = rl.load(GEMMA3)
    rope = rl.measure_rope(model)
    assert rope["layer_type"].values.tolist() == (["sliding"] * 5 + ["full"]) * 3
    assert rope["reach"].values.tolist() == ([512] * 5 + [32768]) * 3
    assert rope["base"].values.tolist() == ([1e4] * 5 + [1e6]) * 3
    assert rope["inv_freq"].isnull().any()  # planes whose norm weights are 0

    model.set_attn_implementation("eager")
    tokens = torch.randint(
        3, 9000, (1, 600), generator=torch.Generator().manual_seed(0)
    )
    short = tokens[:, :150]  # the window of 512 matters only to the attention
    profile = rl.profile(model, short, budget=False)
    attention = rl.capture(model, tokens[0], heads="5.1,6.1")["attention"]
    for layer, call in enumerate(attention_calls(model, tokens[0])[0]):
        for name, x in (("q_norm", call.query), ("k_norm", call.key)):
            norms = x[:, :150].unflatten(-1, (2, -1)).norm(dim=-2).mean(1)
            np.testing.assert_allclose(
                profile[name][layer], norms, rtol=1e-5, atol=1e-5
            )
        if layer in (5, 6):
            np.testing.assert_allclose(
                attention[layer - 5], call.attention[1], atol=1e-5
            )

    slow = {"full": rl.stop_slowest(0.75, heads="full.*")}
    found = rl.evaluate(model, short, edits=slow, measures=["loss"])["mean_loss"].values
    losses = [float(model(short, labels=short).loss)]
    model.model.rotary_emb.full_attention_inv_freq[-96:] = 0
    losses.append(float(model(short, labels=short).loss))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert abs(losses[1] - losses[0]) > 1e-4
