"""Checks the scripts of pages: one statement on a line, and at most 100 columns.

    python tools/javascript.py [FOLDER]

A statement begins on a line of its own, a declaration declares one name, and no list of names
gets a list of values. Minified libraries are left out.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import tree_sitter_javascript
from tree_sitter import Language, Node, Parser

TEMPLATES = Path(__file__).parent.parent / "ropelens" / "report" / "templates"
COLUMNS = 100
DECLARATIONS = ("lexical_declaration", "variable_declaration")


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Number of the line and description of each fault in a script."""
    for number, line in enumerate(source.splitlines(), start=1):
        if len(line) > COLUMNS:
            yield number, f"more than {COLUMNS} columns"
    language = Language(tree_sitter_javascript.language())
    tree = Parser(language).parse(source.encode())
    starts: set[int] = set()
    for node in nodes(tree.root_node):
        line = node.start_point.row + 1
        if node.is_error or node.is_missing:
            yield line, "a syntax error"
        if is_statement(node):
            if line in starts:
                yield line, "a second statement on the line"
            starts.add(line)
        if declares_several(node):
            yield line, "a declaration of several names"
        if is_pair(node):
            yield line, "several assignments in one"


def nodes(node: Node) -> Iterator[Node]:
    """The node and all nodes in it, in the order of the source."""
    yield node
    for child in node.children:
        yield from nodes(child)


def is_statement(node: Node) -> bool:
    """Whether the node is a statement by itself: a block is part of its statement."""
    parent = node.parent
    if parent is None or node.type == "statement_block":
        return False
    if parent.type in ("for_statement", "for_in_statement"):
        return node == parent.child_by_field_name("body")
    if node.type == "if_statement" and parent.type == "else_clause":
        return False
    return node.type.endswith("_statement") or node.type.endswith("_declaration")


def declares_several(node: Node) -> bool:
    names = [child for child in node.children if child.type == "variable_declarator"]
    return node.type in DECLARATIONS and len(names) > 1


def is_pair(node: Node) -> bool:
    """Whether names in a list get the values of a list: [a, b] = [x, y]."""
    if node.type not in ("variable_declarator", "assignment_expression"):
        return False
    left = node.child_by_field_name("name") or node.child_by_field_name("left")
    right = node.child_by_field_name("value") or node.child_by_field_name("right")
    if left is None or right is None:
        return False
    return left.type == "array_pattern" and right.type == "array"


def main(folder: Path) -> int:
    """Print the faults of all scripts in the folder; return their number."""
    count = 0
    for path in sorted(folder.rglob("*.js")):
        if path.name.endswith(".min.js"):
            continue
        for line, fault in faults(path.read_text(encoding="utf-8")):
            print(f"{path}:{line}: {fault}")
            count += 1
    return count


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else TEMPLATES
    sys.exit(main(folder) > 0)
