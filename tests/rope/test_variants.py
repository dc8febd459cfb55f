"""Every row of the table of variants, against transformers, and the selection of planes."""

import numpy as np
import pytest
import torch
import transformers as hf
from cli_runs import save_family
from oracles.tiny import logits, of_kind, random_tokens, tiny
from oracles.versions import skip_before
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

import ropelens as rl
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.interventions.cuts import PlaneSweep, rotating_planes
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import as_live_model
from ropelens.rope.planes import PAIRINGS, Planes
from ropelens.rope.select import Fastest, Slowest, heads_by_layer
from ropelens.rope.turn import positions_by_plane
from ropelens.rope.variant_config import frequencies
from ropelens.rope.variants import VARIANTS, Shape, parse_variant

SPELLED = [
    "rope",
    "rope:5000",
    "abf:500000",
    "nope",
    "p-rope:0",
    "p-rope:0.3",
    "p-rope:1",
    "p-rope-reversed:0",
    "p-rope-reversed:0.3",
    "p-rope-reversed:1",
    "partial:0",
    "partial:0.3",
    "partial:1",
    "linear:4",
    "ntk:4",
    "dynamic:4",
    "yarn:4",
    "yarn:1",
    "llama3:8",
]
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
CONTEXT = 64
FEW = ("abf:500000", "p-rope:0.3", "partial:0.3", "dynamic:4", "yarn:4")


def plain(name: str) -> PreTrainedModel:
    return tiny(name, rope_parameters=dict(ROPE), max_position_embeddings=CONTEXT)


def built(name: str, variant: str) -> PreTrainedModel:
    config = rl.variant_config(plain(name).config, variant)
    return tiny(
        name,
        max_position_embeddings=CONTEXT,
        rope_parameters=config.rope_parameters,
    )


def test_every_row_is_spelled_here():
    assert {spelled.partition(":")[0] for spelled in SPELLED} == set(VARIANTS)
    for name, row in VARIANTS.items():
        assert row.usage.startswith(name)


@pytest.mark.parametrize("length", [0, CONTEXT, CONTEXT + 40])
@pytest.mark.parametrize("spelled", SPELLED)
def test_frequencies_equal_transformers(spelled: str, length: int):
    shape = Shape(16, base=10_000.0, context=CONTEXT, length=length)
    inv_freq, factor = frequencies(parse_variant(spelled), shape)
    rotary = built("llama_gqa", spelled).model.rotary_emb
    positions = torch.arange(max(length, 1))[None]
    rotary(torch.zeros(1, 1, 64), positions)
    torch.testing.assert_close(inv_freq, rotary.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(rotary.attention_scaling, rel=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["llama_gqa", "qwen3", "gemma2", "cohere", "mistral_sliding", "nanochat", "llama4"],
)
def test_an_edit_by_name_equals_a_model_with_this_config(name: str):
    """The last two families have a norm after RoPE, which cancels YaRN's attention factor."""
    model = plain(name)
    before = logits(model)
    for spelled in SPELLED if name == "llama_gqa" else FEW:
        other = built(name, spelled)
        for length in (30, CONTEXT + 6) if spelled == "dynamic:4" else (30,):
            ids = random_tokens(length=length)
            expected = logits(other, ids)
            with rl.edit_rope(model, spelled):
                edited = logits(model, ids)
            error = float((edited - expected).abs().max())
            assert error < 1e-4, (spelled, length, error)
    assert torch.equal(logits(model), before)


def test_a_variant_replaces_what_the_model_has():
    """It replaces also YaRN's attention factor; p-RoPE keeps the remaining frequencies."""
    yarn = built("llama_gqa", "yarn:4")
    expected = logits(plain("llama_gqa"))
    with rl.edit_rope(yarn, "rope"):
        edited = logits(yarn)
    torch.testing.assert_close(edited, expected, rtol=0, atol=1e-4)
    own = yarn.model.rotary_emb.inv_freq.clone()
    with rl.edit_rope(yarn, "p-rope:0.5"):
        planes = RotationProbe(as_live_model(yarn)).planes()[0]
    assert torch.equal(planes.inv_freq[:4], own[:4])
    assert not planes.inv_freq[4:].any()


def test_a_variant_replaces_the_scale_that_a_model_was_built_with():
    """DeepSeek's mscale sharpens all coordinates of a head, also those without rotation."""
    scaled = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    }
    sharpened = tiny("deepseek_v3", rope_parameters=scaled)
    expected = logits(tiny("deepseek_v3", rope_parameters=dict(ROPE)))
    assert (logits(sharpened) - expected).abs().max() > 0.1
    with rl.edit_rope(sharpened, "rope"):
        edited = logits(sharpened)
    torch.testing.assert_close(edited, expected, rtol=0, atol=1e-4)


def test_layers_without_rotation():
    other = tiny("smollm3", no_rope_layers=[1, 1, 1, 0], rope_parameters=dict(ROPE))
    model = tiny("smollm3", no_rope_layers=[1, 1, 1, 1], rope_parameters=dict(ROPE))
    expected = logits(other)
    with rl.edit_rope(model, rl.stop_slowest(1.0, heads="3.*")):
        edited = logits(model)
        rope = rl.measure_rope(model)
    torch.testing.assert_close(edited, expected, rtol=0, atol=1e-4)
    still = np.isinf(rope["wavelength"].values).all(axis=1)
    assert still.tolist() == [False, False, False, True]


@pytest.mark.parametrize("p", [0.25, 0.5, 0.75, 1.0])
def test_partial_equals_gpt_neox(p: float):
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": p}
    config = hf.GPTNeoXConfig(
        hidden_size=128, num_attention_heads=2, rope_parameters=rope
    )
    expected = GPTNeoXRotaryEmbedding(config).inv_freq
    shape = Shape(64, 10_000.0, CONTEXT)
    inv_freq, _ = frequencies(parse_variant(f"partial:{p}"), shape)
    rotating = len(expected)
    torch.testing.assert_close(inv_freq[:rotating], expected, rtol=1e-6, atol=0)
    assert not inv_freq[rotating:].any()


def test_a_model_that_scales_its_types_of_layers_differently():
    """The factor that a variant should replace is unknown; stopping planes needs no factor."""
    skip_before("transformers", "5.9", "reads yarn only if all layers have it")
    own = tiny("gemma3").config.rope_parameters
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    by_layer_type = {**own, "full_attention": own["full_attention"] | yarn}
    model = tiny("gemma3", rope_parameters=by_layer_type)
    edit = rl.edit_rope(model, "linear:2")
    words = "scales its queries in more than one way"
    with pytest.raises(UnsupportedModel, match=words), edit:
        pass
    with rl.edit_rope(model, "p-rope:0.5"):
        logits(model)


@pytest.mark.parametrize(
    "spelled", ["p-rope:0.5", "partial:0.5", "p-rope-reversed:0.5"]
)
def test_a_saved_checkpoint_rotates_as_it_did(tmp_path, spelled: str):
    folder = save_family(tmp_path / "model", "llama_gqa")
    model = built("llama_gqa", spelled)
    model.save_pretrained(folder)
    loaded, _ = rl.load(folder)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-4)


def test_nothing_is_logged_about_types_of_our_own(caplog: pytest.LogCaptureFixture):
    config = rl.variant_config(plain("llama_gqa").config, "partial:0.5")
    again = LlamaConfig(**config.to_dict())
    assert again.rope_parameters["rope_type"] == "ropelens-partial"
    assert hf.LlamaForCausalLM(again).model.rotary_emb.rope_type == "ropelens-partial"
    assert not caplog.records


def test_a_config_is_copied_and_each_type_of_layer_keeps_its_base():
    config = tiny("gemma3").config
    before = config.to_dict()
    changed = rl.variant_config(config, "p-rope:0.5").rope_parameters
    assert config.to_dict() == before
    bases = {key: own["rope_theta"] for key, own in changed.items()}
    assert bases == {"sliding_attention": 1e4, "full_attention": 1e6}
    rope_types = {own["rope_type"] for own in changed.values()}
    assert rope_types == {"proportional"}


def test_the_attention_factor_of_few_planes():
    """Most of the length of a head is in coordinates that do not rotate."""
    model = plain("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.weight.data *= 9
    assert RotationProbe(as_live_model(model)).attention_factor == 1.0


def test_a_base_of_every_layer():
    """Compare with models that have such a config; 0 is a layer without RoPE."""
    model = of_kind(
        "granite_swa", layer_rope_theta=[500.0, 0, 1e5], num_hidden_layers=3
    )
    for spelled in ("rope", "rope:300", "ntk:4", "yarn:4", "p-rope:0.3"):
        config = rl.variant_config(model.config, spelled)
        other = type(model)(config).eval()
        other.load_state_dict(model.state_dict())
        with rl.edit_rope(model, spelled):
            edited = logits(model)
        torch.testing.assert_close(edited, logits(other), rtol=0, atol=1e-3)
    rope = rl.measure_rope(model)
    assert rope["inv_freq_configured"].isnull().all()


SCALED = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0 + plane / 8 for plane in range(8)],
        "long_factor": [2.0 + plane for plane in range(8)],
        "original_max_position_embeddings": 32,
    },
    "dynamic": {"factor": 4.0},
    "default": {"partial_rotary_factor": 0.5},
}


def cannot_be_stored(rope_type: str, spelled: str) -> bool:
    if rope_type == "default":  # a part of each head rotates
        return True
    if rope_type == "dynamic":  # it depends on the length
        return VARIANTS[spelled.partition(":")[0]].stops is not None
    has_earlier_context = "original_max_position_embeddings" in SCALED[rope_type]
    return spelled == "dynamic:4" and has_earlier_context


@pytest.mark.parametrize("rope_type", SCALED)
@pytest.mark.parametrize("spelled", SPELLED)
def test_a_config_of_scaled_rope_rotates_as_the_edit(rope_type: str, spelled: str):
    """Before, a configuration forgot the scaling of planes that go on."""
    if rope_type == "dynamic":
        skip_before("transformers", "5.15", "is refused with dynamic RoPE")
    scaled = ROPE | {"rope_type": rope_type} | SCALED[rope_type]
    model = tiny("llama_gqa", rope_parameters=scaled, max_position_embeddings=CONTEXT)
    tokens = random_tokens(sequences=1, length=48)
    if cannot_be_stored(rope_type, spelled):
        with pytest.raises(UnsupportedModel, match="cannot express") as refused:
            rl.variant_config(model.config, spelled)
        assert "edit_rope" in refused.value.parts["try"]
        return
    config = rl.variant_config(model.config, spelled)
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    with rl.edit_rope(model, spelled):
        edited = logits(model, tokens)
    torch.testing.assert_close(logits(other, tokens), edited, rtol=0, atol=1e-4)


def yarn_with(**scale: float) -> dict[str, object]:
    return ROPE | {"rope_type": "yarn"} | SCALED["yarn"] | scale


@pytest.mark.parametrize("spelled", ["p-rope:0.5", "nope", "rope:300", "linear:2"])
def test_a_config_keeps_the_scales_of_scores(spelled: str):
    """DeepSeek scales scores if its RoPE is scaled, and Ministral 3 scales queries."""
    models = [
        tiny("deepseek_v3", rope_parameters=yarn_with(mscale=1.0, mscale_all_dim=1.0)),
        of_kind("ministral3", rope_parameters=yarn_with(llama_4_scaling_beta=0.5)),
    ]
    tokens = random_tokens(sequences=1, length=48)
    for model in models:
        other = type(model)(rl.variant_config(model.config, spelled)).eval()
        other.load_state_dict(model.state_dict())
        with rl.edit_rope(model, spelled):
            edited = logits(model, tokens)
        torch.testing.assert_close(logits(other, tokens), edited, rtol=0, atol=1e-4)


def test_a_variant_of_one_kind_of_layers():
    model = tiny("gemma3")
    config = rl.variant_config(model.config, "p-rope:0.5@full")
    before = model.config.rope_parameters
    changed = config.rope_parameters
    assert changed["sliding_attention"] == before["sliding_attention"]
    assert changed["full_attention"]["rope_type"] == "proportional"
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    with rl.edit_rope(model, "p-rope:0.5@full"):
        edited = logits(model)
    torch.testing.assert_close(logits(other), edited, rtol=0, atol=1e-4)
    with rl.edit_rope(model, rl.stop_slowest(0.5, heads="full.*")):
        torch.testing.assert_close(logits(model), edited, rtol=0, atol=0)


def test_a_kind_of_layers_that_has_no_rope_of_its_own():
    config = tiny("llama_gqa").config
    assert (
        rl.variant_config(config, "nope@full").to_dict()
        == rl.variant_config(config, "nope").to_dict()
    )
    with pytest.raises(BadArgument, match="no sliding layers"):
        rl.variant_config(config, "nope@sliding")
    with pytest.raises(UnsupportedModel, match="a RoPE of only full layers"):
        rl.variant_config(tiny("gemma2").config, "nope@full")


def test_names_that_only_a_family_has():
    flash = rl.variant_config(hf.Glm4MoeLiteConfig(), "ntk:2").rope_parameters
    assert flash["rope_theta"] == pytest.approx(1e4 * 2 ** (64 / 62))
    dbrx = hf.DbrxConfig(rope_parameters=dict(ROPE))
    yarn = rl.variant_config(dbrx, "yarn:4").rope_parameters
    assert yarn["original_max_position_embeddings"] == 2048
    on_axes = {**ROPE, "mrope_section": [2, 3, 3]}
    qwen = hf.Qwen2VLTextConfig(rope_parameters=on_axes)
    linear = rl.variant_config(qwen, "linear:4").rope_parameters
    assert linear == {**on_axes, "rope_type": "linear", "factor": 4.0}


def test_a_variant_that_a_family_cannot_express():
    words = r"cannot express p-rope:0\.5"
    for name in ("gpt_neox", "gpt2"):  # which is partial already, and which has no RoPE
        config = tiny(name).config
        with pytest.raises(UnsupportedModel, match=words) as refused:
            rl.variant_config(config, "p-rope:0.5")
        assert "edit_rope" in refused.value.parts["try"]


@pytest.mark.parametrize(
    "name", ["gpt_neox", "glm", "phi", "nanochat", "gemma3", "llama4"]
)
def test_any_family_can_be_edited(name: str):
    model = tiny(name)
    before = logits(model)
    for spelled in ("p-rope:0.5", "nope", "linear:2", "abf:100", "yarn:2"):
        with rl.edit_rope(model, spelled):
            assert (logits(model) - before).abs().max() > 1e-4, spelled
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("spelled", "line"),
    [
        ("prope:0.5", "There is no RoPE variant 'prope:0.5'"),
        (
            "p-rope:1.2",
            "no RoPE variant 'p-rope:1.2'; seen: it must be between 0 and 1",
        ),
        ("p-rope:nan", "seen: it must be between 0 and 1"),
        ("p-rope:half", "seen: could not convert string to float: 'half'"),
        ("nope:1", "There is no RoPE variant 'nope:1'"),
        ("yarn:0.5", "seen: it must be between 1 and 1e+15"),
        ("abf:inf", "seen: it must be between 1 and 1e+15"),
    ],
)
def test_unknown_and_malformed_variants(spelled: str, line: str):
    with pytest.raises(BadArgument) as refused:
        parse_variant(spelled)
    assert line in refused.value.line
    for row in VARIANTS.values():
        assert row.usage in refused.value.parts["try"]


def test_the_rotation_under_a_variant_is_printed(ropelens, tmp_path):
    model = save_family(tmp_path / "model", "llama_gqa")
    ended = ropelens("rope", model, "--variant", "p-rope:0.5")
    assert ended.code == 0
    assert ended.err == ""
    assert ended.out.count("inf") == 4
    assert ropelens("rope", model).out.count("inf") == 0


@pytest.mark.parametrize(
    ("heads", "named"),
    [
        ("1.2", {(1, 2)}),
        ("1.*", {(1, 0), (1, 1), (1, 2)}),
        ("1-2.0", {(1, 0), (2, 0)}),
        (
            "*.1-2, 0.0",
            {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)},
        ),
        ("3-9.2", {(3, 2)}),
    ],
)
def test_a_list_names_heads(heads: str, named: set[tuple[int, int]]):
    able = torch.ones(4, 3, dtype=torch.bool)
    chosen = heads_by_layer(heads, able, doing="attend")
    assert {(layer, head) for layer, head in chosen.nonzero().tolist()} == named


@pytest.mark.parametrize(
    "heads", ["", "1", "4.0", "2-1.0", "-1.0", "1-.0", "1.x", "1.0,,", "²-3.0"]
)
def test_an_item_that_names_no_head_is_refused(heads: str):
    able = torch.ones(4, 3, dtype=torch.bool)
    words = r"has no head(.|\n)*layers 0 to 3, heads 0 to 2\n"
    with pytest.raises(BadArgument, match=words):
        heads_by_layer(heads, able, doing="attend")


def test_the_refusal_of_heads_names_the_layers_with_some_able_head():
    able = torch.ones(4, 3, dtype=torch.bool)
    able[0] = False
    able[2, 2] = False
    with pytest.raises(BadArgument, match=r"layers 0 to 3 \(1, 2, 3 rotate\)"):
        heads_by_layer("7.0", able, doing="rotate")


@pytest.mark.parametrize("head_dim", [2, 10, 16, 20, 64, 80, 100, 128, 256])
@pytest.mark.parametrize("p", [tenths / 10 for tenths in range(11)])
def test_the_number_of_planes_equals_transformers(head_dim: int, p: float):
    """The edit, the cut of a sweep and the variant keep the planes that transformers keeps."""
    fast = rotating_in_transformers(head_dim, p)
    slow = fast.flip(0)
    inv_freq = 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    planes = Planes(inv_freq, head_dim, "half")

    assert torch.equal(Slowest(1 - p)(planes), ~fast)
    assert torch.equal(Fastest(1 - p)(planes), ~slow)
    assert stopped_in_sweep(planes, keep=p, end="slow") == numbers(~fast)
    assert stopped_in_sweep(planes, keep=p, end="fast") == numbers(~slow)

    shape = Shape(head_dim, 10_000.0, 2048)
    p_rope, _ = frequencies(parse_variant(f"p-rope:{p}"), shape)
    torch.testing.assert_close(p_rope, inv_freq * fast, rtol=1e-6, atol=0)
    reversed_p_rope, _ = frequencies(parse_variant(f"p-rope-reversed:{p}"), shape)
    torch.testing.assert_close(reversed_p_rope, inv_freq * slow, rtol=1e-6, atol=0)


def rotating_in_transformers(head_dim: int, p: float) -> torch.Tensor:
    """Whether each plane rotates in proportional RoPE, which keeps the fastest planes."""
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": p}
    config = LlamaConfig(head_dim=head_dim, rope_parameters=rope)
    inv_freq, _ = ROPE_INIT_FUNCTIONS["proportional"](config, device="cpu")
    return inv_freq != 0


def numbers(planes: torch.Tensor) -> tuple[int, ...]:
    return tuple(planes.nonzero().flatten().tolist())


def stopped_in_sweep(planes: Planes, *, keep: float, end: str) -> tuple[int, ...]:
    """Numbers of the planes that the only cut of a sweep stops. A sweep may have no cut."""
    sweep = PlaneSweep(keep=[keep], ends=[end], controls=0)
    _, *cuts = sweep.plan([rotating_planes(planes)], seed=0)
    if not cuts:
        return ()
    (cut,) = cuts
    (stopped,) = cut.stopped
    assert stopped, "a cut stops some plane"
    return stopped


def test_planes_begin_at_the_first_coordinate_by_default():
    for pairing in PAIRINGS:
        term_of = Planes(torch.ones(2), 6, pairing).term_of.tolist()
        assert sorted(term_of[:4]) == [0, 0, 1, 1]
        assert term_of[4:] == [2, 2]


def test_each_plane_rotates_with_the_position_on_its_axis():
    positions = torch.tensor([[[5, 6, 7], [8, 9, 10]]])  # [batch, position, axis]
    planes = Planes(torch.ones(4), 8, "half", axis=torch.tensor([0, 0, 2, 1]))
    by_plane = positions_by_plane(positions, planes)
    assert by_plane.tolist() == [[[5, 5, 7, 6], [8, 8, 10, 9]]]
