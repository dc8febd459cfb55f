"""A recalibrated study that is written by hand: tiny models, and made-up losses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from filelock import FileLock
from tiny_checkpoints import identity_of, save_tiny
from trained import shared_folder
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import ropelens as rl
from ropelens.rope.variant_config import variant_config
from ropelens.runtime.folder import file_name
from ropelens.train.recalibration_study import OTHER_RATES

CONTEXT = 32
SEQUENCES = 8  # of the held-out text, in comparisons
TOKENS_PER_STEP = 8 * CONTEXT
STEPS = (0, 1, 2, 4)
DOCUMENTS = np.repeat(np.arange(8), 2)  # of the evaluated sequences
GAPS = {  # of the variants, at each evaluated step, in nats per token
    "control": (0.0, 0.0, 0.0, 0.0),
    "p-rope:0.5": (0.8, 0.6, 0.2, 0.04),
    "nope": (2.5, 2.5, 2.0, 1.0),
    "p-rope:0.75": (0.001, 0.001, 0.001, 0.001),
}
CONTROL_LOSS = (3.0, 2.99, 2.98, 2.97)
SETTINGS: dict[str, Any] = {
    "steps": 4,
    "sequences": 8,
    "context": CONTEXT,
    "learning_rate": 5e-4,
    "warmup": 0.1,
    "train": "all",
    "precision": "fp32",
    "evaluated": 16,
    "text_sha256": "text",
    "valid_sha256": None,
}


def write_study(
    folder: Path,
    *,
    variants: Sequence[str] = ("control", "p-rope:0.5", "nope"),
    seeds: Sequence[int] = (0,),
    control_loss: Sequence[float] = CONTROL_LOSS,
    weights: bool = False,
    other_rates: Mapping[str, Mapping[str, float]] | None = None,
) -> Path:
    """Write a finished study to `folder`; only with `weights`, its models can be measured.

    `other_rates` has the gaps after training of repeated variants, by the name of the rate.
    """
    folder.mkdir(parents=True)
    study = {"kind": "recalibration", "variants": [*variants], "seeds": [*seeds]}
    study["other_rates"] = [*variants[1:2]] if other_rates else []
    (folder / "study.json").write_text(json.dumps(study))
    base = folder.parent / "base"
    if not base.exists():
        save_tiny(base)
    write_data(folder / "data")
    for variant in variants:
        for seed in seeds:
            run = folder / file_name(variant) / f"seed-{seed}"
            write_run(run, base, variant=variant, seed=seed, control_loss=control_loss)
            if weights:
                write_weights(run, base, variant=variant, seed=seed)
    for name, gaps in (other_rates or {}).items():
        factor = OTHER_RATES[name]
        for variant, gap in gaps.items():
            first = GAPS[variant][0]
            write_run(
                folder / file_name(variant) / f"seed-{seeds[0]}-{name}",
                base,
                variant=variant,
                gaps=(first, first, first, gap),
                rate_factor=factor,
                learning_rate=SETTINGS["learning_rate"] * factor,
            )
    return folder


def write_data(folder: Path) -> None:
    folder.mkdir()
    random = np.random.default_rng(0)
    rows = random.integers(2, 28, size=(24, CONTEXT), dtype=np.uint16)
    rows[:, 0] = 0  # the beginning
    np.save(folder / "valid.npy", rows)
    np.save(folder / "valid_documents.npy", np.repeat(np.arange(8), 3))
    record = {"context": CONTEXT, "beginning": [0], "stages": ["train.npy"]}
    (folder / "data.json").write_text(json.dumps(record))


def write_run(
    folder: Path,
    base: Path,
    *,
    variant: str,
    seed: int = 0,
    gaps: Sequence[float] = (),
    control_loss: Sequence[float] = CONTROL_LOSS,
    documents: np.ndarray = DOCUMENTS,
    rate_factor: float = 1.0,
    **changes: Any,
) -> Path:
    """Write run.json, losses.csv and metrics.csv of a finished run."""
    folder.mkdir(parents=True)
    settings = SETTINGS | {"variant": variant, "seed": seed} | changes
    record = {
        "kind": "recalibration",
        "settings": settings,
        "base": {
            "name": str(base),
            "fingerprint": identity_of(base) if base.exists() else "files:0",
            "trained_context": 64,
            "revision": None,
            "trust_remote_code": False,
        },
        "data": "../../data",
        "rate_factor": rate_factor,
        "tokens": 4 * TOKENS_PER_STEP,
        "tokens_per_step": TOKENS_PER_STEP,
        "parameters": 1000,
        "finished": "2026-01-01T00:00:00+00:00",
    }
    (folder / "run.json").write_text(json.dumps(record))
    gap = gaps or GAPS[variant]
    write_losses(folder, np.add(control_loss, gap), documents, seed=seed)
    return folder


def write_losses(
    folder: Path, means: np.ndarray, documents: np.ndarray, *, seed: int = 0
) -> None:
    """Losses with these means at each step; documents and sequences differ alike."""
    difficulty = np.random.default_rng(0).normal(size=len(documents))
    difficulty -= difficulty.mean()
    rows = []
    for step, mean in zip(STEPS, means, strict=True):
        # The gap grows with the difficulty of the sequence, so that intervals have a width.
        for sequence, document in enumerate(documents):
            loss = mean * (1 + 0.02 * difficulty[sequence]) + 0.001 * seed * (step > 0)
            row = {"step": step, "sequence": sequence}
            rows.append(row | {"document": document, "loss": repr(float(loss))})
    pd.DataFrame(rows).to_csv(folder / "losses.csv", index=False)
    metrics = pd.DataFrame({"step": STEPS, "train_loss": [np.nan, 3.0, 2.9, 2.8]})
    metrics.to_csv(folder / "metrics.csv", index=False)


def write_weights(folder: Path, base: Path, *, variant: str, seed: int) -> None:
    """Weights near the weights of the base, with the rotation of the variant."""
    model = AutoModelForCausalLM.from_pretrained(base)
    config = model.config
    if variant != "control":
        config = variant_config(config, variant)
    trained = LlamaForCausalLM(config)
    random = torch.Generator().manual_seed(seed)
    weights: Mapping[str, torch.Tensor] = model.state_dict()
    changed = {}
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=random)
        changed[name] = weight + 0.01 * noise
    trained.load_state_dict(changed)
    trained.save_pretrained(folder)


@pytest.fixture(scope="session")
def recalibrated_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of three models. The first test process writes it."""
    folder = shared_folder(tmp_path_factory) / "recalibrated"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "study.lock"):
        if not (folder / "study").exists():
            write_study(folder / "study", weights=True)
    return folder / "study"


@pytest.fixture(scope="session")
def recalibrated(recalibrated_study: Path) -> xr.Dataset:
    """The comparison of the study. The first test process measures it."""
    cache = recalibrated_study.parent / "cache"
    with FileLock(recalibrated_study.parent / "compared.lock"):
        return rl.compare([recalibrated_study], cache=cache, sequences=SEQUENCES)
