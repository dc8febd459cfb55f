"""A plausible truncation sweep without a model, with the dims and names of `truncate`.

The cost of a set of planes is the sum of the costs of its planes. Fast planes cost most, and
planes slower than the context cost little. All numbers are made up.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import xarray as xr
from synthetic_profile import synthetic_profile

from ropelens.interventions.truncate import named_entries
from ropelens.rope.select import plan_cuts

LABELS = ("positional", "mixed", "semantic")
LENGTHS, DEPTHS, TRIALS = (128, 256, 512), (0.1, 0.5, 0.9), 16


def synthetic_truncation(
    *,
    layers: int = 5,
    heads: int = 8,
    frequencies: int = 16,
    keep: Sequence[float] = (1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0),
    ends: Sequence[str] = ("slow", "fast"),
    bands: int = 8,
    controls: int = 3,
    sequences: int = 32,
    context: int = 512,
    seed: int = 0,
) -> xr.Dataset:
    """A seeded sweep of the model of `synthetic_profile` with the same sizes."""
    rng = np.random.default_rng(seed)
    sizes = {"layers": layers, "heads": heads, "frequencies": frequencies, "context": context}
    profile, table = synthetic_profile(**sizes, seed=seed)
    wavelength = profile["wavelength"].values[0]
    turning = [dict(enumerate(wavelength.tolist()))] * layers
    cuts = plan_cuts(turning, keep=keep, ends=ends, bands=bands, controls=controls, seed=seed)
    cost = np.where(wavelength < context, 4.0 * wavelength**-0.3 / frequencies, 1e-4)
    total = np.array([sum(cost[n] for n in cut.stopped[0]) for cut in cuts])
    labels = table["label"].to_numpy().reshape(layers, heads)
    data = _losses(total, sequences, context, rng) | _tasks(total, (layers, heads), rng)
    data |= _heads(total, labels, rng)
    coordinates = {
        "edit": [cut.name(turning) for cut in cuts],
        "retrieval_length": list(LENGTHS),
        "depth": list(DEPTHS),
        "copy_distance": [63, 255],
        "inv_freq": profile["inv_freq"].variable,
        "wavelength": profile["wavelength"].variable,
    }
    dataset = xr.Dataset(data, coords=coordinates, attrs=_attributes(profile, context))
    for name, variable in dataset.variables.items():
        variable.attrs = {"long_name": str(name).replace("_", " "), "units": "1"}
    return named_entries(dataset, cuts, {"all": turning})


@pytest.fixture(scope="session")
def small():
    return synthetic_profile()


@pytest.fixture(scope="session")
def sweep() -> xr.Dataset:
    return synthetic_truncation()


def _losses(total: np.ndarray, sequences: int, context: int, rng: np.random.Generator) -> dict:
    base = 1.2 + 0.2 * rng.normal(size=sequences)
    wobble = 1 + 0.1 * rng.normal(size=(len(total), sequences))
    loss = base + total[:, None] * wobble
    start = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256])
    position = 1.2 + total[:, None] + 2 / np.sqrt(1 + start)
    return {
        "loss": (("edit", "sequence"), loss),
        "predicted_tokens": ("sequence", rng.integers(context // 2, context, sequences)),
        "position_loss": (("edit", "position_bin"), position),
        "position_loss_se": (("edit", "position_bin"), 0.02 + 0 * position),
        "far_loss": (("edit", "sequence"), loss),
        "far_tokens": ("sequence", np.full(sequences, context // 2)),
    }


def _tasks(total: np.ndarray, heads: tuple[int, int], rng: np.random.Generator) -> dict:
    share = np.exp(-total)
    best = rng.beta(1, 8, size=heads)
    trials = rng.normal(0, 0.05, size=(len(total), TRIALS))
    scores = (share[:, None] * (1 + trials))[..., None, None] * best
    copies = np.stack([4 + total[:, None] + trials] * 2, axis=1)
    sizes = (len(total), len(LENGTHS), len(DEPTHS), TRIALS)
    dims = ("edit", "retrieval_length", "depth", "trial")
    chance = (0.125 + 0.6 * share)[:, None, None, None]
    hit = (rng.random(sizes[1:]) < chance).astype(float)
    return {
        "induction": (("edit", "layer", "head"), share[:, None, None] * best),
        "trial_induction": (("edit", "trial", "layer", "head"), scores),
        "duplicate_token": (("edit", "layer", "head"), share[:, None, None] * best[::-1]),
        "repeat_loss": (("edit", "trial"), 5.0 - 2.0 * share[:, None] + trials),
        "first_loss": (("edit", "trial"), 6.0 + trials),
        "copy_loss": (("edit", "copy_distance", "trial"), copies),
        "retrieval_hit": (dims, hit),
        "retrieval": (dims[:3], hit.mean(-1)),
    }


def _heads(total: np.ndarray, label: np.ndarray, rng: np.random.Generator) -> dict:
    dims = ("edit", "layer", "head")
    labels = np.repeat(label[None], len(total), axis=0).astype(object)
    change = total[:, None, None] * rng.gamma(2, 0.5, size=label.shape)
    labels[change > 0.8] = "semantic"
    chance = np.clip(total / 4, 0, 1)[:, None]
    resampled = rng.binomial(label.size, chance, (len(total), 400))
    return {
        "attention_change": (dims, change),
        "label": (dims, labels),
        "labels_changed_resampled": (("edit", "resample"), resampled),
        "total_bits": (dims, np.full(change.shape, 2.0)),
    }


def _attributes(profile: xr.Dataset, context: int) -> dict:
    names = ("model", "dtype", "seed", "sequences", "rows", "versions", "created")
    copied = {name: profile.attrs[name] for name in names}
    return copied | {"kind": "truncation", "context": context, "trained_context": context}
