"""Files for other projects, read in the way in which each project reads them."""

import json

import numpy as np
import pytest
import torch
import transformers
import xarray as xr
from torch import Tensor

import ropelens as rl
from ropelens.analysis.ranks import write_ranks
from ropelens.commands.app import app
from ropelens.errors import BadArgument

LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16


@pytest.fixture(scope="module")
def profile_and_outputs() -> tuple[xr.Dataset, dict[str, Tensor]]:
    """A profile of a tiny Llama, and its q and k [layer, token, head, coordinate]."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 50}
    sizes["num_hidden_layers"] = LAYERS
    sizes["num_key_value_heads"] = KV_HEADS
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=HEADS, head_dim=HEAD_DIM, initializer_range=0.3
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 50, (4, 40))
    profile = rl.profile(model, ids, budget=False)
    outputs: dict[str, list[Tensor]] = {"q_proj": [], "k_proj": []}
    hooks = [
        module.register_forward_hook(
            lambda _, __, output, to=outputs[name[-6:]]: to.append(
                output.flatten(0, 1).unflatten(-1, (-1, HEAD_DIM)).double()
            )
        )
        for name, module in model.named_modules()
        if name[-6:] in outputs
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return profile, {name: torch.stack(x) for name, x in outputs.items()}


def test_mha2mla_reads_the_ranks_of_the_norms_of_its_own_measurement(
    profile_and_outputs, tmp_path
):
    profile, outputs = profile_and_outputs
    (file,) = write_ranks(profile, "mha2mla", tmp_path)
    ranks = torch.load(file, weights_only=True)
    assert (ranks.shape, ranks.dtype) == ((LAYERS, KV_HEADS, HEAD_DIM), torch.uint8)
    half = HEAD_DIM // 2
    q, k = [x.unflatten(-1, (2, half)).norm(dim=-2).mean(1) for x in outputs.values()]
    product = (q * k.repeat_interleave(2, dim=1)).unflatten(1, (KV_HEADS, 2)).sum(2)
    for kept in range(1, half):  # planes that MHA2MLA still rotates
        mask = ranks < kept
        best = (
            torch.zeros_like(product).scatter(-1, product.topk(kept).indices, 1).bool()
        )
        assert torch.equal(mask, torch.cat([best, best], -1))


def test_triattention_reads_the_mean_queries(profile_and_outputs, tmp_path):
    profile, outputs = profile_and_outputs
    (file,) = write_ranks(profile, "triattention", tmp_path)
    payload = torch.load(file, weights_only=True)
    metadata = payload["metadata"]
    needed = ("prompt_template", "use_chat_template", "attn_implementation", "dtype")
    assert {*needed} <= metadata.keys()
    assert (metadata["rope_style"], metadata["rope_type"]) == ("half", "default")
    assert metadata["head_dim"] == HEAD_DIM
    inv_freq = 1e4 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(metadata["inv_freq"], inv_freq, rtol=1e-4)
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    assert [tuple(item) for item in metadata["sampled_heads"]] == heads
    for layer, head in heads:
        real, imag = outputs["q_proj"][layer, :, head].chunk(
            2, dim=-1
        )  # not yet rotated
        stats = payload["stats"][f"layer{layer:02d}_head{head:02d}"]
        got = torch.complex(stats["q_mean_real"], stats["q_mean_imag"])
        expected = torch.complex(real, imag)
        torch.testing.assert_close(
            got.to(expected), expected.mean(0), rtol=0, atol=1e-4
        )
        torch.testing.assert_close(
            stats["q_abs_mean"].double(), expected.abs().mean(0), rtol=1e-4, atol=0
        )
    real, imag = outputs["k_proj"].mean(1).chunk(2, dim=-1)
    np.testing.assert_allclose(
        profile["k_mean"], torch.stack([real, imag], -1), atol=1e-4
    )


def test_duoattention_reads_a_score_for_each_key_value_head(
    profile_and_outputs, tmp_path
):
    profile, _ = profile_and_outputs
    folder = tmp_path / "analyzed"
    folder.mkdir()
    rl.save(profile, folder / "profile.nc")
    app(["ranks", str(folder), "--for", "duoattention"], standalone_mode=False)
    scores = np.loadtxt(
        folder / "full_attention_heads.tsv", dtype=float, delimiter="\t"
    )
    best = profile["induction"].values.reshape(LAYERS, KV_HEADS, -1).max(-1)
    np.testing.assert_allclose(np.clip(scores, 0, 1), best)
    config = json.loads((folder / "config.json").read_text())
    assert (config["sink_size"], config["recent_size"]) == (64, 256)


def test_a_profile_without_the_numbers_is_refused(profile_and_outputs, tmp_path):
    profile, _ = profile_and_outputs
    planes = xr.DataArray([1, 2], dims="layer")
    differ = "planes that do not pair"
    unusable = [
        ("duoattention", profile.drop_vars("induction"), "no induction"),
        (
            "triattention",
            profile.assign(q_mean=profile["q_mean"] * np.nan),
            "no q_mean",
        ),
        ("mha2mla", profile.assign_attrs(pairing="interleaved"), differ),
        (
            "mha2mla",
            profile.assign_coords(inv_freq=planes * profile["inv_freq"]),
            differ,
        ),
        (
            "triattention",
            profile.assign(excerpt_planes=profile["excerpt_planes"] - 1),
            differ,
        ),
    ]
    for project, part, reason in unusable:
        with pytest.raises(
            BadArgument, match=rf"{project} cannot use .*\n +seen: +{reason}"
        ):
            write_ranks(part, project, tmp_path)
    assert not [*tmp_path.iterdir()]
