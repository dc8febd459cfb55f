"""The rotation probe, compared with the known rotation of every family."""

import copy
import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import (
    FAMILIES,
    SUPPORTED,
    not_as_configured,
    of_kind,
    rotations,
    tiny,
)
from small_measurements import observed_calls
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

import ropelens as rl
from ropelens.errors import UnsupportedModel
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.measured_rotation.read import (
    LayerRotation,
    probe_positions,
    read_rotation,
)
from ropelens.model.as_live_model import as_live_model
from ropelens.rope.planes import Planes

# Families with different bases, pairing, unrotated coordinates, direction and NoPE layers.
ANY_DTYPE = (
    "gemma3",
    "gemma4",
    "glm",
    "gpt_neox",
    "deepseek_v3",
    "nanochat",
    "smollm3",
)


def layers_of(model: nn.Module, *, context: int | None = None) -> list[LayerRotation]:
    return RotationProbe(as_live_model(model)).layers(context)


def rotating(planes: Planes) -> tuple[np.ndarray, np.ndarray]:
    coordinates = np.arange(planes.head_dim)
    pairs = np.stack([coordinates[planes.first], coordinates[planes.second]], axis=1)
    inv_freq = planes.inv_freq.double().numpy()
    return pairs[inv_freq != 0], inv_freq[inv_freq != 0]


def check_layers(model: nn.Module, name: str, *, rtol: float) -> None:
    """Layers have the rotation of the family: to `rtol`, or to the bit if a buffer has it."""
    states = any(key.endswith("inv_freq") for key, _ in model.named_buffers())
    for layer, true in zip(layers_of(model), rotations(model, name=name), strict=True):
        pairs, measured = rotating(layer.measured.planes)
        np.testing.assert_array_equal(pairs, true.pairs)
        np.testing.assert_allclose(measured, true.inv_freq, rtol=rtol)
        pairs, used = rotating(layer.planes)
        np.testing.assert_array_equal(pairs, true.pairs)
        np.testing.assert_allclose(used, true.inv_freq, rtol=0 if states else rtol)
        assert layer.measured.residual < 10 * rtol


@pytest.mark.parametrize("name", SUPPORTED)
def test_measured_rotation_is_the_rotation_of_the_model(name: str):
    model = tiny(name)
    check_layers(model, name, rtol=1e-6)
    sizes = [true.head_dim for true in rotations(model, name=name)]
    assert [layer.planes.head_dim for layer in layers_of(model)] == sizes


@not_as_configured
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["llama_gqa", *ANY_DTYPE])
def test_every_dtype(name: str, dtype: torch.dtype):
    rounding = max(torch.finfo(dtype).eps, 2**-23)  # angles are always float32
    check_layers(tiny(name).to(dtype), name, rtol=4 * rounding)


@pytest.mark.parametrize("name", ["llama_gqa", *ANY_DTYPE])
def test_the_dataset_contains_the_measured_rotation(name: str):
    model = tiny(name)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rope = rl.measure_rope(model)
    assert all(
        torch.equal(value, before[key]) for key, value in model.state_dict().items()
    )
    for number, true in enumerate(rotations(model, name=name)):
        row = rope.isel(layer=number)
        names = ("inv_freq", "wavelength", "inv_freq_stated")
        inv_freq, wavelength, stated = [row[column].values for column in names]
        rotates = inv_freq > 0
        still = inv_freq == 0
        np.testing.assert_allclose(inv_freq[rotates], np.abs(true.inv_freq), rtol=1e-6)
        np.testing.assert_allclose(wavelength[rotates], 2 * math.pi / inv_freq[rotates])
        assert np.isinf(wavelength[still]).all()
        np.testing.assert_array_equal(stated[rotates], np.abs(true.inv_freq))
        assert row["pairing"].item() == (
            FAMILIES[name].pairing if len(true.pairs) else "none"
        )
        stopped = 2 * int(still[: int(row["rotary_dim"]) // 2].sum())
        assert int(row["rotary_dim"]) == true.pairs.size + stopped
    assert float(rope["residual"].max()) < 1e-5
    for variable in rope.data_vars.values():
        assert variable.attrs["long_name"]
        assert "units" in variable.attrs


def test_the_model_runs_once():
    model = tiny("llama_gqa")
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    rl.measure_rope(model)
    assert len(runs) == 5, "one, and four that show noise"
    with rl.edit_rope(model, rl.stop_slowest(0.5)):
        runs.clear()
        rl.measure_rope(model)
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("name", "context"),
    [("llama_dynamic", 10_001), ("llama_longrope", 5000), ("phi3_longrope", 4097)],
)
def test_beyond_the_trained_context(name: str, context: int):
    model = tiny(name)
    kind = model.config.rope_parameters["rope_type"]
    expected, _ = ROPE_INIT_FUNCTIONS[kind](model.config, "cpu", seq_len=context)
    within = layers_of(model)[0].planes.inv_freq
    assert (expected[1:] / within[1:] - 1).abs().min() > 1e-3
    model.model.rotary_emb(torch.zeros(1, 1, 64), torch.tensor([[20_000]]))
    for layer in layers_of(model, context=context):
        torch.testing.assert_close(layer.planes.inv_freq, expected, rtol=1e-6, atol=0)
        measured = layer.measured.planes.inv_freq
        torch.testing.assert_close(measured, expected.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        layers_of(model)[0].planes.inv_freq, within, rtol=0, atol=0
    )


@pytest.mark.parametrize("kind", ["half", "interleaved"])
@pytest.mark.parametrize("direction", [1, -1])
def test_reading_vectors_that_were_rotated_by_hand(kind: str, direction: int):
    """Frequencies up to half a turn per token in any order, between unrotated coordinates."""
    speeds = direction * torch.tensor([3.1, 1.0, 2e-4, 0.5, 7e-7], dtype=torch.float64)
    planes = Planes(speeds, 16, kind, offset=4)
    positions = probe_positions(2**24)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 1, 16, generator=generator, dtype=torch.float64)
    x = start.expand(-1, len(positions), -1).clone()
    z = torch.complex(start[..., planes.first], start[..., planes.second])
    z = z * torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None] * speeds)
    x[..., planes.first] = z.real
    x[..., planes.second] = z.imag
    found = read_rotation(x, positions, noise=torch.full((16,), 1e-15))
    assert found.planes.pairing == kind
    assert (found.planes.offset, found.planes.rotary_dim) == (4, 10)
    torch.testing.assert_close(found.planes.inv_freq, speeds, rtol=1e-9, atol=0)
    turns = found.planes.wavelength.tolist()
    assert turns == pytest.approx([*(2 * math.pi / speeds.abs()).tolist(), math.inf])
    assert found.residual < 1e-9


@pytest.mark.parametrize(("length", "seen"), [(31, True), (29, False)])
def test_the_rotation_of_a_plane_with_almost_no_length_is_unknown(
    length: float, seen: bool
):
    """The limit is 30 times the rounding noise of the plane."""
    positions = probe_positions(2**6)
    noise = torch.full((4,), 1e-3)
    angle = positions[:, None] * torch.tensor([1.0, 0.1])
    x = torch.polar(torch.tensor([1.0, length * 1e-3 * 2**0.5]).expand_as(angle), angle)
    found = read_rotation(torch.cat([x.real, x.imag], -1)[None], positions, noise=noise)
    assert found.planes.inv_freq.isfinite().tolist() == [True, seen]
    assert (
        read_rotation(0 * x.real[None], positions, noise=noise[:2]).planes.pairing
        == "none"
    )


@not_as_configured
def test_planes_with_more_than_half_a_turn_per_token_and_backward_planes():
    """Integer positions show the sign of a phase, but no whole turns per token."""
    model = tiny("llama_gqa")
    stated = model.model.rotary_emb.inv_freq
    stated *= torch.tensor([4.0, 40.0, 1.0, -1.0, 1.0, -1.0, 1.0, 2 * math.pi * 1000])
    stated[6] = 2 * math.pi / 1e7
    rope = rl.measure_rope(model)
    np.testing.assert_allclose(rope["inv_freq"][0], stated, rtol=1e-4)
    np.testing.assert_allclose(rope["wavelength"][:, 6], 1e7, rtol=1e-6)
    np.testing.assert_array_equal(rope["inv_freq_stated"][0], stated.double())
    np.testing.assert_allclose(
        rope["wavelength"][0], 2 * math.pi / stated.abs(), rtol=1e-4
    )
    for layer in layers_of(model):
        assert torch.equal(layer.planes.inv_freq, stated)


SCALED = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0}
SCALED["mscale_all_dim"] = 1.0
SCALED["original_max_position_embeddings"] = 256
ministral = partial(of_kind, "ministral3", num_hidden_layers=1, head_dim=16)


@pytest.mark.parametrize("context", [128, 4096])
def test_queries_that_grow_with_position(context: int):
    model = ministral(rope_parameters=SCALED | {"llama_4_scaling_beta": 0.1})
    rope = rl.measure_rope(model, context=context)
    expected = get_llama_4_attn_scale(
        torch.tensor(rope["position"].values)[None], 0.1, 256
    )
    np.testing.assert_allclose(rope["query_scale"][0], expected.flatten(), rtol=1e-6)
    np.testing.assert_allclose(rope["inv_freq"], rope["inv_freq_stated"], rtol=1e-6)
    assert rl.compare_rope(model, model, context=4096).attrs["verdict"] == "same"
    other = ministral(rope_parameters=SCALED | {"llama_4_scaling_beta": 0.0})
    assert rl.compare_rope(model, other, context=4096).attrs["verdict"] == "different"
    assert rl.profile(model, torch.arange(600).view(2, 300) % 96, surrogates=0).sizes[
        "layer"
    ]


def test_queries_that_grow_with_their_row():
    """Llama 4 scales queries by their row in layers without rotation."""
    model = tiny("llama4", attn_temperature_tuning=True, floor_scale=16)
    rope = rl.measure_rope(model)
    for call, _ in observed_calls(model, torch.full((1, 65), 5)):
        length = call.query[0, 0].norm(dim=-1)
        scale = rope["query_scale"].sel(layer=call.layer, position=[1, 16, 64])
        np.testing.assert_allclose(scale, (length / length[0])[[1, 16, 64]], rtol=1e-5)


class Table(nn.Module):
    """A rotary module that rotates like `rotary`, but states other frequencies or none."""

    def __init__(self, rotary: nn.Module, stated: torch.Tensor | None) -> None:
        super().__init__()
        self.hidden = [rotary]  # not registered, so that its buffer is not found
        if stated is not None:
            self.register_buffer("inv_freq", stated)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple:
        return self.hidden[0](x, position_ids)


def test_a_model_that_states_nothing_is_measured():
    model = tiny("llama_gqa")
    truth = rotations(model, name="llama_gqa")
    model.model.rotary_emb = Table(model.model.rotary_emb, None)
    rope = rl.measure_rope(model)
    assert np.isnan(rope["inv_freq_stated"]).all()
    np.testing.assert_allclose(rope["inv_freq"][0], truth[0].inv_freq, rtol=1e-6)


def test_an_edit_changes_only_its_layers_of_a_model_that_states_nothing():
    model = tiny("llama_gqa")
    model.model.rotary_emb = Table(model.model.rotary_emb, None)
    configuration = copy.deepcopy(model.config)
    configuration.rope_parameters["rope_theta"] = 500.0
    before = rl.measure_rope(model, config=configuration)
    with rl.edit_rope(model, rl.stop(rl.PlaneNumbers([0]), heads="0.*")):
        under_edit = rl.measure_rope(model, config=configuration)
    xr.testing.assert_equal(under_edit.sel(layer=1), before.sel(layer=1))
    assert under_edit["inv_freq"].sel(layer=0)[0] == 0


OTHER_STATEMENTS = {
    "slowest faster": ("llama_gqa", lambda w: torch.cat([w[:-1], w[-1:] * 1.001])),
    "reversed": ("llama_gqa", lambda w: w.flip(0)),
    "one more": ("llama_gqa", lambda w: torch.cat([w, w[-1:] / 3])),
    "one less": ("llama_gqa", lambda w: w[:-1]),
    "partial and one more": ("phi", lambda w: torch.cat([w, w[-1:] / 3])),
}


@pytest.mark.parametrize("kind", OTHER_STATEMENTS)
def test_a_model_that_states_something_else_is_refused(kind: str):
    name, change = OTHER_STATEMENTS[kind]
    model = tiny(name)
    rotary = model.model.rotary_emb
    planes = len(rotary.inv_freq)
    model.model.rotary_emb = Table(rotary, change(rotary.inv_freq))
    with pytest.raises(UnsupportedModel) as refused:
        rl.measure_rope(model)
    assert refused.value.what == f"{type(model).__name__} does not rotate as it states."
    assert (
        f"layer 0: {planes} planes, the fastest at 1 rad" in refused.value.parts["seen"]
    )


SILENT = (
    r"0 of 2 layers showed their queries and keys; the first that did not is layer 0"
)
CHANGES = r"layer 0: the lengths of its planes change with position \(residual 0\.\d+; "
NO_ROTATION = "changes its queries with position, but not by a rotation."
REFUSED = {
    "gpt2": (f"GPT2LMHeadModel {NO_ROTATION}", CHANGES),
    "opt": (f"OPTForCausalLM {NO_ROTATION}", CHANGES),
    "bert": (f"BertForMaskedLM {NO_ROTATION}", CHANGES),
    "bloom": ("BloomForCausalLM hides its attention.", SILENT),
    "mamba": ("MambaForCausalLM has no attention.", "layers of linear_attention"),
    "falcon": ("FalconForCausalLM hides its attention.", SILENT),
    "gptj": ("GPTJForCausalLM hides its attention.", SILENT),
    "codegen": ("CodeGenForCausalLM hides its attention.", SILENT),
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SUPPORTED])
def test_unsupported_families_are_refused(name: str):
    model = tiny(name)
    what, seen = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=seen) as refused:
        rl.measure_rope(model)
    assert refused.value.what == what
    assert refused.value.parts["try"]


@pytest.mark.parametrize("plane", [0, 3, 7])
@pytest.mark.parametrize("family", ["llama_gqa", "glm", "cohere"])
def test_a_plane_without_length_keeps_its_stated_frequency(family: str, plane: int):
    model = tiny(family)
    known = layers_of(model)[0].planes
    plane = min(plane, len(known.inv_freq) - 1)
    places = [
        range(known.head_dim)[part][plane] for part in (known.first, known.second)
    ]
    attention = model.model.layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj):
        for x in projection.parameters():
            x.data.unflatten(0, (-1, known.head_dim))[:, places] = 0
    layer = layers_of(model)[0]
    assert layer.measured.planes.inv_freq.isnan().nonzero().flatten().tolist() == [
        plane
    ]
    assert torch.equal(layer.planes.inv_freq, known.inv_freq)


def test_sequences_that_rotate_differently_by_themselves_are_counted():
    """dynamic: every shorter sequence. longrope: sequences within the trained length."""
    tokens = torch.arange(120).view(3, 40) % 90
    lengths = [40, 30, 10]
    for name, count in (("llama_dynamic", 2), ("llama_longrope", 1), ("llama_gqa", 0)):
        rope = tiny(name).config.rope_parameters | {
            "original_max_position_embeddings": 16
        }
        model = tiny(name, max_position_embeddings=16, rope_parameters=rope)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            rl.evaluate(
                model, rl.Text(tokens, lengths=lengths), edits={}, measures=["loss"]
            )
        words = [
            str(x.message) for x in warned if "the longest one (40" in str(x.message)
        ]
        assert len(words) == (count > 0)
        assert all(word.startswith(f"{count} of 3 sequences") for word in words)
