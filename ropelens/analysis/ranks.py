"""Files with the planes and heads of a profile, in the formats of other projects."""

import io
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr

from ropelens.arguments import public
from ropelens.errors import BadArgument
from ropelens.runtime.folder import write_whole

Project = Literal["mha2mla", "triattention", "duoattention"]


@public
def write_ranks(
    profile: xr.Dataset, project: Project, folder: str | Path
) -> list[Path]:
    """Write the files that `project` reads to `folder`, and return their paths.

    Raises `BadArgument` if the profile lacks the numbers or the model rotates in another way.
    """
    make, *names = FORMATS[project]
    arrays = [profile.get(name, xr.DataArray(np.nan)).values for name in names]
    alike = np.ptp(profile["inv_freq"].values, axis=0).max() < 1e-3
    whole = (profile["excerpt_planes"] == profile.sizes["frequency"]).all()
    pairs = profile.attrs.get("pairing", "half") == "half" and whole and alike
    lacks = ", ".join(
        n for n, x in zip(names, arrays, strict=True) if not np.isfinite(x).all()
    )
    if lacks or not (pairs or project == "duoattention"):
        seen = (
            "planes that do not pair coordinates f and f + F, or differ between layers"
        )
        what, seen = (
            f"{project} cannot use this profile.",
            f"no {lacks}" if lacks else seen,
        )
        raise BadArgument(what, seen=seen, hint="measure again, or another model")
    files = make(profile, *arrays)
    return [
        write_whole(Path(folder) / name, content) for name, content in files.items()
    ]


def rank_planes(_: xr.Dataset, q: np.ndarray, k: np.ndarray) -> dict[str, bytes]:
    """Ranks (uint8) [layer, kv_head, coordinate]; the plane with the largest |q||k| has rank 0.

    |q||k| is summed over the query heads that share the key. Source: src/mha2mla/2_norm.py and
    patch_func.py of github.com/JT-Ushio/MHA2MLA (arXiv 2502.14837).
    """
    product = q.reshape(len(q), k.shape[1], -1, k.shape[2]).sum(2) * k
    ranks = np.argsort(np.argsort(-product, kind="stable")).astype(np.uint8)
    return {"mha2mla-2_norm_rank.pth": _saved(torch.from_numpy(np.tile(ranks, 2)))}


def center_queries(
    profile: xr.Dataset, q: np.ndarray, length: np.ndarray
) -> dict[str, bytes]:
    """Mean q~ and mean |q| of each plane of a head. (TriAttention needs no mean keys.)

    Source: scripts/calibrate.py and triattention/methods/pruning_utils.py of
    github.com/WeianMao/triattention.
    """
    names = ("q_mean_real", "q_mean_imag", "q_abs_mean")
    arrays = torch.tensor(np.stack([q[..., 0], q[..., 1], length]), dtype=torch.float32)
    heads = np.argwhere(length[..., 0]).tolist()
    stats = {
        f"layer{layer:02d}_head{head:02d}": dict(
            zip(names, arrays[:, layer, head].clone(), strict=True)
        )
        for layer, head in heads
    }
    metadata: dict[str, Any] = {"num_traces": 1, "head_dim": 2 * length.shape[-1]}
    metadata |= {"use_chat_template": False, "system_prompt": "", "prompt_template": ""}
    metadata |= {"dtype": profile.attrs["dtype"], "attn_implementation": "sdpa"}
    scaling = str(profile["scaling"].values[0]).partition(" ")[0]
    metadata |= {
        "kv_budget": 0,
        "rope_style": "half",
        "rope_type": scaling or "default",
    }
    metadata |= {
        "inv_freq": profile["inv_freq"].values[0].tolist(),
        "sampled_heads": heads,
    }
    return {"triattention-stats.pt": _saved({"metadata": metadata, "stats": stats})}


def score_heads(profile: xr.Dataset, induction: np.ndarray) -> dict[str, str]:
    """Scores [layer, kv_head] from 0 (streaming) to 1 (retrieval): the largest induction score.

    The project trains gates instead. config.json has the project's default numbers of sinks
    and recent tokens. Source: duo_attn/utils.py of github.com/mit-han-lab/duo-attention.
    """
    scores = induction.reshape(len(induction), profile.sizes["kv_head"], -1).max(-1)
    np.savetxt(table := io.StringIO(), scores, delimiter="\t")
    config = {"model_name": profile.attrs["model"], "sink_size": 64, "recent_size": 256}
    return {
        "full_attention_heads.tsv": table.getvalue(),
        "config.json": json.dumps(config),
    }


def _saved(content: object) -> bytes:
    torch.save(content, stream := io.BytesIO())
    return stream.getvalue()


FORMATS: dict[Project, tuple[Any, ...]] = {
    "mha2mla": (rank_planes, "q_norm", "k_norm"),
    "triattention": (center_queries, "q_mean", "q_norm"),
    "duoattention": (score_heads, "induction"),
}
"""The function that makes the files of a project, and the variables that it needs."""
