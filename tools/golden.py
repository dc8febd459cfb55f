"""Test whether a change to the code changed a number or a sentence.

    PYTHONPATH=BEFORE python tools/golden.py make /tmp/before --shared SHARED --models MODELS
    python tools/golden.py make /tmp/after --shared SHARED --models MODELS
    python tools/golden.py compare /tmp/before /tmp/after --exact
    python tools/golden.py committed reports --shared SHARED

`make` runs every command, the scripts of analyses/ and the main Python calls on small models.
It keeps all numbers and all sentences: the text of each page, the strings and numbers of its
payload, the lines of `describe`, and the output of each command. Folders, times and versions
are masked in them. MODELS may have smollm2-135m, and SHARED has checkpoints/stories260k,
checkpoints/babyllama105, corpora/tinystories and corpora/novels. Both are optional.

`compare` prints the differences. Without --exact, numbers may differ by rounding, and reworded
sentences must state the same numbers; labels, verdicts and ranks must be equal. With --exact,
everything must be equal. `committed` opens every committed result, measures small models again
and compares their numbers within --tolerance, because processors round differently.
"""

import base64
import contextlib
import difflib
import gzip
import importlib
import io
import json
import math
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
import typer
import xarray as xr
from safetensors.numpy import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import ropelens as rl

PACKAGE = Path(rl.__file__).parent
BUNDLED = PACKAGE / "bundled/rope"
SAMPLE = BUNDLED / "sample.jsonl"
ANALYSES = PACKAGE.parent / "analyses"
PROMPT = "Once there was a cat. Once there was"
OTHER_PROMPT = "Once there was a dog. Once there was"
SMALL = "--context 96 --sequences 12 --seed 0"
LOOK = f"--prompt '{PROMPT}' --attention-on punctuation"
SWEEP = "--keep 1,0.5 --bands 2 --controls 1 --rows 32"
TINY = "2x32x2x1"
TRAINING = f"--size {TINY} --context 32 --vocabulary 300 --steps 6 --precision fp32"
LARGER = "--context 256 --seed 0 --batch-size 4"
LARGER_SWEEP = (
    "--sequences 4 --keep 1,0.5 --controls 1 --rows 32"
    " --measures loss,induction,change,copying"
)
EDITS = {"slow": "p-rope:0.5", "yarn": "yarn:4", "nope": "nope"}
STUDY = f"""\
variants = ["rope", "p-rope:0.5"]
seeds = [0, 1]
sizes = ["{TINY}"]
context = 32
vocabulary = 300
steps = 6
decay = 0.5
history_every = 3
precision = "fp32"
"""
ANSWERS = ("frequency_norms", "positional_heads", "causal", "causes", "reach")
"""Scripts of analyses/ that take seconds."""
PROSE = (
    "The old man opened the door, took the letter from the table, and read the letter"
    " once more. Then he put the letter back, and the door closed behind him."
)

DESCRIBED = {
    *("profile", "truncation", "reach", "comparison", "evaluation"),
    *("attribution", "patches", "capture"),
}
"""Kinds of results that `describe` explains in sentences."""
PAGE_NUMBERS = "-numbers.safetensors"
INLINE_TAGS = {"a", "b", "cite", "code", "em", "i", "strong", "sub", "sup"}
HIDDEN_TAGS = {"script", "style"}
SHOWN_ATTRIBUTES = {"title", "aria-label", "alt", "placeholder"}

PROGRESS = re.compile(r"[\w ]+: [\d,]+ of [\d,]+ .*")
MASKS = {
    re.compile(r"(?<![\w.:/<])/(?:[\w.+@:-]+/)+"): "/FOLDER/",
    re.compile(r"\d{4}-\d\d-\d\dT[\d:]+(\+[\d:]+)?"): "TIME",
    re.compile(r"ropelens \d\S+, torch .*?xarray [\d.]+"): "VERSIONS",
    re.compile(r"of [\d.,]+ [kMGT]?B free"): "of SIZE free",
    re.compile(r"expected time: \S+"): "expected time: DURATION",
}
ALWAYS_VOLATILE = (
    r"versions|created|seconds|times?|peak\w*memory\w*|python|platform|threads|device|rope_run"
    r"|tokens_per_second|started|finished|speed"
)
VOLATILE = re.compile(ALWAYS_VOLATILE)
"""Names of values that differ between two runs of the same code."""
UNCHECKED = re.compile(
    rf"{ALWAYS_VOLATILE}|command|digest|contents|folder|path|\w*sha256|arguments"
    r"|fingerprints?|kind|batch_size|source"
)
"""Names of values that are compared only with --exact."""
FITTED = re.compile(r"(.*_)?(bits|fraction|gain|kernel|change|loss_se)")
"""Variables that depend on fits, which stop within 5e-4 of a head's bits."""
FITTED_TO = 1e-4
NUMBER = re.compile(r"[-+\u2212]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?%?")
MOST_SHOWN = 200  # characters of a changed text that are printed

Values = dict[str, np.ndarray]
Describe = Callable[[xr.Dataset | pd.DataFrame], list[str]]

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
Shared = Annotated[Path | None, typer.Option(envvar="ROPELENS_SHARED")]
Models = Annotated[Path | None, typer.Option(envvar="ROPELENS_MODELS")]


# Commands


def command(*parts: object, program: Path | None = None) -> str:
    """Run `ropelens PARTS`, or a script, in this process; its exit status must be 0.

    A part is a path or several words, which are split as a shell splits them. Return the
    output on stdout and on stderr, without the lines of progress.
    """
    words = [str(program or "ropelens"), *words_in(parts)]
    printed = stream_of_bytes()
    messages = stream_of_bytes()
    begun = time.perf_counter()
    with (
        mock.patch.object(sys, "argv", words),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(messages),
    ):
        status = exit_status(program)
    if status:
        fault = f"{shlex.join(words)} ends with exit status {status}"
        raise SystemExit(f"{text_in(messages)}{fault}")
    seconds = time.perf_counter() - begun
    print(f"{seconds:6.1f} s  {shlex.join(words)}", file=sys.stderr)
    lines = lines_without_progress(text_in(messages))
    return masked(text_in(printed) + "".join(lines))


def words_in(parts: Iterable[object]) -> list[str]:
    words = []
    for part in parts:
        if isinstance(part, Path):
            words.append(str(part))
        else:
            words += shlex.split(str(part))
    return words


def stream_of_bytes() -> io.TextIOWrapper:
    """A stream in memory that takes text and bytes, because paths are printed as bytes."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def text_in(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()


def exit_status(program: Path | None) -> object:
    """Run the program, or ropelens, with the current arguments."""
    try:
        if program:
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module("ropelens", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code
    return 0


def lines_without_progress(text: str) -> list[str]:
    lines = text.splitlines(keepends=True)
    return [line for line in lines if not PROGRESS.match(line)]


def masked(text: str) -> str:
    """Replace folders, times and versions, which differ between runs of the same code."""
    for pattern, name in MASKS.items():
        text = pattern.sub(name, text)
    return text


def write_folder(out: Path, *parts: object) -> None:
    """Run a command that writes the folder `out`, and keep its output next to it."""
    printed = command(*parts, "--out", out)
    file = out.with_name(f"{out.name}-printed.txt")
    file.write_text(printed)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write one line for each text. Line breaks in a text are escaped."""
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            escaped = masked(line).replace("\n", "\\n")
            file.write(f"{escaped}\n")


# Measurements


@app.command()
def make(out: Path, shared: Shared = None, models: Models = None) -> None:
    """Run everything and write the results to OUT, a folder that does not exist."""
    out = out.resolve()
    out.mkdir(parents=True)
    measure("bundled", out=out / "bundled")
    if shared:
        stories = shared / "corpora/tinystories"
        for name in ("stories260k", "babyllama105"):
            model = shared / "checkpoints" / name
            measure(model, text=stories, out=out / name)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model_with_two_kinds(Path(folder, "two-kinds"))
        measure(model, text=SAMPLE, out=out / "two-kinds")
    compare_checkpoints(out)
    train_runs(out)
    train_study(out)
    test_claims(out)
    explain_prompts(out)
    run_scripts(out / "answers")
    write_for_other_projects(out)
    if shared and models and (models / "smollm2-135m").exists():
        prose = shared / "corpora/novels/valid"
        measure_smollm2(models / "smollm2-135m", text=prose, out=out / "smollm2")
    record_pages(out)
    record_descriptions(out)
    remove_other_files(out)


def measure(model: str | Path, *, out: Path, text: Path | None = None) -> None:
    """Run the commands that take one model, and the main Python calls."""
    out.mkdir()
    parts: list[object] = [model, SMALL]
    if text:
        parts += ["--text", text]
    write_folder(out / "analyze", "analyze", *parts, LOOK)
    write_folder(out / "truncate", "truncate", *parts, SWEEP)
    write_output(out / "report.txt", "report", out / "analyze")
    write_output(out / "plan.txt", "analyze --plan", *parts)
    write_output(out / "plan-gpu.txt", "analyze --plan --device cuda", *parts)
    write_output(out / "plan-sweep.txt", "truncate --plan", *parts, SWEEP)
    write_output(out / "rope.txt", "rope", model, "--verbose")
    write_output(out / "rope-p-rope-0.5.txt", "rope", model, "--variant p-rope:0.5")
    write_output(out / "rope-yarn-4.txt", "rope", model, "--variant yarn:4")
    results = call_functions(str(model), text=text or SAMPLE)
    for function, result in results.items():
        save(result, out / f"{function}.nc")
    evaluated = results["evaluate"]
    rl.paired_changes(evaluated).to_csv(out / "paired-changes.csv")
    rl.position_losses(evaluated).to_csv(out / "position-losses.csv")
    figure = rl.plot_position_losses(evaluated)
    record_payload(Payload(figure.to_plotly_json()), out, name="position-losses")


def write_output(file: Path, *parts: object) -> None:
    """Run a command and keep its output."""
    file.write_text(command(*parts))


def call_functions(name: str, *, text: Path) -> dict[str, xr.Dataset]:
    """Results of the main functions, by the names of their files."""
    model, tokenizer = rl.load(name)
    corpus = rl.tokenize(rl.read_documents([text]), tokenizer, context=64)[:8]
    plain = rl.Text(corpus.ids, lengths=corpus.lengths)  # without documents
    first = corpus.ids[0, : int(corpus.lengths[0])]
    with rl.edit_rope(model, "linear:2"):
        edited = rl.measure_rope(model)
    with rl.silence_heads(model, "1.*", to="mean", text=plain):
        silent = rl.evaluate(model, plain, edits={}, measures=["loss"])
    stopped = {"1.0": rl.stop(rl.Slowest(0.25), heads="1.0")}
    return {
        "profile-rows": rl.profile(model, corpus, rows=16, tokenizer=tokenizer),
        "evaluate": rl.evaluate(model, corpus, edits=EDITS),
        "controls": rl.evaluate(
            model, corpus, edits=stopped, measures=["loss"], controls=2
        ),
        "silent": silent,
        "capture": rl.capture(model, first, heads="1.2", values=True),
        "capture-named": rl.capture(
            model, [PROMPT, "A cat."], heads="1.*", tokenizer=tokenizer
        ),
        "reach": rl.reach(model, plain, distances=[700, 5000]),
        "rope": rl.measure_rope(model),
        "rope-edited": edited,
        "rope-compared": rl.compare_rope(model, model),
        **explain_answer(model, corpus),
    }


def explain_answer(model: torch.nn.Module, corpus: rl.Text) -> dict[str, xr.Dataset]:
    """Attribute an answer to planes, and patch it from a text of the same length."""
    length = min(24, int(corpus.lengths[:2].min()))
    text = corpus.ids[0, :length]
    source = corpus.ids[1, :length]
    answer = (int(text[0]), int(text[-1]))
    return {
        "attribution": rl.attribute_planes(model, text, answer, check=3, source=source),
        "patches-head": rl.patch_each(model, text, source, answer, over="head"),
        "patches-layer": rl.patch_each(model, text, source, answer, over="layer"),
    }


def save(result: xr.Dataset, path: Path) -> None:
    """Save a dataset. Attributes that are neither texts nor numbers become texts."""
    attrs = {}
    for name, value in result.attrs.items():
        attrs[name] = value if np.isscalar(value) else str(value)
    result = result.assign_attrs(attrs)
    rl.save(result, path)


def write_model_with_two_kinds(folder: Path) -> Path:
    """Write a small Gemma 3 with random weights. Only its last layer has no window."""
    tokenizer = json.loads((BUNDLED / "tokenizer.json").read_text())
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer["model"]["vocab"]),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=24,
        layer_types=[
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    shutil.copy(BUNDLED / "tokenizer_config.json", folder)
    return folder


def compare_checkpoints(out: Path) -> None:
    """List the bundled models, and compare two of them."""
    write_output(out / "list.txt", "list")
    write_output(out / "variant.txt", "rope --variant p-rope:0.75")
    both = "bundled bundled:p-rope-0.75"
    write_folder(out / "checkpoints", "analyze", both, "--text", SAMPLE, SMALL)
    write_folder(out / "compared", "compare", *checkpoints(out))


def checkpoints(out: Path) -> list[Path]:
    """Folders of the two analyzed models."""
    files = out.glob("checkpoints/*/profile.nc")
    return sorted(file.parent for file in files)


def train_runs(out: Path) -> None:
    """Train two models, one of them with measurements on the way, and compare them."""
    runs = out / "runs"
    runs.mkdir()
    training = ("train", TRAINING, "--text", SAMPLE)
    write_folder(runs / "rope", *training, "--variant rope --watch")
    write_folder(runs / "p-rope", *training, "--variant p-rope:0.5")
    write_output(runs / "watch.txt", "report", runs / "rope/watch")
    both = (runs / "rope", runs / "p-rope")
    write_folder(out / "compared-runs", "compare", *both, "--sequences 8")


def train_study(out: Path) -> None:
    """Train a study of two variants and two seeds, and compare its runs."""
    file = out / "study.toml"
    file.write_text(STUDY)
    study = out / "study"
    write_folder(study, "train", "--study", file, "--text", SAMPLE)
    write_folder(out / "compared-study", "compare", study, "--sequences 8")


def test_claims(out: Path) -> None:
    """Test claims on one model, in several settings, and on two analyzed models."""
    write_folder(out / "claims", "claims bundled", SMALL)
    settings = "--robust --contexts 48,96 --sequences 12"
    write_folder(out / "claims-robust", "claims bundled", settings)
    write_folder(out / "claims-two", "claims", *checkpoints(out))
    profile = rl.open(out / "two-kinds/analyze/profile.nc")
    table = rl.test_claims(profile)
    table.to_csv(out / "claims-of-kinds.csv", index=False)
    shown = read_page(rl.show(table).html)
    write_lines(out / "claims-of-kinds.txt", shown.lines)


def explain_prompts(out: Path) -> None:
    """Explain a prompt alone, compared with a token, and compared with another prompt."""
    explain = f"prompt bundled '{PROMPT}'"
    write_folder(out / "prompt", explain)
    write_folder(out / "prompt-token", explain, "--versus the")
    write_folder(out / "prompt-other", explain, f"--versus '{OTHER_PROMPT}'")
    model, tokenizer = rl.load("bundled")
    inside = rl.capture(
        model,
        PROMPT,
        heads="3.*",
        tokenizer=tokenizer,
        logits_of=["the", " the"],
    )
    save(inside, out / "capture-logits.nc")


def run_scripts(out: Path) -> None:
    """Run scripts of analyses/, which write to a folder next to their own."""
    scripts = shutil.copytree(ANALYSES, out / "analyses")
    for name in ANSWERS:
        script = scripts / f"{name}.py"
        printed = command("--context 96 --sequences 12", program=script)
        file = out / f"{name}.txt"
        file.write_text(printed)
    shutil.rmtree(scripts)


def write_for_other_projects(out: Path) -> None:
    """Write edited checkpoints, and numbers in the formats of other projects."""
    export = "export bundled"
    write_folder(out / "exported-variant", export, "--variant p-rope:0.75")
    edits = "--edit drop:0-3,7 --edit scale=0.5:slowest=0.25:3.*"
    write_folder(out / "exported-edits", export, edits)
    analysis = out / "bundled/analyze"
    for project in ("mha2mla", "triattention", "duoattention"):
        ranks = out / f"ranks-{project}"
        write_folder(ranks, "ranks", analysis, f"--for {project}")


def measure_smollm2(model: Path, *, text: Path, out: Path) -> None:
    """Measure a language model on real prose. This takes minutes."""
    out.mkdir()
    parts = (model, "--text", text, LARGER)
    analysis = out / "analyze"
    write_folder(analysis, "analyze", *parts, "--sequences 16")
    write_folder(out / "claims", "claims --quick", analysis)
    write_folder(out / "truncate", "truncate", *parts, LARGER_SWEEP)
    write_folder(out / "prompt", "prompt", model, "'The capital of France is'")
    loaded, tokenizer = rl.load(str(model))
    inside = rl.capture(
        loaded,
        PROSE,
        heads="12.4",
        tokenizer=tokenizer,
        values=True,
    )
    save(inside, out / "capture.nc")


def remove_other_files(out: Path) -> None:
    """Remove pages, tokenizers and caches, and keep files with numbers or sentences."""
    for folder in [*out.rglob("measured"), *out.rglob(".unfinished")]:
        shutil.rmtree(folder)
    for path in sorted(out.rglob("*")):
        kept = path.suffix in READERS and "token" not in path.name
        if path.is_file() and not kept:
            path.unlink()


# Sentences


def record_pages(out: Path) -> None:
    """Write the text, the strings and the numbers of every page next to it."""
    for page in sorted(out.rglob("index.html")):
        html = page.read_text(encoding="utf-8")
        content = read_page(html)
        write_lines(page.with_name("page.txt"), content.lines)
        if content.packed:
            record_payload(unpack(content.packed), page.parent, name="page")


def record_payload(payload: "Payload", folder: Path, *, name: str) -> None:
    """Write the strings and the numbers of a payload to files that begin with `name`."""
    strings = []
    numbers = {}
    for place, value in payload.items():
        if isinstance(value, str):
            strings.append(f"{place}: {value}")
        else:
            numbers[place] = np.ascontiguousarray(value)
    write_lines(folder / f"{name}-strings.txt", sorted(strings))
    save_file(numbers, folder / f"{name}{PAGE_NUMBERS}")


class PageReader(HTMLParser):
    """Reads the visible text of a page, and the payload of its script."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []  # "\n" is the beginning or the end of a block
        self.packed = ""
        self.hidden = ""  # the script or style that is being read
        self.in_payload = False

    @property
    def lines(self) -> list[str]:
        """Visible text, one line for each block of text."""
        text = "".join(self.parts)
        lines = [one_spaced(line) for line in text.splitlines()]
        return [line for line in lines if line]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in INLINE_TAGS:
            self.parts.append("\n")
        if tag in HIDDEN_TAGS:
            self.hidden = tag
            self.in_payload = ("id", "payload") in attrs
        for name, value in attrs:
            if name in SHOWN_ATTRIBUTES and value:
                self.parts.append(f"\n{name}: {one_spaced(value)}\n")

    def handle_endtag(self, tag: str) -> None:
        if tag not in INLINE_TAGS:
            self.parts.append("\n")
        if tag == self.hidden:
            self.hidden = ""
            self.in_payload = False

    def handle_data(self, data: str) -> None:
        if self.in_payload:
            self.packed += data
        elif not self.hidden:
            self.parts.append(re.sub(r"\s+", " ", data))


def one_spaced(text: str) -> str:
    words = text.split()
    return " ".join(words)


def read_page(html: str) -> PageReader:
    reader = PageReader()
    reader.feed(html)
    reader.close()
    return reader


@dataclass
class Payload:
    """JSON of a page or a figure, and the bytes of its arrays."""

    tree: Any
    arrays: bytes = b""

    def items(self) -> Iterator[tuple[str, Any]]:
        """Strings and arrays of numbers, by dotted names."""
        yield from self.items_in(self.tree, name="")

    def items_in(self, value: Any, *, name: str) -> Iterator[tuple[str, Any]]:
        """The items of a part of the tree, whose names begin with `name`."""
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, dict):
            yield from self.items_of_dict(value, name=name)
        elif isinstance(value, (list, tuple)):
            yield from self.items_of_list(value, name=name)
        elif isinstance(value, np.ndarray):
            yield from self.items_of_list(value.tolist(), name=name)
        elif value is not None:
            yield name, np.array([value])

    def items_of_dict(
        self, values: dict[str, Any], *, name: str
    ) -> Iterator[tuple[str, Any]]:
        if is_packed(values):
            yield name, self.array(values)
            return
        for key, value in values.items():
            inner = f"{name}.{key}" if name else key
            yield from self.items_in(value, name=inner)

    def items_of_list(
        self, values: Sequence[Any], *, name: str
    ) -> Iterator[tuple[str, Any]]:
        """One array if the list has only numbers; otherwise, the items of each value."""
        if values and all(is_number_or_none(value) for value in values):
            yield name, np.array(values, dtype=float)
            return
        for index, value in enumerate(values):
            yield from self.items_in(value, name=f"{name}.{index}")

    def array(self, packed: dict[str, Any]) -> np.ndarray:
        """The array of a payload, whose lowest bytes come first, or of a plotly figure."""
        dtype = np.dtype(packed["dtype"])
        if "bdata" in packed:
            data = base64.b64decode(packed["bdata"])
            return np.frombuffer(data, dtype)
        shape = packed["shape"]
        begin = packed["data"]
        end = begin + math.prod(shape) * dtype.itemsize
        data = np.frombuffer(self.arrays[begin:end], np.uint8)
        by_number = data.reshape(dtype.itemsize, -1).T
        numbers = np.ascontiguousarray(by_number).view(dtype)
        return numbers.reshape(shape)


def is_packed(value: dict[str, Any]) -> bool:
    """Whether a dict of a payload is an array."""
    if "dtype" not in value:
        return False
    return "bdata" in value or isinstance(value.get("data"), int)


def is_number_or_none(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, (bool, int, float))


def unpack(packed: str) -> Payload:
    """Decode a payload as `unpack.js` does: base85, gzip, JSON, a zero byte, and arrays."""
    digits = str.maketrans("/,.", "<>&")
    base85 = packed.strip().translate(digits)
    compressed = base64.b85decode(base85)
    content = gzip.decompress(compressed)
    text, _, arrays = content.partition(b"\0")
    return Payload(json.loads(text), arrays)


def find_describe() -> Describe:
    """Find the function that describes results, which is not public and may move."""
    for name in ("ropelens.report.words", "ropelens.report.sentences"):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            if hasattr(module, "describe"):
                return module.describe
    return importlib.import_module("ropelens.report").describe


def record_descriptions(out: Path) -> None:
    """Write the sentences about each saved result, table of heads and analysis."""
    describe = find_describe()
    for path in sorted(out.rglob("*.nc")):
        results = rl.open(path)
        if results.attrs.get("kind") in DESCRIBED:
            lines = described(results, describe)
            write_lines(path.with_suffix(".sentences.txt"), lines)
    for path in sorted(out.rglob("run.json")):
        run = json.loads(path.read_text())
        if run["kind"] in ("analysis", "truncation"):
            lines = lines_of_analysis(path.parent, describe)
            write_lines(path.with_name("analysis.sentences.txt"), lines)


def described(results: xr.Dataset | pd.DataFrame, describe: Describe) -> list[str]:
    """Sentences about results, or the error about results that cannot be described."""
    try:
        return describe(results)
    except rl.RopelensError as error:
        return [f"{type(error).__name__}: {error}"]


def lines_of_analysis(folder: Path, describe: Describe) -> list[str]:
    """Sentences about an analysis and its heads, and its display in a notebook."""
    analysis = rl.open(folder)
    table = pd.read_csv(folder / "heads.csv")
    display = read_page(analysis._repr_html_())
    return [
        repr(analysis),
        *analysis.findings,
        *described(analysis.heads, describe),
        *described(table, describe),
        *display.lines,
    ]


# Comparison


@app.command()
def compare(
    before: Path,
    after: Path,
    strict: bool = False,
    exact: bool = False,
    tolerance: float = 1e-6,
) -> None:
    """Print the differences of two folders; exit with 1 if a number or a verdict differs.

    A file or a name that only one folder has is printed; with --strict it counts as a
    difference. With --exact it counts as well, numbers must be equal bit for bit, and every
    sentence must have the same words.
    """
    rules = Rules(strict=strict or exact, exact=exact, tolerance=tolerance)
    raise SystemExit(differences(before, after, rules) > 0)


@dataclass(frozen=True)
class Rules:
    """What counts as a failure. With `strict`, names that only one folder has do."""

    tolerance: float = 1e-6
    strict: bool = False
    exact: bool = False

    def largest(self, name: str) -> float:
        """The largest relative difference of a variable that is allowed."""
        if self.exact:
            return 0.0
        if FITTED.fullmatch(name):
            return max(self.tolerance, FITTED_TO)
        return self.tolerance

    def compares(self, name: str) -> bool:
        """Whether a variable is compared, given its dotted name."""
        ignored = VOLATILE if self.exact else UNCHECKED
        last_word = name.split(" ")[-1]
        parts = last_word.split(".")
        return not any(ignored.fullmatch(part) for part in parts)

    def compares_file(self, file: Path) -> bool:
        """Whether a file is compared. Numbers of pages are rounded to few digits."""
        return self.exact or not file.name.endswith(PAGE_NUMBERS)


@dataclass
class Change:
    """A text that changed."""

    before: str
    after: str

    @property
    def is_reworded(self) -> bool:
        """Whether it is a sentence that states the same numbers in other words."""
        if self.before.count(" ") < 3:
            return False
        return numbers_in(self.before) == numbers_in(self.after)

    @property
    def first_difference(self) -> int:
        """The number of characters at the beginning that both texts share."""
        shared = min(len(self.before), len(self.after))
        for index in range(shared):
            if self.before[index] != self.after[index]:
                return index
        return shared

    def __str__(self) -> str:
        """Both texts from the first difference on, with the words in front of it."""
        begin = max(0, self.first_difference - MOST_SHOWN // 2)
        shown = slice(begin, begin + MOST_SHOWN)
        return f"{self.before[shown]!r}, now {self.after[shown]!r}"


@dataclass
class Difference:
    """The difference of two variables.

    `size` is the largest relative difference of their numbers, `fault` another difference
    in words, and `changes` are the texts that differ.
    """

    size: float = 0.0
    fault: str = ""
    changes: list[Change] = field(default_factory=list)


def differences(before: Path, after: Path, rules: Rules) -> int:
    """Print a line for each difference and a summary; return the number of failures."""
    comparison = Comparison(rules)
    files_before = files_in(before)
    files_after = files_in(after)
    for file in sorted(files_before ^ files_after):
        folder = before if file in files_before else after
        comparison.add_missing(f"{folder}: {file}")
    for file in sorted(files_before & files_after):
        if rules.compares_file(file):
            comparison.add_file(before / file, after / file)
    print(comparison)
    return comparison.failed


def files_in(folder: Path) -> set[Path]:
    paths = folder.rglob("*")
    return {path.relative_to(folder) for path in paths if path.is_file()}


@dataclass
class Comparison:
    """Counts the differences of files and prints each of them."""

    rules: Rules
    files: int = 0
    equal: int = 0
    close: int = 0
    lines: int = 0
    failed: int = 0

    def add_missing(self, place: str) -> None:
        """Add a file or a name that only one folder has."""
        print(f"only in {place}")
        if self.rules.strict:
            self.failed += 1

    def add_file(self, before: Path, after: Path) -> None:
        """Add two versions of a file."""
        self.files += 1
        a = read_values(before)
        b = read_values(after)
        if before.suffix == ".txt":
            self.lines += len(a["text"])
        for name in sorted(a.keys() | b.keys()):
            if not self.rules.compares(name):
                continue
            if name not in b:
                self.add_missing(f"{before}: {name}")
            elif name not in a:
                self.add_missing(f"{after}: {name}")
            else:
                difference = difference_of(name, a[name], b[name])
                self.add(difference, f"{after} {name}", self.rules.largest(name))

    def add(self, difference: Difference, place: str, largest: float) -> None:
        """Add a variable, whose numbers may have a difference of at most `largest`."""
        if difference == Difference():
            self.equal += 1
        if difference.fault:
            self.failed += 1
            print(f"DIFFERS  {place}: {difference.fault}")
        elif difference.size > largest:
            self.failed += 1
            print(f"DIFFERS  {place}: {difference.size:.2g}")
        elif difference.size > 0:
            self.close += 1
            print(f"close    {place}: {difference.size:.2g}")
        for change in difference.changes:
            word = "reworded" if change.is_reworded else "DIFFERS "
            print(f"{word} {place}: {change}")
            if self.rules.exact or not change.is_reworded:
                self.failed += 1

    def __str__(self) -> str:
        return (
            f"{self.files} files with {self.lines} lines of text: "
            f"{self.equal} variables equal bit for bit, "
            f"{self.close} with differences, {self.failed} failures"
        )


def difference_of(name: str, a: np.ndarray, b: np.ndarray) -> Difference:
    if name == "text":
        changes = changed_lines(texts_in(a), texts_in(b))
        return Difference(changes=changes)
    if a.shape != b.shape:
        return Difference(fault=f"shape {a.shape}, now {b.shape}")
    if is_numeric(a) and is_numeric(b):
        return difference_of_numbers(name, a.astype(float), b.astype(float))
    changes = changed_texts(texts_in(a), texts_in(b))
    return Difference(changes=changes)


def is_numeric(values: np.ndarray) -> bool:
    return values.dtype.kind in "fiub"


def difference_of_numbers(name: str, a: np.ndarray, b: np.ndarray) -> Difference:
    finite = np.isfinite(a)
    same_places = np.array_equal(finite, np.isfinite(b))
    if not same_places or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return Difference(fault="other values are missing or infinite")
    sizes = np.abs(a[finite])
    least = 1e-3 * sizes.max(initial=0)
    if FITTED.fullmatch(name):
        least = 1.0
    scale = np.maximum(sizes, least)
    scale[scale == 0] = 1.0
    relative = np.abs(a[finite] - b[finite]) / scale
    return Difference(size=float(relative.max(initial=0)))


def texts_in(values: np.ndarray) -> list[str]:
    texts = [str(value) for value in values.ravel()]
    return [masked(text) for text in texts]


def changed_texts(before: list[str], after: list[str]) -> list[Change]:
    """The texts that differ, of two lists of the same length."""
    changes = []
    for old, new in zip(before, after, strict=True):
        if old != new:
            changes.append(Change(old, new))
    return changes


def changed_lines(before: list[str], after: list[str]) -> list[Change]:
    """The changed lines of a text, together with lines that were added or removed."""
    if len(before) == len(after):
        return changed_texts(before, after)
    changes = []
    matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    for kind, begin, end, new_begin, new_end in matcher.get_opcodes():
        if kind != "equal":
            removed = "\n".join(before[begin:end])
            added = "\n".join(after[new_begin:new_end])
            changes.append(Change(removed, added))
    return changes


def numbers_in(text: str) -> list[str]:
    numbers = NUMBER.findall(text)
    return sorted(numbers)


# Files


def read_values(path: Path) -> Values:
    """All numbers and texts of a file by name."""
    read = READERS.get(path.suffix, read_bytes)
    return read(path)


def read_dataset(path: Path) -> Values:
    dataset = xr.load_dataset(path, engine="h5netcdf")
    values = {}
    for name, variable in dataset.variables.items():
        values[str(name)] = variable.values
        for attribute, value in variable.attrs.items():
            values[f"{name} attribute {attribute}"] = np.array([value])
    for attribute, value in dataset.attrs.items():
        values[f"attribute {attribute}"] = np.array([value])
    return values


def read_table(path: Path) -> Values:
    table = pd.read_csv(path)
    return {name: table[name].to_numpy() for name in table}


def read_matrix(path: Path) -> Values:
    matrix = np.loadtxt(path, delimiter="\t", ndmin=2)
    return {"matrix": matrix}


def read_json(path: Path) -> Values:
    text = path.read_text(encoding="utf-8")
    return read_tree(json.loads(text))


def read_torch(path: Path) -> Values:
    return read_tree(torch.load(path))


def read_tree(tree: Any) -> Values:
    return {name: np.array([value]) for name, value in leaves(tree)}


def read_lines(path: Path) -> Values:
    text = path.read_text(encoding="utf-8")
    return {"text": np.array(text.splitlines())}


def read_bytes(path: Path) -> Values:
    content = path.read_bytes()
    return {"bytes": np.frombuffer(content, np.uint8)}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and texts of nested JSON, by dotted names; a plain list is one text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}".strip("."))
    elif not isinstance(value, list):
        yield name, value
    elif value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{name}.{index}".strip("."))
    else:
        words = [str(item) for item in value]
        yield name, " ".join(words)


READERS: dict[str, Callable[[Path], Values]] = {
    ".nc": read_dataset,
    ".csv": read_table,
    ".tsv": read_matrix,
    ".json": read_json,
    ".txt": read_lines,
    ".safetensors": load_file,
    ".pt": read_torch,
    ".pth": read_torch,
}
"""Functions that read the kept files, by suffix. Other files are compared by their bytes."""


# Committed results


@app.command()
def committed(reports: Path, shared: Shared = None, tolerance: float = 1e-4) -> None:
    """Open every result under REPORTS, and repeat the measurements of available models."""
    for path in sorted(reports.rglob("*.nc")):
        number = len(rl.open(path))
        print(f"opened {path.relative_to(reports)}: {number} variables")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder, "reports")
        scripts = shutil.copytree(ANALYSES, Path(folder, "analyses"))
        for record in sorted(reports.glob("*/*/run.json")):
            repeat(record, scripts, shared)
        for record in sorted(again.glob("*/*/run.json")):
            name = record.parent.relative_to(again)
            print(f"measured again: {name}")
            rules = Rules(tolerance=tolerance)
            failed += differences(reports / name, again / name, rules)
    raise SystemExit(failed > 0)


def repeat(record: Path, scripts: Path, shared: Path | None) -> None:
    """Run the script of a committed answer again, if its model and text are available."""
    script = scripts / f"{record.parts[-3]}.py"
    run = json.loads(record.read_text())
    if not script.exists() or run["kind"] != "answer":
        return
    parts: list[object] = []
    for word in shlex.split(run["command"])[2:]:
        is_path = "/" in word
        if is_path and shared is None:
            return
        parts.append(shared / word if is_path else word)
    command(*parts, program=script)


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
