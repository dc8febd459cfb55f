"""Historic bugs of conversions and runtimes, rebuilt from public reports, and the verdicts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from oracles.tiny import COMMON, DROP, FAMILIES, SUPPORTED, of_kind, random_tokens, tiny
from safetensors.torch import save_file
from small_measurements import normal
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.config_facts import attending_layers
from ropelens.errors import BadArgument
from ropelens.measured_rotation.model_layers import measure_layers
from ropelens.measured_rotation.row_order import order_losses
from ropelens.model.as_live_model import as_live_model

STEPS = torch.tensor([0, *(2**n for n in range(13))])
TEXT = torch.arange(300)
BASE = {"rope_type": "default", "rope_theta": 10_000.0}
ORIGINAL = {"factor": 16.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    **ORIGINAL,
}
YARN = {"rope_type": "yarn", **ORIGINAL}
SHORT = torch.linspace(1, 2, 8)
LONG = torch.linspace(1, 32, 8)
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 8192,
    "short_factor": SHORT.tolist(),
    "long_factor": LONG.tolist(),
    "factor": 2.0,
}


def config(name: str, **rope: Any) -> transformers.PreTrainedConfig:
    family = FAMILIES[name]
    keys = {**COMMON, **family.config}
    if rope:
        keys["rope_parameters"] = BASE | rope
    stated = {key: value for key, value in keys.items() if value is not DROP}
    model_class = getattr(transformers, family.architecture)
    return model_class.config_class(**stated)


def freq(count: int = 8, *, base: float = 1e4, dim: int | None = None) -> Tensor:
    planes = count if dim is None else dim / 2
    return base ** (-torch.arange(count) / planes)


W = freq()


def turn(
    x: Tensor, p: Tensor, w: Tensor = W, *, half: bool = True, factor: float = 1.0
) -> Tensor:
    """RoPE by hand of x [position, head, coordinate] at p [position (, head)]."""
    n = w.shape[-1]
    if half:
        first = slice(n)
        second = slice(n, 2 * n)
    else:
        first = slice(0, 2 * n, 2)
        second = slice(1, 2 * n, 2)
    angle = p.reshape(len(p), -1, 1) * w
    z = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * angle) * factor
    rotated = x.clone()
    rotated[..., first] = z.real
    rotated[..., second] = z.imag
    return rotated


def mixed_pairs(x: Tensor, p: Tensor) -> Tensor:
    """Interleaved pairs have the angles, and half pairs are mixed."""
    angle_of_plane = p[:, None] * W
    angle = angle_of_plane.repeat_interleave(2, -1)[:, None]
    swapped = torch.cat([-x[..., 8:], x[..., :8]], -1)
    return x * angle.cos() + swapped * angle.sin()


def half_of_each(q: Tensor, k: Tensor, p: Tensor) -> dict[str, Tensor]:
    """Queries and keys are both the first half of a query and the second half of a key."""
    first = turn(q, p)[..., :8]
    second = turn(k, p)[..., 8:]
    crossed = torch.cat([first, second], -1)
    return {"q": crossed, "k": crossed}


def sine_of_one(x: Tensor, p: Tensor) -> Tensor:
    """Half of the coordinates rotate; other coordinates have the cosine 1 and the sine 1."""
    rotated = turn(x[..., :8], p, freq(4))
    swapped = torch.cat([-x[..., 12:], x[..., 8:12]], -1)
    return torch.cat([rotated, x[..., 8:] + swapped], -1)


def only_the_first_head(x: Tensor, p: Tensor) -> Tensor:
    is_first = torch.tensor([True, False])[:, None]
    return torch.where(is_first, turn(x, p), x)


def eight_of_32_coordinates(x: Tensor, p: Tensor) -> Tensor:
    x_of_32 = torch.cat([x, x.flip(-1)], -1)
    w = freq(4, base=1e6, dim=32)
    return turn(x_of_32, p, w)


def four_of_eight_coordinates(x: Tensor, p: Tensor) -> Tensor:
    return turn(x[..., :8], p, freq(2))


def angles_in_half_precision(x: Tensor, p: Tensor) -> Tensor:
    angle = p[:, None, None] * W
    return turn(x, torch.ones_like(p), angle.half().double())


def by_length(p: Tensor) -> Tensor:
    """Frequencies of dynamic RoPE if the sequence ends at each position."""
    factor = (2 * (p + 1) / 4096 - 1).clamp(min=1)
    return freq() * factor[:, None, None] ** (-torch.arange(8) / 7)


def length_so_far(x: Tensor, p: Tensor) -> Tensor:
    return turn(x, p, by_length(p))


def unrotated_queries(q: Tensor, k: Tensor, p: Tensor) -> dict[str, Tensor]:
    return {"q": q, "k": turn(k, p)}


def queries_as_keys(q: Tensor, k: Tensor, p: Tensor) -> dict[str, Tensor]:
    return {"q": q, "k": turn(q, 2 * p)}


def unchanged(p: Tensor) -> Tensor:
    return p


def head_numbers(p: Tensor) -> Tensor:
    """The number of the head is taken for the position."""
    return torch.arange(2.0).expand(len(p), 2)


def shifted_heads(p: Tensor) -> Tensor:
    return p[:, None] + torch.arange(2.0)


Bug = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]


def both(change: Callable[[Tensor, Tensor], Tensor], layer: int = 0) -> Bug:
    """A runtime that changes queries and keys of one layer in the same way."""

    def bug(q: Tensor, k: Tensor, p: Tensor) -> dict[str, Tensor]:
        return {f"q.{layer}": change(q, p), f"k.{layer}": change(k, p)}

    return bug


def turned(
    layer: int = 0,
    *,
    move: Callable[[Tensor], Tensor] = unchanged,
    w: Tensor = W,
    half: bool = True,
    factor: float = 1.0,
) -> Bug:
    """A runtime that rotates queries and keys of one layer at moved positions."""

    def change(x: Tensor, p: Tensor) -> Tensor:
        return turn(x, move(p), w, half=half, factor=factor)

    return both(change, layer)


LLAMA = config("llama_gqa")
LLAMA_3 = config("llama_gqa", **LLAMA3)
DYNAMIC = config("llama_gqa", rope_type="dynamic", factor=2.0)
LONG_ROPE = config("llama_gqa", **LONGROPE)
YARN_16 = config("llama_gqa", **YARN)
FACTOR_ONCE = 0.1 * math.log(16) + 1
FACTOR_TWICE = 0.1 * FACTOR_ONCE * math.log(16) + 1
YARN_W = ROPE_INIT_FUNCTIONS["yarn"](YARN_16, "cpu")[0].double()
AT_16383 = by_length(torch.tensor([16383.0]))[0, 0]
FOUR_OF_PHI = torch.cat([freq(4, dim=16), torch.zeros(4)])
FOUR_OF_EIGHT = torch.cat([freq(4), torch.zeros(4)])
NOT_ONE = "not by one rotation of all heads"
OTHERS = "the frequencies differ from its configuration"


@dataclass(frozen=True, eq=False)
class Report:
    """A report of a fault.

    - name: the public issue.
    - config: configuration of the model.
    - bug: effect of the runtime on queries and keys at some positions.
    - fault: words of the verdict; "" if the runtime rotates as configured.
    """

    name: str
    config: transformers.PreTrainedConfig
    bug: Bug
    fault: str


# Reports of runtimes that rotate one token at far positions.
OF_TOKENS = [
    # pairing
    Report(
        name="vllm-project/vllm#941",
        config=config("gptj"),
        bug=turned(w=freq(4)),
        fault="half pairing, not interleaved",
    ),
    Report(
        name="NeuraLegion/shainet#111",
        config=LLAMA,
        bug=turned(half=False),
        fault="interleaved pairing, not half",
    ),
    Report(
        name="raiyanyahya/how-to-train-your-gpt#6",
        config=LLAMA,
        bug=both(mixed_pairs),
        fault="not by a rotation",
    ),
    # coordinates that rotate
    Report(
        name="ml-explore/mlx-lm#1698",
        config=config("glm"),
        bug=turned(half=False),
        fault="16 coordinates of a head rotate, not 8",
    ),
    Report(
        name="NVIDIA-NeMo/Megatron-Bridge#4195",
        config=config("gemma4"),
        bug=both(eight_of_32_coordinates, layer=1),
        fault="8 coordinates of a head rotate, not 32",
    ),
    Report(
        name="vllm-project/vllm#41185",
        config=config("deepseek_v3"),
        bug=both(four_of_eight_coordinates),
        fault="4 coordinates of a head rotate, not 8",
    ),
    # denominators of partial and proportional RoPE
    Report(
        name="pie-project/pie#603",
        config=config("phi"),
        bug=turned(w=FOUR_OF_PHI),
        fault="16 coordinates of a head rotate, not 8",
    ),
    Report(
        name="aws-neuron/neuronx-distributed-inference#106",
        config=config("llama_proportional"),
        bug=turned(w=FOUR_OF_EIGHT),
        fault="plane 3 rotates by 0.001 rad/token, the configuration asks for 0.0316228",
    ),
    Report(
        name="rasbt/LLMs-from-scratch#410",
        config=LLAMA,
        bug=turned(w=1e4 ** -(torch.arange(8) / 8)),
        fault="",
    ),
    # base
    Report(
        name="lyogavin/airllm#368",
        config=config("llama_gqa", rope_theta=500_000.0),
        bug=turned(),
        fault=OTHERS,
    ),
    Report(
        name="vllm-project/vllm#29111",
        config=config("gemma3"),
        bug=turned(w=freq(base=1e6)),
        fault=f"layer 0, q: {OTHERS}",
    ),
    # scaling
    Report(
        name="Blaizzy/mlx-vlm#1710",
        config=LLAMA_3,
        bug=turned(),
        fault=OTHERS,
    ),
    Report(
        name="lablup/mlxcel#1688",
        config=LLAMA_3,
        bug=turned(move=lambda p: p / 16),
        fault=OTHERS,
    ),
    Report(
        name="ml-explore/mlx-lm#1553",
        config=LLAMA,
        bug=turned(move=lambda p: 2 * p),
        fault="the frequencies are 2 times as high as in its configuration",
    ),
    # layers without RoPE
    Report(
        name="airockchip/rknn-llm#501",
        config=config("smollm3"),
        bug=turned(layer=3, w=freq(base=2e6)),
        fault="layer 3, q: the configuration asks for no rotation",
    ),
    # precision
    Report(
        name="sgl-project/sglang-jax#1472",
        config=LLAMA,
        bug=turned(w=W.bfloat16().double()),
        fault="are rounded to half precision",
    ),
    # positions
    Report(
        name="fla-org/flash-linear-attention#766",
        config=LLAMA,
        bug=turned(layer=1, move=lambda p: p + (p >= 64)),
        fault=NOT_ONE,
    ),
    Report(
        name="Blaizzy/mlx-vlm#1983",
        config=LLAMA,
        bug=turned(move=lambda p: p * (p < 64)),
        fault=NOT_ONE,
    ),
    # heads
    Report(
        name="oxiglade/mlx-rs#357",
        config=LLAMA,
        bug=both(only_the_first_head),
        fault=NOT_ONE,
    ),
    Report(
        name="mlfoundations/open_lm#4",
        config=LLAMA,
        bug=turned(move=head_numbers),
        fault="it does not rotate",
    ),
    # queries and keys
    Report(
        name="RobertCsordas/moeut#6",
        config=LLAMA,
        bug=unrotated_queries,
        fault="layer 0, q: it does not rotate",
    ),
    Report(
        name="vllm-project/vllm-omni#3828",
        config=LLAMA,
        bug=queries_as_keys,
        fault="k: the frequencies are 2 times as high",
    ),
    # direction
    Report(
        name="trymirai/lalamo#268",
        config=LLAMA,
        bug=turned(move=lambda p: -p),
        fault="its planes rotate backward",
    ),
    Report(
        name="karpathy/nanochat#489",
        config=config("nanochat"),
        bug=turned(move=lambda p: -p),
        fault="",
    ),
    # length
    Report(
        name="vllm-project/vllm#3488",
        config=DYNAMIC,
        bug=turned(w=AT_16383),
        fault=OTHERS,
    ),
    Report(
        name="huggingface/transformers#25104",
        config=DYNAMIC,
        bug=both(length_so_far),
        fault=NOT_ONE,
    ),
    Report(
        name="ggml-org/llama.cpp#24823",
        config=LONG_ROPE,
        bug=turned(w=W / LONG),
        fault=OTHERS,
    ),
]

# Reports of runtimes that rotate a text; queries and keys before RoPE are given.
OF_TEXT = [
    # precision
    Report(
        name="EleutherAI/gpt-neox#1016",
        config=LLAMA,
        bug=turned(move=lambda p: p.bfloat16().double()),
        fault=NOT_ONE,
    ),
    Report(
        name="EleutherAI/gpt-neox#1003",
        config=LLAMA,
        bug=both(angles_in_half_precision),
        fault=NOT_ONE,
    ),
    # attention factor
    Report(
        name="ggml-org/llama.cpp#24820",
        config=LONG_ROPE,
        bug=turned(w=W / SHORT),
        fault="its attention factor is 1, not 1.0",
    ),
    Report(
        name="NVIDIA/TensorRT-LLM#16379",
        config=YARN_16,
        bug=turned(w=YARN_W, factor=FACTOR_TWICE),
        fault="its attention factor is 1.35413, not 1.27726",
    ),
    # positions and pairs of coordinates
    Report(
        name="elixir-nx/emlx#121",
        config=LLAMA,
        bug=turned(move=shifted_heads),
        fault="heads rotate [0, 1] positions too far",
    ),
    Report(
        name="hpcaitech/ColossalAI#6429",
        config=LLAMA,
        bug=half_of_each,
        fault="not by a rotation",
    ),
    Report(
        name="vllm-project/vllm#55204",
        config=config("phi"),
        bug=both(sine_of_one),
        fault="not by a rotation",
    ),
    # padding counts: only differences matter
    Report(
        name="huggingface/transformers#22161",
        config=config("gpt_neox"),
        bug=turned(w=freq(2), move=lambda p: p + 3),
        fault="",
    ),
]

# Limits of the measurement, with a text that begins at position 9.
LIMITS = [
    Report(
        name="whole turns",
        config=config("llama_gqa", rope_type="linear", factor=0.1),
        bug=turned(w=10 * W),
        fault="",
    ),
    Report(
        name="still planes",
        config=config("llama_gqa", rope_theta=1e9),
        bug=turned(w=freq(base=1e9)),
        fault="",
    ),
    Report(
        name="small factor",
        config=YARN_16,
        bug=turned(w=YARN_W, factor=1.001 * 1.27726),
        fault="",
    ),
    Report(
        name="large factor",
        config=YARN_16,
        bug=turned(w=YARN_W, factor=1.005 * 1.27726),
        fault="its attention factor is 1.2836",
    ),
]


def positions_of(report: Report) -> Tensor:
    if report in OF_TOKENS:
        return STEPS
    if report in OF_TEXT:
        return TEXT
    return TEXT + 9


def dumped(bug: Bug, positions: Tensor, *, text: bool) -> dict[str, Tensor]:
    """Arrays in float32 of a runtime with this bug, for two query and two key heads.

    A text has another vector at each position, and its arrays contain the vectors before
    RoPE. Without a text, one token is at all positions.
    """
    tokens = len(positions) if text else 1
    q = normal(tokens, 2, 16, seed=0).expand(len(positions), -1, -1)
    k = normal(tokens, 2, 16, seed=1).expand(len(positions), -1, -1)
    after = bug(q, k, positions.double())
    arrays = {name: x.float() for name, x in after.items()}
    arrays["positions"] = positions
    if text:
        for name in after:
            letter = name[0]
            layer = name[1:]
            before = q if letter == "q" else k
            arrays[f"{letter}_before{layer}"] = before.float()
    return arrays


@pytest.mark.parametrize(
    "report", OF_TOKENS + OF_TEXT + LIMITS, ids=lambda report: report.name
)
def test_a_bug_or_a_limit_has_its_verdict(report: Report):
    expected = "different" if report.fault else "same"
    text = report not in OF_TOKENS
    arrays = dumped(report.bug, positions_of(report), text=text)
    rope = rl.measure_rope(arrays, config=report.config)
    assert rope.attrs["verdict"] == expected
    assert report.fault in rope.attrs["why"]


@pytest.mark.parametrize("base", [1e4, 500.0])
def test_a_base_of_zero_asks_for_no_rotation(base: float):
    model = of_kind("granite_swa", layer_rope_theta=[base, 0])
    assert attending_layers(model.config, turning=True) == [0]
    assert rl.measure_rope(model).attrs["verdict"] == "same"
    rotates_in_layer_1 = turned(layer=1, w=freq(base=base))
    arrays = dumped(rotates_in_layer_1, STEPS, text=False)
    rope = rl.measure_rope(arrays, config=model.config)
    expected = "layer 1, q: the configuration asks for no rotation, but it rotates"
    assert expected in rope.attrs["why"]


def of_model(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Queries and keys of one token of a model of transformers, at positions 0, 1, 2, 4, ..."""
    arrays = {"positions": STEPS}
    live = as_live_model(model)

    def record(call: AttentionCall) -> None:
        arrays[f"q.{call.layer}"] = call.query[:, :, 0]
        arrays[f"k.{call.layer}"] = call.key[:, :, 0]

    with live.observe(record), torch.no_grad():
        live.forward(torch.full((len(STEPS), 1), 7), STEPS[:, None])
    return arrays


def add_noise(x: Tensor) -> Tensor:
    return x * (1 + 4e-3 * normal(*x.shape, seed=0))


def changed_vectors(
    arrays: dict[str, Tensor], change: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Changed queries and keys, at unchanged positions."""
    changed = {key: change(x) for key, x in arrays.items() if key != "positions"}
    changed["positions"] = arrays["positions"]
    return changed


@pytest.mark.parametrize("name", SUPPORTED)
def test_no_supported_family_is_accused(name: str):
    expected = {"verdict": "same", "why": "rotates as configured"}
    model = tiny(name)
    of_weights = rl.measure_rope(model)
    assert of_weights.attrs == expected

    arrays = of_model(model)
    of_arrays = rl.measure_rope(arrays, config=model.config)
    assert of_arrays.attrs["verdict"] == expected["verdict"]
    assert of_arrays.attrs["why"] == expected["why"]
    without_configuration = rl.measure_rope(arrays)
    assert without_configuration.attrs["verdict"] == "unknown"

    for change in (Tensor.bfloat16, add_noise):
        inexact = changed_vectors(arrays, change)
        of_inexact = rl.measure_rope(inexact, config=model.config)
        assert of_inexact.attrs["verdict"] == expected["verdict"]


@pytest.mark.filterwarnings("ignore:.*ropelens measures the model")
@pytest.mark.parametrize("name", ["llama_gqa", "nanochat"])
def test_a_negated_buffer_has_negative_frequencies(name: str):
    model = tiny(name)
    model.model.rotary_emb.inv_freq.neg_()
    rope = rl.measure_rope(model)
    assert (rope["inv_freq"] < 0).all()
    np.testing.assert_allclose(rope["inv_freq"], rope["inv_freq_stated"], rtol=1e-6)
    assert "its planes rotate backward" in rope.attrs["why"]


HY_V4 = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "v_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "index_head_dim": 16,
    "index_topk": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


@dataclass(frozen=True)
class HeadRows:
    """Rows of the weights of a projection that make queries and keys.

    - size: number of rows of one head.
    - rotating: rows of a head that RoPE rotates.
    - end: number of rows of all queries and keys; None if the weights have no other rows.
    """

    size: int
    rotating: slice
    end: int | None = None


WHOLE = HeadRows(16, rotating=slice(0, 16))
FIRST_HALF = HeadRows(16, rotating=slice(0, 8))
SECOND_HALF = HeadRows(16, rotating=slice(8, 16))
LATENT = {
    "q_b_proj": SECOND_HALF,
    "kv_a_proj_with_mqa": HeadRows(40, rotating=slice(32, 40)),
}
PROJECTIONS = {
    "llama_gqa": {"q_proj": WHOLE, "k_proj": WHOLE},
    "glm": {"q_proj": FIRST_HALF, "k_proj": FIRST_HALF},
    "phi3": {"qkv_proj": HeadRows(16, rotating=slice(0, 16), end=96)},
    "deepseek_v3": LATENT,
    "hy_v4": LATENT,
}


def model_with_projections(name: str) -> nn.Module:
    if name == "hy_v4":
        return of_kind("hy_v4", **HY_V4)
    return tiny(name)


def permute_rows(weights: Tensor, rows: HeadRows, shape: tuple[int, int]) -> None:
    """Transpose the rotating rows of each head, which have this shape before."""
    heads = weights.data[: rows.end].unflatten(0, (-1, rows.size))
    rotating = torch.arange(rows.size)[rows.rotating]
    order = rotating.view(shape).mT.flatten()
    heads[:, rows.rotating] = heads[:, order]


def permute_projections(
    model: nn.Module, projections: dict[str, HeadRows], shape: tuple[int, int]
) -> None:
    """Permute rows of the weights and biases of these projections."""
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name in projections:
            for weights in module.parameters():
                permute_rows(weights, projections[name], shape)


def losses_of_next_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[None], use_cache=False).logits[0, :-1]
    return nn.functional.cross_entropy(logits, tokens[1:], reduction="none")


@pytest.mark.parametrize("name", PROJECTIONS)
def test_losses_in_another_order_are_losses_of_permuted_weights(name: str):
    live = as_live_model(model_with_projections(name))
    tokens = random_tokens(length=40)[0]
    losses = order_losses(live, tokens, measure_layers(live))
    in_pairs, in_halves = losses.others

    model = model_with_projections(name).requires_grad_(False)
    expected = losses_of_next_tokens(model, tokens)
    np.testing.assert_allclose(losses.present, expected, atol=1e-4)

    for shape, in_other_order in (((-1, 2), in_pairs), ((2, -1), in_halves)):
        permuted = model_with_projections(name).requires_grad_(False)
        permute_projections(permuted, PROJECTIONS[name], shape)
        expected_losses = losses_of_next_tokens(permuted, tokens)
        np.testing.assert_allclose(in_other_order, expected_losses, atol=1e-4)


def test_keys_that_were_permuted_with_the_heads_of_queries():
    """huggingface/transformers#31788: the order of rows is neither of the two others."""
    one = tiny("llama_gqa")
    other = tiny("llama_gqa").requires_grad_(False)
    for layer in other.model.layers:
        weight = layer.self_attn.k_proj.weight
        pairs = weight.data.view(4, 2, -1, 64)
        weight.data = pairs.transpose(1, 2).reshape(weight.shape)
    assert rl.compare_rope(one, other).attrs["verdict"] == "different"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"q": None},
            "neither q nor k: positions [14] of torch.int64, positions [0, 1, 2], ...",
        ),
        (
            {"q": torch.ones(3, 2, 16)},
            "q of layer 0 has 3 positions: positions [14] of torch.int64, q [3, 2, 16] of ",
        ),
        (
            {"query": torch.ones(14, 2, 16)},
            "query is not an array of floats that is called q or k: positions [14] of ",
        ),
        ({"query": torch.ones(14, 2, 16)}, "query [14, 2, 16] of torch.float32"),
        ({"q_before": torch.ones(14, 2, 8)}, "q_before [14, 2, 8] of torch.float32"),
        ({"q": torch.full((14, 2, 16), math.nan)}, "q [14, 2, 16] of torch.float32"),
        ({"q.1": torch.ones(14, 2, 16).long()}, "q.1 is not an array of floats"),
        ({"q": torch.ones(14, 32)}, "q of layer 0 does not have three axes"),
        (
            {"q_before": torch.ones(14, 2, 8)},
            "q_before of layer 0 and q of this layer have different shapes",
        ),
        (
            {"q_before.1": torch.ones(14, 2, 16)},
            "q of this layer have different shapes",
        ),
        ({"q": torch.full((14, 2, 16), math.nan)}, "numbers that are NaN or infinite"),
        ({"positions": 2 * STEPS}, "two positions are not consecutive numbers"),
        ({"positions": 2 * STEPS}, "positions [0, 2, 4], ..."),
        ({"positions": STEPS.clamp(max=64)}, "a position occurs twice"),
        ({"q.7": torch.ones(14, 2, 16)}, "layer 7; the configuration has 2 layers"),
        (
            {"k": torch.ones(14, 2, 16), "q_before": torch.ones(14, 2, 16)},
            "only one of q and k is given before RoPE",
        ),
        (
            {"q": torch.ones(4, 14, 16), "positions": STEPS[:4]},
            "4 positions of 14 heads",
        ),
    ],
)
def test_arrays_that_cannot_be_read(change: dict, words: str):
    arrays = {"positions": STEPS, "q": torch.ones(14, 2, 16)}
    arrays.update(change)
    given = {key: x for key, x in arrays.items() if x is not None}
    with pytest.raises(BadArgument) as refused:
        rl.measure_rope(given, config=LLAMA)
    assert words in refused.value.parts["seen"]


def write_arrays(bug: Bug, path: Path) -> None:
    arrays = dumped(bug, STEPS, text=False)
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        contiguous = {key: x.contiguous() for key, x in arrays.items()}
        save_file(contiguous, path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_the_last_line_is_the_verdict(suffix: str, ropelens, tmp_path):
    path = tmp_path / f"dumped{suffix}"
    configuration = tmp_path / "config.json"
    LLAMA.to_json_file(configuration)

    write_arrays(both(turn), path)
    same = ropelens("rope", path, "--config", configuration)
    assert same.code == 0
    assert same.err == ""
    assert "8 planes, half pairing" in same.out
    assert same.out.splitlines()[-1] == "rotates as configured"

    write_arrays(both(lambda x, p: turn(x, 2 * p)), path)
    different = ropelens("rope", path, "--config", configuration)
    assert different.code == 1
    assert different.err == ""
    assert "times as high" in different.out.splitlines()[-1]

    failed = ropelens("rope", path, "--config", tmp_path / "missing.json")
    assert failed.code == 1
    assert failed.out == ""
    assert failed.err.count("\n") == 1


def test_a_checkpoint_whose_rows_are_in_the_wrong_order(ropelens, tmp_path):
    """ggml-org/llama.cpp#22611, in a folder of safetensors."""
    model, tokenizer = rl.load("bundled")
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            weight = projection.weight
            pairs = weight.data.unflatten(0, (-1, 2, 16))
            weight.data = pairs.transpose(1, 2).reshape(weight.shape)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    warning = "in the wrong order: they were permuted twice"
    with pytest.warns(UserWarning, match=warning):
        rl.load(tmp_path)
    ended = ropelens("rope", tmp_path)
    expected = "The rows of q and k are in the wrong order"
    assert ended.code == 1
    assert ended.out.splitlines()[-1].startswith(expected)
