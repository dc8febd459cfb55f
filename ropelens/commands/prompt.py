"""The command `ropelens prompt`, which explains the next token of a prompt."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ropelens.analysis.options import ModelArgument, OutOption, with_options
from ropelens.checkpoints.load_options import Loading, option
from ropelens.commands.terminal import finish
from ropelens.runtime.progress import opening, show_progress


@with_options(Loading)
def prompt_command(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text of 3 to 256 tokens.")],
    *,
    versus: Annotated[
        str | None,
        option("TEXT", "A token, or another prompt. [default: the second likeliest token]"),
    ] = None,
    out: OutOption = Path("prompt"),
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
    from ropelens.runtime.results import check_out

    check_out(out, "prompt")
    with opening(show_progress, "loading"):
        from ropelens.analysis.prompt import explain_prompt
        from ropelens.checkpoints.load import open_checkpoint

        opened = open_checkpoint(model, options)
        loaded = opened.read()
    how: Any = {"tokenizer": opened.tokenizer, "progress": show_progress}
    explain_prompt(loaded, prompt, versus, **how).save(out)
    finish(out)
