"""The base of a recalibration: a pretrained model that trains on, with a variant of RoPE."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from ropelens.checkpoints.files import weight_files
from ropelens.checkpoints.identity import identity
from ropelens.checkpoints.load import Opened, open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.config_facts import stated_context
from ropelens.errors import RopelensError, UnsupportedModel, explained
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
        path = self.opened.checkpoint.path
        if path.is_file():  # GGUF
            return torch.float32
        dtype = self.opened.config.dtype or stored_dtype(weight_files(path)[0])
        return dtype if dtype in HALF_PRECISION else torch.float32

    @cached_property
    def fingerprint(self) -> str:
        """The identity of the base, which reads all weights."""
        return identity(self.opened)

    def recorded(self) -> dict[str, Any]:
        """The base for run.json."""
        loading = self.opened.loading
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
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
            live = as_live_model(opened.read())
            with self._about(variant):
                opened = replace(opened, config=stored_config(live, variant))
        model = opened.read()
        with self._about(variant):
            _require_storable(model)
        model.requires_grad_(True)
        return model

    def check_variants(self, variants: Iterable[str]) -> None:
        """Raise `UnsupportedModel` if a configuration cannot store one of the variants."""
        live = as_live_model(self.opened.read())
        for variant in variants:
            if variant != CONTROL:
                with self._about(variant):
                    stored_config(live, variant)

    @contextmanager
    def _about(self, variant: str) -> Iterator[None]:
        """Name the base and the variant in an error about the configuration."""
        try:
            yield
        except RopelensError as error:
            raise UnsupportedModel(
                f"No configuration stores {variant} of {self.name}.",
                seen=error.line,
                hint="another variant; rl.edit_rope around a training loop of your own",
            ) from error


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


def stored_dtype(file: Path) -> torch.dtype | None:
    """The dtype of the first floating-point tensor in a file of safetensors."""
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            dtype = tensors.get_tensor(name).dtype
            if dtype.is_floating_point:
                return dtype
    return None


def _require_storable(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` if transformers cannot write the configuration of a model."""
    what = f"transformers cannot write the configuration of {type(model).__name__}."
    with explained(what, error=UnsupportedModel), TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)


def convert_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert a model to `dtype`, which its configurations then state."""
    nn.Module.to(model, dtype)
    model.config.dtype = dtype
    for name in model.config.sub_configs:
        getattr(model.config, name).dtype = dtype


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
