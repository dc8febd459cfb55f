"""The rotation probe, compared with the known rotation of every family."""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from oracles import recording
from oracles.tiny import (
    FAMILIES,
    SUPPORTED,
    not_as_configured,
    of_kind,
    random_tokens,
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


def assert_rotation(
    planes: Planes, expected: recording.LayerRotation, *, rtol: float
) -> None:
    """The planes that rotate are the expected planes, and rotate as fast."""
    coordinates = np.arange(planes.head_dim)
    first = coordinates[planes.first]
    second = coordinates[planes.second]
    pairs = np.stack([first, second], axis=1)
    inv_freq = planes.inv_freq.double().numpy()
    rotates = inv_freq != 0
    np.testing.assert_array_equal(pairs[rotates], expected.pairs)
    np.testing.assert_allclose(inv_freq[rotates], expected.inv_freq, rtol=rtol)


def check_layers(model: nn.Module, name: str, *, rtol: float) -> None:
    """Layers have the rotation of the family: to `rtol`, or to the bit if a buffer has it."""
    names_of_buffers = [key for key, _ in model.named_buffers()]
    has_frequencies = any(key.endswith("inv_freq") for key in names_of_buffers)
    layers = layers_of(model)
    expected = rotations(model, name=name)
    for layer, expected_layer in zip(layers, expected, strict=True):
        assert_rotation(layer.measured.planes, expected_layer, rtol=rtol)
        rounding = 0 if has_frequencies else rtol
        assert_rotation(layer.planes, expected_layer, rtol=rounding)
        assert layer.measured.residual < 10 * rtol


@pytest.mark.parametrize("name", SUPPORTED)
def test_measured_rotation_is_the_rotation_of_the_model(name: str):
    model = tiny(name)
    check_layers(model, name, rtol=1e-6)
    expected = [layer.head_dim for layer in rotations(model, name=name)]
    sizes = [layer.planes.head_dim for layer in layers_of(model)]
    assert sizes == expected


@not_as_configured
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["llama_gqa", *ANY_DTYPE])
def test_every_dtype(name: str, dtype: torch.dtype):
    rounding = max(torch.finfo(dtype).eps, 2**-23)  # angles are always float32
    model = tiny(name).to(dtype)
    check_layers(model, name, rtol=4 * rounding)


def assert_layer_of_dataset(
    layer: xr.Dataset, expected: recording.LayerRotation, *, pairing: str
) -> None:
    """The layer has the expected frequencies, wavelengths and pairing."""
    inv_freq = layer["inv_freq"].values
    wavelength = layer["wavelength"].values
    stated = layer["inv_freq_stated"].values
    rotates = inv_freq > 0
    still = inv_freq == 0
    expected_inv_freq = np.abs(expected.inv_freq)
    np.testing.assert_allclose(inv_freq[rotates], expected_inv_freq, rtol=1e-6)
    np.testing.assert_array_equal(stated[rotates], expected_inv_freq)
    expected_wavelength = 2 * math.pi / inv_freq[rotates]
    np.testing.assert_allclose(wavelength[rotates], expected_wavelength)
    assert np.isinf(wavelength[still]).all()

    expected_pairing = pairing if len(expected.pairs) else "none"
    assert layer["pairing"].item() == expected_pairing
    rotary_dim = int(layer["rotary_dim"])
    still_planes = int(still[: rotary_dim // 2].sum())
    assert rotary_dim == expected.pairs.size + 2 * still_planes


def assert_weights(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key])


@pytest.mark.parametrize("name", ["llama_gqa", *ANY_DTYPE])
def test_the_dataset_contains_the_measured_rotation(name: str):
    model = tiny(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rope = rl.measure_rope(model)
    assert_weights(model, before)

    pairing = FAMILIES[name].pairing
    for number, expected in enumerate(rotations(model, name=name)):
        layer = rope.isel(layer=number)
        assert_layer_of_dataset(layer, expected, pairing=pairing)
    assert float(rope["residual"].max()) < 1e-5
    for variable in rope.data_vars.values():
        assert variable.attrs["long_name"]
        assert "units" in variable.attrs


def test_the_model_runs_once():
    model = tiny("llama_gqa")
    runs = []
    # Such a hook could change positions, so it is also called in passes of ropelens.
    model.register_forward_pre_hook(lambda *_: runs.append(1), with_kwargs=True)
    rl.measure_rope(model)
    assert len(runs) == 1, "no noise is measured if no check needs it"
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
    rope_type = model.config.rope_parameters["rope_type"]
    initialize = ROPE_INIT_FUNCTIONS[rope_type]
    expected, _ = initialize(model.config, "cpu", seq_len=context)
    within = layers_of(model)[0].planes.inv_freq
    assert (expected[1:] / within[1:] - 1).abs().min() > 1e-3

    # The rotary module remembers the longest sequence that it has seen.
    model.model.rotary_emb(torch.zeros(1, 1, 64), torch.tensor([[20_000]]))
    for layer in layers_of(model, context=context):
        torch.testing.assert_close(layer.planes.inv_freq, expected, rtol=1e-6, atol=0)
        measured = layer.measured.planes.inv_freq
        torch.testing.assert_close(measured, expected.double(), rtol=1e-6, atol=0)
    within_again = layers_of(model)[0].planes.inv_freq
    torch.testing.assert_close(within_again, within, rtol=0, atol=0)


def rotate_by_hand(
    start: torch.Tensor, positions: torch.Tensor, planes: Planes
) -> torch.Tensor:
    """Vectors [..., position, coordinate] that begin at `start` [..., 1, coordinate]."""
    angle = positions[:, None] * planes.inv_freq
    rotation = torch.polar(torch.ones(1, dtype=torch.float64), angle)
    z = torch.complex(start[..., planes.first], start[..., planes.second]) * rotation
    x = start.expand(-1, len(positions), -1).clone()
    x[..., planes.first] = z.real
    x[..., planes.second] = z.imag
    return x


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("direction", [1, -1])
def test_reading_vectors_that_were_rotated_by_hand(pairing: str, direction: int):
    """Frequencies up to half a turn per token in any order, between unrotated coordinates."""
    speeds = direction * torch.tensor([3.1, 1.0, 2e-4, 0.5, 7e-7], dtype=torch.float64)
    expected = Planes(speeds, 16, pairing, offset=4)
    positions = probe_positions(2**24)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 1, 16, generator=generator, dtype=torch.float64)
    x = rotate_by_hand(start, positions, expected)

    rotation = read_rotation(x, positions, noise=torch.full((16,), 1e-15))
    planes = rotation.planes
    assert planes.pairing == pairing
    assert planes.offset == 4
    assert planes.rotary_dim == 10
    torch.testing.assert_close(planes.inv_freq, speeds, rtol=1e-9, atol=0)
    expected_wavelengths = [*(2 * math.pi / speeds.abs()).tolist(), math.inf]
    assert planes.wavelength.tolist() == pytest.approx(expected_wavelengths)
    assert rotation.residual < 1e-9


@pytest.mark.parametrize(("length", "seen"), [(31, True), (29, False)])
def test_the_rotation_of_a_plane_with_almost_no_length_is_unknown(
    length: float, seen: bool
):
    """The limit is 30 times the rounding noise of the plane."""
    positions = probe_positions(2**6)
    noise = torch.full((4,), 1e-3)
    angle = positions[:, None] * torch.tensor([1.0, 0.1])
    lengths = torch.tensor([1.0, length * 1e-3 * 2**0.5])
    z = torch.polar(lengths.expand_as(angle), angle)
    x = torch.cat([z.real, z.imag], -1)[None]
    rotation = read_rotation(x, positions, noise=noise)
    assert rotation.planes.inv_freq.isfinite().tolist() == [True, seen]

    zeros = torch.zeros_like(z.real)[None]
    no_rotation = read_rotation(zeros, positions, noise=noise[:2])
    assert no_rotation.planes.pairing == "none"


@not_as_configured
def test_planes_with_more_than_half_a_turn_per_token_and_backward_planes():
    """Integer positions show the sign of a phase, but no whole turns per token."""
    model = tiny("llama_gqa")
    stated = model.model.rotary_emb.inv_freq
    stated *= torch.tensor([4.0, 40.0, 1.0, -1.0, 1.0, -1.0, 1.0, 2 * math.pi * 1000])
    stated[6] = 2 * math.pi / 1e7
    expected_wavelength = 2 * math.pi / stated.abs()
    rope = rl.measure_rope(model)
    np.testing.assert_allclose(rope["inv_freq"][0], stated, rtol=1e-4)
    np.testing.assert_allclose(rope["wavelength"][:, 6], 1e7, rtol=1e-6)
    np.testing.assert_array_equal(rope["inv_freq_stated"][0], stated.double())
    np.testing.assert_allclose(rope["wavelength"][0], expected_wavelength, rtol=1e-4)
    for layer in layers_of(model):
        assert torch.equal(layer.planes.inv_freq, stated)


SCALED = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
}
ministral = partial(of_kind, "ministral3", num_hidden_layers=1, head_dim=16)


@pytest.mark.parametrize("context", [128, 4096])
def test_queries_that_grow_with_position(context: int):
    growing = ministral(rope_parameters=SCALED | {"llama_4_scaling_beta": 0.1})
    rope = rl.measure_rope(growing, context=context)
    positions = torch.tensor(rope["position"].values)[None]
    expected = get_llama_4_attn_scale(positions, 0.1, 256).flatten()
    np.testing.assert_allclose(rope["query_scale"][0], expected, rtol=1e-6)
    np.testing.assert_allclose(rope["inv_freq"], rope["inv_freq_stated"], rtol=1e-6)

    with_itself = rl.compare_rope(growing, growing, context=4096)
    assert with_itself.attrs["verdict"] == "same"
    constant = ministral(rope_parameters=SCALED | {"llama_4_scaling_beta": 0.0})
    with_constant = rl.compare_rope(growing, constant, context=4096)
    assert with_constant.attrs["verdict"] == "different"

    tokens = torch.arange(600).view(2, 300) % 96
    profile = rl.profile(growing, tokens, surrogates=0)
    assert profile.sizes["layer"]


def test_queries_that_grow_with_their_row():
    """Llama 4 scales queries by their row in layers without rotation."""
    model = tiny("llama4", attn_temperature_tuning=True, floor_scale=16)
    rope = rl.measure_rope(model)
    rows = [1, 16, 64]
    for call, _ in observed_calls(model, torch.full((1, 65), 5)):
        length = call.query[0, 0].norm(dim=-1)
        expected = (length / length[0])[rows]
        scale = rope["query_scale"].sel(layer=call.layer, position=rows)
        np.testing.assert_allclose(scale, expected, rtol=1e-5)


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
    expected = rotations(model, name="llama_gqa")[0].inv_freq
    model.model.rotary_emb = Table(model.model.rotary_emb, None)
    rope = rl.measure_rope(model)
    assert np.isnan(rope["inv_freq_stated"]).all()
    np.testing.assert_allclose(rope["inv_freq"][0], expected, rtol=1e-6)


def test_an_edit_changes_only_its_layers_of_a_model_that_states_nothing():
    model = tiny("llama_gqa")
    model.model.rotary_emb = Table(model.model.rotary_emb, None)
    configuration = copy.deepcopy(model.config)
    configuration.rope_parameters["rope_theta"] = 500.0
    before = rl.measure_rope(model, config=configuration)
    stop_plane_0 = rl.stop(rl.PlaneNumbers([0]), heads="0.*")
    with rl.edit_rope(model, stop_plane_0):
        under_edit = rl.measure_rope(model, config=configuration)
    xr.testing.assert_equal(under_edit.sel(layer=1), before.sel(layer=1))
    assert under_edit["inv_freq"].sel(layer=0)[0] == 0


def with_a_plane_more(inv_freq: torch.Tensor) -> torch.Tensor:
    return torch.cat([inv_freq, inv_freq[-1:] / 3])


def with_a_faster_last_plane(inv_freq: torch.Tensor) -> torch.Tensor:
    return torch.cat([inv_freq[:-1], inv_freq[-1:] * 1.001])


@dataclass(frozen=True)
class OtherStatement:
    """A family, and a change of the frequencies that its model states."""

    family: str
    change: Callable[[torch.Tensor], torch.Tensor]


OTHER_STATEMENTS = {
    "slowest faster": OtherStatement("llama_gqa", with_a_faster_last_plane),
    "reversed": OtherStatement("llama_gqa", lambda inv_freq: inv_freq.flip(0)),
    "one more": OtherStatement("llama_gqa", with_a_plane_more),
    "one less": OtherStatement("llama_gqa", lambda inv_freq: inv_freq[:-1]),
    "partial and one more": OtherStatement("phi", with_a_plane_more),
}


@pytest.mark.parametrize("name", OTHER_STATEMENTS)
def test_a_model_that_states_something_else_is_refused(name: str):
    other = OTHER_STATEMENTS[name]
    model = tiny(other.family)
    rotary = model.model.rotary_emb
    planes = len(rotary.inv_freq)
    model.model.rotary_emb = Table(rotary, other.change(rotary.inv_freq))
    with pytest.raises(UnsupportedModel) as refused:
        rl.measure_rope(model)
    class_name = type(model).__name__
    expected = f"layer 0: {planes} planes, the fastest at 1 rad"
    assert refused.value.what == f"{class_name} does not rotate as it states."
    assert expected in refused.value.parts["seen"]


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
    expected = layers_of(model)[0].planes
    head_dim = expected.head_dim
    number = min(plane, len(expected.inv_freq) - 1)
    first = range(head_dim)[expected.first]
    second = range(head_dim)[expected.second]
    pair = [first[number], second[number]]
    attention = model.model.layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj):
        for weights in projection.parameters():
            heads = weights.data.unflatten(0, (-1, head_dim))
            heads[:, pair] = 0

    layer = layers_of(model)[0]
    unknown = layer.measured.planes.inv_freq.isnan()
    assert unknown.nonzero().flatten().tolist() == [number]
    assert torch.equal(layer.planes.inv_freq, expected.inv_freq)


def warnings_of_evaluate(model: nn.Module, text: rl.Text) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rl.evaluate(model, text, edits={}, measures=["loss"])
    return [str(warning.message) for warning in caught]


def test_sequences_that_rotate_differently_by_themselves_are_counted():
    """dynamic: every shorter sequence. longrope: sequences within the trained length."""
    tokens = torch.arange(120).view(3, 40) % 90
    text = rl.Text(tokens, lengths=[40, 30, 10])
    expected_counts = {"llama_dynamic": 2, "llama_longrope": 1, "llama_gqa": 0}
    for name, count in expected_counts.items():
        rope = {
            **tiny(name).config.rope_parameters,
            "original_max_position_embeddings": 16,
        }
        model = tiny(name, max_position_embeddings=16, rope_parameters=rope)
        messages = warnings_of_evaluate(model, text)
        about_length = [
            message for message in messages if "the longest one (40" in message
        ]
        assert len(about_length) == (1 if count else 0)
        for message in about_length:
            assert message.startswith(f"{count} of 3 sequences")


@pytest.mark.parametrize(("content", "seen"), [(math.nan, "nan"), (7e-18, "7e-18")])
def test_a_buffer_of_frequencies_that_was_never_filled_is_refused(content, seen):
    """`to_empty` leaves what the memory held before in a buffer."""
    model = tiny("llama_gqa")
    expected = rl.measure_rope(model).inv_freq
    model.model.rotary_emb.inv_freq.fill_(content)
    with pytest.raises(UnsupportedModel, match="frequencies that no model") as refused:
        rl.profile(model, random_tokens())
    parts = refused.value.parts
    assert parts["seen"] == f"{seen} rad/token in model.model.rotary_emb.inv_freq"
    fill, _, _ = parts["try"].partition(", or ")
    exec(fill, {"model": model})  # the remedy works
    xr.testing.assert_equal(rl.measure_rope(model).inv_freq, expected)
