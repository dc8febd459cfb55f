"""The benchmark of intervals draws correlated layers, and judges the claim on them."""

import runpy
from pathlib import Path

import numpy as np

BENCHMARK = Path(__file__).parents[2] / "benchmarks/coverage.py"


def test_intervals_of_many_correlated_layers_contain_the_truth():
    correlated = runpy.run_path(str(BENCHMARK))["correlated"]
    hits = correlated(24, 0.0, 20, np.random.default_rng(0))
    assert hits.shape == (20, 2)
    assert hits.mean(0).min() >= 0.8
