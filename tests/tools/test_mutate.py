"""Mutants are made from the code, and a mutant is killed only if a test fails."""

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
    assert {mutant.name for mutant in mutants} == {
        f"room/code.py: clip: {x}" for x in CHANGES
    }
    assert len({mutant.source(package) for mutant in mutants}) == len(CHANGES)


def test_the_tests_of_every_room_exist():
    files = {name.split("::")[0] for names in mutate.TESTS.values() for name in names}
    missing = [name for name in files if not (mutate.ROOT / "tests" / name).exists()]
    assert not missing


def test_every_function_gets_a_mutant_before_one_gets_two(tmp_path: Path):
    lines = [f"def f{n}(x):\n    return x + {n} - (x > {n})" for n in range(4)]
    package = write_package(tmp_path, "\n".join(lines))
    functions = [mutant.name.split(": ")[1] for mutant in choose("room", package, 8)]
    assert {*functions[:4]} == {*functions[4:]} == {"f0", "f1", "f2", "f3"}


def test_a_mutant_is_killed_only_by_a_test_of_its_behaviour(tmp_path: Path):
    code = "def total(a, b):\n    return a + b\n\ndef twice(x):\n    return x * 2\n"
    package = write_package(tmp_path, code)
    test = tmp_path / "test_tiny.py"
    test.write_text(TEST)
    outcomes = {}
    for mutant in choose("room", package, 2):
        (package / mutant.file).write_text(mutant.source(package))
        outcome, failed, _ = mutate.run_tests(package, [str(test)], 60)
        (package / mutant.file).write_text(code)
        outcomes[mutant.name.split(": ")[1]] = outcome, failed.split("::")[-1]
    assert outcomes == {"total": ("killed", "test_total"), "twice": ("survived", "")}
    assert mutate.run_tests(package, [str(test)], 0)[0] == "timeout"
