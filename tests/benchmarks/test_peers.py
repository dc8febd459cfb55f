"""The comparison with other libraries runs, and says what could not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_checkpoints import tiny_llama

import ropelens as rl

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import cost
import dense
import peers


def test_dense_sums_are_those_of_a_profile() -> None:
    model = tiny_llama().eval()
    model.set_attn_implementation("eager")
    tokens = torch.randint(3, model.config.vocab_size, (1, 48))
    with torch.no_grad():
        layers = dense.dense_sums(model, tokens)
    profile = rl.profile(model, tokens.repeat(2, 1), surrogates=0)
    compared = set(layers[0]) & set(profile)
    assert compared == set(layers[0]) - {"entropy", "information"}
    for name in compared:
        found = torch.stack([layer[name] for layer in layers]).numpy()
        wanted = profile[name].values[..., : found.shape[-1]]
        np.testing.assert_allclose(found, wanted, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("way", ["plain forward", "ropelens, all rows", "ropelens, 512 rows"])
def test_a_way_has_a_time_and_a_memory(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(vocab_size=32000).eval().requires_grad_(False)
    monkeypatch.setattr(cost, "random_llama", lambda: model)
    found = peers.cost_of(way, 16)
    assert found["seconds"] > 0
    assert found["peak_mib"] >= 0


def test_each_process_gives_a_row_or_says_why_not(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho warned\necho \'{"seconds": 2.0, "peak_mib": 8.0}\'\n')
    python.chmod(0o755)
    table = [peers.row(python, way, n) for n in (512, 1024) for way in list(peers.WAYS)[:2]]
    python.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'nnsight'\" >&2\nexit 1\n"
    )
    table.append(peers.row(python, "nnsight, trace", 512))
    assert table[-1]["problem"] == "ModuleNotFoundError: No module named 'nnsight'"
    costs = pd.DataFrame(table)
    figure = peers.draw(costs, "peak_mib", "peak memory (MiB)", {8: "8"})
    assert [trace.name for trace in figure.data] == list(peers.WAYS)[:2]
    assert list(figure.data[0].y) == [8.0, 8.0]
    lead, problem = peers.told(costs)
    assert lead == (
        "At 1,024 tokens ropelens measures all rows in 1.0 times the time of a plain forward "
        "pass and in 8 MiB."
    )
    assert problem.startswith("nnsight, trace at 512: ModuleNotFoundError")
    assert lead in peers.page(costs)
