"""A stopped measurement continues from its saved progress, with the same numbers."""

import json
import shutil
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.numpy
import torch
import xarray as xr
from small_measurements import assert_same, token_progress
from tiny_checkpoints import tiny_llama

import ropelens as rl
from ropelens.budget import held_out
from ropelens.model.live_model import LiveModel
from ropelens.runtime import savepoint as module
from ropelens.runtime.savepoint import resume, savepoint

TOKENS = torch.randint(2, 40, (6, 24), generator=torch.Generator().manual_seed(0))
MODEL = tiny_llama(num_hidden_layers=1, num_attention_heads=2).eval()
EDITS = {"half": rl.stop_slowest(0.5), "one head": rl.stop_slowest(0.5, heads="0.1")}


class Stop(Exception):
    """Any reason why a run ends."""


def measure(**options: object) -> xr.Dataset:
    with patch.object(held_out, "FOLD_SEQUENCES", 1):  # fits take two of the six
        return rl.profile(MODEL, TOKENS, surrogates=1, rows=10, batch_size=2, **options)


def evaluate(**options: object) -> xr.Dataset:
    few = {"edits": EDITS, "prompt_lengths": [40], "rows": 10, "batch_size": 2}
    return rl.evaluate(MODEL, TOKENS, **few | options)


uninterrupted = cache(lambda measured: measured())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "SECONDS", 0.0)
    return tmp_path / "saved"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    logits = LiveModel.logits

    def counted(self: LiveModel, tokens: torch.Tensor, **options: int | None):
        if tokens.shape[1] == TOKENS.shape[1]:
            sizes.append(len(tokens))
        return logits(self, tokens, **options)

    monkeypatch.setattr(LiveModel, "logits", counted)
    return sizes


def stop_at(tokens: int):
    """A progress function that ends the run after `tokens` tokens."""
    left = tokens

    def progress(more: int) -> None:
        nonlocal left
        left -= more
        if left <= 0:
            raise Stop

    return token_progress(progress)


def test_a_profile_goes_on(folder, ran, monkeypatch, capfd):
    expected = uninterrupted(measure)
    with pytest.raises(Stop), savepoint(folder, {"a": 1}):
        measure(progress=stop_at(4 * 24 + 1))
    assert ran[-3:] == [2, 2, 2]
    assert capfd.readouterr().err == ""
    ran.clear()
    amounts: list[int] = []
    monkeypatch.setattr(
        "ropelens.profiles.profile.LayerFitter", None
    )  # it is not called
    with savepoint(folder, {"a": 1}):
        resumed = measure(progress=token_progress(amounts.append))
    assert ran == [2]
    assert sum(amounts) == 2 * 24
    assert capfd.readouterr().err == f"continuing from the saved progress in {folder}\n"
    assert_same(resumed, expected)


# An entry has 6 x 24 tokens of text in batches of 2, 8 x 63 of repeats and 48 x 40 of needles.
@pytest.mark.parametrize(
    ("measures", "stop", "again", "left"),
    [
        (("loss", "labels", "change"), 5 * 48, [2] * 6, 5 * 48),  # "none" runs again
        (("loss", "labels"), 5 * 48 + 1, [2] * 4, 4 * 48),
        (("induction", "retrieval"), 504 + 1, [], 2 * 504 + 3 * 1920),
        (("induction", "retrieval"), 3 * 504 + 1921, [], 2 * 1920),
    ],
    ids=["text", "text without changes", "repeats", "needles"],
)
def test_an_evaluation_goes_on(folder, ran, measures, stop, again, left):
    with pytest.raises(Stop), savepoint(folder, {}):
        evaluate(measures=measures, progress=stop_at(stop))
    ran.clear()
    amounts: list[int] = []
    with savepoint(folder, {}):
        resumed = evaluate(measures=measures, progress=token_progress(amounts.append))
    assert ran == again
    assert sum(amounts) == left
    assert_same(resumed, uninterrupted(evaluate))


@pytest.mark.parametrize("measures", [("labels", "change"), ("loss",)])
def test_an_evaluation_goes_on_in_other_batches(folder, measures):
    """The size of batches depends on free memory, and a run may stop within a batch twice."""
    for size, stop in ((4, 4 * 24 + 1), (2, 2 * 24 + 1)):
        with pytest.raises(Stop), savepoint(folder, {}):
            evaluate(measures=measures, batch_size=size, progress=stop_at(stop))
    with savepoint(folder, {}):
        resumed = evaluate(measures=measures, batch_size=4)
    assert_same(resumed, evaluate(measures=measures))


REASONS = {
    "other settings": "it is from other settings (seed: 0, now 1)",
    "another format": "it is from another version of ropelens",
    "before format 2": "it is from another version of ropelens",
    "cut": "it is damaged",
    "another file": "it is damaged",
    "empty": "it is damaged",
    "no form": "it is damaged",
}


@pytest.mark.parametrize("how", REASONS)
def test_useless_progress_is_removed_with_the_reason(folder, capfd, monkeypatch, how):
    with savepoint(folder, {"seed": 0}):
        resume().save([torch.ones(100)])
    (file,) = folder.iterdir()
    number = {"0": np.ones(1)}
    digest = {"key": "0" * 64, "form": '[{"tensor": "0"}]'}
    key = json.dumps({"format": module.FORMAT, "seed": 0})
    other = {
        "cut": file.read_bytes()[:-100],
        "another file": b"never mind",
        "empty": b"",
        "before format 2": safetensors.numpy.save(number, digest),
        "no form": safetensors.numpy.save(number, {"key": key}),
    }
    if how == "another format":
        monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    if how in other:
        file.write_bytes(other[how])
    shutil.copy(file, folder / f"1{file.name[1:]}")
    with savepoint(folder, {"seed": int(how == "other settings")}):
        assert resume().state is None
    assert not folder.exists()
    words = f"removed the progress in {folder}: {REASONS[how]}\n"
    assert capfd.readouterr().err == words


def test_a_failed_save_does_not_end_the_measurement(folder: Path):
    folder.write_text("no folder can be made here")
    with savepoint(folder, {}):
        stage = resume()
        with pytest.warns(UserWarning, match="the progress could not be saved"):
            stage.save([1])
        stage.save([2])  # without a second warning


def test_a_state_is_saved_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with savepoint(tmp_path, {}):
        stage = resume()
    for second, number in ((59, 1), (61, 2), (100, 3), (122, 4)):
        now[0] = float(second)
        stage.save([number])
        with savepoint(tmp_path, {}):
            assert resume().state == {59: None, 61: [2], 100: [2], 122: [4]}[second]


def test_a_state_comes_back_bit_for_bit(folder: Path):
    tensors = [
        torch.arange(3)[::2],
        torch.tensor(0.1, dtype=torch.float64),
        torch.ones(0, 2),
    ]
    state = {3: [1.5, None, "é", True, float("nan")], "x": tensors}
    with savepoint(folder, {}):
        resume().save(state)
    with savepoint(folder, {}):
        assert repr(resume().state) == repr(state)


def test_a_link_instead_of_a_savepoint_is_not_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    folder = tmp_path / "out" / ".unfinished"
    outside.mkdir()
    folder.parent.mkdir()
    folder.symlink_to(outside)
    with savepoint(folder, {}):
        stage = resume()
        stage.timer._due = 0.0
        stage.save({"sums": torch.ones(2)})
    assert not any(outside.iterdir())
    assert [file.suffix for file in folder.iterdir()] == [".safetensors"]
