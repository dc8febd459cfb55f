"""The table that `ropelens rope` prints."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from cli_runs import Command, ropelens, save_family
from tiny_checkpoints import save_tiny

__all__ = ["ropelens"]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_for_layers_that_rotate_alike(
    ropelens: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    config = {"num_hidden_layers": 6, "no_rope_layers": [1, 1, 0, 1, 1, 0]}
    ended = ropelens("rope", save_family(tmp_path / "model", "smollm3", **config))
    assert ended.code == 0
    assert ended.err == ""
    lines = ended.out.splitlines()
    assert max(map(len, lines)) <= columns
    titles = [line for line in lines if line.startswith("layer")]
    assert re.match(r"layers 0-1, 3-4: 8 planes, half pairing \(residual \S+\) *$", titles[0])
    assert re.match(r"layers 2, 5: no rotation \(residual 0\.0e\+00\) *$", titles[1])
    both = [line.split("┃")[1:-1] for line in lines[2:4]]
    pairs = zip(*both, strict=True)
    heading = [f"{above.strip()} {below.strip()}".strip() for above, below in pairs]
    units = ["plane", "inv_freq [rad/token]", "wavelength [tokens]", "stated [rad/token]"]
    assert heading == [*units, "measured / stated − 1"]
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert [row[0] for row in rows] == [*map(str, range(8)), "rest"]
    assert rows[0][:4] == ["0", "1", "6.28", "1"]
    for plane, (_, inv_freq, wavelength, stated, apart) in enumerate(rows[:8]):
        expected = 2_000_000 ** (-plane / 8)
        assert float(inv_freq) == pytest.approx(expected, rel=1e-6)
        assert float(stated) == pytest.approx(expected, rel=1e-6)
        assert 0 < abs(float(apart)) < 1e-6  # a measurement, not a copy
        shown = float(wavelength.replace(",", ""))
        assert shown == pytest.approx(2 * np.pi / expected, rel=1e-3)
    assert rows[8] == ["rest", "0", "inf", "", ""]


def test_a_model_is_placed_and_quantized_as_asked(ropelens: Command, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    assert ropelens("rope", model, "--device-map", "auto") == ropelens("rope", model)
    assert "no device map 'car'" in ropelens("rope", model, "--device-map", "car").problem
    assert "to 'int2'" in ropelens("rope", model, "--quantize", "int2").problem


def test_verbose_prints_every_layer(ropelens: Command, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    assert ropelens("rope", model).out.count("layers 0-1:") == 1
    ended = ropelens("rope", model, "--verbose")
    assert re.findall(r"^layer (\d):", ended.out, re.MULTILINE) == ["0", "1"]


@pytest.mark.parametrize("family", ["gpt_neox", "glm", "cohere", "gemma3", "llama_yarn"])
def test_tables_of_many_families_fit_a_terminal(
    ropelens: Command, tmp_path: Path, family: str
) -> None:
    ended = ropelens("rope", save_family(tmp_path / "model", family))
    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= 80
    pairing = "interleaved" if family in ("glm", "cohere") else "half"
    assert f"planes, {pairing} pairing" in ended.out
    partial = family in ("gpt_neox", "glm")
    assert ("rest" in ended.out) == partial
    assert ended.out.count("layer") == (2 if family == "gemma3" else 1)
