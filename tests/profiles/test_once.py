"""A public function checks a text once, and few functions receive the model or the text."""

import dataclasses
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import FrameType
from unittest import mock

import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.model.as_live_model import as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.profiles import measurement
from ropelens.rotation import probe

IDS = random_tokens(sequences=4, length=40)
LENGTHS = torch.tensor([40, 40, 23, 31])
FEW, SWEEP = rl.Options(surrogates=2), {"keep": (0.5,), "ends": ["slow"], "controls": 0}
MEASURED = {
    "analyze": lambda model, text: rl.analyze(model, text, FEW),
    "sweep": lambda model, text: rl.analyze(model, text, FEW, truncation=SWEEP),
    "truncate": lambda model, text: rl.truncate(model, text, **SWEEP),
    "evaluate": lambda model, text: rl.evaluate(model, text, edits={"half": "p-rope:0.5"}),
    "reach": lambda model, text: rl.reach(model, text, copies=[48], draws=1),
    "claims": lambda model, text: rl.test_claims(profile(), model=model, text=text, draws=10),
}
RUNS = {"analyze": 8, "sweep": 24, "truncate": 19, "evaluate": 13, "reach": 4, "claims": 40}
"""Number of times that the model runs. It runs once more for packed rows."""
DOCUMENTS = torch.arange(4).repeat_interleave(40).reshape(2, 80)
TEXTS = {
    "plain": lambda: IDS,
    "padded": lambda: rl.Text(IDS, lengths=LENGTHS),
    "packed": lambda: rl.Text(IDS.reshape(2, 80), documents=DOCUMENTS),
}


@cache
def profile() -> xr.Dataset:
    return rl.profile(tiny("llama_gqa", num_hidden_layers=1), IDS, surrogates=2)


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("measure", MEASURED)
def test_a_text_is_checked_once(measure: str, kind: str):
    model, text = tiny("llama_gqa", num_hidden_layers=1), TEXTS[kind]()
    profile()
    assert as_live_model(model).noise  # measured once for a model
    calls: dict[str, mock.Mock] = {}
    runs: list[torch.Size] = []

    def note(_: object, ids: tuple[torch.Tensor, ...], inputs: dict) -> None:
        runs.append((ids[0] if ids else inputs["input_ids"]).shape)

    model.register_forward_pre_hook(note, with_kwargs=True)

    def count(module: object, name: str) -> mock.Mock:
        calls[name] = mock.Mock(wraps=getattr(module, name))
        return mock.patch.object(module, name, calls[name])

    with ExitStack() as patches, warnings.catch_warnings(record=True) as caught:
        for name in ("model_text", "attention_across", "count_length_mismatches"):
            patches.enter_context(count(measurement, name))
        patches.enter_context(count(measurement, "check_padding"))
        patches.enter_context(count(probe, "probe_single_tokens"))
        warnings.simplefilter("always")
        MEASURED[measure](model, text)
    assert calls.pop("attention_across").call_count == (kind == "packed")
    assert {name: call.call_count for name, call in calls.items()} == dict.fromkeys(calls, 1)
    messages = [str(warning.message) for warning in caught]
    more = kind == "padded" and measure in ("analyze", "sweep")  # two lengths
    assert len(runs) == RUNS[measure] + (kind == "packed") + more, runs
    assert len(messages) == (kind == "packed")
    assert all("in packed rows" in message for message in messages)


PACKAGE = str(Path(rl.__file__).parent)
OWN_FILES = ("model/live_model.py", "text/text.py")
TEXT = rl.Text(random_tokens(sequences=8, length=20), documents=range(8))


def contains(value: object, kind: type, *, depth: int = 2) -> bool:
    if isinstance(value, kind) or depth == 0:
        return isinstance(value, kind)
    parts: list[object] = []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif isinstance(value, list | tuple) and len(value) < 20:
        parts = [*value]
    return any(contains(part, kind, depth=depth - 1) for part in parts)


def receivers(call: Callable[[], object]) -> dict[type, set[str]]:
    """Functions of ropelens that receive the model or the text, without their own methods.

    A function within a function counts as a part of that function.
    """
    names: dict[type, set[str]] = {LiveModel: set(), rl.Text: set()}

    def record(frame: FrameType, event: str, _: object):
        code = frame.f_code
        file = code.co_filename
        if event != "call" or not file.startswith(PACKAGE) or file.endswith(OWN_FILES):
            return
        name = f"{file}.{code.co_qualname.partition('.<locals>')[0]}"
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for kind, receiving in names.items():
            if name not in receiving and any(
                contains(frame.f_locals.get(argument), kind) for argument in arguments
            ):
                receiving.add(name)

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


MEASURES: dict[str, Callable[..., object]] = {
    "profile": lambda model, _: rl.profile(model, TEXT, surrogates=2),
    "truncate": lambda model, _: rl.truncate(model, TEXT, keep=[0.5], controls=1),
    "claims": lambda model, made: rl.test_claims(made, model=model, text=TEXT, draws=10),
}


@pytest.mark.parametrize("name", MEASURES)
def test_few_functions_receive_the_model_or_the_text(name: str):
    model = tiny("llama_gqa")
    made = rl.profile(model, TEXT, surrogates=2) if name == "claims" else None
    for kind, names in receivers(lambda: MEASURES[name](model, made)).items():
        assert 15 < len(names) <= 25, (kind, sorted(names))
