"""Whatever stands in a config, a result or an argument: it works, or ends in one clear line.

A thousand cases, the same ones every time.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic_profile import synthetic_profile
from tiny_checkpoints import save_tiny

from ropelens.analysis.analysis import earlier_analysis, open_analysis
from ropelens.analysis.folders import rewrite_page
from ropelens.analysis.options import Options
from ropelens.analysis.plan import plan_analysis
from ropelens.commands.app import main
from ropelens.errors import RopelensError
from ropelens.files.results import check_out, open_results, read_own_record, save
from ropelens.models.load import open_checkpoint
from ropelens.models.loading import Loading
from ropelens.models.rope import measure_rope
from ropelens.report.index import write_index


def cases(count: int) -> settings:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=checks,
    )


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.integers() | st.just(10**400),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["llama", "gpt2", "bert", "t5", "default", "yarn", "bfloat16", "a/../b"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@contextlib.contextmanager
def works_or_is_refused() -> Iterator[None]:
    """A RopelensError whose one line is short, or nothing; warnings are let pass."""
    line = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except RopelensError as error:
            line = error.line
    assert "\n" not in line
    assert len(line) < 1000


# Configs.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def damaged(model: Path) -> Path:
    """The same, to be damaged anew in every case."""
    return Path(shutil.copytree(model, model.parent / "damaged"))


CONFIG = (
    *("model_type", "architectures", "dtype", "head_dim", "hidden_act", "hidden_size"),
    *("intermediate_size", "max_position_embeddings", "num_attention_heads", "rms_norm_eps"),
    *("num_hidden_layers", "num_key_value_heads", "rope_parameters", "rope_scaling"),
    *("rope_theta", "tie_word_embeddings", "vocab_size", "auto_map", "quantization_config"),
    *("sliding_window", "layer_types", "text_config", "is_encoder_decoder", "bos_token_id"),
    *("transformers_weights", "partial_rotary_factor", "attention_bias", "use_cache"),
    "attribute_map",
)
ROPE = st.fixed_dictionaries(
    {
        "rope_type": st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3"])
        | SCALARS
    },
    optional={
        name: st.floats(-2, 1e6) | SCALARS
        for name in ("rope_theta", "factor", "original_max_position_embeddings")
    },
)


CHANGES = st.dictionaries(st.sampled_from(CONFIG), VALUES, min_size=1, max_size=2)


@cases(250)
@given(changes=CHANGES | ROPE.map(lambda rope: {"rope_parameters": rope}))
def test_configs(model: Path, damaged: Path, changes: dict[str, object]) -> None:
    config = json.loads((model / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | changes))
    with works_or_is_refused():
        plan_analysis(damaged, "a quick fox " * 20, Options(dtype="saved", device="cpu"))
    with works_or_is_refused():
        measure_rope(open_checkpoint(damaged, Loading(device="cpu")).read())


@cases(50)
@given(
    name=st.sampled_from(["tokenizer_config.json", "tokenizer.json", "generation_config.json"]),
    key=st.sampled_from(
        [
            *("bos_token", "model_max_length", "tokenizer_class", "added_tokens_decoder"),
            *("extra_special_tokens", "model", "pre_tokenizer", "eos_token_id", "do_sample"),
        ]
    ),
    value=VALUES,
)
def test_files_beside_the_config(
    model: Path, damaged: Path, name: str, key: str, value: object
) -> None:
    shutil.copytree(model, damaged, dirs_exist_ok=True)
    whole = json.loads((model / name).read_text())
    (damaged / name).write_text(json.dumps(whole | {key: value}))
    with works_or_is_refused():
        open_checkpoint(damaged, Loading(device="cpu")).read()


# Results.


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small file of results, whole.nc."""
    folder = tmp_path_factory.mktemp("results")
    numbers = (("layer", "head"), np.arange(6.0).reshape(2, 3), {"units": "bits"})
    names = ("head", np.array(["a", "b", "c"], dtype=object))
    held = xr.Dataset(
        {"total_bits": numbers, "name": names}, attrs={"model": "tiny", "seed": 0}
    )
    save(held, folder / "whole.nc")
    return folder


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@cases(250)
@given(
    flips=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1
    ),
    kept=st.just(1.0) | st.floats(0, 1),
)
def test_bytes_of_a_profile(results: Path, flips: list[tuple[float, int]], kept: float) -> None:
    content = bytearray((results / "whole.nc").read_bytes())
    for place, bits in flips:
        content[int(place * len(content))] ^= bits
    (results / "profile.nc").write_bytes(content[: int(kept * len(content))])
    with works_or_is_refused():
        opened = open_results(results / "profile.nc", "profile")
        assert opened["total_bits"].values.tolist() == [[0, 1, 2], [3, 4, 5]]


RECORD = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["analysis", "answer", "comparison", "truncation"]) | VALUES,
        "findings": VALUES | st.lists(st.text()),
        "settings": VALUES,
        "seed": VALUES,
    },
)


@cases(250)
@given(
    text=(RECORD | VALUES).map(json.dumps)
    | st.text()
    | st.integers(1, 9).map(lambda n: "[" * n**6)
)
def test_run_json(results: Path, text: str) -> None:
    (results / "run.json").write_text(text, errors="backslashreplace")
    (results / "profile.nc").unlink(missing_ok=True)
    for read in (read_own_record, open_analysis):
        with works_or_is_refused():
            read(results)
    with works_or_is_refused():
        check_out(results, "analysis")


PRINT = {"fingerprint": "0" * 64}


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a sweep could join, once its run.json says so."""
    folder = tmp_path_factory.mktemp("reports") / "analysis" / "tiny"
    folder.mkdir(parents=True)
    save(synthetic_profile()[0], folder / "profile.nc")
    (folder / "index.html").touch()
    return folder


@cases(60)
@given(
    record=st.fixed_dictionaries(
        {"kind": st.just("analysis"), "model": st.just(PRINT) | VALUES},
        optional={
            "findings": st.lists(st.text()) | VALUES,
            "text": st.just(PRINT) | VALUES,
            **dict.fromkeys(("arguments", "seconds", "sweep", "versions"), VALUES),
        },
    )
)
def test_run_json_beside_a_profile(analyzed: Path, record: dict[str, object]) -> None:
    (analyzed / "run.json").write_text(json.dumps(record))
    with works_or_is_refused():
        earlier_analysis(analyzed, PRINT["fingerprint"])
    with works_or_is_refused():
        write_index(analyzed.parents[1])
    with works_or_is_refused():
        rewrite_page(analyzed)


# Arguments.

COMMANDS = {
    "analyze": (
        "--out",
        "--text",
        "--ids",
        "--prompt",
        "--context",
        "--rows",
        "--seed",
        "--plan",
    ),
    "truncate": ("--out", "--keep", "--end", "--bands", "--measures", "--dtype", "--device"),
    "rope": (
        "--variant",
        "--head-dim",
        "--base",
        "--trained-context",
        "--context",
        "--verbose",
    ),
    "compare": ("--out", "--sequences", "--seed", "--device"),
    "report": ("--out", "--help"),
    "train": ("--text", "--out", "--variant", "--size", "--steps", "--study", "--precision"),
    "list": ("--version",),
}
ARGUMENTS = st.one_of(
    st.sampled_from(
        ["nothing", "bundled:x", "0", "1", "-1", "8", "1e400", "nan", "all", "cpu"]
    ),
    st.sampled_from(
        ["p-rope:0.5", "yarn:4", "rope:0", "nope-every:2", "1x16x1x1", "0,1", "\0"]
    ),
    st.text(max_size=6),
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command, and options of its own or not, each with a value or without."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    parts = st.sampled_from(COMMANDS[command]) | ARGUMENTS
    options = draw(st.lists(st.tuples(parts, ARGUMENTS), max_size=4))
    return [command, *(part for option in options for part in option)]


@cases(200)
@given(args=command_lines())
def test_arguments(tmp_path_factory: pytest.TempPathFactory, args: list[str]) -> None:
    """No model is loaded: none of these names is one."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(tmp_path_factory.getbasetemp()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
        mock.patch("ropelens.models.load.locate", side_effect=RopelensError("no model")),
        mock.patch.object(sys, "argv", ["ropelens", *args]),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert ended.value.code in (0, 1, 2)
    lines = [line for line in err.getvalue().splitlines() if "warning: " not in line]
    if ended.value.code:
        assert len(lines) == 1, lines
        assert lines[0].startswith("ropelens: ")
