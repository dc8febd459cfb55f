"""The configuration of a checkpoint, read and checked by building its model without weights."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.checkpoints.files import (
    refuse_gguf_part,
    refuse_mlx,
    refuse_pointers,
)
from ropelens.checkpoints.gguf_rope import add_rope, check_rope
from ropelens.checkpoints.load_options import Loading
from ropelens.checkpoints.locate import locate
from ropelens.checkpoints.unread_folders import folder_without_config
from ropelens.compatibility import newer_transformers
from ropelens.errors import explained

ConfigInput = PreTrainedConfig | Mapping[str, Any] | str | Path
"""A configuration, its dict or file, or the name of a checkpoint."""


@dataclass(frozen=True)
class ConfiguredModel:
    """A configuration, and the numbers of weights in its model and in the largest tensor."""

    config: PreTrainedConfig
    parameters: int
    largest_tensor: int


def source_of(path: Path, loading: Loading) -> dict[str, Any]:
    """Arguments of transformers for reading a folder or a GGUF file."""
    source = {
        "local_files_only": True,
        "trust_remote_code": loading.trust_remote_code,
    }
    if path.is_dir():
        return {"pretrained_model_name_or_path": str(path), **source}
    return {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        **source,
    }


def read_config(path: Path, loading: Loading) -> ConfiguredModel:
    """Read the configuration in a folder or a GGUF file, and count the weights."""
    what = f"transformers cannot read the configuration in {path}."
    with explained(what, _hint(path)):
        config_file = path if path.is_file() else path / "config.json"
        if path.is_file():
            refuse_gguf_part(path)
        if config_file.is_file():
            refuse_pointers([config_file])
        if path.is_dir() and config_file.is_file():
            refuse_mlx(path)
        elif path.is_dir():
            fault = folder_without_config(path)
            if fault is not None:
                raise fault
        config = AutoConfig.from_pretrained(**source_of(path, loading))
        vars(config).pop("transformers_weights", None)  # weight_files chooses the files
        if path.is_file():
            inv_freq = add_rope(path, config)
            model = _without_weights(config, loading)
            if inv_freq is not None:
                check_rope(path, model, inv_freq)
        else:
            model = _without_weights(config, loading)
        model.tie_weights()  # else tied embeddings count twice
    return ConfiguredModel(
        config=config,
        parameters=model.num_parameters(),
        largest_tensor=max(weight.numel() for weight in model.parameters()),
    )


def _hint(path: Path) -> str:
    if path.is_file():
        return "download the file again, or use a newer transformers"
    config_file = path / "config.json"
    if config_file.is_file():
        newer = newer_transformers(_model_type(config_file))
        if newer is not None:
            return newer
        return (
            "a newer transformers; trust_remote_code=True for a model with its own code, "
            "after you have read the code"
        )
    return "a folder with config.json"


def _model_type(config_file: Path) -> object:
    with suppress(OSError, ValueError):
        settings = json.loads(config_file.read_text("utf-8"))
        if isinstance(settings, dict):
            return settings.get("model_type")
    return None


def _without_weights(config: PreTrainedConfig, loading: Loading) -> PreTrainedModel:
    with init_empty_weights():
        try:
            return auto_class(config).from_config(
                config, trust_remote_code=loading.trust_remote_code
            )
        except KeyError as error:
            known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            fault = f"it does not know {error}; a rope_type is {known}"
            raise ValueError(fault) from error


def read_config_of(source: ConfigInput) -> PreTrainedConfig:
    """The text configuration in a dict, a file or a checkpoint."""
    what = "The configuration cannot be read."
    with explained(what, "a config.json with a model_type"):
        if isinstance(source, PreTrainedConfig):
            config = source
        elif isinstance(source, Mapping):
            config = _config_of_dict(source)
        elif Path(source).suffix == ".json":
            settings = json.loads(Path(source).read_text("utf-8"))
            config = _config_of_dict(settings)
        else:
            loading = Loading()
            path = locate(str(source), loading).path
            config = AutoConfig.from_pretrained(**source_of(path, loading))
    return config.get_text_config()


def _config_of_dict(settings: Mapping[str, Any]) -> PreTrainedConfig:
    model_type = settings["model_type"]
    if model_type not in CONFIG_MAPPING:
        newer = newer_transformers(model_type) or "a newer transformers may have it"
        raise ValueError(f"no family of transformers is called {model_type}; {newer}")
    return CONFIG_MAPPING[model_type].from_dict(dict(settings))


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class of transformers for this configuration; it may also take images."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    return AutoModelForCausalLM
