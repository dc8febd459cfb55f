"""A comparison with made-up numbers, without a model."""

import json

import numpy as np
import xarray as xr

from ropelens.budget.labels import LABELS
from ropelens.comparison.compare import with_best_induction

STEPS = (1, 2, 4, 8)
CONTEXT = 32
SIZES = {
    "layer": 2,
    "head": 2,
    "kv_head": 1,
    "frequency": 8,
    "sequence": 8,
    "trial": 4,
    "position_bin": 7,
    "copy_distance": 9,
    "prompt_length": 7,
    "step": len(STEPS),
    "retrieval_length": 1,
    "depth": 3,
    "retrieval_trial": 5,
}
HEADS = ("layer", "head")
PLANES = ("layer", "head", "frequency")
GROWN = {
    "previous_token": HEADS,
    "induction": HEADS,
    "positional_fraction": HEADS,
    "q_norm": PLANES,
    "k_norm": ("layer", "kv_head", "frequency"),
    "selectivity_keys": PLANES,
}
NEEDLES = ("retrieval_length", "depth")
GROUPS = ("rope", "p-rope:0.5", "nope")
TURNING = (8, 4, 0)  # planes that rotate in each group; further groups have none


class Drawn:
    def __init__(self, groups: tuple[str, ...]) -> None:
        self.random = np.random.default_rng(0)
        self.number = np.tile(np.arange(len(groups)), 2)
        self.seed = np.repeat([0, 1], len(groups))
        self.group = np.array(groups, dtype=object)[self.number]

    def __call__(self, *dims: str) -> xr.DataArray:
        sizes = [SIZES[name] for name in dims]
        values = self.random.uniform(0.1, 0.9, size=(len(self.group), *sizes))
        return xr.DataArray(values, dims=("entry", *dims))

    def heads_and_planes(self) -> xr.Dataset:
        """Values in proportion to the step; labels change with the step."""
        made = xr.Dataset({name: self(*dims) for name, dims in GROWN.items()})
        trials = 1 + 0.1 * np.random.default_rng(1).normal(size=(len(self.group), 4))
        noise = xr.DataArray(trials, dims=("entry", "trial"))
        made["trial_induction"] = noise * made["induction"]
        share = xr.DataArray(np.array(STEPS) / STEPS[-1], dims="step")
        grown = (made * share).transpose("entry", "step", ...)
        label = np.resize(np.array(LABELS, dtype=object), (len(self.group), 2, 2))
        moved = np.stack([np.roll(label, n) for n in (6, 2, 1, 0)], axis=1)
        grown = with_best_induction(grown)
        for name, values in grown.items():
            made[f"growth_{name}"] = values
        return made.assign(
            label=(("entry", *HEADS), label),
            growth_label=(("entry", "step", *HEADS), moved),
            mean_wavelength=100 * self(*HEADS),
            wavelength=(("entry", "layer", "frequency"), self.wavelengths()),
        )

    def wavelengths(self) -> np.ndarray:
        """Wavelengths [entry, layer, frequency], which are equal in both layers."""
        wavelength = 2 * np.pi * 10_000.0 ** (np.arange(8) / 8)
        by_entry = []
        for number in self.number:
            turning = TURNING[number] if number < len(TURNING) else 0
            of_layer = np.where(np.arange(8) < turning, wavelength, np.inf)
            by_entry.append([of_layer, of_layer])
        return np.array(by_entry)

    def losses(self) -> dict[str, xr.DataArray]:
        values = 3 + 0.1 * self.number + 0.01 * self.seed * (1 + self.number)
        loss = xr.DataArray(values, dims="entry")
        early = loss + xr.DataArray(3 - np.arange(len(STEPS)), dims="step")
        return {
            "loss": loss,
            "loss_se": xr.full_like(loss, 0.02),
            "sequence_loss": loss + self("sequence"),
            "position_loss": loss + self("position_bin"),
            "first_loss": 5 + self("trial"),
            "repeat_loss": self("trial"),
            "copy_loss": self("copy_distance", "trial"),
            "far_retrieval": self("prompt_length"),
            "growth_loss": early,
            "growth_position_loss": early + self("position_bin"),
            "growth_first_loss": 5 + self("step", "trial"),
            "growth_repeat_loss": self("step", "trial"),
            "growth_retrieval": self("step", *NEEDLES),
        }


def synthetic_comparison(*, groups: tuple[str, ...] = GROUPS) -> xr.Dataset:
    """Two seeds of each group. Half of the second's planes, and all of the third's, stand."""
    draw = Drawn(groups)
    hit = draw(*NEEDLES, "retrieval_trial").round()
    count = len(draw.group)
    names = []
    for group, seed in zip(draw.group, draw.seed, strict=True):
        names.append(f"{group} seed {seed}")
    start = np.array([1, 2, 4, 8, 16, 32, 64])
    comparison = draw.heads_and_planes().assign(draw.losses())
    comparison["retrieval"] = hit.mean("retrieval_trial")
    comparison["retrieval_hit"] = hit
    comparison = comparison.assign_coords(
        entry=np.array(names, dtype=object),
        group=("entry", draw.group),
        variant=("entry", draw.group.copy()),
        seed=("entry", draw.seed),
        partner=("entry", len(groups) * draw.seed),
        size=("entry", np.array(["tiny"] * count, dtype=object)),
        position_start=("position_bin", start),
        position_stop=("position_bin", 2 * start),
        copy_distance=[8 << k for k in range(9)],
        prompt_length=[32 << k for k in range(7)],
        step=list(STEPS),
        tokens_seen=(("entry", "step"), [[128 * step for step in STEPS]] * count),
    )
    return comparison.assign_attrs(
        model=", ".join(groups),
        baseline=groups[0],
        findings="A finding.",
        versions=json.dumps({"torch": "2"}),
        created="2026-01-01T00:00:00+00:00",
        seed=0,
        context=CONTEXT,
        trained_context=CONTEXT,
        sequences=8,
        head_sequences=4,
        growth_sequences=2,
    )
