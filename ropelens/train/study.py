"""Studies: the same training for several variants of RoPE, sizes and seeds.

Runs with the same seed have the same initial weights and read the same tokens in the same
order, so that variants can be compared in pairs.
"""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument, explained, public
from ropelens.runtime.folder import file_name
from ropelens.train.data import log_line, read_texts, require_same, write_json
from ropelens.train.loop import TrainingFailed
from ropelens.train.run import STUDY, Busy, model_config, read_settings, train
from ropelens.train.settings import Settings


def runs_of(study: Mapping[str, Any]) -> dict[Path, Settings]:
    """The runs of a study, by the name of their folder, such as tiny/p-rope-0.75/seed-0.

    All variants of a seed come before the next seed, so a stopped study has complete pairs.
    """
    shared = dict(study)
    variants, seeds = shared.pop("variants"), shared.pop("seeds", [0])
    sizes = shared.pop("sizes", ["tiny"])
    return {
        Path(size, file_name(variant), f"seed-{seed}"): Settings(
            variant=variant, seed=seed, size=size, **shared
        )
        for seed, size, variant in itertools.product(seeds, sizes, variants)
    }


def read_study(path: Path) -> dict[str, Any]:
    """Read the TOML file `path`; raises `BadArgument` if a key or a value is wrong."""
    with explained(f"{path} is not a study.", error=BadArgument):
        study = tomllib.loads(path.read_text(encoding="utf-8"))
        runs = runs_of(study)
        if not runs:
            raise ValueError("it has no run")
        for settings in runs.values():
            model_config(settings)
    return study


@public
def run_study(
    path: str | Path,
    *,
    out: str | Path,
    text: Sequence[str | Path] = (),
    valid: Sequence[str | Path] = (),
    tokens: str | Path | None = None,
) -> Path:
    """Train all runs of the study file `path` in the folder `out`, and return that folder.

    The file lists `variants` (the first is the baseline of comparisons), `seeds`, `sizes`, and
    the settings that all runs share. `text` and `valid` are files or folders. Instead of text,
    `tokens` can be a folder with prepared tokens.

    Finished runs are skipped, and stopped runs are resumed. A run on which another process
    works is skipped as well, so several processes can share a study, for example one for each
    GPU. If a run diverges, the other runs are still trained.

    Raises:
        BadArgument: `path` is not a study, or `out` contains another study.
        BadText: the text is missing, not UTF-8 or too short.
        TrainingFailed: at the end, with the names of the runs that diverged.
    """
    out = Path(out)
    study = read_study(Path(path))
    training, held_out = (list(map(Path, files)) for files in (text, valid))
    data = out / "data" if tokens is None else Path(tokens)
    if not read_settings(out, STUDY, key="variants"):
        read_texts(training, held_out, data=data)  # before any folder is created
        write_json(out / STUDY, study)
    require_same(read_settings(out, STUDY, key="variants"), study, what=f"the study in {out}")
    runs = runs_of(study)
    diverged: list[str] = []
    busy: list[str] = []
    for number, (folder, settings) in enumerate(runs.items(), start=1):
        log_line(f"run {number} of {len(runs)}: {folder}")
        try:
            train(settings, out=out / folder, text=training, valid=held_out, data=data)
        except Busy:
            busy.append(str(folder))
        except TrainingFailed as error:
            log_line(error.line)
            diverged.append(str(folder))
    if busy:
        log_line(f"another process works on {', '.join(busy)}")
    if diverged:
        raise TrainingFailed(
            f"{len(diverged)} of {len(runs)} runs of the study diverged.",
            seen=", ".join(diverged),
            hint="a lower learning_rate in the study file, in a new folder",
        )
    return out
