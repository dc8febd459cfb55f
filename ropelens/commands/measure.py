"""The commands `ropelens analyze` and `ropelens truncate`, which measure a model on text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ropelens.analysis.options import (
    MODEL_HELP,
    AnalysisOut,
    ModelArgument,
    Options,
    TextOption,
    check_names,
    names_in,
    with_options,
)
from ropelens.checkpoints.bundled import check_text, sample_path
from ropelens.checkpoints.load_options import option, setting
from ropelens.checkpoints.names import name_checkpoints
from ropelens.commands.terminal import finish, out_or_own, print_lines, print_message
from ropelens.runtime.progress import opening, show_progress

if TYPE_CHECKING:
    from ropelens.analysis.plan import Plan

PlanOption = Annotated[
    bool,
    option(None, "Print the planned run and its memory; do not run it.", name="--plan"),
]

NOT_IN_SWEEPS = {"prompts", "attention_on", "statistics", "backend"}  # of `analyze`


@with_options(Options)
def analyze_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help=f"{MODEL_HELP} Can be several. [default: bundled]",
            callback=check_names,
        ),
    ] = None,
    *,
    out: AnalysisOut = None,
    plan: PlanOption = False,
    text: TextOption = None,
    options: Options,
) -> None:
    """Measure a model on text: which heads are positional, and which wavelengths they use.

    Writes index.html (the page), profile.nc (all numbers, netCDF), heads.csv (one row per
    head) and run.json (the settings of the run) to DIR, and prints the path of the page.

    If there are several models, each gets a folder DIR/NAME. DIR then contains the output of
    ropelens compare for these models, and heads.csv with a column `checkpoint`. The same
    command can be repeated after a stop; it skips the models that are measured.

    \b
    Examples:
      ropelens analyze
      ropelens analyze ./my-llama --text book.txt --context 1024 --out out
      ropelens analyze ./my-llama --text book.txt --plan
      ropelens analyze runs/rope/history/* --text book.txt --out out
    """
    from ropelens.runtime.own_folder import begun
    from ropelens.runtime.result_folder import check_out

    out = out_or_own(out, "out")
    checkpoints = name_checkpoints(models or ["bundled"])
    several = len(checkpoints) > 1
    first = next(iter(checkpoints.values()))
    if not plan:
        kind = "comparison" if several else "analysis"
        check_out(out, kind, parts=checkpoints if several else ())
    check_text(first, text or ())
    if several and not text:
        text = [sample_path(first)]  # one text for all models
    with opening(show_progress, "reading"):  # find errors before the first measurement
        from ropelens.analysis.answer import write_checkpoints
        from ropelens.analysis.plan import plan_analysis
        from ropelens.analysis.saved_numbers import check_model
        from ropelens.runtime.processes import processes

        plans = {}
        folders = {}
        for name, checkpoint in checkpoints.items():
            plans[name] = plan_analysis(checkpoint, text, options=options, run=not plan)
            folders[name] = out / name if several else out
        if not plan:
            for name, planned in plans.items():
                again = checkpoints[name] if several else ""
                check_model(folders[name], planned.model, again=again)
    if plan:
        print_lines("\n".join(map(str, plans.values())))
        return
    with begun(out):
        for name, planned in plans.items():
            measure_and_save(planned, folders[name], once=several)
        if several and processes().is_main_process:
            with opening(show_progress, "writing"):
                write_checkpoints(out, list(checkpoints))
    finish(out)


def measure_and_save(plan: Plan, folder: Path, *, once: bool = False) -> None:
    """Run the plan in all processes, and save in the first; if `once`, keep equal results."""
    from ropelens.analysis.run_plan import run_plan
    from ropelens.analysis.saved_numbers import is_measured
    from ropelens.runtime.processes import gather, processes, shared

    with shared():  # the first process decides, because disks of processes may differ
        measured = gather(once and is_measured(folder, plan))[0]
    if measured:
        print_message(f"{folder.name} is measured already", by="")
        return
    print_message(f"plan: {', '.join(plan.facts.values())}")
    with shared():
        analysis = run_plan(plan, folder=folder, progress=show_progress)
    if processes().is_main_process:
        with opening(show_progress, "writing"):
            analysis.save(folder, again=str(plan.arguments["model"]) if once else "")


@dataclass(frozen=True, kw_only=True)
class Sweep(Options):
    """Options of `truncate`. If `end` is None, it stops planes from both ends."""

    heads: str | None = setting(
        None,
        "HEADS",
        "Heads with stopped planes: 3.4,12-29.*,full.*, or *.* for all together. [default: "
        "all, in one kind of layers after the other]",
    )
    keep: Any = setting(
        None,
        "P,P,...",
        "Shares of the planes that keep rotating; empty for only bands. [default: 1, 7/8, "
        "..., 0; quarters for long text]",
        parser=lambda text: tuple(map(float, filter(None, text.split(",")))),
    )
    end: Literal["slow", "fast"] | None = setting(
        None,
        None,
        "Planes that stop first: slow as in p-RoPE, or fast. [default: both sweeps]",
    )
    bands: int = setting(0, "N", "Also stop N bands of wavelengths one by one.", min=0)
    controls: int | None = setting(
        None,
        "N",
        "Random sets of planes for each step. [default: 3; 1 for long text]",
        min=0,
    )
    scale: float | None = setting(
        None, "BY", "Scale planes by BY instead of stopping them."
    )
    measures: Any = setting(
        None,
        "NAME,NAME,...",
        "loss, induction (on repeated random tokens), retrieval (of needles), change (of "
        "attention), labels, copying (loss on repeated random tokens by distance). [default: "
        "all; for long text loss, induction, change and copying]",
        parser=names_in,
    )


@with_options(Sweep, only=Sweep.__dataclass_fields__.keys() - NOT_IN_SWEEPS, rows="64")
def truncate_command(
    model: ModelArgument = "bundled",
    *,
    out: AnalysisOut = None,
    text: TextOption = None,
    plan: PlanOption = False,
    options: Sweep,
) -> None:
    """Stop more and more planes of a model, and measure the loss, heads and tasks.

    Writes the files of analyze, truncation.nc and truncation.csv (one row per edit) to DIR, and
    prints the path of the page. Sequences are as long as the trained context; if this takes
    more than two hours, they are halved as often as needed. Above 2048 tokens, 2 to 7 sequences
    are used. If DIR contains an analysis of the same model and text, its profile is kept, and
    the page shows both. For other options, choose another --out.

    \b
    Examples:
      ropelens truncate --measures loss
      ropelens truncate ./my-llama --text book.txt --end slow --bands 8 --out out
    """
    from ropelens.interventions.measure_names import DEFAULT_MEASURES, wanted_measures
    from ropelens.runtime.own_folder import begun
    from ropelens.runtime.result_folder import check_out

    if out is not None and not plan:
        check_out(out, "truncation")
    wanted_measures(options.measures or DEFAULT_MEASURES)
    check_text(model, text or ())
    sweep = {
        name: getattr(options, name) for name in Sweep.__annotations__ if name != "end"
    }
    sweep["ends"] = ["slow", "fast"] if options.end is None else [options.end]
    with opening(show_progress, "reading"):  # importing torch takes seconds
        from ropelens.analysis.plan import plan_analysis
        from ropelens.analysis.saved_numbers import check_model, check_sweep, is_joined

        planned = plan_analysis(model, text, options, truncation=sweep, run=not plan)
    if plan:
        print_lines(planned)
        return
    out = out_or_own(out, "out", joins=lambda folder: is_joined(folder, planned))
    check_out(out, "truncation")
    check_model(out, planned.model)
    check_sweep(out, planned.arguments)
    with begun(out):
        measure_and_save(planned, out)
    finish(out)
