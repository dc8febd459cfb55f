"""The commands that measure a model on text: `ropelens analyze` and `ropelens truncate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ropelens.analysis.options import NAMED, Model, Options, Out, TextOption, with_options
from ropelens.checkpoints.load_options import option
from ropelens.commands.terminal import finish, say
from ropelens.runtime.progress import opening, show_progress

if TYPE_CHECKING:
    from ropelens.analysis.plan import Plan

Planned = Annotated[
    bool, option(None, "Print what would run and its memory; measure nothing.", name="--plan")
]

LEFT_OUT = {"prompts", "attention_on", "backend"}
"""Options of `analyze` that a sweep does not have."""


@with_options(Options)
def analyze(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help=f"{NAMED} Several, such as RUN/history/*, are measured one after another. "
            "[default: bundled]",
        ),
    ] = None,
    *,
    out: Out = Path("out"),
    plan: Planned = False,
    text: TextOption = None,
    options: Options,
) -> None:
    """Measure a model on text: which heads are positional, through which wavelengths.

    Writes index.html (the page), profile.nc (every number, netCDF), heads.csv (a row a
    head) and run.json (how to run it again) to DIR, and prints the path of the page.

    Several models each get a folder DIR/NAME. DIR itself gets what ropelens compare makes of
    them, and heads.csv with a column `checkpoint`. The same command again skips those that
    are measured.

    \b
    Examples:
      ropelens analyze
      ropelens analyze ./my-llama --text book.txt --context 1024 --out out
      ropelens analyze ./my-llama --text book.txt --plan
      ropelens analyze runs/rope/history/* --text book.txt --out out
    """
    from ropelens.checkpoints.bundled import check_text, sample_path
    from ropelens.checkpoints.names import name_checkpoints
    from ropelens.runtime.results import check_out

    checkpoints = name_checkpoints(models or ["bundled"])
    several = len(checkpoints) > 1
    first = next(iter(checkpoints.values()))
    if not plan:
        kind = "comparison" if several else "analysis"
        check_out(out, kind, parts=checkpoints if several else ())
    check_text(first, text or ())
    if several and not text:
        text = [sample_path(first.partition(":")[2] or "rope")]  # the same for all
    with opening(show_progress, "starting"):  # torch and transformers take seconds
        from ropelens.analysis.analysis import is_measured, write_checkpoints
        from ropelens.analysis.plan import plan_analysis
        from ropelens.runtime.processes import gather, processes, shared
    with opening(show_progress, "reading"):  # all, so that nothing is measured in vain
        plans = {name: plan_analysis(of, text, options) for name, of in checkpoints.items()}
    if plan:
        typer.echo("\n".join(map(str, plans.values())))
        return
    for name, planned in plans.items():
        folder = out / name if several else out
        with shared():  # the first process decides: the disk of another may differ
            measured = gather(several and is_measured(folder, planned))[0]
        if measured:
            say(f"{name} is measured already", by="")
        else:
            _measure(planned, folder)
    if several and processes().is_main_process:
        with opening(show_progress, "writing"):
            write_checkpoints(out, list(checkpoints))
    finish(out)


def _measure(plan: Plan, folder: Path) -> None:
    """Measure what is planned, in all processes that torchrun started; the first one saves."""
    from ropelens.analysis.analyze import run_plan
    from ropelens.runtime.processes import processes, shared

    say(f"plan: {', '.join(plan.facts.values())}")
    with shared():
        analysis = run_plan(plan, folder=folder, progress=show_progress)
    if processes().is_main_process:
        with opening(show_progress, "writing"):
            folder.parent.mkdir(exist_ok=True)
            analysis.save(folder)


@dataclass(frozen=True, kw_only=True)
class Sweep(Options):
    """What `truncate` stops and measures; an `end` None means both."""

    heads: Annotated[
        str | None, option("HEADS", "Heads whose planes stop: 3.4,12-29.* [default: all]")
    ] = None
    keep: Annotated[
        Any,
        option(
            "P,P,...",
            "Shares of the planes that go on rotating, from 0 to 1. [default: 1, 7/8, 3/4, "
            "..., 0; of long text quarters] An empty text: bands alone.",
            parser=lambda text: tuple(map(float, filter(None, text.split(",")))),
        ),
    ] = None
    end: Annotated[
        Literal["slow", "fast"] | None,
        option(
            None,
            "The planes that stop first: the slowest (p-RoPE) or the fastest. [default: "
            "both, one after the other]",
        ),
    ] = None
    bands: Annotated[
        int, option("N", "Also stop one of N bands of wavelengths at a time.", min=0)
    ] = 0
    controls: Annotated[
        int | None,
        option(
            "N",
            "Random sets of as many planes beside each step. [default: 3; of long text 1]",
            min=0,
        ),
    ] = None
    measures: Annotated[
        Any,
        option(
            "NAME,NAME,...",
            "What to measure: loss (on the text), induction (on repeated random tokens), "
            "retrieval (of needles in the text), change (of attention), labels, copying "
            "(loss of random tokens that come again, by distance). [default: all; of long "
            "text loss, induction, change and copying]",
            parser=lambda text: tuple(text.replace(" ", "").split(",")),
        ),
    ] = None


@with_options(Sweep, only=Sweep.__dataclass_fields__.keys() - LEFT_OUT, rows="64")
def truncate(
    model: Model = "bundled",
    *,
    out: Out = Path("out"),
    text: TextOption = None,
    plan: Planned = False,
    options: Sweep,
) -> None:
    """Stop more and more planes of a model: which does it need, and for what?

    Writes what analyze writes, with truncation.nc (every number, netCDF) and truncation.csv
    (a row an edit) to DIR, and prints the path of the page. The text is as long as the
    trained context where that takes two hours or less, else half as long, or a quarter, ...;
    of more than 2048 tokens there are 2 to 7 sequences. If DIR holds what analyze wrote of
    the same weights and text, that stays: its profile is not measured again, and the sweep
    joins it on its page. With other options, name another --out.

    \b
    Examples:
      ropelens truncate --measures loss
      ropelens truncate ./my-llama --text book.txt --end slow --bands 8 --out out
    """
    from ropelens.checkpoints.bundled import check_text
    from ropelens.interventions.truncation_table import MEASURES, wanted_measures
    from ropelens.runtime.results import check_out

    if not plan:
        check_out(out, "truncation")
    wanted_measures(options.measures or MEASURES)
    check_text(model, text or ())
    with opening(show_progress, "starting"):  # torch and transformers take seconds
        from ropelens.analysis.plan import plan_analysis
    sweep = {name: getattr(options, name) for name in Sweep.__annotations__}
    end = sweep.pop("end")
    sweep["ends"] = ["slow", "fast"] if end is None else [end]
    plain = Options(**{name: getattr(options, name) for name in Options.__dataclass_fields__})
    with opening(show_progress, "reading"):
        planned = plan_analysis(model, text, plain, truncation=sweep)
    if plan:
        typer.echo(planned)
    else:
        _measure(planned, out)
        finish(out)
