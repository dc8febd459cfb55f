"""Kinds of layers come from masks and rotations that were measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
import xarray as xr
from oracles.recording import attention_calls
from oracles.tiny import COMMON
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ropelens as rl
from ropelens.analysis.sweep_plan import stated_kinds
from ropelens.errors import BadArgument
from ropelens.interventions.plane_edits import Edit
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
    config = hf.Gemma3TextConfig(**SIZES, sliding_window=WINDOW)
    return hf.Gemma3ForCausalLM(config).eval()


def use_own_rope(layer: torch.nn.Module, args: tuple, kwargs: dict) -> tuple:
    """Give a layer the positions of its own rotary module (a hook before the layer)."""
    embeddings = layer.own_rope(args[0], kwargs["position_ids"])
    return args, kwargs | {"position_embeddings": embeddings}


def three_rotations() -> hf.PreTrainedModel:
    """A Llama whose layers get positions from rotary modules of three bases."""
    torch.manual_seed(0)
    model_config = hf.LlamaConfig(**SIZES, initializer_range=0.3)
    model = hf.LlamaForCausalLM(model_config).eval()
    bases = [1e4, 1e5, 1e6] * 2
    for layer, base in zip(model.model.layers, bases, strict=True):
        config = hf.LlamaConfig(**SIZES, rope_theta=base)
        layer.own_rope = LlamaRotaryEmbedding(config)
        layer.register_forward_pre_hook(use_own_rope, with_kwargs=True)
    return model


@dataclass(frozen=True)
class Configured:
    """A class of configurations, its changed keys, and the kinds of its six layers."""

    config_class: type[hf.PreTrainedConfig]
    kinds: list[str]
    changes: Mapping[str, Any] = field(default_factory=dict)


CONFIGS = {
    "gemma3": Configured(
        hf.Gemma3TextConfig,
        kinds=["sliding"] * 5 + ["full"],
        changes={"sliding_window": WINDOW},
    ),
    "mistral": Configured(
        hf.MistralConfig,
        kinds=["sliding"] * 6,
        changes={"sliding_window": WINDOW},
    ),
    "qwen2": Configured(
        hf.Qwen2Config,
        kinds=["full"] * 2 + ["sliding"] * 4,
        changes={
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
    ),
    "llama4": Configured(
        hf.Llama4TextConfig,
        kinds=["chunked"] * 3 + ["none"] + ["chunked"] * 2,
        changes={
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
        },
    ),
    "smollm3": Configured(
        hf.SmolLM3Config,
        kinds=["full"] * 3 + ["none"] + ["full"] * 2,
    ),
    "qwen3_next": Configured(
        hf.Qwen3NextConfig,
        kinds=["recurrent"] * 3 + ["full"] + ["recurrent"] * 2,
        changes={
            **EXPERTS,
            **STATES,
            "linear_value_head_dim": 16,
            "decoder_sparse_step": 99,
        },
    ),
    "lfm2": Configured(
        hf.Lfm2Config,
        kinds=["recurrent", "full"] * 3,
        changes={"layer_types": ["conv", "full_attention"] * 3},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_kinds_of_layers_follow_masks_and_rotations(name: str):
    configured = CONFIGS[name]
    expected = configured.kinds
    torch.manual_seed(0)
    config = configured.config_class(**(SIZES | configured.changes))
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    rope = rl.measure_rope(model)
    assert rope["layer_type"].values.tolist() == expected
    assert stated_kinds(model.config) == expected

    reach = rope["reach"].values
    in_window = np.isin(rope["layer_type"], ["sliding", "chunked"])
    is_full = rope["layer_type"].values == "full"
    assert (reach[in_window] == WINDOW).all()
    assert (reach[is_full] == model.config.max_position_embeddings).all()


def test_layers_with_other_rotations_are_other_kinds_without_names_in_the_configuration():
    model = three_rotations()
    assert getattr(model.config, "layer_types", None) is None
    with pytest.warns(UserWarning, match="frequencies differ from its configuration"):
        profile = rl.profile(model, TOKENS, budget=False)
    expected = {"full": [0, 3], "full-2": [1, 4], "full-3": [2, 5]}
    assert layers_by_kind(profile) == expected
    np.testing.assert_allclose(profile["base"], [1e4, 1e5, 1e6] * 2, rtol=1e-4)


def test_kinds_do_not_depend_on_the_names_or_the_length_of_the_text():
    shorter_than_the_window = TOKENS[:, :8]
    profile = rl.profile(gemma3(), shorter_than_the_window, surrogates=0)
    expected = {"sliding": [0, 1, 2, 3, 4], "full": [5]}
    assert layers_by_kind(profile) == expected

    table = rl.classify_heads(profile).drop_duplicates("layer_type")
    kinds = table[["layer_type", "reach", "base"]].values.tolist()
    expected_kinds = [["sliding", WINDOW, 1e4], ["full", 8192, 1e6]]
    assert kinds == expected_kinds


def logits_under(model: hf.PreTrainedModel, edit: Edit) -> torch.Tensor:
    with rl.edit_rope(model, edit):
        return model(TOKENS).logits


def test_edits_of_a_kind_of_layers_equal_edits_of_its_layers():
    model = gemma3()
    slowest = rl.Slowest(0.5)
    unedited = model(TOKENS).logits
    of_share = logits_under(model, rl.stop_slowest(0.5, heads="full.*"))
    of_kind = logits_under(model, rl.stop(slowest, heads="full.*"))
    expected = logits_under(model, rl.stop(slowest, heads="5.*"))
    assert torch.equal(of_share, expected)
    assert torch.equal(of_kind, expected)
    assert not torch.equal(unedited, of_share)

    of_no_layer = rl.drop(slowest, heads="chunked.*")
    words = r"(?s)no head 'chunked.\*'.*sliding, full"
    with pytest.raises(BadArgument, match=words), rl.edit_rope(model, of_no_layer):
        pass


def assert_edits_of_a_kind(
    sweep: xr.Dataset, model: hf.PreTrainedModel, kind: str, *, longest: float
) -> None:
    """A sweep of all kinds has the edits and losses of a sweep of this kind."""
    of_kind = sweep.isel(edit=(sweep["layers"] == kind).values)
    slow = of_kind.isel(edit=(of_kind["kind"] == "slow").values)
    np.testing.assert_allclose(slow["wavelength_high"].values, [longest], rtol=1e-5)
    assert (of_kind["planes_stopped"] > 0).all()

    expected = rl.truncate(
        model,
        TOKENS,
        bands=2,
        heads=f"{kind}.*",
        keep=[1, 0.5],
        controls=1,
        measures=["loss"],
    )
    names = [f"{kind} {name}" for name in expected["edit"].values[1:]]
    losses = sweep["loss"].sel(edit=names)
    np.testing.assert_array_equal(losses, expected["loss"][1:])


def test_a_sweep_stops_the_planes_of_one_kind_after_the_other():
    model = gemma3()
    sweep = rl.truncate(
        model, TOKENS, bands=2, keep=[1, 0.5], controls=1, measures=["loss"]
    )
    kinds_in_order = list(dict.fromkeys(sweep["layers"].values))
    assert kinds_in_order == ["all", "sliding", "full"]
    longest_sliding = 2 * np.pi * 1e4 ** (7 / 8)
    longest_full = 2 * np.pi * 1e6 ** (7 / 8)
    assert_edits_of_a_kind(sweep, model, "sliding", longest=longest_sliding)
    assert_edits_of_a_kind(sweep, model, "full", longest=longest_full)

    together = rl.truncate(
        model, TOKENS, heads="*.*", keep=[1, 0.5], controls=1, measures=["loss"]
    )
    assert set(together["layers"].values) == {"all"}
    loss_of_all = together["mean_loss"][1]
    loss_of_full = sweep["mean_loss"].sel(edit="full slow 0.5")
    assert loss_of_all - loss_of_full != 0


def test_bands_of_some_heads_stop_planes_of_their_own_layers():
    sweep = rl.truncate(gemma3(), TOKENS, heads="5.*", keep=(), bands=3, controls=0)
    expected = 2 * np.pi * 1e6 ** (7 / 8)
    assert (sweep["planes_stopped"][1:] > 0).all()
    np.testing.assert_allclose(sweep["wavelength_high"].max(), expected)


def assert_kinds_of_gemma_3_270m(model: torch.nn.Module) -> None:
    rope = rl.measure_rope(model)
    assert rope["layer_type"].values.tolist() == (["sliding"] * 5 + ["full"]) * 3
    assert rope["reach"].values.tolist() == ([512] * 5 + [32768]) * 3
    assert rope["base"].values.tolist() == ([1e4] * 5 + [1e6]) * 3
    assert rope["inv_freq"].isnull().any()  # planes whose norm weights are 0


def mean_norms(vectors: torch.Tensor) -> torch.Tensor:
    """Mean length [head, plane] of vectors [head, position, coordinate]."""
    planes = vectors.unflatten(-1, (2, -1))
    return planes.norm(dim=-2).mean(1)


def assert_norms_and_attention(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Norms of 150 tokens, and attention of all tokens, are equal to the recorded calls."""
    profile = rl.profile(model, tokens[:, :150], budget=False)
    attention = rl.capture(model, tokens[0], heads="5.1,6.1")["attention"]
    calls = attention_calls(model, tokens[0])[0]
    for layer, call in enumerate(calls):
        q_norm = mean_norms(call.query[:, :150])
        k_norm = mean_norms(call.key[:, :150])
        np.testing.assert_allclose(
            profile["q_norm"][layer], q_norm, rtol=1e-5, atol=1e-5
        )
        np.testing.assert_allclose(
            profile["k_norm"][layer], k_norm, rtol=1e-5, atol=1e-5
        )
    np.testing.assert_allclose(attention[0], calls[5].attention[1], atol=1e-5)
    np.testing.assert_allclose(attention[1], calls[6].attention[1], atol=1e-5)


def assert_losses_of_an_edit(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Losses without and with slow planes equal losses of changed buffers."""
    slow = {"full": rl.stop_slowest(0.75, heads="full.*")}
    evaluated = rl.evaluate(model, tokens, edits=slow, measures=["loss"])
    unedited = float(model(tokens, labels=tokens).loss)
    model.model.rotary_emb.full_attention_inv_freq[-96:] = 0
    edited = float(model(tokens, labels=tokens).loss)
    np.testing.assert_allclose(evaluated["mean_loss"], [unedited, edited], rtol=1e-5)
    assert abs(edited - unedited) > 1e-4


@pytest.mark.skipif(not GEMMA3.exists(), reason="Gemma 3 is missing; run make gemma3")
@pytest.mark.thorough
def test_gemma_3_270m_agrees_with_plain_transformers():
    model, _ = rl.load(GEMMA3)
    assert_kinds_of_gemma_3_270m(model)

    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 9000, (1, 600), generator=generator)
    assert_norms_and_attention(model, tokens)
    # The window of 512 matters only to the attention.
    assert_losses_of_an_edit(model, tokens[:, :150])
