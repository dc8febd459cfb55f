"""Test the tests: change the code in one place, and see whether a test fails.

    python tools/mutate.py --out build/mutants.json
    python tools/mutate.py --out build/mutants.json --room rope --most 10

A mutant is the package with one small change, such as + instead of -. It is killed if a test
fails. A mutant that survives shows a behaviour that no test checks, unless `EQUIVALENT`
explains why the change has no effect. The program tries `--most` mutants of each room, spread
evenly over the functions. It exits with 1 if a mutant survives without an explanation.

Mutants are written to a temporary copy of the package. Tests run in forks of one process that
has imported torch and transformers, but no module of ropelens. If you stop the program, the
same command continues. Survivors are tried again after their tests have changed.
"""

import gc
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pytest
import typer
from mutants import Mutant, choose

ROOT = Path(__file__).parents[1]
SLOW_IMPORTS = (
    "torch",
    "transformers.modeling_utils",
    "scipy.stats",
    "pandas",
    "xarray",
)

PARITY = ["profiles/test_parity.py::test_every_family[glm]"]
PARITY += ["profiles/test_parity.py::test_every_family[gpt_oss]"]
PARITY += ["profiles/test_parity.py::test_masks_with_gaps"]
LOGIT = "budget/test_logit.py::test_"
FITS = [
    f"{LOGIT}gains_are_scipys_on_tiny_models[{name}]"
    for name in ("phi", "gemma2", "gpt_oss")
]
# fmt: off
TESTS: dict[str, tuple[str, ...]] = {
    "rope": ("rope/test_variants.py", "interventions/test_edit_rope.py"),
    "rope/planes.py": (
        "rope/test_variants.py", "attention/test_row_sums.py",
        "measured_rotation/test_rotation.py", *PARITY),
    "rope/select.py": ("rope/test_variants.py", "interventions/test_truncate.py"),
    "attention": (
        "attention/test_row_sums.py", "attention/test_sinks.py", "budget/test_labels.py",
        "attention/test_distances.py", "profiles/test_laws.py", *PARITY,
        "profiles/test_statistics.py", "profiles/test_capture.py"),
    "attention/block.py": (
        "attention/test_row_sums.py", "attention/test_sinks.py", *FITS, *PARITY,
        "profiles/test_laws.py", "profiles/test_statistics.py"),
    "attention/exchange.py": (
        "attention/test_exchange.py", "attention/test_row_sums.py", *PARITY,
        "profiles/test_laws.py", "profiles/test_statistics.py"),
    "budget": (
        "budget/test_labels.py", "attention/test_sinks.py", "budget/test_budget.py",
        "budget/test_surrogates.py", f"{LOGIT}every_kind_of_sink_has_a_weight_of_its_own",
        *PARITY, *FITS),
    "claims": ("claims/test_atlas.py", "budget/test_surrogates.py",
        "profiles/test_heads.py", "claims/test_claims.py"),
}
"""Tests of each room, the quickest first. A row for a file replaces the row of its room."""

EQUIVALENT = {
    "rope/select.py: kept_planes: round(p, 12) -> round(p, 13)":
        "Shares of planes have far fewer than 12 digits.",
    "rope/variants.py: Shape: 0 -> 1":
        "Dynamic NTK keeps all frequencies for lengths up to the trained context.",
    "budget/surrogates.py: _explained_by_offset: sink <= Thresholds.sink * information -> "
    "sink < Thresholds.sink * information":
        "Two measured numbers are never exactly equal.",
    "claims/numbers.py: _uneven: _shares(length).mean(0) -> _shares(length).sum(0)":
        "The standard deviation is compared with the mean, which grows by the same factor.",
    "claims/numbers.py: slow_half_of_all: count.sum(0, keepdims=True) -> "
    "count.mean(0, keepdims=True)":
        "Shares do not change if all counts are divided by the number of layers.",
    "claims/nulls.py: _change_signs: by_unit * random.choice([-1, 1], len(by_unit)) -> "
    "by_unit / random.choice([-1, 1], len(by_unit))":
        "A number divided by 1 or -1 is the same as the product.",
    "claims/classify.py: judge_wavelengths: draws=0 -> draws=1":
        "This null uses all surrogates, and ignores the number of draws.",
    "claims/arrays.py: _positional_share: bits >= Thresholds.diffuse -> "
    "bits > Thresholds.diffuse":
        "No measured number is exactly equal to the threshold.",
    "claims/arrays.py: _kernels: rotating['total_bits'] >= Thresholds.diffuse -> "
    "rotating['total_bits'] > Thresholds.diffuse":
        "No measured number is exactly equal to the threshold.",
    "attention/fast_products.py: module: 2 ** 20 -> 3 ** 20":
        "The size of a block only affects the speed.",
    "claims/stopped_heads.py: module: 8 -> 9":
        "One more draw of random tokens only makes the number a little more precise.",
    "attention/block.py: blocks_of: 1.0 -> 2.0":
        "The size of a block only affects the speed.",
    "attention/sampled_call.py: module: most=1 -> most=2":
        "Keys of an earlier layer that stay in memory are not read.",
    "budget/offsets.py: sigma_of_means: 1 - masses.sum(-1, keepdim=True) -> "
    "1 + masses.sum(-1, keepdim=True)":
        "A fit ends at the same minimum from another start.",
    "budget/surrogate_attention.py: _split_rows: position - visibility.first[0] -> "
    "position + visibility.first[0]":
        "All rows hide the further keys that are read.",
    "budget/logit.py: _sink_weights: len(of_sinks) < batch -> len(of_sinks) <= batch":
        "Weights of all sequences that are repeated once are the same weights.",
}
# fmt: on
"""The reason why a mutant cannot be killed, by its name."""


def run_tests(copy: Path, tests: Sequence[str], limit: float) -> tuple[str, str, float]:
    """Run tests in a fork: "survived", "killed" or "timeout", the failed test, and seconds."""
    started = time.monotonic()
    log = copy.parent / "log"
    ended = (0, 0)
    if not (child := os.fork()):
        _run_in_child(copy, tests, log)
    os.setpgid(child, child)  # with the processes that tests start
    try:
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > started + limit:
                return "timeout", "", limit
            time.sleep(0.02)
    finally:
        if not ended[0]:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(ended[1])
    seconds = time.monotonic() - started
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", log.read_text(), re.MULTILINE)
    return "killed" if code else "survived", " ".join(failures[:1]), seconds


def _run_in_child(copy: Path, tests: Sequence[str], log: Path) -> None:
    code = 1
    try:
        sys.stdout = sys.stderr = log.open("w")
        for number in (1, 2):  # tests may start processes
            os.dup2(sys.stdout.fileno(), number)
        sys.dont_write_bytecode = (
            True  # or the next mutant of this file could run as this one
        )
        sys.path.insert(0, str(copy.parent))
        options = ["-xq", "-pno:cacheprovider", "-Wignore:Module already imported"]
        code = pytest.main([*options, *tests])
        tested = Path(sys.modules[copy.name].__file__ or "").parent
        assert tested == copy, f"{tested} was tested"
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(int(code))


def try_mutants(mutants: list[Mutant], package: Path, out: Path) -> dict[str, str]:
    """Outcome of each mutant by name; `out` has the known results, and gets the new results."""
    results: dict[str, dict[str, str]] = (
        json.loads(out.read_text()) if out.exists() else {}
    )
    limits: dict[tuple[str, ...], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns("__pycache__")
        copy = Path(
            shutil.copytree(package, Path(folder) / package.name, ignore=ignored)
        )
        for mutant in mutants:
            tests = TESTS.get(mutant.file) or TESTS[mutant.file.split("/")[0]]
            source = mutant.source(package)
            known = results.get(mutant.name, {"outcome": ""})
            row = {"source": _digest(source), "tests": _digest(*map(_read, tests))}
            unchanged = (
                ("source", "tests") if known["outcome"] == "survived" else ("source",)
            )
            if mutant.name in EQUIVALENT:
                results[mutant.name] = {"outcome": "equivalent"}
            elif any(known.get(name) != row[name] for name in unchanged):
                if tests not in limits:
                    outcome, _, seconds = run_tests(copy, tests, 3600)
                    limits[tests] = 30 + 3 * seconds
                    if outcome != "survived":
                        sys.exit(
                            (copy.parent / "log").read_text() + "This is not a mutant."
                        )
                (copy / mutant.file).write_text(source)
                outcome, failed, seconds = run_tests(copy, tests, limits[tests])
                shutil.copy(package / mutant.file, copy / mutant.file)
                results[mutant.name] = {"outcome": outcome, "by": failed, **row}
                out.write_text(json.dumps(results, indent=1))
                print(f"{outcome} in {seconds:.0f} s: {mutant.name}", flush=True)
    return {mutant.name: results[mutant.name]["outcome"] for mutant in mutants}


def _read(test: str) -> str:
    return Path(test.split("::")[0]).read_text()


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def main(
    out: Annotated[
        Path, typer.Option(help="JSON file with the results; it is continued.")
    ],
    room: Annotated[str, typer.Option(help="Only this room.")] = "",
    most: Annotated[int, typer.Option(help="Mutants of each room.")] = 32,
) -> None:
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT / "tests")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    package = ROOT / "ropelens"
    survivors = []
    for name in [room] if room else [key for key in TESTS if "/" not in key]:
        outcomes = try_mutants(choose(name, package, most), package, out)
        survivors += [
            mutant for mutant, outcome in outcomes.items() if outcome == "survived"
        ]
        print(
            f"{name}: {len(outcomes)} mutants, {dict(Counter(outcomes.values()))}",
            flush=True,
        )
    for name in survivors:
        print(f"survived: {name}")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    typer.run(main)
