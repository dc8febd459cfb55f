"""How a script of `analyses/` runs: the options of a command, and an answer in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ropelens.analysis.analysis import Analysis
from ropelens.analysis.analyze import analyze
from ropelens.analysis.folders import Answer, write_answer
from ropelens.analysis.options import Options
from ropelens.commands.options import Model, Text, with_options
from ropelens.commands.terminal import print_path, run_script
from ropelens.report.index import write_index


def run_analysis(
    answer: Callable[[Analysis], Answer], *, rows: int | Literal["all"] = "all"
) -> None:
    """Run a script that answers one question on the model and text of its command line.

    MODEL, --text, --context and --sequences become an `Analysis` (`rows` as for `analyze`),
    of which `answer` makes the answer. It is written to reports/SCRIPT/MODEL beside the
    script's folder, with an index of all reports; the path of the page is printed. --help
    prints the docstring of the script, and it ends as the commands of `ropelens` do.
    """
    script = Path(str(sys.modules[answer.__module__].__file__)).resolve()
    reports = script.parents[1] / "reports"

    @with_options(Options, only=("context", "sequences"), context=512)
    def main(model: Model = "bundled", text: Text = None, *, options: Options) -> None:
        analysis = analyze(model, text, replace(options, rows=rows))
        page = write_answer(reports / script.stem, analysis, answer(analysis))
        write_index(reports)
        print_path(page)

    main.__module__ = answer.__module__
    run_script(main)
