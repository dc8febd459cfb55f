"""Evaluations that stop on the way, what they tell and leave behind, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from evaluated import evaluate, logits
from oracles.tiny import tiny
from torch import nn

import ropelens as rl
from ropelens.errors import BadArgument, RopelensError, UnsupportedModel
from ropelens.measure import batches
from ropelens.measure.evaluate import MEASURES, tokens_of_entry
from ropelens.measure.tasks import Retrieval

# what is left


class Stop(Exception):
    """Raised by a test's own code."""


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_error_on_the_way_leaves_the_model_as_it_was(error: type, after: int):
    model, left = tiny("llama_gqa"), [after]
    plain, configured = logits(model), model.config._attn_implementation

    def progress(done: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise error

    with pytest.raises(error):
        evaluate(model, edits={"a": "nope", "b": "linear:2"}, progress=progress)
    assert torch.equal(logits(model), plain)
    assert model.config._attn_implementation == configured


@pytest.mark.parametrize("measure", MEASURES)
def test_an_error_inside_the_model_leaves_it_as_it_was(
    measure: str, monkeypatch: pytest.MonkeyPatch
):
    """In the middle of an edit's forward pass."""
    model = tiny("llama_gqa")
    plain, configured = logits(model), model.config._attn_implementation
    with monkeypatch.context() as patch:
        from ropelens.edit.rope import ModelEdit

        def fail(*args: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(ModelEdit, "__call__", fail)
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, edits={"a": "nope"}, measures=[measure])
    assert torch.equal(logits(model), plain)
    assert model.config._attn_implementation == configured


def test_what_is_told():
    model, told = tiny("llama_gqa"), []
    found = evaluate(
        model,
        lengths=torch.tensor([40, 20, 3]),
        edits={"a": "nope"},
        rows=9,
        seed=2,
        batch_size=2,
        progress=told.append,
    )
    by_layer = [20, 20, 20]  # after each of two layers, and after the head
    assert told[:12] == [*by_layer, *by_layer, 1, 1, 1, 1, 1, 1]
    facts = {"dtype": "float32", "context": 40, "sequences": 3, "tokens": 63, "rows": 9}
    facts |= {"seed": 2, "trained_context": 8192, "model": "LlamaForCausalLM"}
    assert {name: found.attrs[name] for name in facts} == facts
    assert set(json.loads(found.attrs["versions"])) >= {"torch", "ropelens"}


@pytest.mark.parametrize("measures", [*[(measure,) for measure in MEASURES], MEASURES])
def test_the_tokens_told_add_up(measures: tuple[str, ...]):
    model, told, lengths = tiny("llama_gqa"), [], torch.tensor([40, 20, 3])
    plan = Retrieval(lengths=(33, 40), depths=(0.5,), trials=3)
    asked = {"measures": measures, "retrieval": plan}
    evaluate(model, lengths=lengths, edits={"a": "nope"}, progress=told.append, **asked)
    assert sum(told) == 2 * tokens_of_entry(model, lengths, **asked)


def test_needles_move_by_what_runs_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batches, "TOKENS_PER_BATCH", {"cpu": 80})
    plan, told = Retrieval(lengths=(40,), depths=(0.5,), trials=3), []
    asked = {"measures": ["retrieval"], "retrieval": plan}
    evaluate(tiny("llama_gqa"), edits={"a": "nope"}, progress=told.append, **asked)
    assert told == [80, 40, 80, 40]


def test_results_are_saved_whole(tmp_path: Path):
    found = evaluate(tiny("llama_gqa"), edits={"a": "nope"})
    read = xr.load_dataset(rl.save(found, tmp_path / "e.nc"), engine="h5netcdf")
    for name, variable in found.variables.items():
        np.testing.assert_array_equal(read[name], variable, err_msg=str(name))


# what is refused


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"measures": ["loss", "speed"]}, "There is no measure 'speed'; try: measures: any of"),
        ({"measures": []}, "Nothing is to be measured"),
        ({"edits": {"none": "nope"}}, 'An edit cannot be called "none"'),
        ({"edits": {"a": "nope2"}}, "No RoPE variant is called 'nope2'"),
        ({"edits": {"a": "p-rope:7"}}, "cannot have the value '7'"),
        ({"edits": {"a": rl.stop_planes([8])}}, "The model has no plane 8"),
        ({"edits": {"a": rl.stop_planes([0], heads="9.0")}}, "The model has no head 9.0"),
        ({"rows": 0}, 'rows must be "auto", "all" or a number'),
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more"),
        ({"lengths": torch.tensor([41, 2, 2])}, "cannot be longer than its row"),
        ({"tokens": torch.full((1, 9), 96)}, "not in the model's vocabulary"),
    ],
)
def test_mistakes(options: dict[str, object], line: str):
    model = tiny("llama_gqa")
    before = model.config._attn_implementation
    with pytest.raises(BadArgument) as refused:
        evaluate(model, **options)
    assert re.search(line, refused.value.line), refused.value.line
    assert model.config._attn_implementation == before


OF_OTHER_TYPES = """
import torch
import ropelens as rl
model, _ = rl.load("bundled")
for edits in (["nope"], {1: "nope"}, {"a": 0.5}, {"a": ["nope", None]}):
    try:
        rl.evaluate(model, torch.tensor([[1, 2, 3]]), edits=edits)
    except rl.RopelensError as error:
        print(error.line)
"""


def test_what_is_no_edit():
    """In a process of its own: in this one, beartype refuses other types before we do."""
    ended = subprocess.run([sys.executable, "-c", OF_OTHER_TYPES], capture_output=True)
    nameless, numbered, *others = ended.stdout.decode().splitlines()
    assert nameless.startswith(
        "Edits that are measured have names; seen: ['nope']; try: edits="
    )
    assert numbered.startswith("Edits that are measured have names; seen: {1: 'nope'}; try:")
    assert len(others) == 2, ended.stderr.decode()
    for line, seen in zip(others, ("0.5", "None"), strict=True):
        assert line.startswith(f"This is no edit of a rotation; seen: {seen}; try: ropelens.")


@pytest.mark.parametrize("make", [lambda: tiny("gpt2"), lambda: nn.Linear(2, 2)])
def test_what_cannot_be_measured(make: Callable[[], nn.Module]):
    model = make()
    with pytest.raises(UnsupportedModel):
        evaluate(model, edits={"a": "nope"})
    assert issubclass(UnsupportedModel, RopelensError)
