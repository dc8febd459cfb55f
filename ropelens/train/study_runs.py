"""The runs of a study follow each other. Several processes can divide them."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from ropelens.runtime.records import log_line
from ropelens.train.run_folder import Busy
from ropelens.train.steps import TrainingFailed


def run_each(
    runs: Mapping[Path, Callable[[], Path]], *, may_diverge: Collection[Path] = ()
) -> None:
    """Call the `runs` of a study, which are named by their folders.

    A run on which another process works is left to it. After a run that diverges, the
    next run begins, and `TrainingFailed` at the end names the runs that diverged. Runs in
    `may_diverge` do not count: if they diverge, this is logged.
    """
    diverged: list[str] = []
    busy: list[str] = []
    for number, (folder, run) in enumerate(runs.items(), start=1):
        log_line(f"run {number} of {len(runs)}: {folder}")
        try:
            run()
        except Busy:
            busy.append(str(folder))
        except TrainingFailed as error:
            log_line(error.line)
            if folder in may_diverge:
                log_line(f"the study continues without {folder}")
            else:
                diverged.append(str(folder))
    if busy:
        log_line(f"another process works on {', '.join(busy)}")
    if diverged:
        raise TrainingFailed(
            f"{len(diverged)} of {len(runs)} runs of the study diverged.",
            seen=", ".join(diverged),
            hint="a lower learning_rate in the study file, in a new folder",
        )
