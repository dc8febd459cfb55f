"""Random configs and arguments work, or end with one clear line."""

import contextlib
import io
import json
import sys
import warnings
from unittest import mock

import pytest
from cli_runs import works_or_is_refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropelens.analysis.options import Options
from ropelens.analysis.plan import plan_analysis
from ropelens.checkpoints.load import open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.commands.app import main
from ropelens.errors import RopelensError
from ropelens.measured_rotation.measure import measure_rope


def cases(count: int) -> settings:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=count, suppress_health_check=checks)


SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 5) | st.just(10**400) | st.floats()
)
SCALARS |= st.text(max_size=8)
SCALARS |= st.sampled_from(
    ["llama", "gpt2", "bert", "default", "yarn", "bfloat16", "a/../b"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
    ),
    max_leaves=4,
)
CONFIG = (
    *("model_type", "architectures", "dtype", "head_dim", "hidden_act", "hidden_size"),
    *(
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "rms_norm_eps",
    ),
    *("num_hidden_layers", "num_key_value_heads", "rope_parameters", "rope_scaling"),
    *(
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
        "auto_map",
        "quantization_config",
    ),
    *(
        "sliding_window",
        "layer_types",
        "text_config",
        "is_encoder_decoder",
        "bos_token_id",
    ),
    *(
        "transformers_weights",
        "partial_rotary_factor",
        "attention_bias",
        "attribute_map",
    ),
)
ROPE_TYPES = st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3"])
ROPE_NAMES = ("rope_theta", "factor", "original_max_position_embeddings")
ROPE_KEYS = dict.fromkeys(ROPE_NAMES, st.floats(-2, 1e6) | SCALARS)
ROPE = st.fixed_dictionaries({"rope_type": ROPE_TYPES | SCALARS}, optional=ROPE_KEYS)
CHANGES = st.dictionaries(st.sampled_from(CONFIG), VALUES, min_size=1, max_size=2)


@cases(40)
@given(changes=CHANGES | ROPE.map(lambda rope: {"rope_parameters": rope}))
def test_configs(model, changes: dict[str, object]):
    whole = (model / "config.json").read_text()
    (model / "config.json").write_text(json.dumps(json.loads(whole) | changes))
    with works_or_is_refused():
        plan_analysis(model, "a quick fox " * 20, Options(device="cpu"))
    with works_or_is_refused():
        measure_rope(open_checkpoint(model, Loading(device="cpu")).read())
    (model / "config.json").write_text(whole)


COMMANDS = {
    "analyze": ("--out", "--text", "--prompt", "--context", "--rows", "--plan"),
    "truncate": (
        *("--out", "--heads", "--keep", "--end", "--bands", "--measures"),
        *("--dtype", "--device"),
    ),
    "rope": ("--variant", "--context", "--verbose"),
    "compare": ("--out", "--sequences", "--seed", "--device"),
    "report": ("--out", "--help"),
    "train": (
        "--text",
        "--out",
        "--variant",
        "--size",
        "--steps",
        "--study",
        "--precision",
    ),
    "list": ("--version",),
}
ARGUMENTS = st.one_of(
    st.sampled_from(
        ["nothing", "bundled:x", "0", "-1", "8", "1e400", "nan", "all", "cpu"]
    ),
    st.sampled_from(["p-rope:0.5", "rope:0", "1x16x1x1", "0,1"]),
    st.text(
        st.characters(exclude_characters="\0"), max_size=6
    ),  # a shell cannot pass NUL
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(sorted(COMMANDS)))
    parts = st.sampled_from(COMMANDS[command]) | ARGUMENTS
    options = draw(st.lists(st.tuples(parts, ARGUMENTS), max_size=4))
    return [command, *(part for option in options for part in option)]


@cases(60)
@given(args=command_lines())
def test_arguments(tmp_path_factory: pytest.TempPathFactory, args: list[str]):
    """Models are not loaded, because the names are not names of models."""
    out = io.StringIO()
    err = io.StringIO()
    with (
        contextlib.chdir(tmp_path_factory.getbasetemp()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
        mock.patch(
            "ropelens.checkpoints.locate._find", side_effect=RopelensError("no model")
        ),
        mock.patch.object(sys, "argv", ["ropelens", *args]),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert ended.value.code in (0, 1, 2)
    lines = [line for line in err.getvalue().splitlines() if "warning: " not in line]
    if ended.value.code:
        assert len(lines) == 1, lines
        assert lines[0].startswith("ropelens: ")
