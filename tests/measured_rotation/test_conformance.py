"""Historic bugs of conversions and runtimes, rebuilt from public reports, and the verdicts."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from oracles.tiny import COMMON, DROP, FAMILIES, SUPPORTED, of_kind, random_tokens, tiny
from safetensors.torch import save_file
from small_measurements import normal
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.config_facts import attending_layers
from ropelens.errors import BadArgument
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
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 8192}
LONGROPE["short_factor"] = SHORT.tolist()
LONGROPE["long_factor"] = LONG.tolist()
LONGROPE["factor"] = 2.0


def config(name: str, **rope: Any) -> transformers.PreTrainedConfig:
    family = FAMILIES[name]
    keys = (
        COMMON
        | dict(family.config)
        | ({"rope_parameters": BASE | rope} if rope else {})
    )
    kept = {key: value for key, value in keys.items() if value is not DROP}
    return getattr(transformers, family.architecture).config_class(**kept)


def freq(count: int = 8, *, base: float = 1e4, dim: int | None = None) -> Tensor:
    return base ** (-torch.arange(count) / ((dim or 2 * count) / 2))


W = freq()


def turn(x: Tensor, p: Tensor, w: Tensor = W, *, half=True, factor=1.0) -> Tensor:
    """RoPE by hand of x [position, head, coordinate] at p [position (, head)]."""
    n = w.shape[-1]
    angle = p.reshape(len(p), -1, 1) * w
    parts = (
        (slice(n), slice(n, 2 * n))
        if half
        else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    )
    z = (
        torch.complex(x[..., parts[0]], x[..., parts[1]])
        * torch.exp(1j * angle)
        * factor
    )
    turned = x.clone()
    turned[..., parts[0]] = z.real
    turned[..., parts[1]] = z.imag
    return turned


def mixed_pairs(x: Tensor, p: Tensor) -> Tensor:
    angle = (p[:, None] * W).repeat_interleave(2, -1)[:, None]
    return x * angle.cos() + torch.cat([-x[..., 8:], x[..., :8]], -1) * angle.sin()


def crossed(q: Tensor, k: Tensor, p: Tensor) -> dict[str, Tensor]:
    halves = [turn(q, p)[..., :8], turn(k, p)[..., 8:]]
    return {"q": torch.cat(halves, -1), "k": torch.cat(halves, -1)}


def sine_of_one(x: Tensor, p: Tensor) -> Tensor:
    swapped = torch.cat([-x[..., 12:], x[..., 8:12]], -1)
    return torch.cat([turn(x[..., :8], p, freq(4)), x[..., 8:] + swapped], -1)


def by_length(p: Tensor) -> Tensor:
    """Frequencies of dynamic RoPE if the sequence ends at each position."""
    factor = (2 * (p + 1) / 4096 - 1).clamp(min=1)
    return freq() * factor[:, None, None] ** (-torch.arange(8) / 7)


Bug = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]


def both(change: Callable[[Tensor, Tensor], Tensor], layer: int = 0) -> Bug:
    return lambda q, k, p: {f"q.{layer}": change(q, p), f"k.{layer}": change(k, p)}


def turned(
    layer: int = 0, move: Callable[[Tensor], Tensor] = lambda p: p, **how: Any
) -> Bug:
    return both(lambda x, p: turn(x, move(p), **how), layer)


FIRST_HEAD = torch.tensor([True, False])[:, None]
LLAMA = config("llama_gqa")
LLAMA_3 = config("llama_gqa", **LLAMA3)
DYNAMIC = config("llama_gqa", rope_type="dynamic", factor=2.0)
LONG_ROPE = config("llama_gqa", **LONGROPE)
YARN_16 = config("llama_gqa", **YARN)
FACTOR_TWICE = 0.1 * (0.1 * math.log(16) + 1) * math.log(16) + 1
YARN_W = ROPE_INIT_FUNCTIONS["yarn"](YARN_16, "cpu")[0].double()
NOT_ONE = "not by one rotation of all heads"
OTHERS = "the frequencies differ from its configuration"

Row = tuple[str, transformers.PreTrainedConfig, Bug, str]
# Report, configuration, what the runtime does to q and k at p, and the fault ("" if none).
OF_TOKENS: list[Row] = [
    # pairing
    ("vllm-project/vllm#941", config("gptj"), turned(w=freq(4)),
     "half pairing, not interleaved"),
    ("NeuraLegion/shainet#111", LLAMA, turned(half=False), "interleaved pairing, not half"),
    ("raiyanyahya/how-to-train-your-gpt#6", LLAMA, both(mixed_pairs), "not by a rotation"),
    # coordinates that rotate
    ("ml-explore/mlx-lm#1698", config("glm"), turned(half=False),
     "16 coordinates of a head rotate, not 8"),
    ("NVIDIA-NeMo/Megatron-Bridge#4195", config("gemma4"),
     both(lambda x, p: turn(torch.cat([x, x.flip(-1)], -1), p, freq(4, base=1e6, dim=32)), 1),
     "8 coordinates of a head rotate, not 32"),
    ("vllm-project/vllm#41185", config("deepseek_v3"),
     both(lambda x, p: turn(x[..., :8], p, freq(2))), "4 coordinates of a head rotate, not 8"),
    # denominators of partial and proportional RoPE
    ("pie-project/pie#603", config("phi"),
     turned(w=torch.cat([freq(4, dim=16), torch.zeros(4)])),
     "16 coordinates of a head rotate, not 8"),
    ("aws-neuron/neuronx-distributed-inference#106", config("llama_proportional"),
     turned(w=torch.cat([freq(4), torch.zeros(4)])),
     "plane 3 rotates by 0.001 rad/token, the configuration asks for 0.0316228"),
    ("rasbt/LLMs-from-scratch#410", LLAMA, turned(w=1e4 ** -(torch.arange(8) / 8)), ""),
    # base
    ("lyogavin/airllm#368", config("llama_gqa", rope_theta=500_000.0), turned(), OTHERS),
    ("vllm-project/vllm#29111", config("gemma3"), turned(w=freq(base=1e6)),
     f"layer 0, q: {OTHERS}"),
    # scaling
    ("Blaizzy/mlx-vlm#1710", LLAMA_3, turned(), OTHERS),
    ("lablup/mlxcel#1688", LLAMA_3, turned(move=lambda p: p / 16), OTHERS),
    ("ml-explore/mlx-lm#1553", LLAMA, turned(move=lambda p: 2 * p),
     "the frequencies are 2 times as high as in its configuration"),
    # layers without RoPE
    ("airockchip/rknn-llm#501", config("smollm3"), turned(3, w=freq(base=2e6)),
     "layer 3, q: the configuration asks for no rotation"),
    # precision
    ("sgl-project/sglang-jax#1472", LLAMA, turned(w=W.bfloat16().double()),
     "are rounded to half precision"),
    # positions
    ("fla-org/flash-linear-attention#766", LLAMA, turned(1, lambda p: p + (p >= 64)), NOT_ONE),
    ("Blaizzy/mlx-vlm#1983", LLAMA, turned(move=lambda p: p * (p < 64)), NOT_ONE),
    # heads
    ("oxiglade/mlx-rs#357", LLAMA,
     both(lambda x, p: torch.where(FIRST_HEAD, turn(x, p), x)), NOT_ONE),
    ("mlfoundations/open_lm#4", LLAMA,
     turned(move=lambda p: torch.arange(2.0).expand(len(p), 2)), "it does not rotate"),
    # queries and keys
    ("RobertCsordas/moeut#6", LLAMA, lambda q, k, p: {"q": q, "k": turn(k, p)},
     "layer 0, q: it does not rotate"),
    ("vllm-project/vllm-omni#3828", LLAMA, lambda q, k, p: {"q": q, "k": turn(q, 2 * p)},
     "k: the frequencies are 2 times as high"),
    # direction
    ("trymirai/lalamo#268", LLAMA, turned(move=lambda p: -p), "its planes rotate backward"),
    ("karpathy/nanochat#489", config("nanochat"), turned(move=lambda p: -p), ""),
    # length
    ("vllm-project/vllm#3488", DYNAMIC,
     turned(w=by_length(torch.tensor([16383.0]))[0, 0]), OTHERS),
    ("huggingface/transformers#25104", DYNAMIC,
     both(lambda x, p: turn(x, p, by_length(p))), NOT_ONE),
    ("ggml-org/llama.cpp#24823", LONG_ROPE, turned(w=W / LONG), OTHERS),
]  # fmt: skip
OF_TEXT: list[Row] = [
    # precision
    ("EleutherAI/gpt-neox#1016", LLAMA, turned(move=lambda p: p.bfloat16().double()), NOT_ONE),
    ("EleutherAI/gpt-neox#1003", LLAMA,
     both(lambda x, p: turn(x, torch.ones_like(p), (p[:, None, None] * W).half().double())),
     NOT_ONE),
    # attention factor
    ("ggml-org/llama.cpp#24820", LONG_ROPE, turned(w=W / SHORT),
     "its attention factor is 1, not 1.0"),
    ("NVIDIA/TensorRT-LLM#16379", YARN_16, turned(w=YARN_W, factor=FACTOR_TWICE),
     "its attention factor is 1.35413, not 1.27726"),
    # positions and pairs of coordinates
    ("elixir-nx/emlx#121", LLAMA, turned(move=lambda p: p[:, None] + torch.arange(2.0)),
     "heads rotate [0, 1] positions too far"),
    ("hpcaitech/ColossalAI#6429", LLAMA, crossed, "not by a rotation"),
    ("vllm-project/vllm#55204", config("phi"), both(sine_of_one), "not by a rotation"),
    ("huggingface/transformers#22161", config("gpt_neox"),
     turned(w=freq(2), move=lambda p: p + 3), ""),  # padding counts: only differences matter
]  # fmt: skip
LIMITS: list[Row] = [
    ("whole turns", config("llama_gqa", rope_type="linear", factor=0.1), turned(w=10 * W), ""),
    ("still planes", config("llama_gqa", rope_theta=1e9), turned(w=freq(base=1e9)), ""),
    ("small factor", YARN_16, turned(w=YARN_W, factor=1.001 * 1.27726), ""),
    ("large factor", YARN_16, turned(w=YARN_W, factor=1.005 * 1.27726),
     "its attention factor is 1.2836"),
]  # fmt: skip


def dumped(bug: Bug, positions: Tensor, *, text: bool) -> dict[str, Tensor]:
    """Arrays in float32 of a runtime with this bug, for two query and two key heads."""
    rows = len(positions) if text else 1
    q, k = [normal(rows, 2, 16, seed=n).expand(len(positions), -1, -1) for n in (0, 1)]
    after = bug(q, k, positions.double())
    arrays = {name: x.float() for name, x in after.items()} | {"positions": positions}
    if not text:
        return arrays
    before = {name: (q if name[0] == "q" else k).float() for name in after}
    return arrays | {f"{n[0]}_before{n[1:]}": x for n, x in before.items()}


@pytest.mark.parametrize("row", OF_TOKENS + OF_TEXT + LIMITS, ids=lambda row: row[0])
def test_a_bug_or_a_limit_has_its_verdict(row: Row):
    (_, asked, bug, fault) = row
    text = row not in OF_TOKENS
    positions = TEXT + 9 if row in LIMITS else TEXT if text else STEPS
    rope = rl.measure_rope(dumped(bug, positions, text=text), config=asked)
    assert rope.attrs["verdict"] == ("different" if fault else "same")
    assert fault in rope.attrs["why"]


@pytest.mark.parametrize("base", [1e4, 500.0])
def test_a_base_of_zero_asks_for_no_rotation(base: float):
    model = of_kind("granite_swa", layer_rope_theta=[base, 0])
    assert attending_layers(model.config, turning=True) == [0]
    assert rl.measure_rope(model).attrs["verdict"] == "same"
    array = dumped(turned(1, w=freq(base=base)), STEPS, text=False)
    asks_for_none = "layer 1, q: the configuration asks for no rotation, but it rotates"
    assert asks_for_none in rl.measure_rope(array, config=model.config).attrs["why"]


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


@pytest.mark.parametrize("name", SUPPORTED)
def test_no_supported_family_is_accused(name: str):
    model = tiny(name)
    assert rl.measure_rope(model).attrs == {
        "verdict": "same",
        "why": "rotates as configured",
    }
    arrays = of_model(model)
    rope = rl.measure_rope(arrays, config=model.config)
    assert (rope.attrs["verdict"], rope.attrs["why"]) == (
        "same",
        "rotates as configured",
    )
    assert rl.measure_rope(arrays).attrs["verdict"] == "unknown"
    for change in (
        Tensor.bfloat16,
        lambda x: x * (1 + 4e-3 * normal(*x.shape, seed=0)),
    ):
        noisy = {
            key: x if key == "positions" else change(x) for key, x in arrays.items()
        }
        assert rl.measure_rope(noisy, config=model.config).attrs["verdict"] == "same"


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
}
HY_V4["qk_rope_head_dim"] = 8
HY_V4["qk_nope_head_dim"] = 8
HY_V4["index_head_dim"] = 16
HY_V4["index_topk"] = 64
HY_V4["n_routed_experts"] = 4
HY_V4["num_experts_per_tok"] = 2
HY_V4["moe_intermediate_size"] = 48
LATENT = {"q_b_proj": (16, 8, 0), "kv_a_proj_with_mqa": (40, 32, 0)}
# Rows of a head, the first row that rotates, and rows at the end that are not q or k.
PROJECTIONS = {
    "llama_gqa": {"q_proj": (16, 0, 0), "k_proj": (16, 0, 0)},
    "glm": {"q_proj": (16, 0, 8), "k_proj": (16, 0, 8)},
    "phi3": {"qkv_proj": (16, 0, 0)},
    "deepseek_v3": LATENT,
    "hy_v4": LATENT,
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_losses_in_another_order_are_losses_of_permuted_weights(name: str):
    make = lambda: of_kind("hy_v4", **HY_V4) if name == "hy_v4" else tiny(name)  # noqa: E731
    tokens = random_tokens(length=40)[0]
    found = order_losses(as_live_model(make()), tokens)
    for losses, shape in zip(found, (None, (-1, 2), (2, -1)), strict=True):
        model = make().requires_grad_(False)
        for part, module in model.named_modules() if shape else ():
            head, first, rest = PROJECTIONS[name].get(
                part.rpartition(".")[2], (0, 0, 0)
            )
            for x in [module.weight, getattr(module, "bias", None)] if head else []:
                if x is not None:
                    rows = x.data[: 96 if name == "phi3" else None].unflatten(
                        0, (-1, head)
                    )
                    part_of = slice(first, head - rest)
                    order = torch.arange(head)[part_of].view(shape).mT.flatten()
                    rows[:, part_of] = rows[:, order]
        logits = model(tokens[None], use_cache=False).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(
            logits, tokens[1:], reduction="none"
        )
        np.testing.assert_allclose(losses, expected, atol=1e-4)


def test_keys_that_were_permuted_with_the_heads_of_queries():
    """huggingface/transformers#31788: the order of rows is neither of the two others."""
    one = tiny("llama_gqa")
    other = tiny("llama_gqa").requires_grad_(False)
    for layer in other.model.layers:
        x = layer.self_attn.k_proj.weight
        x.data = x.data.view(4, 2, -1, 64).transpose(1, 2).reshape(x.shape)
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
    arrays = {"positions": STEPS, "q": torch.ones(14, 2, 16)} | change
    arrays = {key: x for key, x in arrays.items() if x is not None}
    with pytest.raises(BadArgument) as refused:
        rl.measure_rope(arrays, config=LLAMA)
    assert words in refused.value.parts["seen"]


@pytest.mark.parametrize("kind", [".npz", ".safetensors"])
def test_the_last_line_is_the_verdict(kind: str, ropelens, tmp_path):
    path = tmp_path / f"dumped{kind}"
    asked = tmp_path / "config.json"
    LLAMA.to_json_file(asked)

    def write(bug: Bug) -> None:
        arrays = dumped(bug, STEPS, text=False)
        if kind == ".npz":
            np.savez(path, **arrays)
        else:
            save_file({key: x.contiguous() for key, x in arrays.items()}, path)

    write(both(turn))
    ended = ropelens("rope", path, "--config", asked)
    assert (ended.code, ended.err) == (0, "")
    assert "8 planes, half pairing" in ended.out
    assert ended.out.splitlines()[-1] == "rotates as configured"
    write(both(lambda x, p: turn(x, 2 * p)))
    ended = ropelens("rope", path, "--config", asked)
    assert (ended.code, ended.err) == (1, "")
    assert "times as high" in ended.out.splitlines()[-1]
    ended = ropelens("rope", path, "--config", tmp_path / "missing.json")
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)


def test_a_checkpoint_whose_rows_are_in_the_wrong_order(ropelens, tmp_path):
    """ggml-org/llama.cpp#22611, in a folder of safetensors."""
    model, tokenizer = rl.load("bundled")
    for layer in model.model.layers:
        for x in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
            x.data = x.data.unflatten(0, (-1, 2, 16)).transpose(1, 2).reshape(x.shape)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match="in the wrong order: they were permuted twice"
    ):
        rl.load(tmp_path)
    ended = ropelens("rope", tmp_path)
    assert ended.code == 1
    assert ended.out.splitlines()[-1].startswith(
        "The rows of q and k are in the wrong order"
    )
