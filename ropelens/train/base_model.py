"""The base of a recalibration: a pretrained model that trains on, with a variant of RoPE."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ropelens.checkpoints.identity import identity
from ropelens.checkpoints.load import Opened, open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.config_facts import stated_context
from ropelens.errors import UnsupportedModel
from ropelens.interventions.export import stored_config
from ropelens.model.as_live_model import as_live_model
from ropelens.model.attention_hooks import attention_modules
from ropelens.train.recalibration_settings import CONTROL

HALF_PRECISION = (torch.bfloat16, torch.float16)
MATRIX_DIMS = 2


@dataclass(frozen=True)
class Base:
    """A checkpoint from which a recalibration starts."""

    opened: Opened

    @property
    def name(self) -> str:
        return self.opened.checkpoint.name

    @property
    def trained_context(self) -> int | None:
        return stated_context(self.opened.config)

    @property
    def own_dtype(self) -> torch.dtype:
        """The dtype of the trained weights in files: half precision if the base has it."""
        stated = self.opened.config.dtype
        if self.opened.checkpoint.path.is_dir() and stated in HALF_PRECISION:
            return stated
        return torch.float32

    def recorded(self) -> dict[str, Any]:
        """The base for run.json."""
        loading = self.opened.loading
        return {
            "name": self.name,
            "fingerprint": identity(self.opened),
            "trained_context": self.trained_context,
            "revision": self.opened.checkpoint.revision or None,
            "trust_remote_code": loading.trust_remote_code,
        }

    def read(self, variant: str = CONTROL) -> PreTrainedModel:
        """The base with the rotation of a variant, in float32 and ready to train.

        Raises `UnsupportedModel` if a configuration cannot store this rotation, which is the
        rotation that `edit_rope` gives.
        """
        opened = self.opened
        if variant != CONTROL:
            config = stored_config(as_live_model(opened.read()), variant)
            opened = replace(opened, config=config)
        model = opened.read()
        model.requires_grad_(True)
        return model


def open_base(name: str | Path, loading: Loading) -> Base:
    """Open a checkpoint without its weights; raises `UnsupportedModel` if it cannot train."""
    opened = open_checkpoint(name, loading)
    if opened.checkpoint.adapter is not None:
        raise UnsupportedModel(
            f"{opened.checkpoint.name} has an adapter.",
            seen=f"adapter weights in {opened.checkpoint.adapter}",
            hint="a merged model: model.merge_and_unload().save_pretrained(FOLDER)",
        )
    if opened.stays_quantized:
        raise UnsupportedModel(
            f"The weights of {opened.checkpoint.name} are quantized, and cannot train.",
            seen=f"quantization_config in {opened.checkpoint.path / 'config.json'}",
            hint="the checkpoint in float32 or bfloat16",
        )
    for key, value in opened.config.get_text_config().to_dict().items():
        if key.endswith("aux_loss_coef") and value:
            raise UnsupportedModel(
                f"{opened.checkpoint.name} is a mixture of experts with an auxiliary loss, "
                "which a recalibration does not train.",
                seen=f"{key} {value}",
                hint="a dense model",
            )
    return Base(opened)


def choose_parameters(model: PreTrainedModel, which: str) -> None:
    """Let "all" parameters of a model train, or only the projections of "attention"."""
    model.requires_grad_(which == "all")
    if which == "all":
        return
    projections = [*_projections(model)]
    if not projections:
        raise UnsupportedModel(
            f"{type(model).__name__} has no known projections of attention.",
            hint="--train all",
        )
    for projection in projections:
        projection.requires_grad_(True)


def _projections(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The projections of queries, keys, values and outputs of all layers."""
    for module in attention_modules(model):
        if "Attention" not in type(module).__name__:
            continue
        for child in module.children():
            weight = getattr(child, "weight", None)
            if weight is not None and weight.ndim == MATRIX_DIMS:
                yield child


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that train; weights that are shared are counted once."""
    return [weight for weight in model.parameters() if weight.requires_grad]
