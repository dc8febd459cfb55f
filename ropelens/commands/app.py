"""The command line: the list of commands, and the short commands."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import ropelens as rl
from ropelens.analysis.options import (
    ComparisonOut,
    ModelArgument,
    Options,
    OutOption,
    PromptOut,
    path_of,
    with_options,
)
from ropelens.checkpoints.bundled import BUNDLED, bundled_facts
from ropelens.checkpoints.load_options import Loading, option
from ropelens.commands.claims import claims_command
from ropelens.commands.measure import analyze_command, truncate_command
from ropelens.commands.rope import rope_command
from ropelens.commands.terminal import finish, out_or_own, print_path, run_app
from ropelens.commands.train import train_command
from ropelens.interventions.edit_grammar import EDIT_EXAMPLES, parse_edit
from ropelens.runtime.folder import check_new_folder, check_writable
from ropelens.runtime.progress import opening, show_progress

app = typer.Typer(
    name="ropelens",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def ropelens(
    context: typer.Context,
    show_version: Annotated[
        bool, option(None, "Show the version and exit.", name="--version")
    ] = False,
) -> None:
    """See how a language model uses the frequencies of its rotary position embedding."""
    if show_version:
        typer.echo(version("ropelens"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        context.exit(2)


def list_bundled() -> None:
    """List the checkpoints that come with ropelens. Other commands accept them as MODEL.

    \b
    Example:
      ropelens list
    """
    typer.echo(f"{'name':<30}{'tokens seen':>12}{'loss*':>8}")
    for name in BUNDLED:
        facts = bundled_facts(name)
        loss = f"{facts['validation_loss']:.3f}"
        typer.echo(
            f"{'bundled:' + name:<30}{facts['tokens']:>12,}{loss:>8}  {facts['what']}"
        )
    typer.echo("* validation loss, nats per token")


@with_options(Loading)
def prompt_command(
    model: ModelArgument,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text of 3 to 256 tokens.")
    ],
    *,
    versus: Annotated[
        str | None,
        option(
            "TEXT", "A token, or another prompt. [default: the second likeliest token]"
        ),
    ] = None,
    out: PromptOut = None,
    options: Loading,
) -> None:
    """Explain the next token of a prompt: which heads and planes add to its logit.

    The answer is the difference of two logits: of the next token and the token TEXT, or of the
    next tokens that the prompts PROMPT and TEXT favour.

    Writes index.html (the page), attribution.nc, planes.csv (the planes with the largest
    attribution), patched_head.nc and patched_position.nc (with another prompt as --versus) and
    run.json to DIR, and prints the path of the page. No analysis of the model is needed.

    \b
    Examples:
      ropelens prompt ./my-llama "The capital of France is"
      ropelens prompt ./my-llama "The capital of France is" --versus "The capital of Italy is"
    """
    from ropelens.runtime.result_folder import check_out

    out = out_or_own(out, "prompt")
    check_out(out, "prompt")
    with opening(show_progress, "loading"):
        from ropelens.analysis.prompt import explain_prompt
        from ropelens.checkpoints.load import open_checkpoint

        opened = open_checkpoint(model, options)
        loaded = opened.read()
    explanation = explain_prompt(
        loaded, prompt, versus, tokenizer=opened.tokenizer, progress=show_progress
    )
    explanation.save(out)
    finish(out)


@with_options(Loading, only=("device", "revision", "trust_remote_code"))
def export_command(
    model: ModelArgument,
    *,
    out: OutOption,
    variant: Annotated[
        str | None,
        option("NAME[:VALUE]", "Rotate as this variant: p-rope:0.75, yarn:4, ..."),
    ] = None,
    edit: Annotated[
        list[str] | None,
        option("ACTION:PLANES[:HEADS]", f"Such as {EDIT_EXAMPLES}. Can be repeated."),
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
    edits: list[Any] = [variant] if variant else []
    edits += [parse_edit(text) for text in edit or []]
    if not edits:
        raise typer.BadParameter("--variant or --edit is needed")
    check_new_folder(out)
    from ropelens.checkpoints.load import open_checkpoint

    with opening(show_progress, "loading"):
        opened = open_checkpoint(model, options)
        loaded = opened.read()
    print_path(rl.export(loaded, *edits, out=out, tokenizer=opened.tokenizer))


@with_options(Options, only=("seed", "device"))
def compare_command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Trained runs and studies, or analyzed folders. The first is the baseline.",
        ),
    ],
    *,
    out: ComparisonOut = None,
    sequences: Annotated[
        int, option("N", "Validation sequences of a run.", min=2, max=10**7)
    ] = 512,
    options: Options,
) -> None:
    """Compare trained runs, recalibrations, or analyzed models: losses, heads and planes.

    Writes index.html (the page), comparison.nc (all numbers, netCDF), comparison.csv (one
    row per variant or model) and run.json to DIR, and prints the path of the page, which also
    shows two chosen heads next to each other. Each checkpoint of a run is measured on the
    validation text of the run. DIR/measured keeps the measurements, so the same command can
    continue after a stop. Folders that ropelens analyze wrote are not measured again.
    Runs and studies of train --from need a control: the page shows the gap of each variant
    to it, the share that training recovered, and the heads that changed, with links to pages
    of the models in DIR/models.

    \b
    Examples:
      ropelens compare runs/variants --out out
      ropelens compare runs/recalibration --out out
      ropelens compare analyzed/llama analyzed/qwen --out out
    """
    from ropelens.runtime.result_folder import check_out

    out = out_or_own(out, "compared")
    check_out(out, "comparison", parts=["measured", "models"])
    from ropelens.analysis.answer import save_comparison
    from ropelens.comparison.compare import compare
    from ropelens.runtime.own_folder import begun
    from ropelens.runtime.processes import processes, shared

    with begun(out), shared():
        comparison = compare(
            paths,
            cache=out / "measured",
            sequences=sequences,
            seed=options.seed,
            device=options.device,
            progress=show_progress,
        )
    if processes().is_main_process:
        save_comparison(out, comparison)
        finish(out)


def report_command(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder of analyze, truncate, compare or a watch."
        ),
    ],
) -> None:
    """Make the page of DIR again from its saved numbers, and print the path of the page.

    The numbers are read from profile.nc and truncation.nc, or from comparison.nc.

    \b
    Example:
      ropelens report out
    """
    from ropelens.analysis.open_folder import rewrite_page

    print_path(rewrite_page(folder))


def ranks_command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder that analyze or truncate wrote."),
    ],
    *,
    project: Annotated[
        Literal["mha2mla", "triattention", "duoattention"],
        option(None, "The project that reads the files.", name="--for"),
    ],
    out: Annotated[
        Path | None,
        option("DIR", "Folder for the files. [default: DIR]", parser=path_of),
    ] = None,
) -> None:
    """Write plane ranks (mha2mla), mean queries (triattention) or head scores (duoattention).

    Each project reads the files without changes.

    \b
    Example:
      ropelens ranks out --for mha2mla
    """
    from ropelens.analysis.ranks import write_ranks
    from ropelens.profiles.measures import open_profile

    place = out or folder
    check_writable(place)
    for path in write_ranks(open_profile(folder / "profile.nc"), project, place):
        print_path(path)


for name, short_help, command in (
    ("analyze", "Measure a model on text, and make a page.", analyze_command),
    ("list", "List the checkpoints that come with ropelens.", list_bundled),
    ("rope", "Measure how each layer of a model rotates.", rope_command),
    (
        "prompt",
        "Explain the next token of a prompt by heads and planes.",
        prompt_command,
    ),
    ("truncate", "Stop planes of a model, and measure the effects.", truncate_command),
    ("claims", "Test published claims about RoPE on a model.", claims_command),
    ("export", "Write an edited model as a checkpoint.", export_command),
    ("compare", "Compare trained runs, or analyzed models.", compare_command),
    ("report", "Make a page again from saved results.", report_command),
    ("ranks", "Write planes and heads in formats of other projects.", ranks_command),
    ("train", "Train a small model on text, or a pretrained model on.", train_command),
):
    app.command(name, short_help=short_help)(command)


def main() -> None:
    run_app(app)
