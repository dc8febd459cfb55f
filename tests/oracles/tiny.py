"""Tiny random models, one row per family, with the true rotation of each family.

The true rotation is written by hand or read from the buffers `inv_freq`. It is never measured,
because rotation probes are tested against it. Weights have standard deviation 0.3. With the
0.02 of transformers, attention is nearly uniform, and wrong code passes loose tolerances.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from .recording import LayerRotation
from .versions import is_at_least, skip_before, skip_with_older

INITIAL_STD = 0.3
WINDOW = 12  # tokens that a sliding layer sees, shorter than the tested sequences
SLIDING = "sliding_attention"
FULL = "full_attention"

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """One model family: a small configuration, and the true rotation.

    - architecture: class of transformers.
    - config: keyword arguments that extend `COMMON`; the value `DROP` removes an argument.
    - pairing: coordinates that share a plane, among the 2n from `first_rotated` on ("half"
      f, f + n; "interleaved" 2f, 2f + 1); None if the model has no RoPE.
    - direction: 1 if a plane turns by +w_f per token as a complex number, -1 if by -w_f.
    - unrotated: number of coordinates per head that do not rotate, for all layers or for each
      layer (the whole head in `nope_layers`). A plane of `inv_freq` 0 counts as two.
    - head_norms: added to the weights of query and key norms, so that scores spread.
    - supported: whether ropelens must measure it.
    - since: the first version of transformers with which ropelens can measure it.
    """

    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    pairing: Literal["half", "interleaved"] | None = "half"
    direction: Literal[1, -1] = 1
    first_rotated: int = 0
    unrotated: int | tuple[int, ...] = 0
    nope_layers: tuple[int, ...] = ()
    head_norms: float = 1.0
    supported: bool = True
    since: str = "5.5"


DROP = object()

_HEAD = {"head_dim": 16}
_HEAD_NORMS = (
    "q_norm.weight",
    "q_layernorm.weight",
    "k_norm.weight",
    "k_layernorm.weight",
)
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def _scaled(rope_type: str = "default", **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {**_ROPE, "rope_type": rope_type, **parameters}}


def _by_type(rope_type: str = "default", **parameters: Any) -> dict[str, Any]:
    full = {**_ROPE, "rope_type": rope_type, **parameters}
    return {"rope_parameters": {SLIDING: dict(_ROPE), FULL: full}}


def _partial(factor: float) -> dict[str, Any]:
    return _scaled(partial_rotary_factor=factor)


_ORIGINAL = {"factor": 2.0, "original_max_position_embeddings": 4096}
_LLAMA3 = {**_ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGROPE = {
    **_ORIGINAL,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.8, 2.5, 4.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0],
}
_SLIDING = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GEMMA = {"query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA4 = {
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
}
_DEEPSEEK = {
    **_MOE,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_SHOWN = is_at_least("transformers", "5.24")
"""Whether GPT-J and CodeGen use the attention interface of transformers."""
_NO_KV_HEADS = {"num_key_value_heads": DROP}
_THREE_OF_FOUR = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}


def _family(name: str, *parts: Mapping[str, Any], **facts: Any) -> Family:
    """The class `name`ForCausalLM; each of `parts` extends its configuration."""
    config: dict[str, Any] = {}
    for part in parts:
        config.update(part)
    return Family(f"{name}ForCausalLM", config, **facts)


def _interleaved(name: str, *parts: Mapping[str, Any], **facts: Any) -> Family:
    return _family(name, *parts, pairing="interleaved", **facts)


def _without_rope(architecture: str, **facts: Any) -> Family:
    return Family(architecture, pairing=None, supported=False, **facts)


FAMILIES: dict[str, Family] = {
    # Llama: how many key-value heads, and every rope type
    "llama_mha": _family("Llama", _HEAD, {"num_key_value_heads": 4}),
    "llama_gqa": _family("Llama", _HEAD),
    "llama_mqa": _family("Llama", _HEAD, {"num_key_value_heads": 1}),
    "llama_linear": _family("Llama", _HEAD, _scaled("linear", factor=4.0)),
    "llama_dynamic": _family(
        "Llama", _HEAD, _scaled("dynamic", factor=2.0), since="5.15"
    ),
    "llama_yarn": _family("Llama", _HEAD, _scaled("yarn", **_ORIGINAL)),
    "llama_llama3": _family("Llama", _HEAD, _scaled("llama3", **_LLAMA3)),
    "llama_longrope": _family("Llama", _HEAD, _scaled("longrope", **_LONGROPE)),
    "llama_proportional": _family(
        "Llama",
        _HEAD,
        _scaled("proportional", partial_rotary_factor=0.5),
        unrotated=8,
    ),
    # the Llama layout under other names
    "mistral_sliding": _family("Mistral", _HEAD, {"sliding_window": WINDOW}),
    "mixtral": _family("Mixtral", _HEAD, _EXPERTS),
    "qwen2": _family("Qwen2"),
    "qwen3": _family("Qwen3", _HEAD),
    "qwen3_moe": _family("Qwen3Moe", _HEAD, _MOE, {"num_experts": 4}),
    "gemma": _family("Gemma", _HEAD),
    "gemma2": _family(
        "Gemma2", _HEAD, _GEMMA, _SLIDING, {"attn_logit_softcapping": 5.0}
    ),
    "gemma3": _family(
        "Gemma3", _HEAD, _GEMMA, _SLIDING, _by_type(rope_theta=1_000_000.0)
    ),
    "gemma4": _family(
        "Gemma4",
        _HEAD,
        _SLIDING,
        _GEMMA4,
        _by_type("proportional", partial_rotary_factor=0.25, rope_theta=1_000_000.0),
        unrotated=(0, 24),
        head_norms=0.0,  # it divides no score by sqrt(head_dim)
        since="5.7",
    ),
    # learned sinks take less of a row that has more keys, so that even a repeated token has
    # different hidden states at different positions from layer 1 on
    "gpt_oss": _family(
        "GptOss",
        _HEAD,
        _EXPERTS,
        _SLIDING,
        _scaled("yarn", truncate=False, **_ORIGINAL),
    ),
    "granite": _family("Granite", {"attention_multiplier": 0.25}),
    "olmo2": _family("Olmo2"),
    "olmo3": _family("Olmo3", _SLIDING),
    "phi3": _family("Phi3"),
    "phi3_longrope": _family(
        "Phi3",
        {"original_max_position_embeddings": 4096},
        _scaled("longrope", **_LONGROPE),
    ),
    "starcoder2": _family("Starcoder2", {"sliding_window": WINDOW}),
    "seed_oss": _family("SeedOss", _HEAD),
    # clockwise: only this family has the opposite signs in rotate_half
    "nanochat": _family("NanoChat", direction=-1),
    # some layers without rotation
    "smollm3": _family(
        "SmolLM3", _THREE_OF_FOUR, unrotated=(0, 0, 0, 16), nope_layers=(3,)
    ),
    "exaone4": _family("Exaone4", _SLIDING, unrotated=(0, 16), nope_layers=(1,)),
    # neighbouring coordinates share a plane
    "cohere": _interleaved("Cohere"),
    "cohere2": _interleaved("Cohere2", _SLIDING, unrotated=(0, 16), nope_layers=(1,)),
    "ernie4_5": _interleaved("Ernie4_5", _HEAD),
    "helium": _interleaved("Helium", _HEAD),
    "glm": _interleaved("Glm", _HEAD, _partial(0.5), unrotated=8),
    "glm4": _interleaved("Glm4", _HEAD, _partial(0.5), unrotated=8),
    "llama4": _interleaved(
        "Llama4",
        _HEAD,
        _THREE_OF_FOUR,
        _scaled(),
        {"intermediate_size_mlp": 96, "num_local_experts": 2},
        unrotated=(0, 0, 0, 16),
        nope_layers=(3,),
    ),
    # the last part of each head rotates
    "deepseek_v3": _family(
        "DeepseekV3", _scaled(), _DEEPSEEK, first_rotated=8, unrotated=8
    ),
    # the first part of each head rotates
    "gpt_neox": _family("GPTNeoX", _partial(0.25), _NO_KV_HEADS, unrotated=12),
    "nemotron": _family("Nemotron", _HEAD, _partial(0.5), unrotated=8, since="5.15"),
    "persimmon": _family("Persimmon", _partial(0.5), _NO_KV_HEADS, unrotated=8),
    "phi": _family("Phi", _partial(0.5), unrotated=8),
    "stablelm": _family("StableLm", _partial(0.25), unrotated=12),
    # refused families: learned positions, ALiBi, no attention
    "gpt2": _without_rope("GPT2LMHeadModel"),
    "opt": _without_rope("OPTForCausalLM"),
    "bloom": _without_rope("BloomForCausalLM"),
    "bert": _without_rope("BertForMaskedLM"),
    "mamba": _without_rope("MambaForCausalLM", since="5.13"),
    # families without the attention interface of transformers (GPT-J and CodeGen until 5.23)
    "falcon": _family(
        "Falcon",
        _NO_KV_HEADS,
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        supported=False,
    ),
    "gptj": _interleaved("GPTJ", {"rotary_dim": 8}, unrotated=8, supported=_SHOWN),
    "codegen": _interleaved(
        "CodeGen", {"rotary_dim": 8}, unrotated=8, supported=_SHOWN
    ),
}

SUPPORTED = tuple(
    name
    for name, family in FAMILIES.items()
    if family.supported and is_at_least("transformers", family.since)
)
TEN = (
    "llama_gqa",
    "llama_yarn",
    "mistral_sliding",
    "gemma2",
    "gpt_oss",
    "nanochat",
    "smollm3",
    "cohere",
    "deepseek_v3",
    "gpt_neox",
)
"""Families that represent all: each mask, pairing, direction and kind of partial rotation."""
not_as_configured = pytest.mark.filterwarnings("ignore:.*ropelens measures the model")
"""Mark of tests whose model does not rotate as its configuration asks."""


def tiny(name: str, *, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """The family `name` with random float32 weights, in eval mode, with eager attention."""
    family = FAMILIES[name]
    skip_before("transformers", family.since, f"does not show {name} as newer ones do")
    model_class = getattr(transformers, family.architecture)
    arguments = {**COMMON, **family.config, **overrides}
    arguments = {name: x for name, x in arguments.items() if x is not DROP}
    config = model_class.config_class(**arguments)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped one has no float64
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    if name != "mamba":  # other state matrices would not be stable
        spread_weights(model, seed=seed, head_norms=family.head_norms)
    return model.eval()


def of_kind(
    kind: str, *, how: str = "eager", **overrides: Any
) -> transformers.PreTrainedModel:
    arguments = {**COMMON, "initializer_range": INITIAL_STD, **overrides}
    if kind not in transformers.CONFIG_MAPPING:
        skip_with_older("transformers", f"has no {kind}")
    config = transformers.CONFIG_MAPPING[kind](**arguments)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=how
        )
    return model.eval()


_SIGHTED_TEXT = {
    **COMMON,
    **_MOE,
    "head_dim": 16,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "initializer_range": INITIAL_STD,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 3, 3],
    },
}
_EYES = {
    "depth": 1,
    "embed_dim": 32,
    "num_heads": 2,
    "hidden_size": 64,
    "patch_size": 4,
    "out_hidden_size": 64,
    "intermediate_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def sighted(kind: str) -> transformers.PreTrainedModel:
    """A vision model, whose planes rotate with three positions of a token."""
    config = transformers.CONFIG_MAPPING[kind](
        text_config=dict(_SIGHTED_TEXT),
        vision_config=dict(_EYES),
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForImageTextToText.from_config(config).eval()


@pytest.fixture
def llama() -> transformers.LlamaForCausalLM:
    return tiny("llama_gqa")


@torch.no_grad()
def spread_weights(model: nn.Module, *, seed: int, head_norms: float) -> None:
    """Draw matrices with deviation `INITIAL_STD`, and add noise of 0.1 to every vector.

    A norm on the wrong tensor then shows. Learned sinks are near 4, a usual score at this size.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim >= 2:
            weight.copy_(INITIAL_STD * noise)
        elif name.endswith("sinks"):
            weight.copy_(4 + noise)
        elif name.endswith(_HEAD_NORMS):
            weight.add_(head_norms + 0.1 * noise)
        else:
            weight.add_(0.1 * noise)


def rotations(
    model: transformers.PreTrainedModel, *, name: str
) -> tuple[LayerRotation, ...]:
    """True planes of each layer, from the row of the family and the `inv_freq` of the model."""
    family = FAMILIES[name]
    assert family.pairing is not None, f"{name} does not rotate"
    unrotated = family.unrotated
    if isinstance(unrotated, int):
        unrotated = (unrotated,) * model.config.num_hidden_layers
    result = []
    for layer, count in enumerate(unrotated):
        inv_freq = _stated_inv_freq(model, layer=layer)
        if layer in family.nope_layers:
            inv_freq = inv_freq[:0]
        pairs = np.arange(2 * len(inv_freq)).reshape(-1, 2)  # interleaved
        if family.pairing == "half":
            pairs = np.arange(2 * len(inv_freq)).reshape(2, -1).T
        turning = np.flatnonzero(inv_freq)
        pairs = pairs[turning] + family.first_rotated
        rotation = LayerRotation(
            pairs=pairs,
            inv_freq=family.direction * inv_freq[turning],
            head_dim=count + pairs.size,
        )
        result.append(rotation)
    return tuple(result)


def _stated_inv_freq(
    model: transformers.PreTrainedModel, *, layer: int
) -> NDArray[np.float64]:
    """Buffer of the model for this layer, including the zeros of p-RoPE."""
    buffers = {
        name.rpartition(".")[2]: buffer for name, buffer in model.named_buffers()
    }
    if "embed_positions" in buffers:  # GPT-J has sines and cosines of each position
        sine, cosine = buffers["embed_positions"][1].double().chunk(2)
        return torch.atan2(sine, cosine).numpy()
    name = "inv_freq"
    if name not in buffers:
        name = f"{model.config.layer_types[layer]}_inv_freq"
    return buffers[name].double().numpy()


def random_tokens(seed: int = 0, *, sequences=2, length=30, vocabulary=96) -> Tensor:
    """Random tokens [sequences, length] in [3, vocabulary), after a BOS token (1)."""
    random = np.random.default_rng(seed)
    tokens = random.integers(3, vocabulary, size=(sequences, length))
    tokens[:, 0] = COMMON["bos_token_id"]
    return torch.from_numpy(tokens)


def keep(model: nn.Module, kept: Callable[[int], Tensor]) -> Any:
    """`model`, whose rotary modules multiply their frequencies by `kept(count)`."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            factors = kept(len(buffer))
            buffer.mul_(factors)
    return model


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor | None = None, **inputs: Tensor) -> Tensor:
    ids = random_tokens() if ids is None else ids
    return model(input_ids=ids, **inputs, use_cache=False).logits
