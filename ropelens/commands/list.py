"""The command `ropelens list`."""

from __future__ import annotations

from ropelens.commands.terminal import print_tables


def list_bundled() -> None:
    """Name the checkpoints that come with ropelens, which other commands take as MODEL.

    \b
    Example:
      ropelens list
    """
    from rich.table import Table

    from ropelens.models.bundled import BUNDLED, bundled_facts

    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    for heading in ("tokens seen", "validation loss\n(nats/token)"):
        table.add_column(heading, justify="right")
    for name in BUNDLED:
        facts = bundled_facts(name)
        loss = f"{facts['validation_loss']:.3f}"
        table.add_row(f"bundled:{name}", facts["what"], f"{facts['tokens']:,}", loss)
    print_tables(table)
