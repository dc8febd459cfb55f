"""Write llms.txt, from which an assistant learns to use ropelens: `make llms`.

The form follows llmstxt.org: a title, a summary in a quotation, and sections.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import typer
from reference import reference

import ropelens as rl
from ropelens.claims.claims import CLAIMS
from ropelens.commands.app import app

PAGE = Path("llms.txt")
SECTIONS = {
    "README.md": ["Two commands", "Your own model", "In Python"],
    "docs/tasks.md": ["Pitfalls", "Tasks"],
    "docs/guide.md": ["Guide", "Texts"],
    "docs/variants.md": ["Variants of RoPE", "Editing a live model"],
    "docs/measures.md": ["Notation", "Labels"],
}
"""Sections that llms.txt has, by page."""
SHORT: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"\b(?:[a-z_]+\.)+(?=[A-Z])": "",
    r"'(\w+ \| None)'": r"\1",
    r"Annotated\[Integral, Is\[lambda number: number >= \d\]\]": "int",
    r"Optional\[((?:[^][]|\[[^]]*\])*)\]": r"\1 | None",
    r"(?:str \| Path \| )?Module \| LiveModel \| Traced": "MODEL",
    r"Text \| str \|[^:]*?Mapping\[str, Any\]": "TEXT",
    r"Callable\[\.\.\., AbstractContextManager\[.*?\]\]\]": "Progress",
    r"str \| Integral \| tuple\[str \| Integral.*?Callable\[\[Tensor\], Tensor\]": "ANSWER",
    r"= Options\(.*?\)": "= Options()",
    r"Callable\[\[Planes\], Bool\[Tensor, 'frequency'\]\]": "PLANES",
    r"PreTrainedConfig \| Mapping\[str, Any\] \| str \| Path": "CONFIG",
    r"Literal\[([^]]*)\]": lambda found: found[1].replace(", ", "|"),
    r" -> Figure": "",
    r"Union\[(.*?), (.*?)\](?= =)": r"\1|\2",
    r"Sequence\[(\w+)\]": r"[\1]",
    r"(device_map|quantize|revision|trust_remote_code|progress): [^=]*? = ": r"\1=",
    r"tokenizer: (?:(?!, \*)[^=])*? = ": "tokenizer=",
    r"\(1\.0, 2\..*?\)": "...",
    r": (?:int|str|bool|Real|float)(?= = )| -> None$": "",
    r" = (?=[^>])": "=",
    r"Mapping\[str, Edit \| Silence.*?\]\]": "EDITS",
    r"\bself(?:, )?|\bIntegral\b|<factory>": lambda found: {"Integral": "int"}.get(
        found[0], ""
    ),
}
"""Replacements that make signatures short."""
BOUNDS = r" \[(?:[0-9.]+<=)?x[<>]=[0-9.]+\]"
"""The bounds of an option in its help, such as " [x>=1]"; an error states them."""
TYPES = """MODEL is a transformers model, a compiled or peft model, or a TransformerBridge.
`analyze` and `measure_rope` also take the name of a checkpoint. TEXT is an `rl.Text`, token ids
[sequence, position], a batch of a tokenizer, or a string with `tokenizer=`. ANSWER is a
token (its logit), a pair of tokens (the difference of their logits), or a function of the
logits. PLANES is `rl.Slowest(share)`, `rl.Fastest(share)`, `rl.PlaneNumbers([0, 2])`, or
a function of `rl.Planes`. `heads` is a list of heads such as "3.4,4.*,full.*". `edits` of
`evaluate` maps names to edits, variants ("p-rope:0.75") or blocks of `silence_heads`,
or to lists of these. `paired_changes` returns columns NAME, NAME_change, NAME_change_low and
NAME_change_high (95 %) for each measure NAME.
`rl.Options` takes the options of `ropelens analyze` as keywords (context=512,
batch_size=8, prompts=[...]). `print(analysis)` prints the findings. Dataset is an
xarray.Dataset. `help(rl.NAME)` explains all arguments, results and errors."""


def llms() -> str:
    """The whole file."""
    title, summary = Path("README.md").read_text().split("\n\n")[:2]
    quoted = "\n".join(f"> {line}" for line in summary.splitlines())
    parts = [title, quoted]
    parts += [
        section(Path(page), name) for page, names in SECTIONS.items() for name in names
    ]
    parts += ["## Variables of profile.nc and columns of heads.csv", variables()]
    parts += ["## Python: public names of `import ropelens as rl`", TYPES, *names()]
    parts += [
        "## Claims of `rl.test_claims` (slow_norms to diagonal need no model)",
        *claims(),
    ]
    parts += ["## Command line", *commands(), "## Documentation", *pages()]
    text = "\n\n".join(parts) + "\n"
    between_entries = r"(?m)^( *- .*)\n\n(?=- )"
    return re.sub(between_entries, r"\1\n", text)


def section(page: Path, name: str) -> str:
    """A section of a page without pictures; its links become plain words."""
    text = page.read_text()
    found = re.search(
        rf"^#+ {re.escape(name)}\n.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    assert found, f"{page} has no section {name!r}"
    plain = re.sub(
        r"!\[[^]]*\]\([^)]*\)\n*|(?<!!)\[([^]]+)\]\([^)]*\)", r"\1", found[0]
    )
    return re.sub(r"^#+", "##", plain).strip()


def variables() -> str:
    """The reference of docs/measures.md without the column of functions."""
    lines = []
    for line in reference().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        without_functions = [*cells[:4], cells[5]]
        lines.append(f"|{'|'.join(without_functions)}|")
    return "\n".join(lines)


def names() -> Iterator[str]:
    """Each public name with its signature and the first paragraph of its docstring."""
    stub = (Path("ropelens") / "__init__.pyi").read_text()
    for line in stub.splitlines():
        if found := re.match(r"from \S+ import (\w+) as", line):
            yield entry(found[1])
        elif re.fullmatch(r"# [a-z ]+", line):
            yield f"### {line[2:].capitalize()}"


def entry(name: str) -> str:
    """A name with its signature and docstring."""
    thing = getattr(rl, name)
    lines = [f"- `rl.{name}{signature(thing)}`: {words_of(thing)}"]
    for method, function in vars(thing).items() if name == "Analysis" else ():
        if inspect.isfunction(function) and not method.startswith("_"):
            lines.append(f"  - `.{method}{signature(function)}`: {words_of(function)}")
    return "\n".join(lines)


def signature(thing: object) -> str:
    if thing in (rl.Options, rl.Statistic) or (
        isinstance(thing, type) and issubclass(thing, Exception)
    ):
        return ""
    text = str(inspect.signature(cast(Callable[..., object], thing)))
    for pattern, short in SHORT.items():
        text = re.sub(pattern, short, text)
    return text


def words_of(thing: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def claims() -> Iterator[str]:
    """One list with the name and statement of each claim."""
    yield "\n".join(f"- `{claim.name}`: {claim.statement}" for claim in CLAIMS)


def commands() -> Iterator[str]:
    """Each command with its help. An option that several commands share is explained once."""
    seen = set[str]()
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        context = typer.Context(command, info_name=name)
        lines = [line for p in command.params if (line := option_line(p, context))]
        facts = {line: line.partition(" [")[0] for line in lines}  # without the default
        new = [line for line in lines if facts[line] not in seen]
        also = [line.split("`")[1].split()[0] for line in lines if facts[line] in seen]
        seen |= set(facts.values())
        words = inspect.cleandoc(command.help or "").replace("\b\n", "")
        usage = " ".join(
            p.metavar or "" for p in command.params if p.param_type_name == "argument"
        )
        parts = [f"### ropelens {name} {usage}".strip(), words, "\n".join(new)]
        if also:
            parts.append(f"As above: {', '.join(also)}")
        yield "\n\n".join(part for part in parts if part)


def option_line(parameter: object, context: typer.Context) -> str:
    """A line about an argument or option, without its bounds; "" for --help."""
    record = parameter.get_help_record(context)  # type: ignore[attr-defined]
    if not record:
        return ""
    words = re.sub(BOUNDS, "", " ".join(record[1].split()))
    return f"- `{record[0]}`: {words}"


def pages() -> Iterator[str]:
    """Links to the pages, with the questions that they answer (the table of README.md)."""
    table = Path("README.md").read_text().partition("## Documentation")[2]
    for name, path, question in re.findall(
        r"^\| \[(\w+)\]\((\S+)\) \| (.+) \|$", table, re.M
    ):
        yield f"- [{name}]({path}): {question}"


if __name__ == "__main__":
    PAGE.write_text(llms())
