"""Differences between versions of the libraries that ropelens uses.

Each part states the version that makes it unnecessary. This file imports no slow library,
because commands and pages use it.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from packaging.version import Version

if TYPE_CHECKING:
    import xarray as xr
    from transformers import PreTrainedModel

OLDEST_TRANSFORMERS = "5.5"
# Language models (model_type) that a newer transformers than the oldest one has
FAMILIES_SINCE = {
    "5.6": ("hy_v3", "qianfan_ocr"),
    "5.7": ("laguna", "minicpmv4_6"),
    "5.8": ("deepseek_v4", "exaone4_5", "gemma4_assistant", "granite4_vision"),
    "5.9": ("cohere2_moe", "hrm_text", "hyperclovax"),
    "5.10": (
        "deepseek_ocr2",
        "gemma4_unified",
        "gemma4_unified_text",
        "glmga",
        "mellum",
    ),
    "5.11": ("cosmos3_omni", "deepseek_v32", "diffusion_gemma"),
    "5.12": ("minimax_m3_vl", "minimax_m3_vl_text"),
    "5.13": ("hunyuan_vl", "kimi_k25", "mimo_v2_flash", "minicpm3", "zaya"),
    "5.14": ("inkling_mm_model", "inkling_text"),
    "5.15": ("axk1", "axk2", "granite_swa", "granitemoe_swa", "muse_glimmer"),
    "5.16": (
        "cohere_compass",
        "cohere_compass_text",
        "qwen4_exp",
        "qwen4_exp_text",
        "step3p7",
    ),
    "5.17": ("glm5_next", "hy_v4", "kimi_linear"),
    "5.18": ("hyperclovax_vision_v2", "minicpmv4_7", "nemotron_h_omni"),
    "5.20": ("bailing_hybrid", "kolibri1", "molmo2", "muse_spark", "unlimited_ocr"),
    "5.21": ("beam", "flint", "minicpm_ocr"),
    "5.22": ("mistral_large4",),
    "5.23": (
        "dots3_note",
        "dots3_note_text",
        "granite_docling",
        "inkling2",
        "inkling2_text",
        "internlm3",
        "iquestcoder",
        "lfm3",
        "lfm3_vl",
    ),
    "5.24": (
        "apertus1p5",
        "apertus1p5_text",
        "dory",
        "exaone",
        "hy_v4_vl",
        "sarvam_mla",
        "sarvam_moe",
    ),
}
# Language models that did not show their attention to other functions before this version
SHOWN_SINCE = {
    "5.7": ("gemma4", "gemma4_text"),
    "5.13": ("diffllama",),
    "5.15": ("nemotron",),
    "5.24": ("codegen", "gptj"),
}
OLD_LINEAR_ATTENTION = "mamba"  # the type of a layer before transformers 5.13
OLD_M_ROPE = "apply_multimodal_rotary_pos_emb"
DATASET = re.compile(
    r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?"
)


def is_older(library: str, than: str) -> bool:
    """Whether the installed `library` is older than a version."""
    return Version(version(library)) < Version(than)


def refuse_old_transformers() -> None:
    """Raise ImportError for an older transformers; end the command `ropelens` with the line."""
    if not is_older("transformers", OLDEST_TRANSFORMERS):
        return
    line = f"ropelens needs transformers {OLDEST_TRANSFORMERS} or newer, and "
    line += f"{version('transformers')} is installed: pip install -U transformers"
    # `python -m` calls the program "-m" until it runs.
    if Path(sys.argv[0]).name in ("ropelens", "-m"):
        raise SystemExit(line)
    raise ImportError(line)


def newer_transformers(model_type: object) -> str | None:
    """The remedy if a newer transformers has this family, or shows its attention."""
    for families in (FAMILIES_SINCE, SHOWN_SINCE):
        for first, model_types in families.items():
            if model_type in model_types and is_older("transformers", first):
                return f"transformers {first} or newer for {model_type}"
    return None


def keeps_longest_rotation() -> bool:
    """Whether RoPE of type "dynamic" keeps the frequencies of the longest text that it read.

    Before transformers 5.15, the type did not return to the frequencies of short texts.
    """
    return is_older("transformers", "5.15")


def rotates_by_axes(modules: Iterable[Any]) -> bool:
    """Whether planes rotate with several positions of a token (M-RoPE)."""
    is_old = is_older("transformers", "5.17")
    for module in modules:
        if "mrope_section" in vars(module):
            return True
        # No module of Qwen2-VL had this attribute.
        file = sys.modules.get(type(module).__module__)
        if is_old and hasattr(file, OLD_M_ROPE):
            return True
    return False


def options_of_formula(
    rope_parameters: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, str]:
    """Arguments that the formula of a rope_type needs for Gemma 4 before transformers 5.15."""
    is_proportional = rope_parameters.get("rope_type") == "proportional"
    if not is_proportional or "global_head_dim" not in settings:
        return {}
    if is_older("transformers", "5.15"):
        return {"head_dim_key": "global_head_dim"}
    return {}


def cache_argument(parameters: Mapping[str, Any]) -> str:
    """The name of the argument for a key-value cache, `cache` since transformers 5.24."""
    return "cache" if "cache" in parameters else "past_key_values"


def without_quantization(model: Any) -> None:
    """Remove the statement that a model read from GGUF is quantized, because it has floats."""
    # It states nothing before transformers 5.18.
    vars(model.config).pop("quantization_config", None)
    vars(model).pop("hf_quantizer", None)


@contextmanager
def adapters_ignored() -> Iterator[None]:
    """Let transformers load only the model of a folder that also has an adapter.

    Since transformers 5.23, it looks for the adapter in the subfolder that it is told.
    """
    if not is_older("transformers", "5.23"):
        yield
        return
    with ExitStack() as stack:
        for module in ("models.auto.auto_factory", "integrations.peft"):
            namespace = sys.modules[f"transformers.{module}"]
            without = replaced(namespace, "find_adapter_config_file", _find_nothing)
            stack.enter_context(without)
        yield


def _find_nothing(*_: Any, **__: Any) -> None:
    pass


def load_adapter(model: Any, folder: str, *, dtype: Any) -> Any:
    """Add an adapter, and return the report about its weights."""
    if not is_older("transformers", "5.7"):
        return model.load_adapter(folder, dtype=dtype)
    reports = []

    def keep(*, loading_info: Any, **_: Any) -> None:
        reports.append(loading_info)

    # It only writes the report to the log.
    peft = sys.modules["transformers.integrations.peft"]
    with replaced(peft, "log_state_dict_report", keep):
        model.load_adapter(folder, dtype=dtype)
    return reports[0]


@contextmanager
def replaced(module: ModuleType, name: str, function: Any) -> Iterator[None]:
    """Replace a function of a module in the block."""
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


@dataclass(frozen=True)
class DatasetAddress:
    """The parts of hf://datasets/NAME/DATASET[@REVISION][/FOLDER]."""

    id: str
    revision: str | None
    folder: str


def parse_dataset(address: str) -> DatasetAddress:
    """The parts of an address; raises ValueError for something else."""
    if is_older("huggingface-hub", "1.14"):
        match = DATASET.fullmatch(address)
        if match is None:
            raise ValueError("it is not an address of a dataset")
        revision = None if match[2] is None else unquote(match[2])
        return DatasetAddress(match[1], revision, folder=match[3] or "")
    from huggingface_hub.utils import parse_hf_uri

    uri = parse_hf_uri(address)
    if uri.type != "dataset":
        raise ValueError(f"it is an address of a {uri.type}")
    return DatasetAddress(uri.id, uri.revision, uri.path_in_repo)


def netcdf_bytes(
    results: "xr.Dataset", encoding: Mapping[Any, Mapping[str, Any]]
) -> bytes:
    """The netCDF file of `results`, made in memory."""
    if not is_older("xarray", "2025.8"):
        return bytes(results.to_netcdf(engine="h5netcdf", encoding=encoding))
    import h5netcdf
    from xarray.backends import H5NetCDFStore

    content = BytesIO()
    with h5netcdf.File(content, "w") as file:
        results.dump_to_store(H5NetCDFStore(file), encoding=encoding)
    return content.getvalue()


def recompute_layers(model: "PreTrainedModel") -> None:
    """Let the backward pass compute the layers of `model` again, which saves memory."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # its name since 5.23
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)
