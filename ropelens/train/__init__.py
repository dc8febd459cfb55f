"""Train LLaMA-style models that ropelens can look into."""

from __future__ import annotations

from ropelens.train.loop import TrainingFailed
from ropelens.train.run import train
from ropelens.train.sizes import SIZES, Size, model_config
from ropelens.train.study import Study, read_study, run_study

__all__ = [
    "SIZES",
    "Size",
    "Study",
    "TrainingFailed",
    "model_config",
    "read_study",
    "run_study",
    "train",
]
