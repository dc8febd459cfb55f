"""Blocks show every attention call with its planes, and belong to the thread that opens it."""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
import torch
from measured import observed_calls
from oracles.recording import attention_calls
from oracles.tiny import TEN, logits, random_tokens, rotations, sighted, tiny
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, DynamicCache, StaticCache
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
    return lambda call, planes: seen.update({call.layer: (call, planes)})


@pytest.mark.parametrize("name", TEN)
def test_planes_match_the_rotation_of_the_call(name: str):
    model, seen = tiny(name), {}
    plain, (true, _) = logits(model), attention_calls(model, random_tokens()[0])
    with rl.observe(model, noting(seen)):
        assert torch.equal(logits(model), plain)
    assert sorted(seen) == list(range(len(true)))
    for layer, rotation in enumerate(rotations(model, name=name)):
        call, planes = seen[layer]
        turning = planes.inv_freq != 0
        np.testing.assert_allclose(
            planes.inv_freq[turning], rotation.inv_freq, rtol=1e-6
        )
        still = rotation.unrotate(true[layer].query)
        first, second = torch.from_numpy(rotation.pairs).unbind(-1)
        expected = torch.complex(still[..., first], still[..., second])
        q = torch.complex(
            call.query[0][..., planes.first], call.query[0][..., planes.second]
        )
        q = q * torch.exp(-1j * torch.arange(LENGTH)[:, None] * planes.inv_freq)
        atol = 1e-4 * float(call.query.abs().max())
        torch.testing.assert_close(
            q[..., turning], expected.to(q.dtype), rtol=1e-3, atol=atol
        )


@torch.no_grad()
def test_a_step_on_a_cache_is_checked_after_a_plain_pass(llama, monkeypatch):
    def other(module, query, key, value, attention_mask, **kwargs):
        inputs = (module, query, key, value, attention_mask)
        out, weights = eager_attention_forward(*inputs, **kwargs)
        return out * (1.1 if key.shape[2] > query.shape[2] else 1.0), weights

    monkeypatch.setattr(f"{LlamaAttention.__module__}.eager_attention_forward", other)
    llama.set_attn_implementation("eager")
    ids, cache = random_tokens()[:, :2], DynamicCache()
    with rl.observe(llama, lambda call, planes: None):
        llama(ids[:, :1], past_key_values=cache)
        with pytest.raises(UnsupportedModel, match="attends in a way"):
            llama(ids[:, 1:], past_key_values=cache)


@pytest.mark.parametrize("inside", [False, True], ids=["edit outside", "edit inside"])
def test_the_edited_model_is_observed(inside: bool):
    model, seen = tiny("llama_gqa"), {}
    blocks = [
        rl.edit_rope(model, rl.stop_slowest(0.5)),
        rl.observe(model, noting(seen)),
    ]
    outer, inner = blocks[::-1] if inside else blocks
    with outer, inner:
        logits(model)
    call, planes = seen[0]
    assert planes.inv_freq.tolist()[4:] == [0.0] * 4
    assert (planes.inv_freq[:4] > 0).all()
    with rl.observe(model, noting(seen)):
        logits(model)
    plain, unedited = seen[0]
    assert (unedited.inv_freq > 0).all()
    assert (call.query - plain.query).abs().max() > 0.1
    one_head = rl.edit_rope(model, rl.stop(rl.PlaneNumbers([1, 5]), heads="0.2"))
    with one_head, rl.observe(model, noting(seen)):
        logits(model)
    call, planes = seen[0]
    assert (planes.inv_freq == 0).nonzero().tolist() == [[2, 1], [2, 5]]
    assert call.key.shape[1] == call.query.shape[1] == 4
    assert seen[1][1].inv_freq.ndim == 1
    assert seen[1][0].key.shape[1] == 2


def test_a_rotation_that_depends_on_the_length():
    model, seen = tiny("llama_dynamic", max_position_embeddings=16), {}
    with rl.observe(model, noting(seen)):
        for length in (10, 40, 12):
            logits(model, random_tokens(length=length))
            assert torch.equal(seen[1][1].inv_freq, model.model.rotary_emb.inv_freq), (
                length
            )
    with rl.observe(model, noting(seen)):
        logits(model, random_tokens(length=40))
        assert (seen[1][1].inv_freq < model.model.rotary_emb.original_inv_freq).any()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_padding_is_hidden(name: str, side: str, implementation: str):
    model, seen, ids = tiny(name), {}, random_tokens()
    model.set_attn_implementation(implementation)
    real = [slice(None), slice(15, LENGTH) if side == "left" else slice(15)]
    mask = torch.zeros_like(ids)
    mask[0], mask[1, real[1]] = 1, 1
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    plain = logits(model, **inputs)
    with rl.observe(model, noting(seen)):
        assert torch.equal(logits(model, **inputs), plain)
    for row, at in enumerate(real):
        calls = [call for call, _ in observed_calls(model, ids[row : row + 1, at])]
        for layer, alone in enumerate(calls):
            weights = attention_map(seen[layer][0])[row, :, at, at]
            torch.testing.assert_close(
                weights, attention_map(alone)[0], rtol=0, atol=1e-5
            )


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
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    options |= {"attention_mask": mask}
    edits = (rl.stop(rl.PlaneNumbers([1]), heads="*.1"),) if edited else ()
    whole: list[torch.Tensor] = []
    cached: list[tuple[torch.Tensor, int]] = []

    def note(call: AttentionCall, planes: Planes) -> None:
        cached.append((attention_map(call), call.past))

    with rl.edit_rope(model, *edits):
        expected = model.generate(
            random_tokens(), **options, cache_implementation=cache
        )
        with rl.observe(model, lambda call, planes: whole.append(attention_map(call))):
            model.generate(random_tokens(), **options, use_cache=False)
        with rl.observe(model, note):
            again = model.generate(
                random_tokens(), **options, cache_implementation=cache
            )
    assert torch.equal(again, expected)
    assert [weights.shape[2] for weights, _ in cached] == [LENGTH] * 2 + [1] * 6
    for true, (weights, past) in zip(whole, cached, strict=True):
        rows, keys = weights.shape[2:]
        assert past == keys - rows
        real = slice(padded if rows > 1 else 0, None)
        seen, true = weights[:, :, real], true[:, :, -rows:][:, :, real]
        torch.testing.assert_close(seen, true[..., -keys:], rtol=1e-4, atol=1e-5)
        assert float(true[..., :-keys].sum()) == 0, (
            "keys that left the cache are not visible"
        )


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_a_part_that_is_padded_on_the_right_continues_the_cache(kind):
    """The length of the cache gives the positions of the new rows, also of padding."""
    model, seen = tiny("llama_gqa"), {}
    cache = (
        kind(config=model.config, max_cache_len=40) if kind is StaticCache else kind()
    )
    ids, mask = random_tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    mask[:, 24:] = 0
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
    with (
        rl.observe(model, noting({})),
        pytest.raises(UnsupportedModel, match=words) as refused,
    ):
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
        rl.profile(model, text)
    assert 'attn_implementation="sdpa"' in refused.value.parts["try"]
    model.set_attn_implementation("sdpa")
    ours, expected = (
        rl.profile(m, text)["entropy_bits"] for m in (model, model.float())
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-4)


TOKENS = random_tokens(sequences=2, length=24, vocabulary=80)
REFUSED = pytest.raises(BadArgument, match="Another thread or asyncio task")


def elsewhere(call: Callable[..., Any], *arguments: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *arguments).result()


def test_a_block_belongs_to_the_thread_that_opened_it(llama):
    plain, other = logits(llama, TOKENS), copy.deepcopy(llama)
    with rl.edit_rope(llama, "nope"):
        edited = logits(llama, TOKENS)
        for call in (lambda: logits(llama, TOKENS), lambda: llama.model(TOKENS)):
            with REFUSED:
                elsewhere(call)
        with REFUSED:
            elsewhere(rl.measure_rope, llama)
        assert torch.equal(elsewhere(logits, other, TOKENS), plain)
        assert torch.equal(elsewhere(copy_context().run, logits, llama, TOKENS), edited)
    assert torch.equal(elsewhere(logits, llama, TOKENS), plain)


@pytest.mark.parametrize("training", [False, True])
def test_another_thread_never_changes_a_measurement(llama, training: bool):
    expected = rl.evaluate(llama.train(training), TOKENS, edits={}, measures=["loss"])
    refused: list[object] = []

    def serve(*_: Any) -> None:
        with REFUSED as error:
            elsewhere(lambda: llama(TOKENS.flip(1), use_cache=False))
        refused.append(error)

    with as_live_model(llama).observe(serve):
        llama(TOKENS)
    hook = llama.get_output_embeddings().register_forward_pre_hook(serve)
    assert expected.equals(rl.evaluate(llama, TOKENS, edits={}, measures=["loss"]))
    hook.remove()
    assert len(refused) > 2


def test_tasks_do_not_share_blocks(llama):
    results = {}

    async def run(edit: str, then: Callable[[], Any]) -> None:
        with nullcontext() if edit == "plain" else rl.edit_rope(llama, edit):
            results[edit] = [
                then() if edit == "plain" else await asyncio.to_thread(then)
            ]

    async def together() -> Any:
        parts = [
            run(x, lambda: logits(llama, TOKENS)) for x in ("nope", "plain", "rope:9")
        ]
        return await asyncio.gather(*parts, return_exceptions=True)

    done, *errors = asyncio.run(together())
    assert done is None
    assert [type(error) for error in errors] == [BadArgument] * 2
    with rl.edit_rope(llama, "nope"):
        assert torch.equal(results["nope"][0], logits(llama, TOKENS))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("backward", ["inside", "after", "thread", "of a plain pass"])
@pytest.mark.parametrize(
    ("name", "how"), [("llama4", True), ("qwen2_vl", False), ("phi", None)]
)
def test_recomputation_belongs_to_the_block_of_its_forward_pass(name, how, backward):
    """Reentrant or not, layer by layer; None: a function that runs the whole model."""
    seen: list[int] = []

    def gradient(*, repeats: bool, inside: bool) -> torch.Tensor:
        model = (sighted if name == "qwen2_vl" else tiny)(name).train()
        if repeats and how is not None:
            model.gradient_checkpointing_enable({"use_reentrant": how})
        edit: AbstractContextManager[None] = rl.edit_rope(model, rl.stop_slowest(0.5))
        blocks, note = (
            (edit, nullcontext()),
            rl.observe(model, lambda c, _: seen.append(c)),
        )
        with blocks[backward == "of a plain pass"], note:
            run = lambda x: model(x, use_cache=False).logits.square().mean()  # noqa: E731
            whole = repeats and how is None
            loss = (
                checkpoint(run, TOKENS, use_reentrant=False) if whole else run(TOKENS)
            )
            if inside:
                loss.backward()
        seen.clear()
        with blocks[backward != "of a plain pass"]:
            if not inside:
                (elsewhere if backward == "thread" else lambda call: call())(
                    loss.backward
                )
        return model.get_input_embeddings().weight.grad

    expected = gradient(repeats=False, inside=True)
    torch.testing.assert_close(
        gradient(repeats=True, inside=backward == "inside"), expected
    )
    assert not seen, "a closed block shows no calls"


def test_blocks_do_not_change_the_classes_of_transformers(llama):
    """Python 3.13 stops following the attributes of a class after a thousand changes."""
    before = dict(vars(AttentionInterface))
    with rl.edit_rope(llama, "nope"):
        assert dict(vars(AttentionInterface)) == before
    assert dict(vars(AttentionInterface)) == before


BLOCKS = {
    "edit": lambda model: rl.edit_rope(model, rl.stop(rl.Fastest(0.5))),
    "patch": lambda model: rl.patch_planes(model, TOKENS[:1], heads="*.1"),
    "observer": lambda model: rl.observe(model, lambda call, planes: None),
    "silence": lambda model: rl.silence_heads(model, "0.1"),
}
GREEDY = settings.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
NO_BATCHING = pytest.raises(UnsupportedModel, match="cannot use continuous batching")


def small_cache(**more: int) -> settings.ContinuousBatchingConfig:
    return settings.ContinuousBatchingConfig(max_batch_tokens=64, **more)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", BLOCKS)
def test_continuous_batching_in_a_block_is_refused(llama, block: str):
    prompts, cache = [TOKENS[0].tolist(), TOKENS[1, :9].tolist()], {"num_blocks": 16}
    configured = llama.config._attn_implementation
    with BLOCKS[block](llama), NO_BATCHING:
        llama.generate_batch(prompts, GREEDY, small_cache(**cache))
    assert llama.config._attn_implementation == configured
    results = llama.generate_batch(prompts, GREEDY, small_cache(**cache)).values()
    for prompt, result in zip(prompts, results, strict=True):
        alone = llama.generate(torch.tensor([prompt]), GREEDY, use_cache=False)
        assert result.generated_tokens == alone[0, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore")
def test_a_manager_from_before_a_block_is_refused_in_the_block(llama):
    """A manager that is kept, a new manager, a manager that runs, and a request that runs."""
    llama.set_attn_implementation("sdpa")
    prompt, long = TOKENS[0].tolist(), copy.copy(GREEDY)
    long.max_new_tokens = 3000
    cache = small_cache(num_blocks=64)
    llama.generate_batch([prompt], GREEDY, cache, persistent_manager=True)
    with rl.edit_rope(llama, "nope"), NO_BATCHING:
        llama.generate_batch([prompt], GREEDY)
    llama.destroy_cached_continuous_batching_manager()
    manager = llama.init_continuous_batching(long, cache)
    with rl.edit_rope(llama, "nope"):
        for run in (manager.start, manager.warmup):
            with NO_BATCHING:
                run()
    manager.start()
    manager.add_request(prompt)
    with rl.edit_rope(llama, "nope"):
        with NO_BATCHING:
            manager.add_requests([prompt])
        running = manager.get_result(timeout=60)
    manager.stop()
    assert "Another thread or asyncio task" in running.error


@pytest.mark.filterwarnings("ignore")
def test_a_block_is_refused_while_a_manager_has_changed_the_attention(llama):
    llama.set_attn_implementation("eager")
    manager = llama.init_continuous_batching(GREEDY, small_cache(num_blocks=16))
    with pytest.raises(UnsupportedModel, match="A manager of continuous batching uses"):
        rl.measure_rope(llama)
    manager.start()
    manager.stop()
    rl.measure_rope(llama)
