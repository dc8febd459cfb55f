"""Studies: the same training for several variants of RoPE, sizes and seeds.

Runs with one seed see the same text in the same order, with the same tokenizer, and start
from the same weights, so that variants are compared in pairs.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument, explained, public
from ropelens.runtime.folder import file_name
from ropelens.train.data import read_texts, require_same, say, write_json
from ropelens.train.loop import TrainingFailed
from ropelens.train.run import STUDY, Busy, model_config, read_own, train
from ropelens.train.settings import Settings


def runs_of(study: Mapping[str, Any]) -> dict[Path, Settings]:
    """The runs of a study, by folders in its own such as tiny/p-rope-0.75/seed-0.

    All variants of a seed come before the next: a stopped study compares most.
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
    """The study in the TOML file `path`.

    Raises `BadArgument` for a file, key, variant, size or value that is wrong.
    """
    with explained(f"{path} is no study.", error=BadArgument):
        study = tomllib.loads(path.read_text(encoding="utf-8"))
        runs = runs_of(study)
        if not runs:
            raise ValueError("it names no run")
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
    """Train what the study file `path` names in the folder `out`, and return that folder.

    The file names `variants` (the first is the baseline of comparisons), `seeds` and `sizes`,
    and the settings that all runs share. Finished runs are passed over, a stopped one is
    resumed, and one that another process is at work on is left to it: the same command, given
    several times at once, shares the runs out (one for each GPU, say). If a run diverges, the
    others are still trained. `text` and `valid` are files or folders; in place of text,
    `tokens` is a folder of tokens that were made before.

    Raises:
        BadArgument: `path` is no study, or `out` holds another one.
        BadText: no such text, not UTF-8, or too little of it.
        TrainingFailed: at the end, naming the runs that diverged.
    """
    out = Path(out)
    study = read_study(Path(path))
    learnt, held_out = (list(map(Path, files)) for files in (text, valid))
    data = out / "data" if tokens is None else Path(tokens)
    if not read_own(out, STUDY, key="variants"):
        read_texts(learnt, held_out, data=data)  # before there is a folder to leave behind
        write_json(out / STUDY, study)
    require_same(read_own(out, STUDY, key="variants"), study, what=f"the study in {out}")
    runs = runs_of(study)
    diverged: list[str] = []
    busy: list[str] = []
    for number, (folder, settings) in enumerate(runs.items(), start=1):
        say(f"run {number} of {len(runs)}: {folder}")
        try:
            train(settings, out=out / folder, text=learnt, valid=held_out, data=data)
        except Busy:
            busy.append(str(folder))
        except TrainingFailed as error:
            say(error.line)
            diverged.append(str(folder))
    if busy:
        say(f"another process is at work on {', '.join(busy)}")
    if diverged:
        raise TrainingFailed(
            f"{len(diverged)} of {len(runs)} runs of the study diverged.",
            seen=", ".join(diverged),
            hint="a lower learning_rate in the study file, in a new folder",
        )
    return out
