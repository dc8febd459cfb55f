"""The default dtype and device of the process change no number."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xarray as xr
from oracles.tiny import logits, random_tokens, tiny
from torch import nn

import ropelens as rl

PACKAGE = Path(rl.__file__).parent
TOKENS = random_tokens(sequences=4, length=24)
NAMES = SimpleNamespace(decode=lambda ids, **_: str(ids[0]), bos_token_id=None)
NOPE = {"nope": "nope"}
QUESTION = TOKENS[0, :16]
SOURCE = TOKENS[1, :16]


def logits_under(edit: object) -> Callable[[nn.Module], xr.Dataset]:
    """A function that returns the logits of an edited model."""

    def of_model(model: nn.Module) -> xr.Dataset:
        with rl.edit_rope(model, edit):
            edited = logits(model, TOKENS[:2])
        return xr.Dataset({"logits": (("sequence", "row", "token"), edited.numpy())})

    return of_model


def silenced(model: nn.Module) -> xr.Dataset:
    with rl.silence_heads(model, "1.*", to="mean", text=TOKENS):
        changed = logits(model, TOKENS[:2])
    return xr.Dataset({"logits": (("sequence", "row", "token"), changed.numpy())})


def attention_on_tokens(model: nn.Module) -> xr.Dataset:
    text = TOKENS % 7 + 3  # its tokens are almost equally frequent
    statistics = rl.attention_on(text, "3", NAMES)
    return rl.profile(model, text, budget=False, statistics=statistics)


def claims(model: nn.Module) -> xr.Dataset:
    profile = rl.profile(model, TOKENS, rows=8, surrogates=2)
    ledger = rl.test_claims(profile, model=model, text=TOKENS, draws=20)
    return ledger.select_dtypes("number").to_xarray()


CALLS: dict[str, Callable[[nn.Module], xr.Dataset]] = {
    "measure_rope": rl.measure_rope,
    "profile": lambda model: rl.profile(model, TOKENS, rows=8, surrogates=2),
    "attention_on": attention_on_tokens,
    "capture": lambda model: rl.capture(model, QUESTION, heads="1.*", logits_of=[5]),
    "logits of an edit": logits_under("partial:0.5"),
    "logits of factors": logits_under(rl.scale(rl.Slowest(0.5), by=0.3)),
    "silence_heads": silenced,
    "attribute_planes": lambda model: rl.attribute_planes(model, QUESTION, answer=5),
    "patch_each": lambda model: rl.patch_each(model, QUESTION, source=SOURCE, answer=5),
    "reach": lambda model: rl.reach(model, TOKENS, copied=4, copies=[8]),
    "evaluate": lambda model: rl.evaluate(model, TOKENS, edits=NOPE, measures="loss"),
    "claims": claims,
}


@contextmanager
def process_with(setting: torch.dtype | str) -> Iterator[None]:
    """A process with another default dtype, or another default device."""
    if isinstance(setting, str):
        # torch 2.6 has no default device after set_default_device(None).
        with torch.device(setting):
            yield
        return
    try:
        torch.set_default_dtype(setting)
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def default_settings() -> list[torch.dtype | str]:
    return [torch.float64, torch.float16, torch.bfloat16, "meta"]


@pytest.mark.parametrize("name", CALLS)
def test_numbers_depend_neither_on_the_default_dtype_nor_on_the_default_device(name):
    expected = CALLS[name](tiny("llama_gqa"))
    for setting in default_settings():
        model = tiny("llama_gqa")  # a model keeps its rotation
        with process_with(setting):
            measured = CALLS[name](model)
        xr.testing.assert_equal(measured, expected)


@pytest.mark.parametrize(
    "family",
    [
        "llama_yarn",
        pytest.param("gemma3", marks=pytest.mark.thorough),
        pytest.param("gpt_oss", marks=pytest.mark.thorough),
        pytest.param("phi3_longrope", marks=pytest.mark.thorough),
    ],
)
def test_other_kinds_of_rotation_do_not_depend_on_them_either(family):
    expected = rl.profile(tiny(family), TOKENS, rows=8, surrogates=1)
    for setting in default_settings():
        model = tiny(family)
        with process_with(setting):
            measured = rl.profile(model, TOKENS, rows=8, surrogates=1)
        xr.testing.assert_equal(measured, expected)


def test_logarithms_of_counts_do_not_depend_on_the_default_dtype():
    share, _ = rl.attention_on(TOKENS % 7 + 3, "3", NAMES)
    token_set = share.values.__self__
    expected = token_set.log_count(TOKENS % 7 + 3)
    with process_with(torch.bfloat16):
        assert torch.equal(token_set.log_count(TOKENS % 7 + 3), expected)


def test_a_checkpoint_is_loaded_in_float32_on_the_cpu_in_any_process():
    expected, _ = rl.load("bundled", device="cpu")
    for setting in default_settings():
        with process_with(setting):
            model, tokenizer = rl.load("bundled", device="cpu")
            text = rl.tokenize(["the other words " * 9], tokenizer, context=8)
        assert torch.equal(logits(model, text.ids), logits(expected, text.ids))


DTYPE_OF_VALUES = {"arange", "randint", "randperm", "as_tensor"}
"""Functions that make whole numbers, or keep the dtype of their argument."""

MAKE_TENSORS = DTYPE_OF_VALUES | {
    "asarray",
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}


def made_tensors(source: str) -> list[ast.Call]:
    """The calls of functions of torch that make a tensor from something else."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        if function.removeprefix("torch.") in MAKE_TENSORS and "torch." in function:
            calls.append(node)
    return calls


def test_each_new_tensor_has_an_explicit_device_and_dtype():
    for path in sorted(PACKAGE.rglob("*.py")):
        for call in made_tensors(path.read_text()):
            where = f"{path}, line {call.lineno}"
            given = {keyword.arg for keyword in call.keywords}
            assert "device" in given, where
            assert "dtype" in given or call.func.attr in DTYPE_OF_VALUES, where
