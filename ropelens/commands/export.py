"""The command `ropelens export`, which writes an edited model as a checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import ropelens as rl
from ropelens.analysis.options import ModelArgument, OutOption, with_options
from ropelens.checkpoints.load_options import Loading, option
from ropelens.commands.terminal import print_path
from ropelens.errors import BadArgument, explained
from ropelens.runtime.progress import opening, show_progress

EDITS = "stop:0-3,7 or drop:slowest=0.25 or scale=0.5:fastest=0.25:3.4,5.*"


@with_options(Loading, only=("device", "revision", "trust_remote_code"))
def export_command(
    model: ModelArgument,
    *,
    out: OutOption,
    variant: Annotated[
        str | None, option("NAME[:VALUE]", "Rotate as this variant: p-rope:0.75, yarn:4, ...")
    ] = None,
    edit: Annotated[
        list[str] | None,
        option("ACTION:PLANES[:HEADS]", f"Such as {EDITS}. Can be repeated."),
    ] = None,
    options: Loading,
) -> None:
    """Write an edited model as a checkpoint that transformers loads without ropelens.

    Writes the configuration, the weights in float32 (safetensors) and the tokenizer to DIR, and
    prints its path. Plane 0 is the fastest. Edits that neither a configuration nor weights of
    queries can carry are refused.

    \b
    Examples:
      ropelens export ./my-llama --variant p-rope:0.75 --out p-rope
      ropelens export ./my-llama.gguf --edit drop:0-3,7 --edit scale=0.5:9:3.* --out mine
    """
    edits: list[Any] = [*([variant] if variant else []), *map(parse_edit, edit or [])]
    if not edits:
        raise typer.BadParameter("--variant or --edit is needed")
    from ropelens.checkpoints.load import open_checkpoint

    with opening(show_progress, "loading"):
        opened = open_checkpoint(model, options)
        loaded = opened.read()
    print_path(rl.export(loaded, *edits, out=out, tokenizer=opened.tokenizer))


def parse_edit(text: str) -> Any:
    """The edit ACTION:PLANES or ACTION:PLANES:HEADS."""
    with explained(f"{text!r} is not an edit.", EDITS, error=BadArgument):
        action, planes, *heads = text.split(":", 2)
        (name, *factor), (end, *share) = action.split("="), planes.split("=")
        spans = [[*map(int, span.split("-"))] for span in planes.split(",") if not share]
        numbers = [n for span in spans for n in range(span[0], span[-1] + 1)]
        if not (share or numbers):
            raise ValueError("no planes")
        ends: Any = {"slowest": rl.Slowest, "fastest": rl.Fastest}
        select = ends[end](*map(float, share)) if share else rl.PlaneNumbers(numbers)
        make: Any = {"stop": rl.stop, "drop": rl.drop, "scale": rl.scale}[name]
        more = {"by": float(factor[0])} if factor else {}
        return make(select, heads=heads[0] if heads else "*.*", **more)
