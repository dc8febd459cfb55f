"""Only the first function receives the model; later functions receive the live model."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from oracles.tiny import random_tokens, tiny

import ropelens as rl

PACKAGE = str(Path(rl.__file__).parent)
TOKENS = random_tokens(sequences=3, length=20)


def visits(model: object, call: Callable[[], object]) -> list[tuple[str, str]]:
    """Functions of ropelens that receive or return the bare model, in order."""
    places: list[tuple[str, str]] = []

    def record(frame: FrameType, event: str, result: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        if event == "return" and result is model:
            places.append((code.co_qualname, "return"))
        if event == "call":
            given = frame.f_locals.items()
            places.extend((code.co_qualname, name) for name, value in given if value is model)

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return places


@pytest.mark.parametrize(
    ("measure", "few"),
    [
        (rl.truncate, {"keep": [0.5], "controls": 0}),
        (rl.analyze, {}),
        (rl.reach, {"copies": [48]}),
    ],
)
def test_few_functions_receive_the_model(
    measure: Callable[..., object], few: dict[str, object]
) -> None:
    model = tiny("llama_gqa", num_hidden_layers=1)
    places = visits(model, lambda: measure(model, TOKENS, **few))
    assert 5 < len(set(places)) < 25
    assert places.count(("as_live_model", "model")) == 1
