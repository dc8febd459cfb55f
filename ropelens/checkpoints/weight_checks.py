"""Checks of weights that transformers does not make, or reports only in its log."""

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedModel

from ropelens.errors import BadCheckpoint

ADAPTED = re.compile(r"\.(lora_\w+|base_layer)\.")  # weights under an adapter of peft
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


def check_head(
    model: PreTrainedModel, missing: Collection[str], saved_as: Sequence[str]
) -> None:
    """Raise BadCheckpoint if only the output weights are missing, as in a base model.

    `saved_as` are the classes of the saved model, as its configuration states them.
    """
    head = model.get_output_embeddings()
    names_of_head = [name for name, module in model.named_modules() if module is head]
    modules = {name.rpartition(".")[0] for name in missing}
    if modules != {*names_of_head} or type(model).__name__ in saved_as:
        return
    saved = ", ".join(saved_as) or "a model of unknown class"
    raise BadCheckpoint(
        f"The checkpoint has no output weights of {type(model).__name__}.",
        seen=f"weights of {saved}, without {_first_names(missing)}",
        means="base, reward and embedding models do not predict tokens",
        hint="the checkpoint of the language model from which it was trained",
    )


def check_weights(name: str, report: dict[str, set]) -> None:
    """Raise BadCheckpoint if the model lacks weights, and warn about unused tensors.

    `report` is the loading report of transformers about `name`, a class or an adapter.
    """
    mismatched = {}
    empty = set()
    for weight, in_file, in_model in report["mismatched_keys"]:
        mismatched[weight] = f"{[*in_file]} instead of {[*in_model]}"
        if 0 in in_file:
            empty.add(weight)
    if empty:
        raise _without_numbers(name, empty)
    unused = report["unexpected_keys"]
    missing = report["missing_keys"] | mismatched.keys()
    if missing:
        adapted = [tensor for tensor in unused if ADAPTED.search(tensor)]
        if adapted:
            raise _with_adapter(name, adapted)
        renamed = _renaming(missing, unused)
        if renamed is not None:
            raise renamed.error(name, missing, unused)
        seen = f"{len(missing)} missing or with another shape: {_first_names(missing)}"
        if mismatched:
            first = min(mismatched)
            seen += f"; {first} has the shape {mismatched[first]}"
        means = "transformers would use random numbers instead"
        hint = (
            "the config.json that was saved with these weights, and all of their files"
        )
        what = f"The checkpoint lacks weights of {name}."
        raise BadCheckpoint(what, seen=seen, means=means, hint=hint)
    if unused:
        tensors = f"{len(unused)} tensors of its file: {_first_names(unused)}"
        warnings.warn(
            f"{name} does not use {tensors}", stacklevel=6
        )  # the caller of load


def require_numbers(name: str, file: Path) -> None:
    """Raise BadCheckpoint if the file of an adapter has tensors of size 0."""
    empty = set()
    with safe_open(file, framework="pt") as tensors:
        for tensor in tensors.keys():  # noqa: SIM118
            if 0 in tensors.get_slice(tensor).get_shape():
                empty.add(tensor)
    if empty:
        raise _without_numbers(name, empty)


def _without_numbers(name: str, empty: Collection[str]) -> BadCheckpoint:
    return BadCheckpoint(
        f"The checkpoint has weights of {name} without numbers.",
        seen=f"{len(empty)} tensors of size 0: {_first_names(empty)}",
        means="with ZeRO-3 of DeepSpeed, each process holds a part of a tensor, and this "
        "file was saved without collecting the parts",
        hint="python zero_to_fp32.py . . --safe_serialization, in the folder that has this "
        "script; or save again with stage3_gather_16bit_weights_on_model_save",
    )


def _with_adapter(name: str, adapted: Collection[str]) -> BadCheckpoint:
    return BadCheckpoint(
        f"The weights of {name} were saved together with an adapter of peft.",
        seen=f"{len(adapted)} names such as {min(adapted)}",
        means="transformers reads an adapter only from its own file, next to plain weights",
        hint="save model.merge_and_unload(), or let save_pretrained of peft save the adapter",
    )


@dataclass(frozen=True)
class Renaming:
    """The `part` that a wrapper added to names of weights, in front of them or inside."""

    part: str
    in_front: bool

    def remove(self, name: str) -> str:
        """The name without the part."""
        if self.in_front:
            return name.removeprefix(self.part)
        return name.replace(f".{self.part}", ".")

    def key_mapping(self) -> str:
        """The argument of transformers that removes the part."""
        literal = re.escape(self.part)
        if self.in_front:
            return f'{{r"^{literal}": ""}}'
        return f'{{r"\\.{literal}": "."}}'

    def error(
        self, name: str, missing: Collection[str], unused: Collection[str]
    ) -> BadCheckpoint:
        """The error for a checkpoint of `name` whose names of weights have the part."""
        place = "begin with" if self.in_front else "contain"
        renamed = [tensor for tensor in unused if self.remove(tensor) in missing]
        hint = f"AutoModelForCausalLM.from_pretrained(OLD, key_mapping={self.key_mapping()})"
        return BadCheckpoint(
            f'The names of the weights of {name} {place} "{self.part}".',
            seen=f"{len(renamed)} names such as {min(renamed)}",
            means="DDP, torch.compile, peft, a trainer or another wrapper added it",
            # Otherwise transformers saves the names as it found them.
            hint=f"{hint}.save_pretrained(NEW_FOLDER, save_original_format=False)",
        )


def _renaming(missing: Collection[str], unused: Collection[str]) -> Renaming | None:
    """The part of names that explains most of the missing weights, or None."""
    counts: Counter[Renaming] = Counter()
    for name in unused:
        words = name.split(".")
        for index in range(1, len(words)):
            in_front = Renaming(".".join(words[:index]) + ".", in_front=True)
            inside = Renaming(f"{words[index]}.", in_front=False)
            for renaming in (in_front, inside):
                if renaming.remove(name) in missing:
                    counts[renaming] += 1
    if not counts:
        return None
    best = max(counts, key=lambda renaming: counts[renaming])
    return best if 2 * counts[best] > len(missing) else None


def _first_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    first = ", ".join(ordered[:3])
    return f"{first}, ..." if len(ordered) > 3 else first
