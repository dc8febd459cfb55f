"""Models in GGUF files: the bundled model, and SmolLM2, which `make smollm2` downloads."""

import copy
import functools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from oracles.versions import skip_before
from tiny_checkpoints import identity_of
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import ggml
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

import ropelens as rl
from ropelens.checkpoints import gguf_reader
from ropelens.checkpoints.bundled import bundled_path, sample_path
from ropelens.checkpoints.config import read_config
from ropelens.checkpoints.load_options import Loading
from ropelens.commands.app import app
from ropelens.config_facts import depends_on_length
from ropelens.errors import BadCheckpoint, UnsupportedModel
from ropelens.measured_rotation import row_order
from ropelens.measured_rotation.row_order import check_row_order
from ropelens.measured_rotation.single_tokens import BRIEF, FULL
from ropelens.model.as_live_model import as_live_model


def as_pairs(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Move coordinates j and j + size / 2 of each head to 2j and 2j + 1."""
    return x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)


def finish(writer: gguf.GGUFWriter, stated) -> None:
    """Add keys of RoPE, or tensors if the values are arrays, and write the file."""
    for name, value in stated.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(f"{name}.weight", value.astype(np.float32))
        else:
            add = {
                str: writer.add_string,
                int: writer.add_uint32,
                float: writer.add_float32,
            }
            add[type(value)](f"{writer.arch}.rope.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_bundled(
    file: Path,
    *,
    permutations=1,
    kind="F32",
    bos: bool = True,
    stated: Any = None,
) -> None:
    quantized = gguf.GGMLQuantizationType[kind]
    config = LlamaConfig.from_pretrained(bundled_path())
    model = LlamaForCausalLM.from_pretrained(bundled_path(), dtype=torch.float32)
    described = json.loads((bundled_path() / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(described["vocab"], key=described["vocab"].get))
    writer.add_token_merges([" ".join(pair) for pair in described["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_add_bos_token(bos)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for torch_name, weight in model.named_parameters():
        name = names.get_name(torch_name, (".weight",))
        x = weight.detach()
        for _ in range(
            permutations * name.endswith(("attn_q.weight", "attn_k.weight"))
        ):
            x = as_pairs(x, config.num_attention_heads)
        if x.ndim == 1 or kind == "F32":
            writer.add_tensor(name, x.numpy())
        else:
            writer.add_tensor(
                name, gguf.quantize(x.numpy(), quantized), raw_dtype=quantized
            )
    finish(writer, stated or {})


@pytest.fixture(scope="module")
def bundled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "bundled.gguf"
    write_bundled(file)
    return file


def test_a_file_is_the_model_it_was_made_of(bundled_file, tmp_path, capfd):
    model, tokenizer = rl.load(bundled_file.parent)  # a folder with one file
    assert capfd.readouterr().err == ""  # no bar without a terminal
    original, _ = rl.load("bundled")
    text = "Call me Ishmael. The old man lived by the sea."
    tokens = tokenizer(text, return_tensors="pt").input_ids
    torch.testing.assert_close(model(tokens).logits, original(tokens).logits)
    skip_before("transformers", "5.6", "cannot read the tokenizer of a file again")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, same = rl.load(tmp_path)
    assert torch.equal(same(text, return_tensors="pt").input_ids, tokens)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_file_is_parsed_twice_and_its_names_are_mapped_once(
    bundled_file, monkeypatch
):
    """transformers would parse a file three times, and map names once for each module."""
    counts = {}
    for owner, name in (
        (gguf.GGUFReader, "_build_fields"),
        (gguf.TensorNameMap, "__init__"),
    ):
        count = counts[name] = mock.Mock(side_effect=getattr(owner, name))
        monkeypatch.setattr(owner, name, lambda *args, count=count: count(*args))
    rl.load(bundled_file)
    assert [count.call_count for count in counts.values()] == [2, 1]
    assert type(counts["_build_fields"].call_args.args[0].data) is np.ndarray


def test_fields_are_those_of_the_plain_reader(bundled_file, tmp_path):
    plain = gguf.GGUFReader(bundled_file)
    fast = gguf_reader.FastReader(bundled_file)
    assert len(plain.fields["tokenizer.ggml.tokens"].data) > 200
    for name, field in plain.fields.items():
        ours = fast.fields[name]
        assert ours.types == field.types
        parsed = [
            ggml._gguf_parse_value(field.parts[n], field.types) for n in field.data
        ]
        assert [
            gguf_reader.parse_value(ours.parts[n], ours.types) for n in ours.data
        ] == parsed
    content = bundled_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    begin = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    numbers = content[: begin - 4] + b"\x05" + content[begin - 3 :]  # a list of int32
    endless = (
        content[:begin] + b"\xff" * 7 + content[begin + 7 :]
    )  # the number of tokens
    for damaged in (content[: begin + 500], endless, numbers[: begin + 95]):
        cut.write_bytes(damaged)
        with pytest.raises(ValueError, match="the file ends within a list"):
            gguf_reader.FastReader(cut)
        with pytest.raises(BadCheckpoint, match="download the file again"):
            rl.load(cut)


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.01), ("Q4_1", 0.15)])
def test_a_quantized_file_is_the_model_except_for_rounding(kind, error, tmp_path):
    write_bundled(tmp_path / "small.gguf", kind=kind)
    (model, tokenizer) = rl.load(tmp_path / "small.gguf")
    (original, _) = rl.load("bundled")
    tokens = tokenizer(
        "Call me Ishmael. The old man lived.", return_tensors="pt"
    ).input_ids
    expected = original(tokens).logits
    logits = model(tokens).logits
    assert error / 10 < float((logits - expected).norm() / expected.norm()) < error
    assert not check_row_order(as_live_model(model, tokenizer)).wrong


@pytest.mark.parametrize(("stated", "first"), [(False, "the text"), (True, "<s>")])
def test_texts_begin_as_a_file_states(tmp_path: Path, stated: bool, first: str):
    file = tmp_path / "small.gguf"
    write_bundled(file, bos=stated)
    text = tmp_path / "text.txt"
    text.write_text(rl.read_documents([sample_path()])[0])
    few = rl.Options(context=64, sequences=4, surrogates=0)
    with nullcontext() if stated else pytest.warns(UserWarning, match="--bos always"):
        analysis = rl.analyze(file, text, options=few)
    bos = analysis.tokenizer.bos_token_id
    assert (analysis.tokenizer("The").input_ids[0] == bos) == stated
    assert (analysis.text.ids[:, 0] == bos).all() == stated
    assert analysis.profile.attrs["beginning"] == f"begins with {first}"


@pytest.mark.parametrize("permutations", [0, 2])
def test_a_wrong_order_of_rows_is_reported(tmp_path: Path, permutations: int):
    file = tmp_path / "wrong.gguf"
    write_bundled(file, permutations=permutations)
    with pytest.warns(UserWarning, match="rows of q and k are in the wrong order"):
        model, tokenizer = rl.load(file)
    before = copy.deepcopy(model.state_dict())
    assert check_row_order(as_live_model(model, tokenizer)).wrong
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_short_probe_that_fails_leaves_a_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measure_layers = row_order.measure_layers

    def without_short_probe(live, *, settings=FULL):
        if settings is BRIEF:
            raise UnsupportedModel("The rotation is not clear.", hint="more tokens")
        return measure_layers(live, settings=settings)

    monkeypatch.setattr(row_order, "measure_layers", without_short_probe)
    write_bundled(tmp_path / "wrong.gguf", permutations=2)
    with pytest.warns(UserWarning, match="rows of q and k are in the wrong order"):
        rl.load(tmp_path / "wrong.gguf")


def forward_passes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """A list to which every pass of a Llama appends the shape of its tokens."""
    shapes: list[torch.Size] = []
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def counted(self, input_ids, *args, **options):
        shapes.append(input_ids.shape)
        return forward(self, input_ids, *args, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    return shapes


def save_with_rope(folder: Path, **parameters: object) -> None:
    """Save the bundled model as a folder, as `snapshot_download` writes it."""
    model, tokenizer = rl.load("bundled")
    model.config.rope_parameters |= parameters
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["folder", "dynamic RoPE", "GGUF"])
def test_checks_of_a_sound_model_are_four_passes_of_64_tokens(
    kind: str, bundled_file: Path, tmp_path: Path, monkeypatch
):
    """The checks: causality, the rotation, and the order of the rows of q and k."""
    source = tmp_path
    if kind == "GGUF":
        source = bundled_file
    elif kind == "dynamic RoPE":
        save_with_rope(tmp_path, rope_type="dynamic", factor=2.0)
    else:
        save_with_rope(tmp_path)
    shapes = forward_passes(monkeypatch)
    rl.load(source)
    assert 0 < len(shapes) <= 4, shapes
    assert max(shape.numel() for shape in shapes) <= 64, shapes


def test_a_model_in_doubt_is_checked_on_the_whole_story(tmp_path: Path, monkeypatch):
    """Most planes of this model do not rotate: 32 tokens do not show that rows are permuted."""
    model, tokenizer = rl.load("bundled:p-rope-reversed-0.75")
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            pairs = projection.weight.data.unflatten(0, (-1, 16, 2))
            projection.weight.data = pairs.transpose(1, 2).reshape(
                projection.weight.shape
            )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    shapes = forward_passes(monkeypatch)
    with pytest.warns(UserWarning, match="rows of q and k are in the wrong order"):
        rl.load(tmp_path)
    assert max(shape[1] for shape in shapes) > 100


@pytest.mark.usefixtures("pageless")
def test_a_run_on_a_file(bundled_file: Path, tmp_path: Path):
    runner = CliRunner()
    result = runner.invoke(app, ["rope", str(bundled_file)])
    assert result.exit_code == 0, result.output
    assert "The rows of q and k are in the right order" in result.output
    story, *_ = rl.read_documents([sample_path()])
    (tmp_path / "text.txt").write_text(story)
    arguments = f"--text {tmp_path}/text.txt --context 64 --sequences 4 --surrogates 2"
    arguments += f" --out {tmp_path}/out"
    result = runner.invoke(app, ["analyze", str(bundled_file), *arguments.split()])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert record["model"]["fingerprint"] == identity_of(bundled_file)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(BadCheckpoint, match=r"transformers cannot read .*model.gguf"):
        rl.load(file)


SHORT = np.linspace(1, 2, 16)
LONG = np.linspace(1, 8, 16)
YARN = {
    "scaling.type": "yarn",
    "scaling.factor": 4.0,
    "scaling.original_context_length": 128,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
FROM_128 = {"original_max_position_embeddings": 128}
LLAMA3 = FROM_128 | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3["high_freq_factor"] = 4.0


def described(rope_parameters: dict[str, Any]) -> LlamaConfig:
    config = LlamaConfig.from_pretrained(bundled_path())
    config.rope_parameters = {"rope_theta": 10000.0} | rope_parameters
    return config


def llama3_factors() -> np.ndarray:
    rates = [
        ROPE_INIT_FUNCTIONS[name](described(LLAMA3))[0] for name in ("linear", "llama3")
    ]
    return 8 * (rates[0] / rates[1]).numpy()


# fmt: off
STATED = {  # keys and tensors of a file, and the rope_parameters of its model or an error
    "linear": ({"scaling.type": "linear", "scaling.factor": 4.0}, LINEAR),
    "an older key": ({"scale_linear": 4.0}, LINEAR),
    "none": ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
    "yarn": (YARN, LINEAR | FROM_128 | {"rope_type": "yarn"}),
    "yarn with bounds": (YARN | {"scaling.yarn_beta_fast": 8.0, "scaling.yarn_beta_slow": 2.0},
        LINEAR | FROM_128 | {"rope_type": "yarn", "beta_fast": 8, "beta_slow": 2}),
    "llama3": ({"rope_freqs": llama3_factors()}, LLAMA3),
    "longrope": ({"scaling.attn_factor": 1.25, "scaling.original_context_length": 128,
        "rope_factors_short": SHORT, "rope_factors_long": LONG}, FROM_128 | {
        "rope_type": "longrope", "attention_factor": 1.25, "short_factor": [*SHORT],
        "long_factor": [*LONG]}),
    "dynamic": ({"scaling.type": "dynamic", "scaling.factor": 4.0}, "scaling of type dynamic"),
    "attention": (YARN | {"scaling.yarn_attn_factor": 1.5}, "yarn_attn_factor"),
    "yarn and factors": (YARN | {"rope_freqs": SHORT}, "scaling of type yarn"),
    "only long": ({"rope_factors_long": LONG}, "scaling of type linear"),
    "unknown": ({"scaling.alpha": 4.0}, "scaling.alpha"),
    "few factors": ({"rope_freqs": SHORT[:8]}, "8 factors for 32 coordinates"),
}
FAMILIES = {
    "gemma3": ({"freq_base": 1e6, "scaling.factor": 4.0}, {
        "full_attention": LINEAR | {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    "starcoder2": ({"freq_base": 1e5}, {"rope_type": "default", "rope_theta": 1e5}),
    "nemotron": ({"freq_base": 1e4, "dimension_count": 32},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}),
    "qwen2": ({"freq_base": 1e4, "dimension_count": 16}, "8 frequencies, sum 1.46"),
}
# fmt: on


@pytest.mark.parametrize("rope", STATED)
def test_a_file_rotates_as_it_states_or_is_refused(tmp_path: Path, rope: str):
    stated, parameters = STATED[rope]
    write_bundled(tmp_path / "model.gguf", stated=stated)
    if isinstance(parameters, str):
        with pytest.raises(
            BadCheckpoint, match=f"states a rotation(?s:.*){parameters}"
        ):
            rl.load(tmp_path / "model.gguf")
        return
    model, _ = rl.load(tmp_path / "model.gguf")
    usual = LlamaForCausalLM.from_pretrained(bundled_path(), dtype=torch.float32)
    right = LlamaForCausalLM(described(parameters)).eval()
    right.load_state_dict(usual.state_dict())
    tokens = torch.arange(300)[None]
    with torch.no_grad():
        logits = model(tokens).logits
        torch.testing.assert_close(logits, right(tokens).logits, atol=1e-3, rtol=0)
        assert rope == "none" or (logits - usual(tokens).logits).abs().max() > 1
    assert depends_on_length(model.config) == (rope == "longrope")
    rl.measure_rope(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_has_the_rotation_of_the_file(tmp_path: Path, family: str):
    stated, expected = FAMILIES[family]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", family)
    for key in (
        "vocab_size",
        "embedding_length",
        "feed_forward_length",
        "context_length",
    ):
        writer.add_uint32(f"{family}.{key}", 128)
    for key in ("block_count", "attention.head_count", "attention.head_count_kv"):
        writer.add_uint32(f"{family}.{key}", 4)
    finish(writer, stated)
    context = pytest.raises(BadCheckpoint, match=str(expected))
    with context if isinstance(expected, str) else nullcontext():
        config = read_config(tmp_path / "model.gguf", Loading()).config
        rope = config.rope_parameters
        if "full_attention" in rope:  # an older transformers states another base beside
            rope = {kind: rope[kind] for kind in expected}
        assert rope == expected
