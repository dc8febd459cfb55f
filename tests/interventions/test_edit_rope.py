"""Edits of a live model equal models that were built that way, and dense attention."""

import copy
import math
import pickle
import pkgutil
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.recording import attention_calls
from oracles.tiny import (
    SUPPORTED,
    keep,
    logits,
    of_kind,
    random_tokens,
    rotations,
    tiny,
)
from small_measurements import observed_calls
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import ropelens as rl
from ropelens.attention.call import attention_map
from ropelens.errors import BadArgument
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import as_live_model
from ropelens.rope.select import kept_planes
from ropelens.rope.turn import TargetRotation, rotate_to

GROUPED = (
    "llama_gqa",
    "llama_mqa",
    "gemma2",
    "gpt_oss",
    "cohere",
    "glm",
    "nanochat",
    "phi",
)
LENGTH = 30


def test_planes_that_are_not_chosen_keep_every_bit():
    model = tiny("llama_gqa")
    plain, _ = observed_calls(model, random_tokens())[0]
    with rl.edit_rope(model, rl.stop(rl.PlaneNumbers([1, 5]))):
        edited, _ = observed_calls(model, random_tokens())[0]
    changed = (plain.query != edited.query).any(dim=2).flatten(0, 1).any(0)
    assert changed.nonzero().flatten().tolist() == [1, 5, 9, 13]
    assert torch.equal(plain.value, edited.value)


def test_a_function_chooses_planes():
    model = tiny("llama_gqa")
    stop_slow = rl.stop(lambda planes: planes.inv_freq < 0.02)
    with rl.edit_rope(model, stop_slow):
        stopped = rl.measure_rope(model)["inv_freq"] == 0
    expected = rl.measure_rope(model)["inv_freq"] < 0.02
    assert 0 < int(expected.sum()) < expected.size
    assert (stopped == expected).all()


@pytest.mark.thorough
@pytest.mark.parametrize("name", SUPPORTED)
def test_stopped_planes_equal_a_model_with_frequency_zero(name: str):
    model = tiny(name)
    plain = logits(model)
    nothing = [
        rl.stop_slowest(0.0),
        rl.stop(rl.Fastest(0.0)),
        rl.drop(rl.PlaneNumbers(())),
    ]
    with rl.edit_rope(model), rl.edit_rope(model, *nothing):
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), plain)

    def slow(count: int) -> torch.Tensor:
        return torch.arange(count) < kept_planes(0.7, 2 * count)

    def fast(count: int) -> torch.Tensor:
        return slow(count).flip(0)

    for edit, kept in (
        (rl.stop_slowest(0.3), slow),
        (rl.stop(rl.Fastest(0.3)), fast),
        (rl.stop_slowest(1.0), torch.zeros),
    ):
        with rl.edit_rope(model, edit):
            edited = logits(model)
        expected = logits(keep(tiny(name), kept))
        error = (edited - expected).abs().max()
        assert error < 1e-5 * plain.abs().max()


@pytest.mark.parametrize(
    "name", ["nanochat", "glm", "gpt_neox", "deepseek_v3", "cohere"]
)
def test_rescaled_planes_keep_their_direction(name: str):
    model = tiny(name)
    own = next(b for n, b in model.named_buffers() if n.endswith("rotary_emb.inv_freq"))
    halved = keep(tiny(name), lambda count: torch.full((count,), 0.5))
    expected = logits(halved)
    scale = expected.abs().max()
    assert (expected - logits(model)).abs().max() > 1e-3 * scale
    with rl.edit_rope(model, rl.rescale(own / 2)):
        assert (logits(model) - expected).abs().max() < 1e-5 * scale


@pytest.mark.filterwarnings("ignore:.*ropelens measures the model")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_dtype(dtype: torch.dtype):
    model = tiny("llama_gqa").to(dtype)
    kept = keep(tiny("llama_gqa"), lambda n: torch.arange(n) < 4)
    expected = logits(kept.to(dtype))
    with rl.edit_rope(model, rl.stop_slowest(0.5)):
        edited = logits(model)
    assert edited.dtype == dtype
    error = (edited - expected).abs().max() / expected.abs().max()
    assert error < (0.05 if dtype == torch.bfloat16 else 1e-6)


def test_a_rotation_with_a_gain_rounds_once():
    x = torch.randn(1, 2, 9, 16).bfloat16()
    positions = torch.arange(9)[None]
    live = as_live_model(tiny("llama_gqa"))
    planes = RotationProbe(live).layers()[0].planes
    halved = planes.inv_freq.float().expand(2, -1) / 2
    target = TargetRotation(halved, torch.full((2, 8), 1.3))
    exact = rotate_to(x.double(), positions, planes, target)
    turned = rotate_to(x, positions, planes, target)
    assert torch.equal(turned, exact.bfloat16())


def test_gradients_pass_an_edit():
    model = tiny("llama_gqa")
    other = keep(tiny("llama_gqa"), lambda n: torch.arange(n) < 4)
    with rl.edit_rope(model, rl.stop_slowest(0.5)):
        model(random_tokens(), labels=random_tokens()).loss.backward()
    other(random_tokens(), labels=random_tokens()).loss.backward()
    for own, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-3, atol=1e-4)


# one head of the first layer, whose input no edit changes, compared with dense attention


def first_layer_scores(
    name: str,
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Attention [head, row, key] of layer 0.

    `change` rotates complex queries and keys [head, position, plane] of every query head.
    """
    model = tiny(name)
    calls, _ = attention_calls(model, random_tokens(sequences=1)[0])
    call = calls[0]
    rotation = rotations(model, name=name)[0]
    group = len(call.query) // len(call.key)
    query = rotation.unrotate(call.query)
    key = rotation.unrotate(call.key.repeat_interleave(group, dim=0))
    positions = torch.arange(LENGTH).float()
    angle = positions[:, None] * torch.from_numpy(rotation.inv_freq).float()
    turn = torch.exp(1j * angle.double())
    pairs = torch.from_numpy(rotation.pairs)
    turned_query, turned_key = change(
        planes_of(query, pairs), planes_of(key, pairs), turn
    )
    put_planes(query, pairs, turned_query)
    put_planes(key, pairs, turned_key)
    scores = call.scale * query @ key.mT
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores.masked_fill(~call.visible, -math.inf).softmax(-1)


def planes_of(x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """The planes [..., plane] of vectors, as complex numbers."""
    return torch.complex(x[..., pairs[:, 0]], x[..., pairs[:, 1]])


def put_planes(x: torch.Tensor, pairs: torch.Tensor, planes: torch.Tensor) -> None:
    x[..., pairs[:, 0]] = planes.real
    x[..., pairs[:, 1]] = planes.imag


def observed(model: PreTrainedModel) -> torch.Tensor:
    call, _ = observed_calls(model, random_tokens(sequences=1))[0]
    weights = attention_map(call)[0].double()
    return weights / weights.sum(-1, keepdim=True)  # without the weight of a sink


@pytest.mark.parametrize("heads", [[1], [2, 3]])
@pytest.mark.parametrize("name", GROUPED)
def test_one_plane_of_some_heads_stops_or_adds_nothing(name: str, heads: list[int]):
    """One of the heads that share a key-value head; and both, which still share one key."""

    def stopped(query, key, turned):
        rotation = turned.expand(query.shape).clone()
        rotation[heads, :, 1] = 1
        return query * rotation, key * rotation

    def dropped(query, key, turned):
        query[heads, :, 1] = 0
        return query * turned, key * turned

    def tripled(query, key, turned):
        query[heads, :, 1] *= 3
        return query * turned, key * turned

    model = tiny(name)
    plain = observed(model)
    named = ",".join(f"0.{head}" for head in heads)
    others = [other for other in range(4) if other not in heads]
    triple = partial(rl.scale, by=3)
    for change, edit in ((stopped, rl.stop), (dropped, rl.drop), (tripled, triple)):
        edit_of_heads = edit(rl.PlaneNumbers([1]), heads=named)
        with rl.edit_rope(model, edit_of_heads):
            edited = observed(model)
        expected = first_layer_scores(name, change)
        torch.testing.assert_close(edited, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(edited[others], plain[others], rtol=0, atol=1e-6)
        assert (edited[heads] - plain[heads]).abs().max() > 1e-3


def test_factors_multiply(llama):
    plain = logits(llama)
    half = rl.scale(rl.Slowest(0.5), by=0.5)
    planes = rl.PlaneNumbers([4, 5, 6, 7])
    for edits in ([rl.scale(planes, by=1)], [half, rl.scale(planes, by=2)]):
        with rl.edit_rope(llama, *edits):
            assert torch.equal(logits(llama), plain)
    with rl.edit_rope(llama, "yarn:16", half):
        expected = logits(llama)
    for edits in ([half, "yarn:16"], ["yarn:16", rl.scale(planes, by=0.5)]):
        with rl.edit_rope(llama, *edits):
            assert torch.equal(logits(llama), expected)


def coefficients(profile: xr.Dataset) -> np.ndarray:
    """Product of the lengths of queries and keys in layer 0 [head, plane]."""
    group = profile.sizes["head"] // profile.sizes["kv_head"]
    of_keys = profile["k_norm"].values[0].repeat(group, axis=0)
    return profile["q_norm"].values[0] * of_keys


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_neox"])
def test_a_scaled_head_keeps_the_length_of_its_coefficients(name: str):
    """The lengths are of the first layer, whose input no edit changes."""
    model = tiny(name)
    tokens = random_tokens()
    plain = rl.profile(model, tokens, surrogates=0)
    edit = rl.scale(rl.PlaneNumbers([0]), by=0.25, keep_length=plain, heads="0.1,0.2")
    with rl.edit_rope(model, edit):
        edited = rl.profile(model, tokens, surrogates=0)
    before = coefficients(plain)
    after = coefficients(edited)
    length = np.linalg.norm(after, axis=1)
    np.testing.assert_allclose(length, np.linalg.norm(before, axis=1), rtol=1e-5)
    ratio = after / before
    np.testing.assert_allclose(ratio[[0, 3]], 1, rtol=1e-5)
    scaled = ratio[1:3]
    np.testing.assert_allclose(scaled[:, 0] / scaled[:, 1], 0.25, rtol=1e-5)
    assert (scaled[:, 1] > 1.005).all()


def test_lengths_that_do_not_fit_the_model_are_refused():
    model = tiny("llama_gqa")
    plain = rl.profile(model, random_tokens(), budget=False)
    without_norms = plain.drop_vars("q_norm")
    with pytest.raises(BadArgument, match="scale needs the lengths of queries"):
        rl.scale(rl.PlaneNumbers([0]), by=0.25, keep_length=without_norms)
    one_layer = plain.isel(layer=[0])
    of_other = rl.scale(rl.PlaneNumbers([0]), by=0.25, keep_length=one_layer)
    block = rl.edit_rope(model, of_other)
    with pytest.raises(BadArgument, match="The edit was made for another model"), block:
        pass


def test_a_rotation_that_depends_on_the_length():
    model = tiny("llama_dynamic", max_position_embeddings=16)
    inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, "cpu", seq_len=LENGTH)
    other = tiny("llama_gqa")
    other.model.rotary_emb.inv_freq = inv_freq * (torch.arange(8) < 4)
    with rl.edit_rope(model, rl.stop_slowest(0.5)):
        torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=1e-4)
        short = random_tokens(length=10)
        kept = keep(tiny("llama_gqa"), lambda n: torch.arange(n) < 4)
        within = logits(kept, short)
        torch.testing.assert_close(logits(model, short), within, rtol=0, atol=1e-4)


def test_an_indexer_ignores_the_edit_with_a_warning():
    model = of_kind(
        "deepseek_v32",
        first_k_dense_replace=2,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=8,
        index_n_heads=2,
        index_head_dim=16,
        n_group=1,
    )
    block = rl.edit_rope(model, "nope")
    with pytest.warns(UserWarning, match="DeepseekV32ForCausalLM's indexer"), block:
        pass


def state(model: PreTrainedModel) -> dict[str, object]:
    """Everything of a model that a block may change."""
    groups = []
    hooks = []
    for module in model.modules():
        groups.append(vars(module).get("num_key_value_groups"))
        hooks.append(len(module._forward_pre_hooks))
    return {
        "groups": groups,
        "hooks": hooks,
        "attention": model.config._attn_implementation,
        "buffers": {name: tensor.tolist() for name, tensor in model.named_buffers()},
    }


def test_an_error_at_the_attention_restores_the_model(llama, monkeypatch):
    """The error is raised while the module expects a key for every query head."""
    plain = logits(llama)
    before = state(llama)
    groups = []

    def fail(module, *args: object, **kwargs: object) -> None:
        groups.append(module.num_key_value_groups)
        raise ZeroDivisionError

    eager = "transformers.models.llama.modeling_llama.eager_attention_forward"
    stopped = rl.stop(rl.PlaneNumbers([3]), heads="*.1")
    edit = rl.edit_rope(llama, stopped)
    with monkeypatch.context() as patch, edit:
        patch.setattr(eager, fail)
        with pytest.raises(ZeroDivisionError):
            logits(llama)
    assert groups == [1]
    assert state(llama) == before
    assert torch.equal(logits(llama), plain)


def test_edits_nest_and_add_up(llama):
    plain = logits(llama)
    slowest = rl.stop(rl.PlaneNumbers([6, 7]))
    faster = rl.stop(rl.PlaneNumbers([4, 5]))
    with rl.edit_rope(llama, slowest):
        outer = logits(llama)
        with rl.edit_rope(llama, faster):
            both = logits(llama)
        assert torch.equal(logits(llama), outer)
        with pytest.raises(IndexError), rl.edit_rope(llama, faster):
            llama(torch.tensor([[999]]))
        assert torch.equal(logits(llama), outer)
    assert torch.equal(logits(llama), plain)
    with rl.edit_rope(llama, rl.stop_slowest(0.5)):
        assert torch.equal(logits(llama), both)
    separate = [rl.stop(rl.PlaneNumbers([4, 6])), rl.stop(rl.PlaneNumbers([5, 7]))]
    by_heads = rl.stop_slowest(0.5, heads="0.*, 1.0,1.1 ,1.2,*.3")
    for edits in (separate, [by_heads]):
        with rl.edit_rope(llama, *edits):
            assert torch.equal(logits(llama), both)


def test_attention_factors_do_not_add_up(llama):
    """The inner attention factor replaces the outer factor. Dropped planes stay dropped."""
    plain = logits(llama)
    with rl.edit_rope(llama, "yarn:16"):
        once = logits(llama)
        assert not torch.allclose(once, plain, atol=0.01)
        with rl.edit_rope(llama, "rope"):
            torch.testing.assert_close(logits(llama), plain, rtol=0, atol=1e-5)
    with rl.edit_rope(llama, "yarn:16", "yarn:16"):
        assert torch.equal(logits(llama), once)
    every_plane = rl.drop(rl.Slowest(1))
    with rl.edit_rope(llama, every_plane):
        dropped = logits(llama)
        with rl.edit_rope(llama, "yarn:16"):
            torch.testing.assert_close(logits(llama), dropped, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "take", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_made_inside_a_block_is_the_plain_model(llama, take):
    plain = logits(llama)
    with rl.edit_rope(llama, "nope"):
        other = take(llama)
        assert torch.equal(logits(other), plain)
        assert not torch.allclose(logits(llama), plain, atol=0.01)
        with rl.edit_rope(other, "nope"):
            assert torch.equal(logits(other), logits(llama))
    assert torch.equal(logits(other), plain)
    assert type(other.config._attn_implementation) is str


def test_saving_in_a_block_warns_and_writes_the_plain_model(llama, tmp_path):
    before = {name: x.clone() for name, x in llama.state_dict().items()}
    words = r"without the edits of the open block; ropelens\.export\("
    with rl.edit_rope(llama, "p-rope:0.5"):
        with pytest.warns(UserWarning, match=words) as warned:
            llama.save_pretrained(tmp_path / "in")
        assert warned[0].filename == __file__
        with rl.edit_rope(llama, rl.drop(rl.PlaneNumbers([1]))):
            copied = copy.deepcopy(llama)
        with pytest.warns(UserWarning, match=words):
            llama.save_pretrained(tmp_path / "after the inner block")
        rl.export(llama, rl.drop(rl.PlaneNumbers([1])), out=tmp_path / "exported")
    llama.save_pretrained(tmp_path / "out")
    copied.lm_head.weight.data.neg_()
    copied.save_pretrained(tmp_path / "copy")
    for place, sign in (("in", 1), ("out", 1), ("copy", -1)):
        saved = type(llama).from_pretrained(tmp_path / place).state_dict()
        assert torch.equal(saved["lm_head.weight"], sign * before["lm_head.weight"])
    assert "save_pretrained" not in vars(llama)


def test_edits_survive_pickling_for_other_processes(llama):
    profile = rl.profile(llama, random_tokens(), surrogates=0)
    frequencies = torch.linspace(1, 0.1, 8)
    edits = [
        rl.stop_slowest(0.5),
        rl.stop(rl.Fastest(0.25), heads="0.*"),
        rl.drop(rl.PlaneNumbers([1])),
        rl.scale(rl.Slowest(0.5), by=2, keep_length=profile),
        rl.rescale(frequencies, attention_factor=1.5),
    ]
    for edit in edits:
        with rl.edit_rope(llama, edit):
            expected = logits(llama)
        with rl.edit_rope(llama, pickle.loads(pickle.dumps(edit))):
            assert torch.equal(logits(llama), expected)
    for function in (rl.stop_slowest, rl.stop, rl.drop, rl.scale, rl.rescale):
        name = f"{function.__module__}:{function.__qualname__}"
        assert pkgutil.resolve_name(name) is function, "workers import it by this name"


def test_blocks_that_do_not_nest_restore_the_model(llama):
    before = state(llama)
    plain = logits(llama)
    outer = rl.edit_rope(llama, "nope")
    inner = rl.edit_rope(llama, "rope:500")
    outer.__enter__()
    inner.__enter__()
    for block in (outer, inner):
        assert not torch.equal(logits(llama), plain)
        block.__exit__(None, None, None)
    assert state(llama) == before
    assert torch.equal(logits(llama), plain)


Block = Callable[[PreTrainedModel], AbstractContextManager[None]]


def edited(heads: str) -> Block:
    edit = rl.stop(rl.Fastest(0.5), heads=heads)
    return lambda model: rl.edit_rope(model, edit)


def silenced(to: str) -> Block:
    text = random_tokens(length=12) if to == "mean" else None
    return partial(rl.silence_heads, heads="0.1,1.2", to=to, text=text)


@pytest.mark.parametrize(
    ("block", "name", "implementation", "cache", "padding"),
    [
        (edited("*.*"), "llama_gqa", "eager", "dynamic", 7),
        (edited("*.1"), "llama_gqa", "sdpa", "static", 7),
        (edited("*.1"), "mistral_sliding", "eager", "static", 7),
        (edited("*.1"), "gemma3", "sdpa", "dynamic", 7),
        # Without padding, sdpa has no mask that shows the empty part of a cache.
        (edited("*.*"), "llama_gqa", "sdpa", "static", 0),
        (edited("*.*"), "persimmon", "sdpa", "static", 0),
        (silenced("zero"), "llama_gqa", "eager", "static", 7),
        (silenced("mean"), "llama_gqa", "sdpa", "static", 7),
        (silenced("mean"), "gemma3", "eager", "dynamic", 7),
        (silenced("resample"), "gemma3", "sdpa", "dynamic", 0),
    ],
)
def test_generation_with_a_cache(block, name, implementation, cache, padding):
    model = tiny(name)
    model.set_attn_implementation(implementation)
    ids = random_tokens(length=20)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    generate = partial(
        model.generate,
        ids,
        attention_mask=mask,
        min_new_tokens=5,
        max_new_tokens=5,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    plain = generate(use_cache=False)
    with block(model):
        expected = generate(use_cache=False)
        cached = generate(cache_implementation=cache)
    assert torch.equal(cached.sequences, expected.sequences)
    for ours, true in zip(cached.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-3)
    assert (plain.logits[0] - expected.logits[0]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: rl.stop_slowest(1.2), "from 0 to 1, not 1.2"),
        (
            lambda: rl.stop(rl.PlaneNumbers([8])),
            "no plane for Pl.*8.*; seen: planes 0 to 7",
        ),
        (lambda: rl.stop_slowest(1, heads="2.0"), "no head '2.0'; seen: layers 0 to 1"),
        (lambda: rl.stop_slowest(1, heads="1.1,3"), "no head '3'; seen: layers 0 to 1"),
        (lambda: rl.rescale([1.0, 0.5]), "2 frequencies; layer 0 has 8 planes"),
        (
            lambda: rl.scale(rl.Slowest(1), by=np.float32("nan")),
            "by must be a number; seen: float32",
        ),
    ],
)
def test_mistakes_in_an_edit(llama, make, line: str):
    before = state(llama)
    with pytest.raises(BadArgument) as refused, rl.edit_rope(llama, make()):
        pytest.fail("the edit was opened")
    assert re.search(line, refused.value.line), refused.value.line
    assert state(llama) == before
