"""Mutants of a file: small changes, each in one place of its code."""

import ast
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
PAIRS = (
    "min max",
    "any all",
    "sum mean",
    "amin amax",
    "argmin argmax",
    "minimum maximum",
)
FUNCTIONS = {a: b for pair in PAIRS for a, b in (pair.split(), pair.split()[::-1])}
SAME_VALUE = ast.parse("lambda x: x", mode="eval").body
IGNORED = {"annotation", "returns", "decorator_list"}  # parts of the syntax tree
AXES = {"dim", "axis", "keepdims", "keepdim", "strict"}  # wrong arguments crash at once


@dataclass(frozen=True)
class Mutant:
    """A change of a file: the place in the syntax tree, and new fields of this node.

    `name` describes the change, such as "rope/planes.py: unrotate: a + b -> a - b". A number
    follows if a function has several equal changes.
    """

    name: str
    file: str
    place: int
    fields: dict[str, Any]

    def source(self, package: Path) -> str:
        """The text of the changed file."""
        tree = ast.parse((package / self.file).read_text())
        _, node, _ = next(islice(places(tree), self.place, None))
        vars(node).update(self.fields)
        return ast.unparse(ast.fix_missing_locations(tree))


def places(
    outer: ast.AST, function: str = "module"
) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Each node in `outer`, with the name of its function and the node that contains it."""
    for part, value in ast.iter_fields(outer):
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or part in IGNORED:
                continue
            if not _is_ignored(node, outer):
                # Functions and classes have a name.
                inside = getattr(node, "name", function)
                yield inside, node, outer
                yield from places(node, inside)


def _is_ignored(node: ast.AST, outer: ast.AST) -> bool:
    """Whether `node` is a message, or an axis, such as -1 in x.sum(-1) or 0 in x.shape[0]."""
    match outer:
        case ast.Call(func=ast.Attribute(value=owner), args=args) if node in args:
            number = ast.unparse(node).removeprefix("-").isdecimal()
            return number and ast.unparse(owner) not in ("torch", "np", "math")
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=index):
            return node is index
    return isinstance(node, ast.JoinedStr) or getattr(node, "arg", "") in AXES


def changes(node: ast.AST) -> Iterator[dict[str, Any]]:
    """Small changes of a node, as new values of its fields."""
    if isinstance(node, ast.Constant):
        yield from _changes_of_constant(node)
    elif isinstance(node, ast.Call):
        yield from _changes_of_call(node)
    elif isinstance(node, ast.Slice):
        yield from _changes_of_slice(node)
    else:
        yield from _changes_of_operator(node)


def _changes_of_operator(node: ast.AST) -> Iterator[dict[str, Any]]:
    match node:
        case (
            ast.BinOp(left=ast.Constant(value=str())) | ast.BinOp(left=ast.JoinedStr())
        ):
            return
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            yield {"op": OPERATORS[type(op)]()}
        case ast.Compare(ops=ops):
            for n, op in enumerate(ops):
                yield {"ops": [*ops[:n], OPERATORS[type(op)](), *ops[n + 1 :]]}
        case ast.UnaryOp(op=ast.USub()):
            yield {"op": ast.UAdd()}
        case ast.UnaryOp(op=ast.Not() | ast.Invert()):
            yield {"operand": ast.UnaryOp(node.op, node.operand)}


def _changes_of_constant(node: ast.Constant) -> Iterator[dict[str, Any]]:
    match node:
        case ast.Constant(value=bool(value)):
            yield {"value": not value}
        case ast.Constant(value=int(value)):
            yield {"value": value + 1}
        case ast.Constant(value=float(value)):
            yield {"value": 2 * value or 1.0}


def _changes_of_call(node: ast.Call) -> Iterator[dict[str, Any]]:
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="abs")):
            yield {"func": SAME_VALUE, "args": [value]}
        case ast.Call(func=ast.Name(id="abs")):
            yield {"func": SAME_VALUE}
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in FUNCTIONS:
            yield {"func": ast.Attribute(value, FUNCTIONS[name])}
        case ast.Call(func=ast.Name(id="min" | "max" | "any" | "all" as name)):
            yield {"func": ast.Name(FUNCTIONS[name])}


def _changes_of_slice(node: ast.Slice) -> Iterator[dict[str, Any]]:
    for end, value in (("lower", node.lower), ("upper", node.upper)):
        if value is not None and not isinstance(value, ast.Constant):
            yield {end: ast.BinOp(value, ast.Add(), ast.Constant(1))}


def mutants_of(file: str, package: Path) -> dict[str, list[Mutant]]:
    """All mutants of a file by function."""
    by_function: dict[str, list[Mutant]] = {}
    names: Counter[str] = Counter()
    tree = ast.parse((package / file).read_text())
    for place, (function, node, outer) in enumerate(places(tree)):
        small = isinstance(node, ast.Constant | ast.Slice) and not isinstance(
            outer, ast.stmt | ast.arguments
        )
        shown = outer if small else node
        for fields in changes(node):
            before = dict(vars(node))
            old = ast.unparse(shown)
            vars(node).update(fields)
            new = ast.unparse(ast.fix_missing_locations(shown))
            vars(node).update(before)
            name = f"{file}: {function}: {old} -> {new}"
            names[name] += 1
            if names[name] > 1:
                name += f" #{names[name]}"
            by_function.setdefault(function, []).append(
                Mutant(name, file, place, fields)
            )
    return by_function


def choose(room: str, package: Path, most: int) -> list[Mutant]:
    """Up to `most` mutants of a room, drawn evenly from its functions, the same each time."""
    drawn: dict[str, list[Mutant]] = {}
    for path in package.glob(f"{room}/*.py"):
        file = path.relative_to(package).as_posix()
        for function, mutants in mutants_of(file, package).items():
            key = f"{file}: {function}"  # the seed: other functions do not affect the draw
            drawn[key] = random.Random(key).sample(mutants, len(mutants))
    keys = sorted(drawn, key=lambda key: random.Random(key).random())
    rounds = chain.from_iterable(zip_longest(*map(drawn.__getitem__, keys)))
    return list(islice(filter(None, rounds), most))
