"""Files for other projects, read in the way in which each project reads them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import xarray as xr
from torch import Tensor, nn

import ropelens as rl
from ropelens.analysis.ranks import write_ranks
from ropelens.commands.app import app
from ropelens.errors import BadArgument

LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16


@dataclass(frozen=True, eq=False)
class Recorded:
    """A profile of a tiny Llama, and its queries and keys before RoPE.

    The axes of queries and keys are layer, token, head and coordinate.
    """

    profile: xr.Dataset
    queries: Tensor
    keys: Tensor


def tiny_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        vocab_size=50,
        num_hidden_layers=LAYERS,
        num_key_value_heads=KV_HEADS,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).eval()


def append_heads(outputs: list[Tensor]) -> Callable[..., None]:
    """A forward hook that appends the output of a projection, split into heads."""

    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        tokens = output.flatten(0, 1)
        heads = tokens.unflatten(-1, (-1, HEAD_DIM))
        outputs.append(heads.double())

    return hook


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    torch.manual_seed(0)
    model = tiny_llama()
    ids = torch.randint(3, 50, (4, 40))
    profile = rl.profile(model, ids, budget=False)
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(append_heads(queries))
        layer.self_attn.k_proj.register_forward_hook(append_heads(keys))
    with torch.no_grad():
        model(ids)
    return Recorded(profile, queries=torch.stack(queries), keys=torch.stack(keys))


def mean_plane_norms(vectors: Tensor) -> Tensor:
    """Mean length of each plane [layer, head, plane] over tokens."""
    planes = vectors.unflatten(-1, (2, HEAD_DIM // 2))
    return planes.norm(dim=-2).mean(1)


def largest(scores: Tensor, count: int) -> Tensor:
    """Whether a score is among the largest `count` scores of the last axis."""
    zeros = torch.zeros_like(scores)
    return zeros.scatter(-1, scores.topk(count).indices, 1).bool()


def test_mha2mla_reads_the_ranks_of_the_norms_of_its_own_measurement(
    recorded, tmp_path
):
    (file,) = write_ranks(recorded.profile, "mha2mla", tmp_path)
    ranks = torch.load(file, weights_only=True)
    assert ranks.shape == (LAYERS, KV_HEADS, HEAD_DIM)
    assert ranks.dtype == torch.uint8

    q_norm = mean_plane_norms(recorded.queries)
    k_norm = mean_plane_norms(recorded.keys)
    product = q_norm * k_norm.repeat_interleave(2, dim=1)
    by_key_head = product.unflatten(1, (KV_HEADS, 2)).sum(2)
    for kept in range(1, HEAD_DIM // 2):  # planes that MHA2MLA still rotates
        kept_planes = largest(by_key_head, kept)
        expected = torch.cat([kept_planes, kept_planes], -1)
        assert torch.equal(ranks < kept, expected)


def as_complex(vectors: Tensor) -> Tensor:
    """Planes of half pairing as complex numbers."""
    real, imag = vectors.chunk(2, dim=-1)
    return torch.complex(real, imag)


def assert_metadata(metadata: dict) -> None:
    """The metadata has the keys that TriAttention needs, and the planes of the model."""
    needed = {"prompt_template", "use_chat_template", "attn_implementation", "dtype"}
    expected_inv_freq = 1e4 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert needed <= metadata.keys()
    assert metadata["rope_style"] == "half"
    assert metadata["rope_type"] == "default"
    assert metadata["head_dim"] == HEAD_DIM
    np.testing.assert_allclose(metadata["inv_freq"], expected_inv_freq, rtol=1e-4)


def assert_statistics(statistics: dict[str, Tensor], queries: Tensor) -> None:
    """The statistics of a head are means of its queries [token, coordinate]."""
    z = as_complex(queries)
    q_mean = torch.complex(statistics["q_mean_real"], statistics["q_mean_imag"])
    q_abs_mean = statistics["q_abs_mean"].double()
    torch.testing.assert_close(q_mean.to(z), z.mean(0), rtol=0, atol=1e-4)
    torch.testing.assert_close(q_abs_mean, z.abs().mean(0), rtol=1e-4, atol=0)


def test_triattention_reads_the_mean_queries(recorded, tmp_path):
    (file,) = write_ranks(recorded.profile, "triattention", tmp_path)
    payload = torch.load(file, weights_only=True)
    metadata = payload["metadata"]
    assert_metadata(metadata)

    expected_heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    sampled_heads = [tuple(head) for head in metadata["sampled_heads"]]
    assert sampled_heads == expected_heads
    for layer, head in expected_heads:
        statistics = payload["stats"][f"layer{layer:02d}_head{head:02d}"]
        assert_statistics(statistics, recorded.queries[layer, :, head])

    mean_keys = as_complex(recorded.keys.mean(1))
    expected_k_mean = torch.view_as_real(mean_keys)
    np.testing.assert_allclose(recorded.profile["k_mean"], expected_k_mean, atol=1e-4)


def test_duoattention_reads_a_score_for_each_key_value_head(recorded, tmp_path):
    folder = tmp_path / "analyzed"
    folder.mkdir()
    rl.save(recorded.profile, folder / "profile.nc")
    app(["ranks", str(folder), "--for", "duoattention"], standalone_mode=False)
    file = folder / "full_attention_heads.tsv"
    scores = np.loadtxt(file, dtype=float, delimiter="\t")
    induction = recorded.profile["induction"].values
    expected = induction.reshape(LAYERS, KV_HEADS, -1).max(-1)
    np.testing.assert_allclose(np.clip(scores, 0, 1), expected)

    config = json.loads((folder / "config.json").read_text())
    assert config["sink_size"] == 64
    assert config["recent_size"] == 256


def assert_refused(
    profile: xr.Dataset, project: str, reason: str, *, folder: Path
) -> None:
    words = rf"{project} cannot use .*\n +seen: +{reason}"
    with pytest.raises(BadArgument, match=words):
        write_ranks(profile, project, folder)


def test_a_profile_without_the_numbers_is_refused(recorded, tmp_path):
    profile = recorded.profile
    without_induction = profile.drop_vars("induction")
    without_queries = profile.assign(q_mean=profile["q_mean"] * np.nan)
    assert_refused(without_induction, "duoattention", "no induction", folder=tmp_path)
    assert_refused(without_queries, "triattention", "no q_mean", folder=tmp_path)

    by_layer = xr.DataArray([1, 2], dims="layer")
    interleaved = profile.assign_attrs(pairing="interleaved")
    other_layers = profile.assign_coords(inv_freq=by_layer * profile["inv_freq"])
    other_planes = profile.assign(excerpt_planes=profile["excerpt_planes"] - 1)
    differ = "planes that do not pair"
    assert_refused(interleaved, "mha2mla", differ, folder=tmp_path)
    assert_refused(other_layers, "mha2mla", differ, folder=tmp_path)
    assert_refused(other_planes, "triattention", differ, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
