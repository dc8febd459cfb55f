"""The tables that `ropelens rope` prints."""

import re
from pathlib import Path

import families
import numpy as np
import pytest
from cli_runs import Command, save_family
from tiny_checkpoints import save_tiny


def test_a_table_for_layers_that_rotate_alike(ropelens: Command, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 6, "no_rope_layers": [1, 1, 0, 1, 1, 0]}
    ended = ropelens("rope", save_family(tmp_path / "model", "smollm3", **config))
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert max(map(len, lines)) <= 80
    titles = [line for line in lines if line.startswith("layer")]
    assert re.match(r"layers 0–1 and 3–4: 8 planes, half pairing \(residual \S+\)$", titles[0])
    assert re.match(r"layers 2 and 5: no rotation \(residual 0\.0e\+00\)$", titles[1])
    assert lines[1].split()[-4:] == ["stated", "configured", "off", "by"]
    rows = [line.split() for line in lines if re.match(r" +(\d|rest)", line)]
    assert [row[0] for row in rows] == [*map(str, range(8)), "rest"]
    assert rows[0][:4] == ["0", "1", "6.28", "1"]
    for plane, (_, inv_freq, wavelength, stated, configured, difference) in enumerate(rows[:8]):
        expected = 2_000_000 ** (-plane / 8)
        assert float(inv_freq) == pytest.approx(expected, rel=1e-6)
        assert float(stated) == pytest.approx(expected, rel=1e-6)
        assert float(configured) == pytest.approx(expected, rel=1e-6)
        assert 0 < abs(float(difference)) < 1e-6  # a measurement, not a copy
        shown = float(wavelength.replace(",", ""))
        assert shown == pytest.approx(2 * np.pi / expected, rel=1e-3)
    assert rows[8] == ["rest", "0", "inf"]


def test_layers_that_do_not_attend(ropelens: Command, tmp_path: Path) -> None:
    families.tiny("Lfm2ForCausalLM").save_pretrained(tmp_path)
    out = ropelens("rope", tmp_path).out
    assert "layers 0 and 2: no attention (conv)\n" in out
    assert re.search(r"^layers 1 and 3: 8 planes, half pairing \(residual \S+\)$", out, re.M)


def test_queries_that_grow_with_position(ropelens: Command, tmp_path: Path) -> None:
    config = {"attn_temperature_tuning": True, "floor_scale": 256}
    out = ropelens("rope", save_family(tmp_path / "model", "llama4", **config)).out
    assert "queries grow with position, to" in " ".join(out.split())
    assert "from 1.069 at position 256" in " ".join(out.split())


def test_verbose_prints_every_layer(ropelens: Command, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    assert ropelens("rope", model).out.count("layers 0–1:") == 1
    assert ropelens("rope", model, "--device-map", "auto") == ropelens("rope", model)
    ended = ropelens("rope", model, "--verbose")
    assert re.findall(r"^layer (\d):", ended.out, re.MULTILINE) == ["0", "1"]
