"""Branches for older versions of libraries give what newer versions give."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers
from oracles.tiny import tiny
from oracles.versions import is_at_least, skip_before
from packaging.version import Version

import ropelens as rl
from ropelens import compatibility
from ropelens.errors import BadCheckpoint, UnsupportedModel
from ropelens.rope.planes import Planes
from ropelens.rope.turn import positions_by_plane


@pytest.fixture
def transformers_5_5(monkeypatch: pytest.MonkeyPatch) -> None:
    """ropelens takes the installed transformers for 5.5.0."""
    monkeypatch.setattr(compatibility, "version", lambda library: "5.5.0")


def test_versions_are_compared_by_their_numbers(transformers_5_5):
    assert compatibility.is_older("transformers", "5.15")
    assert not compatibility.is_older("transformers", "5.5")


IMPORT = """
import importlib.metadata
import sys
importlib.metadata.version = lambda library: "5.4.0"
sys.argv[0] = sys.argv[1]
import ropelens
"""


def test_an_older_transformers_is_refused_at_import():
    lines = {}
    for program in ("script.py", "bin/ropelens", "-m"):
        command = [sys.executable, "-c", IMPORT, program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        lines[program] = done.stderr.splitlines()
    fault = (
        "ropelens needs transformers 5.5 or newer, and 5.4.0 is installed: "
        "pip install -U transformers"
    )
    assert lines["script.py"][-1] == f"ImportError: {fault}"
    assert lines["bin/ropelens"] == lines["-m"] == [fault]


def test_a_family_of_a_newer_transformers_is_refused_with_its_version(
    transformers_5_5, tmp_path: Path
):
    # A name that no version knows, next to one that 5.17 has.
    for model_type, hint in (
        ("hy_v4", "transformers 5.17 or newer for hy_v4"),
        ("acme", "a newer transformers"),
    ):
        settings = {"model_type": model_type, "num_hidden_layers": "many"}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(BadCheckpoint) as refused:
            rl.load(tmp_path)
        assert refused.value.parts["try"].startswith(hint)


def test_a_family_that_shows_its_attention_later_is_refused_with_the_version(
    transformers_5_5,
):
    assert (
        compatibility.newer_transformers("gptj")
        == "transformers 5.24 or newer for gptj"
    )
    assert compatibility.newer_transformers("llama") is None


def test_the_table_of_families_names_families_of_transformers():
    for first, families in compatibility.FAMILIES_SINCE.items():
        if is_at_least("transformers", first):
            assert set(families) <= {*transformers.CONFIG_MAPPING}, first


def test_dynamic_rotation_is_refused_if_transformers_cannot_undo_it(transformers_5_5):
    skip_before("transformers", "5.15", "is refused, as this test expects of 5.5")
    model = tiny("llama_dynamic")
    with pytest.raises(UnsupportedModel, match="RoPE of type dynamic") as refused:
        rl.measure_rope(model)
    assert refused.value.parts["try"] == "transformers 5.15 or newer"


def test_positions_on_axes_are_refused_for_a_model_without_axes():
    """With one sequence, three tokens and three heads, wrong planes would rotate."""
    planes = Planes(torch.ones(4), 8, "half")
    positions = torch.zeros(1, 3, 3, dtype=torch.long)
    with pytest.raises(UnsupportedModel, match="positions on several axes"):
        positions_by_plane(positions, planes)


@pytest.mark.parametrize(
    ("address", "dataset", "revision", "folder"),
    [
        ("hf://datasets/me/one", "me/one", None, ""),
        ("hf://datasets/me/one@v1", "me/one", "v1", ""),
        ("hf://datasets/me/one@v1/a/b", "me/one", "v1", "a/b"),
        ("hf://datasets/me/one/a", "me/one", None, "a"),
        ("hf://datasets/me/one@refs/pr/3/a", "me/one", "refs/pr/3", "a"),
        ("hf://datasets/me/one@refs%2Fpr%2F3", "me/one", "refs/pr/3", ""),
    ],
)
def test_an_address_of_a_dataset_has_parts(
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    dataset: str,
    revision: str | None,
    folder: str,
):
    expected = compatibility.DatasetAddress(dataset, revision, folder)
    assert compatibility.parse_dataset(address) == expected
    monkeypatch.setattr(compatibility, "is_older", lambda library, than: True)
    assert compatibility.parse_dataset(address) == expected
    for other in ("hf://me/one", "hf://datasets/me/one@"):
        with pytest.raises(ValueError, match="not an address of a dataset"):
            compatibility.parse_dataset(other)


def test_each_stated_version_is_newer_than_the_oldest():
    """A part for a version that is no longer allowed can be deleted."""
    oldest = Version(compatibility.OLDEST_TRANSFORMERS)
    tables = (compatibility.FAMILIES_SINCE, compatibility.SHOWN_SINCE)
    for table in tables:
        assert all(Version(first) > oldest for first in table)
    assert Version(version("transformers")) >= oldest
