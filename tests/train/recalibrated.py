"""Bases and texts of recalibrations, and the runs that tests share."""

import random
import string
from pathlib import Path
from typing import Any

import pandas as pd
from oracles.tiny import tiny
from tiny_checkpoints import save_tiny
from transformers import PreTrainedModel

from ropelens.train.recalibration import recalibrate
from ropelens.train.recalibration_settings import Recalibration

MODELS = Path(__file__).parents[2] / "models"
SMOLLM2 = MODELS / "smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = MODELS / "gemma3-270m/gemma-3-270m-q4_k_m.gguf"
SHORT = {"context": 16, "steps": 5, "sequences": 4, "evaluated": 12}
"""Settings of a quick run."""


def write_documents(folder: Path, *, count: int = 20, words: int = 30) -> Path:
    """Files of random words, in which some words come again."""
    folder.mkdir()
    drawn = random.Random(0)
    known = ["".join(drawn.choices(string.ascii_lowercase, k=4)) for _ in range(12)]
    for number in range(count):
        text = " ".join(drawn.choices(known, k=words))
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def save_base(kind: str, folder: Path) -> str:
    """The name of a base: "bundled", or a folder with a tiny model of a family."""
    if kind == "bundled":
        return kind
    save_tiny(folder)  # its tokenizer
    model = tiny(kind)
    model.config.bos_token_id = 0
    model.config.eos_token_id = 1
    model.save_pretrained(folder)
    return str(folder)


def short_run(
    base: str, variant: str, *, out: Path, text: Path, **changes: Any
) -> Path:
    settings = Recalibration(**{**SHORT, "variant": variant, **changes})
    return recalibrate(base, settings, out=out, text=[text])


def losses_of(run: Path) -> pd.DataFrame:
    """The losses [step, sequence] of a run."""
    table = pd.read_csv(run / "losses.csv", converters={"loss": float})
    return table.pivot(index="step", columns="sequence", values="loss")


def same_weights(first: PreTrainedModel, second: PreTrainedModel) -> list[str]:
    """The names of the parameters that are equal in two models."""
    others = dict(second.named_parameters())
    names = []
    for name, weight in first.named_parameters():
        if weight.equal(others[name]):
            names.append(name)
    return names
