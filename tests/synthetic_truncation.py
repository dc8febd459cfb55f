"""A plausible truncation sweep without a model, with the dims and names of `truncate`.

The cost of a set of planes is the sum of the costs of its planes. Fast planes cost most, and
planes slower than the context cost little. All numbers are made up.
"""

from collections.abc import Iterable

import numpy as np
import pytest
import xarray as xr
from synthetic_profile import synthetic_profile

from ropelens.interventions.cuts import PlaneSweep
from ropelens.interventions.truncate import named_entries

LENGTHS = (128, 256, 512)
DEPTHS = (0.1, 0.5, 0.9)
TRIALS = 16
SEQUENCES = 32
CONTEXT = 512
KEEP = [planes / 8 for planes in range(8, -1, -1)]
COPIED = (
    "model",
    "dtype",
    "seed",
    "sequences",
    "rows",
    "versions",
    "created",
    "context",
    "trained_context",
)
EDIT_HEADS = ("edit", "layer", "head")


def synthetic_truncation(
    *, ends=("slow", "fast"), bands=8, controls=3, **sizes
) -> xr.Dataset:
    """A sweep of the model of `synthetic_profile` with these sizes."""
    rng = np.random.default_rng(0)
    profile, table = synthetic_profile(**sizes, context=CONTEXT)
    shape = profile["total_bits"].shape
    wavelength = profile["wavelength"].values[0]
    turning = [dict(enumerate(wavelength.tolist()))] * shape[0]
    sweep = PlaneSweep(keep=KEEP, ends=ends, bands=bands, controls=controls)
    cuts = sweep.plan(turning, seed=0)
    total = _costs([cut.stopped[0] for cut in cuts], wavelength)
    label = table["label"].to_numpy().reshape(shape)
    variables = {
        **_losses(total, rng),
        **_tasks(total, shape, rng),
        **_heads(total, label, rng),
    }
    coordinates = {
        "edit": [cut.edit for cut in cuts],
        "retrieval_length": list(LENGTHS),
        "depth": list(DEPTHS),
        "copy_distance": [63, 255],
        "inv_freq": profile["inv_freq"].variable,
        "wavelength": profile["wavelength"].variable,
    }
    attrs = {name: profile.attrs[name] for name in COPIED}
    attrs["kind"] = "truncation"
    dataset = xr.Dataset(variables, coords=coordinates, attrs=attrs)
    for name, variable in dataset.variables.items():
        variable.attrs = {"long_name": str(name).replace("_", " "), "units": "1"}
    return named_entries(dataset, cuts)


def _costs(stopped: list[Iterable[int]], wavelength: np.ndarray) -> np.ndarray:
    """The cost (nats) of each set of stopped planes."""
    fast = 4.0 * wavelength**-0.3 / len(wavelength)
    of_plane = np.where(wavelength < CONTEXT, fast, 1e-4)
    totals = []
    for planes in stopped:
        totals.append(sum(of_plane[plane] for plane in planes))
    return np.array(totals)


@pytest.fixture(scope="session")
def small():
    return synthetic_profile()


@pytest.fixture(scope="session")
def sweep() -> xr.Dataset:
    return synthetic_truncation()


def _losses(total: np.ndarray, rng: np.random.Generator) -> dict:
    base = 1.2 + 0.2 * rng.normal(size=SEQUENCES)
    wobble = 1 + 0.1 * rng.normal(size=(len(total), SEQUENCES))
    loss = base + total[:, None] * wobble
    start = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256])
    position = 1.2 + total[:, None] + 2 / np.sqrt(1 + start)
    predicted = rng.integers(CONTEXT // 2, CONTEXT, SEQUENCES)
    return {
        "loss": (("edit", "sequence"), loss),
        "predicted_tokens": ("sequence", predicted),
        "position_loss": (("edit", "position_bin"), position),
        "position_loss_se": (("edit", "position_bin"), 0.02 + 0 * position),
        "far_loss": (("edit", "sequence"), loss),
        "far_tokens": ("sequence", np.full(SEQUENCES, CONTEXT // 2)),
    }


def _tasks(total: np.ndarray, heads: tuple[int, int], rng: np.random.Generator) -> dict:
    share = np.exp(-total)
    by_edit = share[:, None, None]
    best = rng.beta(1, 8, size=heads)
    trials = rng.normal(0, 0.05, size=(len(total), TRIALS))
    of_trial = share[:, None] * (1 + trials)
    copies = np.stack([4 + total[:, None] + trials] * 2, axis=1)
    sizes = (len(LENGTHS), len(DEPTHS), TRIALS)
    chance = 0.125 + 0.6 * share
    hit = rng.random(sizes) < chance[:, None, None, None]
    hit = hit.astype(float)
    needles = ("edit", "retrieval_length", "depth")
    return {
        "induction": (EDIT_HEADS, by_edit * best),
        "trial_induction": (
            ("edit", "trial", "layer", "head"),
            of_trial[..., None, None] * best,
        ),
        "duplicate_token": (EDIT_HEADS, by_edit * best[::-1]),
        "repeat_loss": (("edit", "trial"), 5.0 - 2.0 * share[:, None] + trials),
        "first_loss": (("edit", "trial"), 6.0 + trials),
        "copy_loss": (("edit", "copy_distance", "trial"), copies),
        "retrieval_hit": ((*needles, "trial"), hit),
        "retrieval": (needles, hit.mean(-1)),
    }


def _heads(total: np.ndarray, label: np.ndarray, rng: np.random.Generator) -> dict:
    labels = np.repeat(label[None], len(total), axis=0).astype(object)
    change = total[:, None, None] * rng.gamma(2, 0.5, size=label.shape)
    labels[change > 0.8] = "semantic"
    chance = np.clip(total / 4, 0, 1)
    resampled = rng.binomial(label.size, chance[:, None], (len(total), 400))
    return {
        "attention_change": (EDIT_HEADS, change),
        "label": (EDIT_HEADS, labels),
        "label_change_confidence": (EDIT_HEADS, np.clip(change, 0, 1)),
        "labels_changed_resampled": (("edit", "resample"), resampled),
        "total_bits": (EDIT_HEADS, np.full(change.shape, 2.0)),
    }
