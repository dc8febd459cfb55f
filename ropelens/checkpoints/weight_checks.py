"""Checks of weights that transformers does not make, or reports only in its log."""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from ropelens.errors import BadCheckpoint

WEIGHT_SCALE = re.compile(r"\.(weight[._]scale\w*|q?scale_weight|scales?(_inv)?)$")


def require_floats(files: Iterable[Path]) -> None:
    """Raise ValueError for integers, which transformers would use as weights."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                dtype = tensors.get_slice(name).get_dtype()
                if name.endswith(".weight") and dtype.startswith(("I", "U")):
                    fault = f"{name} is {dtype} without a quantization in config.json"
                    raise ValueError(fault)


def check_scales(files: Iterable[Path], unused: set[str]) -> None:
    """Raise BadCheckpoint if the model uses weights without their scales, which are not 1.

    `unused` are the names of tensors that the model does not use.
    """
    scales = set()
    for name in unused:
        if (
            WEIGHT_SCALE.search(name)
            and WEIGHT_SCALE.sub(".weight", name) not in unused
        ):
            scales.add(name)
    if not scales:
        return
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in scales & set(tensors.keys()):
                if (tensors.get_tensor(name).float() == 1).all():
                    scales.remove(name)
    if scales:
        what = "Weights in few bits are wrong, because nothing multiplies them by their scales."
        seen = (
            f"{len(scales)} scales that the model does not use: {_first_names(scales)}"
        )
        hint = "the model in bfloat16, or with weights that transformers scales"
        raise BadCheckpoint(what, seen=seen, hint=hint)


def check_weights(name: str, report: dict[str, set]) -> None:
    """Raise BadCheckpoint if the model lacks weights, and warn about unused tensors.

    `report` is the loading report of transformers about `name`, a class or an adapter.
    """
    mismatched = {weight for weight, *_ in report["mismatched_keys"]}
    missing = report["missing_keys"] | mismatched
    if missing:
        seen = f"{len(missing)} missing or with another shape: {_first_names(missing)}"
        means = "transformers would use random numbers instead"
        what = f"The checkpoint lacks weights of {name}."
        raise BadCheckpoint(what, seen=seen, means=means)
    unused = report["unexpected_keys"]
    if unused:
        tensors = f"{len(unused)} tensors of its file: {_first_names(unused)}"
        warnings.warn(
            f"{name} does not use {tensors}", stacklevel=6
        )  # the caller of load


def _first_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    first = ", ".join(ordered[:3])
    return f"{first}, ..." if len(ordered) > 3 else first
