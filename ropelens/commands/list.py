"""The command `ropelens list`."""

from __future__ import annotations

import typer


def list_bundled() -> None:
    """Name the checkpoints that come with ropelens, which other commands take as MODEL.

    \b
    Example:
      ropelens list
    """
    from ropelens.models.paths import BUNDLED, bundled_facts

    typer.echo(f"{'name':<30}{'tokens seen':>12}{'loss*':>8}")
    for name in BUNDLED:
        facts = bundled_facts(name)
        loss = f"{facts['validation_loss']:.3f}"
        typer.echo(f"{'bundled:' + name:<30}{facts['tokens']:>12,}{loss:>8}  {facts['what']}")
    typer.echo("* validation loss, nats/token")
