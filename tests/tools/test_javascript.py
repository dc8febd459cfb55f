"""The check of scripts finds lines that do several things."""

import pytest
from javascript import faults

LONG_CALL = "f(" + 40 * "1, " + "1);"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("if (a) b();", "a second statement on the line"),
        ("const f = () => { g(); };", "a second statement on the line"),
        ("a(); b();", "a second statement on the line"),
        ("let x = 1, y = 2;", "a declaration of several names"),
        ("const [x, y] = [1, 2];", "several assignments in one"),
        ("[x, y] = [1, 2];", "several assignments in one"),
        (LONG_CALL, "more than 100 columns"),
        ("f(;", "a syntax error"),
    ],
)
def test_a_line_that_does_several_things_is_a_fault(source: str, fault: str):
    assert (1, fault) in faults(source)


def test_plain_scripts_have_no_faults():
    lines = [
        "const page = await unpack();",
        "for (let i = 0; i < 3; i++) {",
        "  use(i, () => page.rows[i]);",
        "}",
        "if (page) {",
        "  show();",
        "} else if (other) {",
        "  const [first, second] = other.map(number);",
        "}",
    ]
    script = "\n".join(lines)
    assert list(faults(script)) == []
