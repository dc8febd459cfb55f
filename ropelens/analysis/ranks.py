"""Files with the planes and heads of a profile, in the formats of other projects."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float

from ropelens.arguments import public
from ropelens.errors import BadArgument
from ropelens.profiles.measures import complete_profile
from ropelens.runtime.folder import write_whole

Project = Literal["mha2mla", "triattention", "duoattention"]


@public
def write_ranks(
    profile: xr.Dataset, project: Project, folder: str | Path
) -> list[Path]:
    """Write the files that `project` reads to `folder`, and return their paths.

    Raises `BadArgument` if the profile lacks the numbers or the model rotates in another way.
    """
    profile = complete_profile(profile)
    file_format = FORMATS[project]
    missing = [name for name in file_format.variables if not _is_known(profile, name)]
    seen = f"no {', '.join(missing)}" if missing else ""
    if not missing and file_format.needs_halves and not _pairs_halves(profile):
        seen = (
            "planes that do not pair coordinates f and f + F, or differ between layers"
        )
    if seen:
        raise BadArgument(
            f"{project} cannot use this profile.",
            seen=seen,
            hint="measure again, or another model",
        )
    files = file_format.make(profile)
    return [
        write_whole(Path(folder) / name, content) for name, content in files.items()
    ]


def _is_known(profile: xr.Dataset, name: str) -> bool:
    """Whether the profile has all numbers of a variable."""
    return name in profile and bool(np.isfinite(profile[name].values).all())


def _pairs_halves(profile: xr.Dataset) -> bool:
    """Whether all coordinates rotate in planes (f, f + F), equally in all layers."""
    alike = np.ptp(profile["inv_freq"].values, axis=0).max() < 1e-3
    whole = (profile["excerpt_planes"] == profile.sizes["frequency"]).all()
    return profile.attrs.get("pairing", "half") == "half" and bool(whole and alike)


def rank_planes(profile: xr.Dataset) -> dict[str, bytes | str]:
    """Ranks (uint8) [layer, kv_head, coordinate]; the plane with the largest |q||k| has rank 0.

    |q||k| is summed over the query heads that share the key. Source: src/mha2mla/2_norm.py and
    patch_func.py of github.com/JT-Ushio/MHA2MLA (arXiv 2502.14837).
    """
    q: Float[np.ndarray, "layer head frequency"] = profile["q_norm"].values
    k: Float[np.ndarray, "layer kv_head frequency"] = profile["k_norm"].values
    by_shared_key = q.reshape(len(q), k.shape[1], -1, k.shape[2])
    product = by_shared_key.sum(2) * k
    order = np.argsort(-product, kind="stable")
    ranks = np.argsort(order).astype(np.uint8)
    of_coordinates = np.tile(ranks, 2)
    return {"mha2mla-2_norm_rank.pth": _saved(torch.from_numpy(of_coordinates))}


def center_queries(profile: xr.Dataset) -> dict[str, bytes | str]:
    """Mean q~ and mean |q| of each plane of a head. (TriAttention needs no mean keys.)

    Source: scripts/calibrate.py and triattention/methods/pruning_utils.py of
    github.com/WeianMao/triattention.
    """
    mean = torch.tensor(profile["q_mean"].values, dtype=torch.float32, device="cpu")
    length = torch.tensor(profile["q_norm"].values, dtype=torch.float32, device="cpu")
    heads = np.argwhere(profile["q_norm"].values[..., 0]).tolist()
    stats: dict[str, dict[str, torch.Tensor]] = {}
    for layer, head in heads:
        stats[f"layer{layer:02d}_head{head:02d}"] = {
            "q_mean_real": mean[layer, head, :, 0].clone(),
            "q_mean_imag": mean[layer, head, :, 1].clone(),
            "q_abs_mean": length[layer, head].clone(),
        }
    scaling, _, _ = str(profile["scaling"].values[0]).partition(" ")
    metadata = {
        "num_traces": 1,
        "head_dim": 2 * length.shape[-1],
        "use_chat_template": False,
        "system_prompt": "",
        "prompt_template": "",
        "dtype": profile.attrs["dtype"],
        "attn_implementation": "sdpa",
        "kv_budget": 0,
        "rope_style": "half",
        "rope_type": scaling or "default",
        "inv_freq": profile["inv_freq"].values[0].tolist(),
        "sampled_heads": heads,
    }
    return {"triattention-stats.pt": _saved({"metadata": metadata, "stats": stats})}


def score_heads(profile: xr.Dataset) -> dict[str, bytes | str]:
    """Scores [layer, kv_head] from 0 (streaming) to 1 (retrieval): the largest induction score.

    The project trains gates instead. config.json has the project's default numbers of sinks
    and recent tokens. Source: duo_attn/utils.py of github.com/mit-han-lab/duo-attention.
    """
    induction = profile["induction"].values
    by_key = induction.reshape(len(induction), profile.sizes["kv_head"], -1)
    table = io.StringIO()
    np.savetxt(table, by_key.max(-1), delimiter="\t")
    config = {"model_name": profile.attrs["model"], "sink_size": 64, "recent_size": 256}
    return {
        "full_attention_heads.tsv": table.getvalue(),
        "config.json": json.dumps(config),
    }


def _saved(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


@dataclass(frozen=True)
class FileFormat:
    """Files of a project: `make` gives their contents from the `variables` of a profile.

    If it `needs_halves`, planes must pair the halves of a head, equally in all layers.
    """

    make: Callable[[xr.Dataset], dict[str, bytes | str]]
    variables: tuple[str, ...]
    needs_halves: bool = True


FORMATS: dict[Project, FileFormat] = {
    "mha2mla": FileFormat(rank_planes, ("q_norm", "k_norm")),
    "triattention": FileFormat(center_queries, ("q_mean", "q_norm")),
    "duoattention": FileFormat(score_heads, ("induction",), needs_halves=False),
}
