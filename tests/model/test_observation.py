"""Blocks show every attention call with its planes, and belong to the thread that opens it."""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from oracles.recording import LayerRotation, attention_calls
from oracles.tiny import TEN, logits, random_tokens, rotations, sighted, tiny
from oracles.versions import skip_before
from small_measurements import observed_calls
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)
from transformers.generation import configuration_utils as settings
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    eager_attention_forward,
)

import ropelens as rl
from ropelens.attention.call import AttentionCall, attention_map
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.model.as_live_model import as_live_model
from ropelens.rope.planes import Planes

LENGTH = 30
Seen = dict[int, tuple[AttentionCall, Planes]]


def noting(seen: Seen) -> Callable[[AttentionCall, Planes], None]:
    """An observer that keeps the last call of each layer."""

    def note(call: AttentionCall, planes: Planes) -> None:
        seen[call.layer] = (call, planes)

    return note


def ignore_call(call: AttentionCall, planes: Planes) -> None:
    """An observer that keeps nothing."""


@pytest.mark.parametrize("name", TEN)
def test_planes_match_the_rotation_of_the_call(name: str):
    model = tiny(name)
    plain = logits(model)
    recorded, _ = attention_calls(model, random_tokens()[0])
    seen: Seen = {}
    with rl.observe(model, noting(seen)):
        assert torch.equal(logits(model), plain)
    assert sorted(seen) == list(range(len(recorded)))
    for layer, rotation in enumerate(rotations(model, name=name)):
        call, planes = seen[layer]
        turning = planes.inv_freq != 0
        inv_freq = planes.inv_freq[turning]
        np.testing.assert_allclose(inv_freq, rotation.inv_freq, rtol=1e-6)
        ours = turned_back(call.query[0], planes)[..., turning]
        expected = unrotated(recorded[layer].query, rotation).to(ours.dtype)
        atol = 1e-4 * float(call.query.abs().max())
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=atol)


def turned_back(query: torch.Tensor, planes: Planes) -> torch.Tensor:
    """Queries before RoPE [head, position, plane], from the observed planes."""
    rotated = torch.complex(query[..., planes.first], query[..., planes.second])
    angle = torch.arange(LENGTH)[:, None] * planes.inv_freq
    return rotated * torch.exp(-1j * angle)


def unrotated(query: torch.Tensor, rotation: LayerRotation) -> torch.Tensor:
    """Queries before RoPE [head, position, plane], from the true rotation."""
    still = rotation.unrotate(query)
    first, second = torch.from_numpy(rotation.pairs).unbind(-1)
    return torch.complex(still[..., first], still[..., second])


@torch.no_grad()
def test_a_step_on_a_cache_is_checked_after_a_plain_pass(llama, monkeypatch):
    def other(module, query, key, value, attention_mask, **kwargs):
        output, weights = eager_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        on_cache = key.shape[2] > query.shape[2]
        return output * (1.1 if on_cache else 1.0), weights

    monkeypatch.setattr(f"{LlamaAttention.__module__}.eager_attention_forward", other)
    llama.set_attn_implementation("eager")
    ids = random_tokens()[:, :2]
    cache = DynamicCache()
    with rl.observe(llama, ignore_call):
        llama(ids[:, :1], past_key_values=cache)
        with pytest.raises(UnsupportedModel, match="attends in a way"):
            llama(ids[:, 1:], past_key_values=cache)


@pytest.mark.parametrize("inside", [False, True], ids=["edit outside", "edit inside"])
def test_the_edited_model_is_observed(inside: bool):
    model = tiny("llama_gqa")
    seen: Seen = {}
    edit = rl.edit_rope(model, rl.stop_slowest(0.5))
    observer = rl.observe(model, noting(seen))
    outer, inner = (observer, edit) if inside else (edit, observer)
    with outer, inner:
        logits(model)
    edited_call, edited_planes = seen[0]
    with rl.observe(model, noting(seen)):
        logits(model)
    call, planes = seen[0]
    assert edited_planes.inv_freq.tolist()[4:] == [0.0] * 4
    assert (edited_planes.inv_freq[:4] > 0).all()
    assert (planes.inv_freq > 0).all()
    assert (edited_call.query - call.query).abs().max() > 0.1


def test_one_edited_head_is_observed():
    """The edited layer has planes and keys of each head. The other layer has shared planes."""
    model = tiny("llama_gqa")
    seen: Seen = {}
    edit = rl.edit_rope(model, rl.stop(rl.PlaneNumbers([1, 5]), heads="0.2"))
    with edit, rl.observe(model, noting(seen)):
        logits(model)
    call, planes = seen[0]
    assert (planes.inv_freq == 0).nonzero().tolist() == [[2, 1], [2, 5]]
    assert call.key.shape[1] == call.query.shape[1] == 4
    other_call, other_planes = seen[1]
    assert other_planes.inv_freq.ndim == 1
    assert other_call.key.shape[1] == 2


def test_a_rotation_that_depends_on_the_length():
    model = tiny("llama_dynamic", max_position_embeddings=16)
    rotary = model.model.rotary_emb
    seen: Seen = {}
    with rl.observe(model, noting(seen)):
        for length in (10, 40, 12):
            logits(model, random_tokens(length=length))
            _, planes = seen[1]
            assert torch.equal(planes.inv_freq, rotary.inv_freq), length
    with rl.observe(model, noting(seen)):
        logits(model, random_tokens(length=40))
        _, planes = seen[1]
        assert (planes.inv_freq < rotary.original_inv_freq).any()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_padding_is_hidden(name: str, side: str, implementation: str):
    model = tiny(name)
    model.set_attn_implementation(implementation)
    real = [slice(None), slice(15, LENGTH) if side == "left" else slice(15)]
    mask = torch.zeros_like(random_tokens())
    for sequence, at in enumerate(real):
        mask[sequence, at] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    plain = logits(model, attention_mask=mask, position_ids=positions)
    seen: Seen = {}
    with rl.observe(model, noting(seen)):
        padded = logits(model, attention_mask=mask, position_ids=positions)
    assert torch.equal(padded, plain)
    for sequence, at in enumerate(real):
        without_padding = random_tokens()[sequence : sequence + 1, at]
        for alone, _ in observed_calls(model, without_padding):
            call, _ = seen[alone.layer]
            weights = attention_map(call)[sequence, :, at, at]
            expected = attention_map(alone)[0]
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("padded", "edited"), [(0, False), (7, True)])
@pytest.mark.parametrize(
    ("implementation", "cache"),
    [("eager", "dynamic"), ("sdpa", "dynamic"), ("sdpa", "static")],
)
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3"])
def test_generation(
    name: str, implementation: str, cache: str, padded: int, edited: bool
):
    model = tiny(name)
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(random_tokens())
    mask[0, :padded] = 0
    edits = (rl.stop(rl.PlaneNumbers([1]), heads="*.1"),) if edited else ()
    without_cache: list[ObservedMap] = []
    on_cache: list[ObservedMap] = []
    with rl.edit_rope(model, *edits):
        expected = generate(model, mask, cache=cache)
        with rl.observe(model, noting_maps(without_cache)):
            generate(model, mask, cache=None)
        with rl.observe(model, noting_maps(on_cache)):
            observed = generate(model, mask, cache=cache)
    assert torch.equal(observed, expected)
    assert [call.weights.shape[2] for call in on_cache] == [LENGTH] * 2 + [1] * 6
    for cached, whole in zip(on_cache, without_cache, strict=True):
        assert_same_rows(cached, whole, padded=padded)


@dataclass(frozen=True)
class ObservedMap:
    """Attention of a call [batch, head, row, key], and the keys before its first row."""

    weights: torch.Tensor
    past: int


def noting_maps(maps: list[ObservedMap]) -> Callable[[AttentionCall, Planes], None]:
    def note(call: AttentionCall, planes: Planes) -> None:
        maps.append(ObservedMap(attention_map(call), call.past))

    return note


def generate(
    model: PreTrainedModel, mask: torch.Tensor, *, cache: str | None
) -> torch.Tensor:
    return model.generate(
        random_tokens(),
        attention_mask=mask,
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        use_cache=cache is not None,
        cache_implementation=cache,
    )


def assert_same_rows(cached: ObservedMap, whole: ObservedMap, *, padded: int) -> None:
    """The rows of a call on a cache equal the last rows of a call without a cache."""
    rows, keys = cached.weights.shape[2:]
    assert cached.past == keys - rows
    first = padded if rows > 1 else 0
    weights = cached.weights[:, :, first:]
    expected = whole.weights[:, :, -rows:][:, :, first:]
    torch.testing.assert_close(weights, expected[..., -keys:], rtol=1e-4, atol=1e-5)
    left = expected[..., :-keys]
    assert float(left.sum()) == 0, "keys that left the cache are not visible"


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_a_part_that_is_padded_on_the_right_continues_the_cache(kind):
    """The length of the cache gives the positions of the new rows, also of padding."""
    model = tiny("llama_gqa")
    if kind is StaticCache:
        cache = StaticCache(config=model.config, max_cache_len=40)
    else:
        cache = DynamicCache()
    ids = random_tokens()
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[:, 24:] = 0
    seen: Seen = {}
    with rl.observe(model, noting(seen)):
        model(ids[:, :18], attention_mask=mask[:, :18], past_key_values=cache)
        model(ids[:, 18:], attention_mask=mask, past_key_values=cache)
    assert [call.past for call, _ in seen.values()] == [18, 18]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_cache_of_keys_with_another_rotation_is_refused(kind: str):
    """Both change past 16 tokens; longrope changes its buffer in place."""
    rope = tiny(f"llama_{kind}").config.rope_parameters
    rope = {**rope, "original_max_position_embeddings": 16}
    model = tiny("llama_gqa", max_position_embeddings=16, rope_parameters=rope)
    words = "rotation of the keys in this cache"
    observer = rl.observe(model, ignore_call)
    with observer, pytest.raises(UnsupportedModel, match=words) as refused:
        model.generate(random_tokens(length=14), max_new_tokens=8, do_sample=False)
    assert refused.value.parts["try"] == "call the model with use_cache=False"


@pytest.mark.parametrize(
    ("name", "hidden"), [("llama_gqa", [0]), ("mistral_sliding", range(1, 20))]
)
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_that_sees_no_key(name: str, hidden: list[int], row: int):
    """In float64, eager attention of transformers returns NaN for it, and sdpa does not."""
    marks = torch.zeros(2, 40, dtype=torch.bool)
    marks[row, list(hidden)] = True
    text = rl.Text(random_tokens(sequences=2, length=40), hidden=marks)
    model = tiny(name).double()
    words = r"computes NaN|squares are not finite"
    with pytest.raises(UnsupportedModel, match=words) as refused:
        rl.profile(model, text, surrogates=0)
    assert 'attn_implementation="sdpa"' in refused.value.parts["try"]
    model.set_attn_implementation("sdpa")
    ours = rl.profile(model, text, surrogates=0)
    expected = rl.profile(model.float(), text, surrogates=0)
    np.testing.assert_allclose(
        ours["entropy_bits"], expected["entropy_bits"], rtol=1e-4
    )


TOKENS = random_tokens(sequences=2, length=24, vocabulary=80)
SLOW_HALF = rl.stop_slowest(0.5)
REFUSED = pytest.raises(BadArgument, match="Another thread or asyncio task")


def elsewhere(call: Callable[..., Any], *arguments: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *arguments).result()


def test_a_block_belongs_to_the_thread_that_opened_it(llama):
    plain = logits(llama, TOKENS)
    other = copy.deepcopy(llama)
    with rl.edit_rope(llama, "nope"):
        edited = logits(llama, TOKENS)
        with REFUSED:
            elsewhere(logits, llama, TOKENS)
        with REFUSED:
            elsewhere(llama.model, TOKENS)
        with REFUSED:
            elsewhere(rl.measure_rope, llama)
        of_other = elsewhere(logits, other, TOKENS)
        in_context = elsewhere(copy_context().run, logits, llama, TOKENS)
    assert torch.equal(of_other, plain)
    assert torch.equal(in_context, edited)
    afterwards = elsewhere(logits, llama, TOKENS)
    assert torch.equal(afterwards, plain)


@pytest.mark.parametrize("training", [False, True])
def test_another_thread_never_changes_a_measurement(llama, training: bool):
    llama.train(training)
    expected = rl.evaluate(llama, TOKENS, edits={}, measures=["loss"])
    refused: list[object] = []

    def call_in_another_thread() -> None:
        llama(TOKENS.flip(1), use_cache=False)

    def serve(*_: Any) -> None:
        with REFUSED as error:
            elsewhere(call_in_another_thread)
        refused.append(error)

    with as_live_model(llama).observe(serve):
        llama(TOKENS)
    hook = llama.get_output_embeddings().register_forward_pre_hook(serve)
    served = rl.evaluate(llama, TOKENS, edits={}, measures=["loss"])
    hook.remove()
    assert expected.equals(served)
    assert len(refused) > 2


def test_tasks_do_not_share_blocks(llama):
    results: dict[str, torch.Tensor] = {}

    async def run_plain() -> None:
        results["plain"] = logits(llama, TOKENS)

    async def run_edited(edit: str) -> None:
        with rl.edit_rope(llama, edit):
            results[edit] = await asyncio.to_thread(logits, llama, TOKENS)

    async def together() -> list[object]:
        return await asyncio.gather(
            run_edited("nope"),
            run_plain(),
            run_edited("rope:9"),
            return_exceptions=True,
        )

    done, *errors = asyncio.run(together())
    assert done is None
    assert [type(error) for error in errors] == [BadArgument] * 2
    with rl.edit_rope(llama, "nope"):
        expected = logits(llama, TOKENS)
    assert torch.equal(results["nope"], expected)


def mean_square(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits.square().mean()


def loss_to_recompute(model: PreTrainedModel, how: bool | None) -> torch.Tensor:
    """A loss whose activations are computed again in the backward pass."""
    if how is None:
        return checkpoint(mean_square, model, TOKENS, use_reentrant=False)
    model.gradient_checkpointing_enable({"use_reentrant": how})
    return mean_square(model, TOKENS)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("backward", ["inside", "after", "thread", "of a plain pass"])
@pytest.mark.parametrize(
    ("name", "how"), [("llama4", True), ("qwen2_vl", False), ("phi", None)]
)
def test_recomputation_belongs_to_the_block_of_its_forward_pass(name, how, backward):
    """Reentrant or not, layer by layer; None: a function that runs the whole model."""
    model = sighted(name) if name == "qwen2_vl" else tiny(name)
    model.train()
    without_repeats = copy.deepcopy(model)
    seen: list[AttentionCall] = []
    observer = rl.observe(model, lambda call, _: seen.append(call))
    edit = rl.edit_rope(model, SLOW_HALF)
    if backward == "of a plain pass":
        mean_square(without_repeats, TOKENS).backward()
        with observer:
            loss = loss_to_recompute(model, how)
        seen.clear()
        with edit:
            loss.backward()
    else:
        with rl.edit_rope(without_repeats, SLOW_HALF):
            mean_square(without_repeats, TOKENS).backward()
        with edit, observer:
            loss = loss_to_recompute(model, how)
            if backward == "inside":
                loss.backward()
        seen.clear()
        if backward == "after":
            loss.backward()
        elif backward == "thread":
            elsewhere(loss.backward)
    assert not seen, "a closed block shows no calls"
    gradient = model.get_input_embeddings().weight.grad
    expected = without_repeats.get_input_embeddings().weight.grad
    torch.testing.assert_close(gradient, expected)


def test_blocks_do_not_change_the_classes_of_transformers(llama):
    """Python 3.13 stops following the attributes of a class after a thousand changes."""
    before = dict(vars(AttentionInterface))
    with rl.edit_rope(llama, "nope"):
        assert dict(vars(AttentionInterface)) == before
    assert dict(vars(AttentionInterface)) == before


BLOCKS = {
    "edit": lambda model: rl.edit_rope(model, rl.stop(rl.Fastest(0.5))),
    "patch": lambda model: rl.patch_planes(model, TOKENS[:1], heads="*.1"),
    "observer": lambda model: rl.observe(model, ignore_call),
    "silence": lambda model: rl.silence_heads(model, "0.1"),
}
GREEDY = settings.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
NO_BATCHING = pytest.raises(UnsupportedModel, match="cannot use continuous batching")


def small_cache(blocks: int) -> settings.ContinuousBatchingConfig:
    return settings.ContinuousBatchingConfig(max_batch_tokens=64, num_blocks=blocks)


PROMPTS = [TOKENS[0].tolist(), TOKENS[1, :9].tolist()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", BLOCKS)
def test_continuous_batching_in_a_block_is_refused(llama, block: str):
    configured = llama.config._attn_implementation
    skip_before("transformers", "5.9", "generates differently after batching")
    with BLOCKS[block](llama), NO_BATCHING:
        llama.generate_batch(PROMPTS, GREEDY, small_cache(16))
    assert llama.config._attn_implementation == configured


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "block",
    [
        "edit",
        pytest.param("patch", marks=pytest.mark.thorough),
        pytest.param("observer", marks=pytest.mark.thorough),
        pytest.param("silence", marks=pytest.mark.thorough),
    ],
)
def test_continuous_batching_after_a_block_gives_the_tokens_of_the_model(llama, block):
    skip_before("transformers", "5.9", "generates differently after batching")
    with BLOCKS[block](llama), NO_BATCHING:
        llama.generate_batch(PROMPTS, GREEDY, small_cache(16))
    results = llama.generate_batch(PROMPTS, GREEDY, small_cache(16)).values()
    for prompt, result in zip(PROMPTS, results, strict=True):
        alone = llama.generate(torch.tensor([prompt]), GREEDY, use_cache=False)
        assert result.generated_tokens == alone[0, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore")
def test_a_manager_from_before_a_block_is_refused_in_the_block(llama):
    """A manager that is kept, and a new manager."""
    llama.set_attn_implementation("sdpa")
    cache = small_cache(64)
    llama.generate_batch([PROMPTS[0]], GREEDY, cache, persistent_manager=True)
    with rl.edit_rope(llama, "nope"), NO_BATCHING:
        llama.generate_batch([PROMPTS[0]], GREEDY)
    llama.destroy_cached_continuous_batching_manager()
    manager = llama.init_continuous_batching(GREEDY, cache)
    with rl.edit_rope(llama, "nope"):
        with NO_BATCHING:
            manager.start()
        with NO_BATCHING:
            manager.warmup()
    manager.start()
    manager.stop()


@pytest.mark.filterwarnings("ignore")
def test_a_manager_that_runs_is_refused_in_the_block(llama):
    """A new request is refused, and a request that runs ends with an error."""
    llama.set_attn_implementation("sdpa")
    long = copy.copy(GREEDY)
    long.max_new_tokens = 3000
    manager = llama.init_continuous_batching(long, small_cache(64))
    manager.start()
    manager.add_request(PROMPTS[0])
    with rl.edit_rope(llama, "nope"):
        with NO_BATCHING:
            manager.add_requests([PROMPTS[0]])
        running = manager.get_result(timeout=60)
    manager.stop()
    assert "Another thread or asyncio task" in running.error


@pytest.mark.filterwarnings("ignore")
def test_a_block_is_refused_while_a_manager_has_changed_the_attention(llama):
    llama.set_attn_implementation("eager")
    skip_before("transformers", "5.9", "does not undo a change by a manager")
    manager = llama.init_continuous_batching(GREEDY, small_cache(16))
    with pytest.raises(UnsupportedModel, match="A manager of continuous batching uses"):
        rl.measure_rope(llama)
    manager.start()
    manager.stop()
    rl.measure_rope(llama)
