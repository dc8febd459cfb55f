"""A block belongs to the thread or task that opened it, and to recomputations of its passes."""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any

import pytest
import torch
from oracles.tiny import logits, random_tokens, sighted, tiny
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.generation import configuration_utils as settings

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.model.as_live_model import as_live_model

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
            results[edit] = [then() if edit == "plain" else await asyncio.to_thread(then)]

    async def together() -> Any:
        parts = [run(x, lambda: logits(llama, TOKENS)) for x in ("nope", "plain", "rope:9")]
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
        blocks, note = (edit, nullcontext()), rl.observe(model, lambda c, _: seen.append(c))
        with blocks[backward == "of a plain pass"], note:
            run = lambda x: model(x, use_cache=False).logits.square().mean()  # noqa: E731
            whole = repeats and how is None
            loss = checkpoint(run, TOKENS, use_reentrant=False) if whole else run(TOKENS)
            if inside:
                loss.backward()
        seen.clear()
        with blocks[backward != "of a plain pass"]:
            if not inside:
                (elsewhere if backward == "thread" else lambda call: call())(loss.backward)
        return model.get_input_embeddings().weight.grad

    expected = gradient(repeats=False, inside=True)
    torch.testing.assert_close(gradient(repeats=True, inside=backward == "inside"), expected)
    assert not seen, "a closed block shows no calls"


def test_blocks_do_not_change_the_classes_of_transformers(llama):
    """Python 3.13 stops following the attributes of a class after a thousand changes."""
    before = dict(vars(AttentionInterface))
    with rl.edit_rope(llama, "nope"):
        assert dict(vars(AttentionInterface)) == before
    assert dict(vars(AttentionInterface)) == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (lambda model: rl.edit_rope(model, rl.stop(rl.Fastest(0.5))), ""),
        (
            lambda model: rl.edit_rope(model, rl.stop_slowest(0.5, heads="*.1")),
            "only silences",
        ),
        (lambda model: rl.patch_planes(model, TOKENS[:1], heads="*.1"), "only silences"),
        (lambda model: rl.observe(model, lambda call, planes: None), "only silences"),
        (lambda model: rl.silence_heads(model, "0.1", to="mean"), "mean of a batch"),
    ],
)
@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_continuous_batching_runs_in_the_context_of_its_caller(name, block, reason: str):
    llama = tiny(name)
    prompts = [TOKENS[0].tolist(), TOKENS[1, :9].tolist()]
    options = settings.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    with block(llama):
        small = settings.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
        results = llama.generate_batch(prompts, options, small).values()
        if not reason:
            for prompt, result in zip(prompts, results, strict=True):
                alone = llama.generate(torch.tensor([prompt]), options, use_cache=False)
                assert result.generated_tokens == alone[0, len(prompt) :].tolist()
    assert all(reason in (result.error or "") for result in results)
