"""`load`: the name of a checkpoint becomes a model that can be measured, or a clear error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ropelens.errors import BadArgument, BadCheckpoint, UnsupportedModel, words_of
from ropelens.models import checks, llama2c
from ropelens.models.checkpoint import (
    PICKLE_SUFFIXES,
    locate,
    pickle_refused,
    read_config,
    weight_files,
)

DTYPES = ("float32", "float16", "bfloat16", "float64", "auto")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "*.tiktoken"),
)


def load(
    name: str | Path,
    *,
    dtype: str = "float32",
    device: str = "auto",
    revision: str | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A causal language model and its tokenizer, ready to be measured.

    `name`: a local folder, a llama2.c `.bin` file, "bundled", "bundled:NAME", or a Hub id
    at `revision`. Only safetensors are read, never a pickle. The tokenizer is None where
    the checkpoint has none; text then cannot be used, token ids can.

    `dtype`: float32 on every device unless said otherwise, so that a measurement does not
    depend on the machine; "auto" keeps the checkpoint's own. `device`: "auto" takes CUDA
    where there is one. The model is in evaluation mode, its weights take no gradients, and
    the random state of torch is left as it was.

    Raises BadCheckpoint for files or weights that are missing or broken, UnsupportedModel
    for what is no causal language model, BadArgument for the other arguments. Warns where
    the checkpoint holds more than the model uses, or its config sets what has no effect.
    """
    if dtype not in DTYPES:
        raise BadArgument(
            f"There is no dtype {dtype!r}.", attempt=f"one of {', '.join(DTYPES)}"
        )
    arguments = {"dtype": dtype, "device_map": {"": _device(device)}}
    with _quiet_transformers():
        checkpoint = locate(str(name), revision=revision, local_files_only=local_files_only)
        if checkpoint.path.is_dir():
            model, tokenizer = _read_folder(checkpoint.path, trust_remote_code, arguments)
        else:
            model, tokenizer = _read_file(checkpoint.path, arguments)
        model.config._name_or_path = checkpoint.name
        model.eval().requires_grad_(False)
        checks.check_finite(model)
        checks.check_causal(model)
    checks.warn_of_idle_rotary_factor(model)
    return model, tokenizer


def _read_folder(
    folder: Path, trust_remote_code: bool, arguments: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    written = read_config(folder)
    checks.check_model_type(written, trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a wrong value makes its class raise
        raise BadCheckpoint(
            f"{folder / 'config.json'} is refused by transformers.",
            seen=words_of(error, kind=True),
        ) from error
    checks.check_architecture(config)
    weight_files(folder, config=written)
    model = _build(
        AutoModelForCausalLM,
        folder,
        folder,
        config=config,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # check_loading refuses them by name
        **arguments,
    )
    return model, _read_tokenizer(folder, trust_remote_code)


def _read_file(
    path: Path, arguments: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    if path.suffix in PICKLE_SUFFIXES - {".bin"}:
        raise pickle_refused(path)
    if path.suffix != ".bin":
        raise BadCheckpoint(
            f"{path} is a file, and not one of llama2.c (.bin).",
            attempt=f"pass the folder that holds config.json and the weights: {path.parent}",
        )
    config, state = llama2c.read_model(path)
    model = _build(LlamaForCausalLM, path, None, config=config, state_dict=state, **arguments)
    beside = llama2c.tokenizer_file(path, vocabulary=config.vocab_size)
    if beside is None:
        return model, None
    return model, llama2c.read_tokenizer(beside, vocabulary=config.vocab_size)


def _read_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    # Without any of these files AutoTokenizer makes an empty tokenizer of the model's family.
    if not any(found for pattern in TOKENIZER_FILES for found in folder.glob(pattern)):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever a damaged file makes its class raise
        raise BadCheckpoint(
            f"The tokenizer in {folder} cannot be read.",
            seen=words_of(error, kind=True),
            attempt="fetch its files again, or remove them to work with token ids",
        ) from error


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unknown = BadArgument(
        f"There is no device {name!r}.", attempt="auto, cpu, cuda, or cuda:1 and the like"
    )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown from error
    if device.type not in ("cpu", "cuda"):  # sums are in float64, which others lack
        raise unknown
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadArgument(
            f"The device {name!r} needs CUDA, which is not available.",
            seen=f"torch {torch.__version__}",
            attempt="device cpu, or a torch built for CUDA on a machine with a GPU",
        )
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadArgument(
            f"The device {name!r} does not work here.",
            seen=words_of(error, kind=True),
            attempt="device cpu",
        ) from error
    return device


def _build(family: Any, path: Path, source: Path | None, **arguments: Any) -> PreTrainedModel:
    """The checked model that transformers makes of `source` or the arguments, from `path`."""
    try:
        model, found = family.from_pretrained(source, output_loading_info=True, **arguments)
    except torch.OutOfMemoryError as error:
        raise BadArgument(
            f"The model in {path} does not fit into the memory of the device.",
            seen=words_of(error, kind=True),
            attempt="a smaller dtype (bfloat16), or another device",
        ) from error
    except ImportError as error:
        raise UnsupportedModel(
            f"The model in {path} needs a package that is not installed.",
            seen=words_of(error, kind=True),
        ) from error
    except Exception as error:  # the files' fault: nothing of ours runs inside
        raise BadCheckpoint(
            f"transformers cannot load the model in {path}.", seen=words_of(error, kind=True)
        ) from error
    checks.check_loading(model, found)
    return model


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No reports of transformers: they are checked here. No progress bars in a log file."""
    verbosity = transformers_logging.get_verbosity()
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    hide_bars = transformers_logging.is_progress_bar_enabled() and not on_terminal
    transformers_logging.set_verbosity_error()
    if hide_bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if hide_bars:
            transformers_logging.enable_progress_bar()
