"""Few functions receive the live model or the Text while a measurement runs."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.model.live_model import LiveModel

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
