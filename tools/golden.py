"""Test whether a change to the code changed a number.

    PYTHONPATH=BEFORE python tools/golden.py make /tmp/before --shared SHARED
    python tools/golden.py make /tmp/after --shared SHARED
    python tools/golden.py compare /tmp/before /tmp/after
    python tools/golden.py committed reports --shared SHARED

`make` runs every command and the main calls on three small models. `compare` prints the
differences; labels, verdicts and ranks must be equal, and reworded sentences must state the
same numbers. `committed` opens every committed result, measures small models again and compares
their numbers within --tolerance, because processors round differently. SHARED has
checkpoints/stories260k, checkpoints/babyllama105 and corpora/tinystories.
"""

import contextlib
import io
import json
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
import typer
import xarray as xr
from safetensors.numpy import load_file

import ropelens as rl

HERE = Path(rl.__file__).parent
SAMPLE = HERE / "bundled/rope/sample.jsonl"
SMALL = ("--context", 96, "--sequences", 12, "--seed", 0)
TINY = (
    "--size",
    "2x32x2x1",
    "--context",
    32,
    "--vocabulary",
    300,
    "--precision",
    "fp32",
)
EDITS = {"slow": "p-rope:0.5", "yarn": "yarn:4", "nope": "nope"}
TRAINED = ("rope", "p-rope:0.5")
KEPT = {".nc", ".csv", ".json", ".txt", ".safetensors"}
VOLATILE = re.compile(
    r"versions|command|created|seconds|times?|peak\w*memory\w*|digest|contents|python|platform"
    r"|threads|device|folder|path|\w*sha256|tokens_per_second|arguments|started|finished|speed"
    r"|fingerprints?|kind|batch_size|source"
)
FITTED = re.compile(r"(.*_)?(bits|fraction|gain|kernel|change|loss_se)")
"""Variables that depend on fits, which stop within 5e-4 of a head's bits; see `FITTED_TO`."""
FITTED_TO = 1e-4
NUMBER = re.compile(r"[-+\u2212]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?%?")

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
Shared = Annotated[Path | None, typer.Option(envvar="ROPELENS_SHARED")]


def command(*args: object, program: Path | None = None) -> str:
    """The output of `ropelens *args`, or of a script; its exit status must be 0."""
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8")  # paths are printed as bytes
    with (
        mock.patch.object(sys, "argv", [str(program or "ropelens"), *map(str, args)]),
        contextlib.redirect_stdout(printed),
    ):
        try:
            if program:
                runpy.run_path(str(program), run_name="__main__")
            else:
                runpy.run_module("ropelens", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise SystemExit(f"{args} end with exit status {end.code}") from end
    printed.flush()
    return printed.buffer.getvalue().decode()


@app.command()
def make(out: Path, shared: Shared = None) -> None:
    """Run everything and write the results to OUT, a folder that does not exist."""
    out.mkdir(parents=True)
    measure("bundled", None, out / "bundled")
    for name in ("stories260k", "babyllama105") if shared else ():
        model, stories = shared / "checkpoints" / name, shared / "corpora/tinystories"
        measure(str(model), stories, out / name)
    (out / "list.txt").write_text(command("list"))
    (out / "variant.txt").write_text(command("rope", "--variant", "p-rope:0.75"))
    both = ("bundled", "bundled:p-rope-0.75")
    command("analyze", *both, "--text", SAMPLE, *SMALL, "--out", out / "checkpoints")
    folders = sorted(path.parent for path in out.glob("checkpoints/*/profile.nc"))
    command("compare", *folders, "--out", out / "compared")
    (out / "runs").mkdir()
    runs = [out / "runs" / name.replace(":", "-") for name in TRAINED]
    for name, run in zip(TRAINED, runs, strict=True):
        options = (*TINY, "--steps", 6, "--text", SAMPLE, "--variant", name)
        command("train", *options, "--out", run)
    command("compare", *runs, "--sequences", 8, "--out", out / "compared-runs")
    for path in sorted(out.rglob("*")):  # keep only files with numbers
        if path.is_file() and (path.suffix not in KEPT or "token" in path.name):
            path.unlink()
    shutil.rmtree(out / "compared-runs/measured", ignore_errors=True)


def measure(name: str, text: Path | None, out: Path) -> None:
    """Run every command, and the main Python calls, on one model."""
    out.mkdir()
    options = (name, *(("--text", text) if text else ()), *SMALL)
    look = (
        "--prompt",
        "Once there was a cat. Once there was",
        "--attention-on",
        "punctuation",
    )
    command("analyze", *options, *look, "--out", out / "analyze")
    command("report", out / "analyze")
    steps = ("--keep", "1,0.5", "--bands", 2, "--controls", 1, "--rows", 32)
    command("truncate", *options, *steps, "--out", out / "truncate")
    (out / "rope.txt").write_text(command("rope", name, "--verbose"))
    for variant in ("p-rope:0.5", "yarn:4"):
        printed = command("rope", name, "--variant", variant)
        (out / f"rope-{variant.replace(':', '-')}.txt").write_text(printed)

    model, tokenizer = rl.load(name)
    corpus = rl.tokenize(rl.read_documents([text or SAMPLE]), tokenizer, context=64)[:8]
    plain = rl.Text(corpus.ids, lengths=corpus.lengths)  # without documents
    first = corpus.ids[0, : int(corpus.lengths[0])]
    with rl.edit_rope(model, "linear:2"):
        edited = rl.measure_rope(model)
    with rl.silence_heads(model, "1.*", to="mean", text=plain):
        silent = rl.evaluate(model, plain, edits={}, measures=["loss"])
    calls = {
        "profile-rows": rl.profile(model, corpus, rows=16, tokenizer=tokenizer),
        "evaluate": rl.evaluate(model, corpus, edits=EDITS),
        "silent": silent,
        "capture": rl.capture(model, first, heads="1.2", values=True),
        "reach": rl.reach(model, plain, distances=[700, 5000]),
        "rope": rl.measure_rope(model),
        "rope-edited": edited,
        "rope-compared": rl.compare_rope(model, model),
    }
    for call, result in calls.items():
        plain = {
            key: v if np.isscalar(v) else str(v) for key, v in result.attrs.items()
        }
        result.assign_attrs(plain).to_netcdf(out / f"{call}.nc", engine="h5netcdf")


@app.command()
def compare(
    before: Path,
    after: Path,
    strict: bool = False,
    exact: bool = False,
    tolerance: float = 1e-6,
) -> None:
    """Print the differences of two folders; exit with 1 if a number or a verdict differs.

    A name that only one folder has is printed; with --strict it counts as a difference. With
    --exact, numbers must be equal bit for bit.
    """
    options = {"strict": strict, "exact": exact, "tolerance": tolerance}
    raise SystemExit(differences(before, after, **options) > 0)


def differences(
    before: Path,
    after: Path,
    *,
    tolerance: float,
    strict: bool = False,
    exact: bool = False,
) -> int:
    """Print a line for each difference and a summary; return the number of failures."""
    failed, equal, close = 0, 0, 0
    files_before, files_after = (
        {path.relative_to(folder) for path in folder.rglob("*") if path.suffix in KEPT}
        for folder in (before, after)
    )
    for file in sorted(files_before | files_after):
        a = values(before / file) if file in files_before else {}
        b = values(after / file) if file in files_after else {}
        for name in sorted(a.keys() ^ b.keys()):
            print(f"only in {before if name in a else after}: {file} {name}")
            failed += strict
        for name in sorted(a.keys() & b.keys()):
            difference, word = differs(name, a[name], b[name])
            allowed = max(tolerance, FITTED_TO) if FITTED.fullmatch(name) else tolerance
            allowed = 0.0 if exact else allowed
            if word or difference > allowed:
                print(f"DIFFERS {file} {name}: {word or f'{difference:.2g}'}")
            elif difference:
                print(f"close   {file} {name}: {difference:.2g}")
            failed += bool(word) or difference > allowed
            equal, close = (
                equal + (not word and not difference),
                close + (difference > 0),
            )
    print(
        f"{equal} variables equal bit for bit, {close} with differences, {failed} failures"
    )
    return failed


@app.command()
def committed(reports: Path, shared: Shared = None, tolerance: float = 1e-4) -> None:
    """Open every result under REPORTS, and repeat the measurements of available models."""
    for path in sorted(reports.rglob("*.nc")):
        print(f"opened {path.relative_to(reports)}: {len(rl.open(path))} variables")
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder, "reports")
        scripts = shutil.copytree(HERE.parent / "analyses", Path(folder, "analyses"))
        for record in sorted(reports.glob("*/*/run.json")):
            script = scripts / f"{record.parts[-3]}.py"
            run = json.loads(record.read_text())
            if script.exists() and run["kind"] == "answer":
                words = shlex.split(run["command"])[2:]
                if shared or not any("/" in word for word in words):
                    places = [shared / word if "/" in word else word for word in words]
                    command(*places, program=script)
        names = sorted(
            path.parent.relative_to(again) for path in again.glob("*/*/run.json")
        )
        failed = [
            differences(reports / n, again / n, tolerance=tolerance) for n in names
        ]
    print(f"measured again: {', '.join(map(str, names))}")
    raise SystemExit(any(failed))


def values(path: Path) -> dict[str, np.ndarray]:
    """All numbers and texts of a file by name, except values that change from run to run."""
    if path.suffix == ".nc":
        data = xr.load_dataset(path, engine="h5netcdf")
        arrays = {str(name): data[name].values for name in data.variables}
        arrays |= {f"attribute {name}": np.array([v]) for name, v in data.attrs.items()}
    elif path.suffix == ".csv":
        table = pd.read_csv(path)
        arrays = {name: table[name].to_numpy() for name in table}
    elif path.suffix == ".safetensors":
        arrays = load_file(path)
    elif path.suffix == ".json":
        arrays = {
            name: np.array([v]) for name, v in leaves(json.loads(path.read_text()))
        }
    else:
        arrays = {"text": np.array([path.read_text()])}
    parts = {name: name.split(" ")[-1].split(".") for name in arrays}
    return {
        name: v
        for name, v in arrays.items()
        if not any(map(VOLATILE.fullmatch, parts[name]))
    }


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and texts of nested JSON, by dotted names; a list is one text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}".strip("."))
    else:
        yield name, " ".join(map(str, value)) if isinstance(value, list) else value


def differs(name: str, a: np.ndarray, b: np.ndarray) -> tuple[float, str]:
    """The largest relative difference, and any other difference in words."""
    if a.shape != b.shape:
        return 0, f"shape {a.shape}, now {b.shape}"
    if a.dtype.kind not in "fiub" or b.dtype.kind not in "fiub":
        for x, y in zip(map(str, a.ravel()), map(str, b.ravel()), strict=True):
            if (
                x != y
                and sorted(NUMBER.findall(x)) == sorted(NUMBER.findall(y))
                and " " in x
            ):
                print(f"reworded {name}: {x[:90]!r}, now {y[:90]!r}")
            elif x != y:
                return 0, f"{x[:300]!r}, now {y[:300]!r}"
        return 0, ""
    a, b = a.astype(float), b.astype(float)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return 0, "other values are missing or infinite"
    least = 1 if FITTED.fullmatch(name) else 1e-3 * np.abs(a[finite]).max(initial=0)
    size = np.maximum(np.abs(a[finite]), least)
    gap = np.abs(a[finite] - b[finite])
    return float((gap / np.where(size, size, 1)).max(initial=0)), ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
