"""A comparison with numbers that are known beforehand, and no model behind it."""

from __future__ import annotations

import json

import numpy as np
import xarray as xr

from ropelens.statistics.labels import LABELS

STEPS = (1, 2, 4, 8)
CONTEXT = 32


def synthetic_comparison(
    *, groups: tuple[str, ...] = ("rope", "p-rope:0.5", "nope")
) -> xr.Dataset:
    """Two seeds of each of `groups`, of two layers of two heads and eight planes.

    What the heads and planes do grows in proportion to the step, and their labels move on.

    The loss of group g and seed s is 3 + 0.1 g + 0.01 s (1 + g); the second half of the
    planes of the second group stop, all of those of the third.
    """
    random = np.random.default_rng(0)
    entries = [(number, group, seed) for seed in (0, 1) for number, group in enumerate(groups)]
    names = np.array([f"{group} seed {seed}" for _, group, seed in entries], dtype=object)
    loss = np.array([3 + 0.1 * g + 0.01 * s * (1 + g) for g, _, s in entries])
    wavelength = 2 * np.pi * 10_000.0 ** (np.arange(8) / 8)
    turning = [np.arange(8) < {0: 8, 1: 4}.get(g, 0) for g, _, _ in entries]
    start = np.array([1, 2, 4, 8, 16, 32, 64])
    heads, planes = ("entry", "layer", "head"), ("entry", "layer", "head", "frequency")
    count = len(entries)

    def draw(*shape: int) -> np.ndarray:
        return random.uniform(0.1, 0.9, (count, *shape))

    dims = ("entry", "retrieval_length", "depth")
    hit = np.round(draw(1, 3, 5))
    label = np.resize(np.array(LABELS, dtype=object), (count, 2, 2))
    of_heads = {
        name: (heads, draw(2, 2))
        for name in ("previous_token", "induction", "positional_fraction")
    }
    trials = 1 + 0.1 * np.random.default_rng(1).normal(size=(count, 4, 1, 1))
    of_heads["trial_induction"] = (
        ("entry", "trial", "layer", "head"),
        of_heads["induction"][1][:, None] * trials,
    )
    of_planes = {
        "q_norm": (planes, draw(2, 2, 8)),
        "k_norm": (("entry", "layer", "kv_head", "frequency"), draw(2, 1, 8)),
        "selectivity_keys": (planes, draw(2, 2, 8)),
    }
    grown = {
        name: (
            (*dims[:1], "step", *dims[1:]),
            np.stack([values * step / STEPS[-1] for step in STEPS], axis=1),
        )
        for name, (dims, values) in (of_heads | of_planes).items()
    }
    moved = [np.roll(label, n) for n in (6, 2, 1, 0)]  # no positional head at first
    fall = 3 - np.arange(len(STEPS))
    return xr.Dataset(
        of_heads
        | of_planes
        | {f"growth_{name}": value for name, value in grown.items()}
        | {
            "label": (heads, label),
            "mean_wavelength": (heads, 100 * draw(2, 2)),
            "wavelength": (
                ("entry", "layer", "frequency"),
                np.array([[np.where(t, wavelength, np.inf)] * 2 for t in turning]),
            ),
            "loss": ("entry", loss),
            "loss_se": ("entry", np.full(count, 0.02)),
            "sequence_loss": (("entry", "sequence"), loss[:, None] + draw(8)),
            "position_loss": (("entry", "position_bin"), loss[:, None] + draw(7)),
            "first_loss": (("entry", "trial"), 5 + draw(4)),
            "repeat_loss": (("entry", "trial"), draw(4)),
            "copy_loss": (("entry", "copy_distance", "trial"), draw(9, 4)),
            "far_retrieval": (("entry", "prompt_length"), draw(7)),
            "retrieval": (dims, hit.mean(-1)),
            "retrieval_hit": ((*dims, "retrieval_trial"), hit),
            "growth_label": (("entry", "step", "layer", "head"), np.stack(moved, axis=1)),
            "growth_loss": (("entry", "step"), loss[:, None] + fall),
            "growth_position_loss": (
                ("entry", "step", "position_bin"),
                loss[:, None, None] + fall[:, None] + draw(1, 7),
            ),
            "growth_first_loss": (("entry", "step", "trial"), 5 + draw(len(STEPS), 4)),
            "growth_repeat_loss": (("entry", "step", "trial"), draw(len(STEPS), 4)),
            "growth_retrieval": (("entry", "step", *dims[1:]), draw(len(STEPS), 1, 3)),
        },
        coords={
            "entry": names,
            "group": ("entry", np.array([group for _, group, _ in entries], dtype=object)),
            "variant": ("entry", np.array([group for _, group, _ in entries], dtype=object)),
            "size": ("entry", np.array(["tiny"] * count, dtype=object)),
            "seed": ("entry", [seed for *_, seed in entries]),
            "partner": ("entry", [len(groups) * seed for *_, seed in entries]),
            "position_start": ("position_bin", start),
            "position_stop": ("position_bin", 2 * start),
            "copy_distance": [8 << k for k in range(9)],
            "prompt_length": [32 << k for k in range(7)],
            "step": list(STEPS),
            "tokens_seen": (("entry", "step"), [[128 * step for step in STEPS]] * count),
        },
        attrs={
            "model": ", ".join(groups),
            "baseline": groups[0],
            "findings": "A finding.",
            "seed": 0,
            "versions": json.dumps({"torch": "2"}),
            "created": "2026-01-01T00:00:00+00:00",
            **{"context": CONTEXT, "trained_context": CONTEXT},
            **{"sequences": 8, "head_sequences": 4, "growth_sequences": 2},
        },
    )
