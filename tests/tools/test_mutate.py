"""Mutants are made from the code, and a mutant is killed only if a test fails."""

from dataclasses import dataclass
from pathlib import Path

import mutate
from mutants import choose

CODE = '''
def clip(x: "1 + 1", low=0):
    """At least 0, and at most 9."""
    if x is None or x.shape[0] == 0:
        raise ValueError(f"{x + 1} items")
    return max(low, -x if not abs(x) < 9 else x)
'''
CHANGES = {
    "0 -> 1",
    "x is None or x.shape[0] == 0 -> x is None and x.shape[0] == 0",
    "x is None -> x is not None",
    "x.shape[0] == 0 -> x.shape[0] != 0",
    "x.shape[0] == 0 -> x.shape[0] == 1",
    "max(low, -x if not abs(x) < 9 else x) -> min(low, -x if not abs(x) < 9 else x)",
    "-x -> +x",
    "not abs(x) < 9 -> not not abs(x) < 9",
    "abs(x) < 9 -> abs(x) <= 9",
    "abs(x) < 9 -> abs(x) < 10",
    "abs(x) -> (lambda x: x)(x)",
}
TEST = """
from tiny_package.room.code import total
def test_total():
    assert total(2, 3) == 5
"""


def write_package(folder: Path, code: str) -> Path:
    (folder / "tiny_package/room").mkdir(parents=True)
    (folder / "tiny_package/__init__.py").touch()
    (folder / "tiny_package/room/code.py").write_text(code)
    return folder / "tiny_package"


def test_operators_numbers_and_defaults_are_changed_but_no_messages_or_axes(
    tmp_path: Path,
):
    package = write_package(tmp_path, CODE)
    mutants = choose("room", package, 100)
    names = {mutant.name for mutant in mutants}
    expected = {f"room/code.py: clip: {change}" for change in CHANGES}
    assert names == expected
    sources = {mutant.source(package) for mutant in mutants}
    assert len(sources) == len(CHANGES)


def test_the_tests_of_every_room_exist():
    names = [name for tests in mutate.TESTS.values() for name in tests]
    files = {name.split("::")[0] for name in names}
    folder = mutate.ROOT / "tests"
    missing = [file for file in files if not (folder / file).exists()]
    assert not missing


def test_every_function_gets_a_mutant_before_one_gets_two(tmp_path: Path):
    lines = [f"def f{n}(x):\n    return x + {n} - (x > {n})" for n in range(4)]
    package = write_package(tmp_path, "\n".join(lines))
    mutants = choose("room", package, 8)
    functions = [mutant.name.split(": ")[1] for mutant in mutants]
    expected = {"f0", "f1", "f2", "f3"}
    assert set(functions[:4]) == expected
    assert set(functions[4:]) == expected


@dataclass(frozen=True)
class Outcome:
    """The outcome of the tests of a mutant, and the test that failed."""

    outcome: str
    failed: str


def test_a_mutant_is_killed_only_by_a_test_of_its_behaviour(tmp_path: Path):
    code = "def total(a, b):\n    return a + b\n\ndef twice(x):\n    return x * 2\n"
    package = write_package(tmp_path, code)
    test = tmp_path / "test_tiny.py"
    test.write_text(TEST)
    outcomes = {}
    for mutant in choose("room", package, 2):
        file = package / mutant.file
        file.write_text(mutant.source(package))
        outcome, failed, _ = mutate.run_tests(package, [str(test)], 60)
        file.write_text(code)
        function = mutant.name.split(": ")[1]
        outcomes[function] = Outcome(outcome, failed.split("::")[-1])
    assert outcomes == {
        "total": Outcome("killed", "test_total"),
        "twice": Outcome("survived", ""),
    }
    late, *_ = mutate.run_tests(package, [str(test)], 0)
    assert late == "timeout"
