"""How commands measure one model into one folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropelens.analysis.analyze import analyze
from ropelens.analysis.options import Options
from ropelens.commands.terminal import say
from ropelens.files.progress import opening, show_progress
from ropelens.models.processes import processes, shared


def measure(
    model: str,
    text: list[Path] | None,
    options: Options,
    *,
    folder: Path,
    tokenizer: str | None,
    truncation: Mapping[str, Any] | None = None,
) -> tuple[list[str], Path] | None:
    """Measure a model and save the results in `folder`; their summary, and the page's path.

    All processes that torchrun started measure; the first one saves, for the others the
    result is None.
    """
    with shared():
        analysis = analyze(
            model,
            text,
            options,
            tokenizer=tokenizer,
            truncation=truncation,
            folder=folder,
            progress=show_progress,
            announce=lambda plan: say(f"plan: {plan.line}"),
        )
    if not processes().is_main_process:
        return None
    with opening(show_progress, "writing"):
        folder.parent.mkdir(exist_ok=True)
        page = analysis.save(folder)
    return analysis.summary, page
