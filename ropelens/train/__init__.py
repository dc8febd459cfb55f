"""Train LLaMA-style models that ropelens can look into."""

from __future__ import annotations

from ropelens.train.bundle import write_bundle
from ropelens.train.loop import TrainingFailed
from ropelens.train.run import train
from ropelens.train.sizes import SIZES, Size, model_config

__all__ = ["SIZES", "Size", "TrainingFailed", "model_config", "train", "write_bundle"]
