"""Test which causal models of the installed transformers ropelens supports: docs/families.md.

    python tools/families.py            writes the page; two and a half minutes of one core
    python tools/families.py CLASS...   prints the rows of some classes

Builds a model of every class of AutoModelForCausalLM whose code mentions rotary embeddings,
from the configuration of the class, made tiny, with random weights of standard deviation 0.3.
Each class runs in a separate process. A class is supported if all of this holds:

- its rotation can be measured, and equals the rotation that the model states;
- attention recomputed from the captured queries and keys equals the attention of the model;
- a profile is made;
- an observed model gives the same logits to the bit, even if only the last logits are computed;
- with its slowest quarter stopped it rotates as the edit states, attends as captured, and gives
  other logits; a silenced head also changes the logits; afterwards it gives the first logits to
  the bit.

Otherwise the row has the error message that a user reads.
"""

import inspect
import multiprocessing
import re
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import xarray as xr
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.errors import RopelensError, words_of

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
VOCABULARY = 96
LONGEST = 8192
LARGEST = 100_000_000  # weights; a larger class has sizes that are missing in `SIZES`

SECONDS = 180
MEMORY = 4 * 2**30  # limits for one class

SIZES: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": LONGEST,
    "n_positions": LONGEST,
    "original_max_position_embeddings": LONGEST // 2,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "global_head_dim": 32,
    "rotary_dim": 8,
    "sliding_window": 12,
    "sliding_window_size": 12,
    "rel_extent": 32,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "zero_expert_num": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "ffn_hidden_size": 96,
    # latent attention and its indexer
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "o_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    # state-space and linear layers
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "n_mamba_heads": 4,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "lru_width": 64,
    # images and audio
    "image_size": 28,
    "patch_size": 14,
}
"""Tiny values for the sizes that a configuration may have."""

LATENT = {"head_dim": 8, "num_key_value_heads": 4}
"""Replaces entries of `SIZES` if keys come from one latent vector."""

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LOCAL_GLOBAL = ["sliding_attention", "full_attention"] * 2
_CONVOLUTION = ["conv", "full_attention"] * 2

SPECIAL: dict[str, dict[str, object]] = {
    "CohereCompassForCausalLM": {
        "layer_types": _LOCAL_GLOBAL,
        "rope_parameters": {kind: dict(_ROPE) for kind in _LOCAL_GLOBAL},
    },
    "BailingHybridForCausalLM": {
        "layer_types": ["linear_attention", "full_attention"] * 2
    },
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "BltForCausalLM": {
        "patch_size": 4,
        "encoder_hash_byte_group_vocab": VOCABULARY,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "DbrxForCausalLM": {
        "hidden_size": 2048,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96},
    },
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 128},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 2, "layer_types": _LOCAL_GLOBAL},
    "Gemma4ForCausalLM": {"num_kv_shared_layers": 2, "layer_types": _LOCAL_GLOBAL},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "position_embedding_type": "rope",
    },
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2ForCausalLM": {"layer_types": _CONVOLUTION},
    "Lfm2MoeForCausalLM": {"layer_types": _CONVOLUTION},
    "Lfm3ForCausalLM": {"layer_types": ["conv", *_LOCAL_GLOBAL[:2], "conv"]},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
"""Replaces entries of `SIZES` by class, so that its sizes fit each other."""


@dataclass(frozen=True)
class Row:
    """The result of a class: how its layers rotate, or why it is refused or was not tried.

    `features` lists the special features of its attention in the trial.
    """

    name: str
    types: str
    rotation: str = ""
    features: str = ""
    refused: str = ""
    untried: str = ""

    def __str__(self) -> str:
        words = self.refused or self.untried or f"{self.rotation} | {self.features}"
        return f"| `{self.name}` | {self.types} | {words} |"


def rotating() -> dict[str, str]:
    """The classes of AutoModelForCausalLM that rotate, each with its model types."""
    by_rotation: dict[str, list[str]] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        by_rotation.setdefault(name, []).append(model_type)
    return {
        name: ", ".join(types)
        for name, types in sorted(by_rotation.items())
        if _rotates(name)
    }


def _rotates(name: str) -> bool:
    """Whether the code that defines a class mentions rotary embeddings."""
    source = inspect.getsourcefile(getattr(transformers, name))
    assert source is not None
    return "rotary" in Path(source).read_text(encoding="utf-8").lower()


def tiny_config(
    kind: type[PreTrainedConfig], changes: dict[str, Any]
) -> PreTrainedConfig:
    """A configuration of this class with `SIZES` and `changes`, also in its parts."""
    plain = kind()
    named = plain.to_dict().keys() | plain.attribute_map.keys()
    latent = LATENT if "kv_lora_rank" in named else {}
    usual = {key: value for key, value in SIZES.items() if key in named}
    chosen = usual | latent | changes
    sizes = {key: value for key, value in chosen.items() if value is not None}
    for name in plain.sub_configs:
        part = getattr(plain, name)
        if isinstance(part, PreTrainedConfig):
            sizes[name] = tiny_config(type(part), changes.get(name, {}))
    return kind(**sizes)


def tiny(name: str) -> PreTrainedModel:
    """A model of the class `name`: float32, eager attention, weights of standard deviation 0.3.

    With 0.02, the default of transformers, attention is nearly even and hides wrong code.
    """
    kind = getattr(transformers, name)
    config = tiny_config(kind.config_class, SPECIAL.get(name, {}))
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in kind(config).parameters())
    assert weights < LARGEST, f"{weights:,} weights"
    generator = torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim < 2:
                weight.add_(0.1 * noise)
            else:
                weight.copy_(0.3 * noise)
    return model


def row(name: str, types: str) -> Row:
    """Build the class `name`, of these model types, and try it."""
    try:
        model = tiny(name)
    except Exception as error:
        return Row(name, types, untried=words_of(error, with_type=True)[:160])
    try:
        rotation, features = try_model(model)
        return Row(name, types, rotation=rotation, features=features)
    except RopelensError as error:
        reason = error.parts["seen"]
        return Row(
            name,
            types,
            refused=f"{error.what} Seen: {reason}." if reason else error.what,
        )


@torch.no_grad()
def try_model(model: PreTrainedModel) -> tuple[str, str]:
    """Test all operations on `model`; return its rotation and the features of its attention."""
    config = model.config.get_text_config()
    generator = torch.manual_seed(0)
    tokens = torch.randint(3, config.vocab_size, (2, 40), generator=generator)
    tokens[:, 0] = 1

    def run() -> torch.Tensor:
        return model(tokens, use_cache=False).logits

    logits = run()
    rope = rl.measure_rope(model)
    rl.capture(model, tokens[0])
    rl.profile(model, tokens, surrogates=0)
    features: set[str] = set()
    with rl.observe(model, lambda call, planes: features.update(special(call))):
        assert torch.equal(run(), logits), "observing changes the logits"
    if config.to_dict().get("num_kv_shared_layers"):
        features.add("layers that share keys")
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        last = partial(model, tokens, use_cache=False, logits_to_keep=1)
        last_logits = last().logits
        with rl.observe(model, lambda call, planes: None):
            assert torch.equal(last().logits, last_logits), (
                "observing changes the last logits"
            )
        features.add("last logits only")
    with rl.edit_rope(model, rl.stop_slowest(0.25)):
        edited = rl.measure_rope(model)
        assert bool((edited["inv_freq"] == 0).sum() > (rope["inv_freq"] == 0).sum())
        rl.capture(model, tokens[0])
        assert not torch.equal(run(), logits), "an edit does nothing"
    attend = rope["residual"].notnull().values
    with rl.silence_heads(model, f"{attend.argmax()}.0"):
        assert not torch.equal(run(), logits), "silence does nothing"
    assert torch.equal(run(), logits), "an edit or a silence stays"
    return described(rope), ", ".join(sorted(features))


def special(call: AttentionCall) -> Iterator[str]:
    """Features of a call other than causal attention to all earlier keys."""
    if call.visibility.mask is not None:
        yield "sparse mask"
    elif bool((call.visibility.first > 0).any()):
        yield "window"
    if call.softcap is not None:
        yield "soft-cap"
    if call.sink_logits is not None:
        yield "learned sinks"


def described(rope: xr.Dataset) -> str:
    """The rotation of all layers in words; equal layers are counted."""
    turning = (rope["inv_freq"] > 0).sum("frequency").values
    attends = rope["residual"].notnull().values
    pairings = rope["pairing"].values
    layers = []
    for planes, pairing, attend in zip(turning, pairings, attends, strict=True):
        if planes:
            layers.append(f"{planes} planes, {pairing}")
        elif attend:
            layers.append("none")
        else:
            layers.append("no attention")
    counts = Counter(layers)
    if len(counts) == 1:
        return layers[0]
    # A counter lists layers in the order in which they came first.
    words = [f"{layer} ({count} of {len(layers)})" for layer, count in counts.items()]
    return "; ".join(words)


def bounded(name: str, types: str) -> Row:
    """The row of a class, tested in a separate process with limited memory and time."""
    with multiprocessing.get_context("fork").Pool(1, _limit) as pool:
        try:
            return pool.apply_async(row, (name, types)).get(SECONDS)
        except multiprocessing.TimeoutError:
            return Row(name, types, untried=f"takes more than {SECONDS} seconds")
        except (
            Exception
        ) as error:  # such as too little memory, or a fault of this script
            return Row(
                name, types, untried=f"fails: {words_of(error, with_type=True)[:160]}"
            )


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()


def page(rows: list[Row]) -> str:
    """docs/families.md with the counts and tables of these rows, and its text unchanged."""
    supported = [row for row in rows if row.rotation]
    refused = [row for row in rows if row.refused]
    untried = [row for row in rows if row.untried]
    counts = (
        f"AutoModelForCausalLM of transformers {transformers.__version__} knows {len(rows)} "
        "classes whose code mentions rotary\nembeddings. ropelens supports "
        f"{len(supported)} classes, refuses {len(refused)}, and could not try {len(untried)}."
    )
    text = PAGE.read_text(encoding="utf-8").partition("\n## Supported\n")[0]
    pattern = r"AutoModelForCausalLM of .*? try \d+\."
    head = re.sub(pattern, lambda _: counts, text, count=1, flags=re.S)
    tables = [
        ("Supported", "rotation of a tiny model | tried with", supported),
        ("Refused", "message, and what was seen", refused),
        ("Not tried", "why no tiny model ran here", untried),
    ]
    parts = [
        table_of(title, words, listed) for title, words, listed in tables if listed
    ]
    return "\n".join([head, *parts])


def table_of(title: str, columns: str, rows: Sequence[object]) -> str:
    """A table with a title; `columns` are the headings after the class and its types."""
    rule = "|---" * (3 + columns.count("|"))
    head = f"## {title}\n\n| class | model types | {columns} |\n{rule}|\n"
    return head + "".join(f"{row}\n" for row in rows)


def main() -> None:
    torch.set_num_threads(1)
    types = rotating()
    row("LlamaForCausalLM", "")  # imports modules that every process would import again
    rows = []
    for name in sys.argv[1:] or types:
        rows.append(bounded(name, types[name]))
        print(rows[-1], flush=True)
    if not sys.argv[1:]:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
