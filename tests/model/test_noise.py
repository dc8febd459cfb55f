"""Checks accept sound models with the rounding of any machine, and still refuse faults."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from accelerate import Accelerator
from oracles.tiny import TEN, not_as_configured, random_tokens, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    eager_attention_forward,
    rotate_half,
)

import ropelens as rl
from ropelens.checkpoints.causal import check_causal
from ropelens.errors import UnsupportedModel
from ropelens.model.as_live_model import as_live_model

FAMILIES = (*TEN, "gemma3", "qwen3_moe")
SMOLLM2 = (
    Path(__file__).parents[2] / "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
)
LEVELS = (1e-7, 2e-6, 1e-5, 3e-4)  # the last is TF32

pytestmark = [pytest.mark.filterwarnings("ignore:.*rounding noise"), not_as_configured]
both_kinds = pytest.mark.parametrize(
    "repeatable", [True, False], ids=["repeatable", "random"]
)
aten = torch.ops.aten
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
if hasattr(aten, "_grouped_mm"):  # since torch 2.8
    PRODUCTS.add(aten._grouped_mm.default)


def is_angle(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether a product makes rotary angles, as transformers did before 5.22.

    It adds no products of numbers, and therefore no noise.
    """
    return operation == aten.bmm.default and args[0].shape[2] == 1


class Noisy(TorchDispatchMode):
    """Add noise to every matrix product, as a share `size` of its root mean square.

    `repeatable` noise depends on the numbers, as on a real processor. Else two passes differ.
    """

    def __init__(self, size: float, *, repeatable: bool = False) -> None:
        super().__init__()
        self.size = size
        self.repeatable = repeatable
        self.random = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation in PRODUCTS and not is_angle(operation, args):
            self.add_noise(result[0] if isinstance(result, tuple) else result)
        return result

    def add_noise(self, product: Tensor) -> None:
        x = product.double()
        squares = x.square()
        if self.repeatable:
            content = hash((product.shape, float(x.sum()), float(squares.sum())))
            self.random.manual_seed(content % 2**63)
        noise = torch.randn(x.shape, generator=self.random, dtype=x.dtype)
        product.add_(self.size * squares.mean().sqrt() * noise)


def run_checks(model) -> None:
    ids = random_tokens(vocabulary=model.config.vocab_size, length=24)
    check_causal(model)
    rl.evaluate(model, ids, measures=["loss"])
    verdict = rl.compare_rope(model, model)
    assert verdict.attrs["verdict"] == "same", verdict.attrs["why"]
    rl.attribute_planes(model, ids[:1], answer=5, check=0)


FEW = (
    "llama_gqa",
    "gemma2",
    "gpt_oss",
    "smollm3",
    "cohere",
    "deepseek_v3",
    "bundled",
)
"""Models whose attention or rotation differ most."""


def quick(name: str) -> Any:
    marks = () if name in FEW else pytest.mark.thorough
    return pytest.param(name, 1e-5, False, marks=marks)


QUICK = [quick(name) for name in (*FAMILIES, "bundled")]
NAMES = (*FAMILIES, "bundled", "stories260k", "smollm2")
SLOW = [
    pytest.param(name, level, True, marks=pytest.mark.slow)
    for name in NAMES
    for level in LEVELS
]


def loaded(name: str, request: pytest.FixtureRequest) -> PreTrainedModel:
    if name in FAMILIES:
        return tiny(name)
    source: str | Path = name
    if name == "stories260k":
        source = request.getfixturevalue("shared") / "checkpoints" / name
    elif name == "smollm2":
        if not SMOLLM2.exists():
            pytest.skip("no real checkpoints in models (make smollm2)")
        source = SMOLLM2
    model, _ = rl.load(source)
    return model


@both_kinds
@pytest.mark.parametrize(("name", "level", "profiled"), [*QUICK, *SLOW])
def test_a_sound_model_is_not_refused(name, level, profiled, repeatable, request):
    with Noisy(level, repeatable=repeatable):
        model = loaded(name, request)
        run_checks(model)
        if profiled:
            ids = random_tokens(vocabulary=model.config.vocab_size, length=24)
            rl.profile(model, ids, surrogates=0)


@pytest.mark.parametrize("how", ["bfloat16", "autocast", "high"])
@pytest.mark.parametrize(
    "name",
    [
        "llama_gqa",
        pytest.param("gemma2", marks=pytest.mark.thorough),
        "gpt_oss",
        pytest.param("gpt_neox", marks=pytest.mark.thorough),
        pytest.param("smollm3", marks=pytest.mark.thorough),
        "deepseek_v3",
    ],
)
def test_low_precision_is_measured(name: str, how: str):
    model = tiny(name)
    if how == "bfloat16":
        run_checks(model.bfloat16())
    elif how == "autocast":
        with torch.autocast("cpu"):
            run_checks(model)
    else:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            run_checks(model)
        finally:
            torch.set_float32_matmul_precision(before)


def attend(change: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    def run(module, query, key, value, attention_mask, scaling, **options):
        mask, scaling, factor = change(attention_mask.clone(), scaling)
        output, _ = eager_attention_forward(
            module, query, key, value, mask, scaling=scaling, **options
        )
        return output * factor, None

    return "eager_attention_forward", run


def one_key_ahead(mask: Tensor, scaling: float) -> tuple[Tensor, float, float]:
    rows = torch.arange(0, mask.shape[2] - 1, 7)
    mask[:, :, rows, rows + 1] = 0
    return mask, scaling, 1.0


def turn(change: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    def run(q, k, cos, sin):
        angle = torch.atan2(sin, cos)[:, None]
        query = change(q, angle, query=True)
        key = change(k, angle, query=False)
        return query, key

    return "apply_rotary_pos_emb", run


def half(x: Tensor, angle: Tensor) -> Tensor:
    return x * angle.cos() + rotate_half(x) * angle.sin()


def interleaved(x: Tensor, angle: Tensor, *, query: bool) -> Tensor:
    planes = angle.shape[-1] // 2
    angle = angle[..., :planes].repeat_interleave(2, -1)
    other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * angle.cos() + other * angle.sin()


def growing(x: Tensor, angle: Tensor, *, query: bool) -> Tensor:
    """The angle of the slowest plane at 8,192 tokens is about 3 rad."""
    turned = half(x, angle)
    if not query:
        return turned
    share = (angle[..., -1:].abs() / 3).clamp(max=1)
    return turned * (1 + 0.01 * share)


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a scale that is off by 2 %": attend(
        lambda mask, scaling: (mask, 1.02 * scaling, 1.0)
    ),
    "one key ahead in every seventh row": attend(one_key_ahead),
    "another pairing": turn(interleaved),
    "queries that grow by 1 %": turn(growing),
}


@both_kinds
@pytest.mark.parametrize(
    "fault", [*FAULTS, "frequencies off by 1 %", "rows of a head swapped"]
)
def test_a_fault_is_refused_or_named_under_noise(
    fault: str, repeatable: bool, monkeypatch
):
    model = tiny("llama_gqa")
    sound = tiny("llama_gqa")
    if fault in FAULTS:
        function, faulty = FAULTS[fault]
        monkeypatch.setattr(modeling_llama, function, faulty)
    elif fault == "frequencies off by 1 %":
        used = tiny("llama_gqa").model.rotary_emb
        used.inv_freq *= 1.01
        model.model.rotary_emb.forward = used.forward
    else:
        rows = model.model.layers[1].self_attn.q_proj.weight
        rows.data[:16] = rows[:16].flip(0)
    with Noisy(1e-5, repeatable=repeatable):
        try:
            rope = rl.measure_rope(model)
            rl.evaluate(model, random_tokens(), measures=["loss"])
        except UnsupportedModel:
            return
        if fault == "another pairing":
            assert set(rope["pairing"].values) == {"interleaved"}
        elif fault == "queries that grow by 1 %":
            assert float(rope["query_scale"].max()) > 1.005
        else:
            assert rl.compare_rope(sound, model).attrs["verdict"] == "different"


@torch.no_grad()
def test_a_fault_of_ten_percent_is_refused_in_bfloat16(monkeypatch):
    function, faulty = attend(lambda mask, scaling: (mask, scaling, 1.1))
    monkeypatch.setattr(modeling_llama, function, faulty)
    model = tiny("llama_gqa").bfloat16()
    with pytest.raises(UnsupportedModel, match="attends in a way"):
        rl.evaluate(model, random_tokens(), measures=["loss"])


def test_noise_is_that_of_the_products():
    assert as_live_model(tiny("llama_gqa")).noise.run < 1e-5
    model = tiny("llama_gqa")
    with Noisy(1e-4):
        noise = as_live_model(model).noise
    assert 1e-4 < noise.run < 1e-2
    assert all(1e-4 < share < 2e-3 for share in noise.call.values())
    assert as_live_model(model).noise is noise, "a model is measured once"


def test_noise_is_measured_only_if_a_check_needs_it(monkeypatch):
    tokens = random_tokens(length=24)
    runs: list[int] = []
    sound = tiny("llama_gqa")
    # Such a hook could change positions, so it is also called in passes of ropelens.
    sound.register_forward_pre_hook(lambda *_: runs.append(1), with_kwargs=True)
    calls = as_live_model(sound).record_calls(tokens, lambda call: call.layer)
    assert calls == {0: 0, 1: 1}
    assert len(runs) == 1

    noisy = tiny("llama_gqa")
    runs.clear()
    # Such a hook could change positions, so it is also called in passes of ropelens.
    noisy.register_forward_pre_hook(lambda *_: runs.append(1), with_kwargs=True)
    with Noisy(1e-3):
        calls = as_live_model(noisy).record_calls(tokens, lambda call: call.layer)
    assert calls == {0: 0, 1: 1}
    assert len(runs) == 6, (
        "the pass that was stopped, four that show noise, and another"
    )

    function, faulty = attend(lambda mask, scaling: (mask, scaling, 1.02))
    monkeypatch.setattr(modeling_llama, function, faulty)
    with pytest.raises(UnsupportedModel, match="attends in a way"):
        as_live_model(tiny("llama_gqa")).record_calls(tokens, lambda call: None)


def sees_later_tokens(mask: Tensor, scaling: float) -> tuple[Tensor, float, float]:
    return torch.zeros_like(mask), scaling, 1.0


def sees_a_little_of_later_tokens(
    mask: Tensor, scaling: float
) -> tuple[Tensor, float, float]:
    mask[mask < -1e30] = math.log(1e-3)
    return mask, scaling, 1.0


@both_kinds
@pytest.mark.parametrize("level", [0, 1e-5, 3e-4])
@pytest.mark.parametrize("fault", [sees_later_tokens, sees_a_little_of_later_tokens])
def test_a_model_that_sees_later_tokens_is_refused_under_noise(
    fault: Callable[..., Any], level: float, repeatable: bool, monkeypatch
):
    function, faulty = attend(fault)
    monkeypatch.setattr(modeling_llama, function, faulty)
    with (
        Noisy(level, repeatable=repeatable),
        pytest.raises(UnsupportedModel, match="is not a causal language model"),
    ):
        check_causal(tiny("llama_gqa"))


def test_a_profile_states_its_noise_and_warns_if_it_is_large():
    words = r"rounding noise of \d\.\d%: sound runs"
    with Noisy(1e-3), pytest.warns(UserWarning, match=words):
        profile = rl.profile(tiny("llama_gqa"), random_tokens(), surrogates=0)
    assert 0.01 < profile.attrs["noise_run"] < 0.1
    assert 1e-3 < profile.attrs["noise_call"] < 0.01
    assert 1e-3 < profile.attrs["noise_rotation"] < 0.01


def test_a_profile_states_the_dtype_in_which_autocast_computes():
    model = tiny("llama_gqa")
    tokens = random_tokens()
    plain = rl.profile(model, tokens, budget=False)
    with torch.autocast("cpu", torch.bfloat16):
        block = rl.profile(model, tokens, budget=False)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    inside = rl.profile(prepared, tokens, budget=False)
    assert plain.attrs["dtype"] == "float32"
    assert block.attrs["dtype"] == "float32, computed in bfloat16"
    assert inside.attrs["dtype"] == "float32, computed in bfloat16"
    assert inside.attrs["noise_call"] > 100 * plain.attrs["noise_call"]
    xr.testing.assert_equal(inside.selectivity, block.selectivity)
