"""The benchmark of intervals draws correlated layers, and judges the claim on them."""

import runpy
from pathlib import Path

import numpy as np

BENCHMARK = Path(__file__).parents[2] / "benchmarks/coverage.py"


def test_intervals_of_many_correlated_layers_contain_the_truth():
    benchmark = runpy.run_path(str(BENCHMARK))
    random = np.random.default_rng(0)
    hits = benchmark["correlated"](layers=24, alike=0.0, draws=20, random=random)
    assert hits.shape == (20, 2)
    coverage = hits.mean(0)
    assert coverage.min() >= 0.8
