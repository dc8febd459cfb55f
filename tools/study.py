"""Train, resume, measure and draw the studies of analyses/: see `make study`.

    python tools/study.py [STUDY]... [--novels FOLDER] [--runs FOLDER]

A study is a row of `STUDIES`. Each of its parts has a file analyses/PART.toml. With --novels,
a folder with `train` and `valid` (tools/README.md), runs are trained in RUNS/PART and
measured, and tools/study/STUDY.tar.xz keeps all numbers that its pages need. Finished runs and
measurements are not repeated. On a machine without RUNS/PART, they come from this archive.
Several processes can divide the runs; the last process measures them.

Then its scripts draw the pages from tools/study/STUDY.tar.xz. Without --novels, the command
only draws.
"""

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import pandas as pd
import typer
import xarray as xr
from filelock import FileLock
from mixture import main as make_mixture

import ropelens as rl
from ropelens.commands.terminal import run_script
from ropelens.comparison.checkpoint_measures import head_measures
from ropelens.errors import BadArgument, explained
from ropelens.profiles.measures import compared
from ropelens.runtime.digits import (
    FIVE_DIGITS,
    FOUR_DIGITS,
    THREE_DIGITS,
    rounded,
    with_digits,
)
from ropelens.runtime.folder import RECORD, whole_file
from ropelens.runtime.netcdf import open_results
from ropelens.runtime.records import read_json, read_json_if_exists, write_json
from ropelens.train.data import DATA
from ropelens.train.run import read_study, run_study
from ropelens.train.run_folder import STUDY, Busy, lock_run
from ropelens.train.steps import TrainingFailed

ROOT = Path(__file__).parent.parent
KEPT = Path("tools/study")  # archives of finished studies, in the repository
MEASURED = "measured"  # folder of the measurements of a study
KEPT_OF_RUNS = (STUDY, RECORD, "metrics.csv", "losses.csv")
FINAL = "final.nc"
PROFILE = "profile.nc"
BY_TRIAL = "trial_induction"
NOT_COMPARED = ("q_norm", "k_norm", "selectivity_keys")  # if a checkpoint is early
# Dimensions of the variables of a profile from which labels of heads follow
OF_LABELS = {"layer", "head", "group", "trial"}
LOSSES = ("step", "tokens", "train_loss", "valid_loss")


@dataclass(frozen=True)
class Study:
    """Study files in analyses/, and the scripts there that answer the questions of a study.

    `mixture` is the recipe of its tokens in tools/mixture.py; without one it reads the novels.
    Each of its `parts` has a file analyses/PART.toml; the first part has the name of the study.
    """

    scripts: tuple[str, ...]
    parts: tuple[str, ...]
    mixture: str = ""


STUDIES = {
    "variants": Study(scripts=("variants.py",), parts=("variants", "variants-more")),
    "copying": Study(scripts=("copying.py",), parts=("copying",), mixture="copying"),
}


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Studies. [default: all]")
    ] = None,
    *,
    novels: Annotated[
        Path | None, typer.Option(help="Folder with the texts train and valid.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
) -> None:
    for name in names or STUDIES:
        if name not in STUDIES:
            raise BadArgument(f"There is no study {name!r}.", hint=", ".join(STUDIES))
        if novels is not None:
            restore(name, runs)
            train_study(name, novels=novels, runs=runs)
            parts = [runs / part for part in STUDIES[name].parts]
            folders = [part for part in parts if part.exists()]
            if any(map(is_busy, folders)):
                typer.echo(f"{name}: another process trains its last runs")
                continue
            # Runs of another process that was stopped meanwhile
            train_study(name, novels=novels, runs=runs)
            with lock_study(name, runs):
                answer(name, folders)
                keep(folders, KEPT / f"{name}.tar.xz")
        with lock_study(name, runs):
            draw(name, runs / "kept")


def lock_study(name: str, runs: Path) -> FileLock:
    """Processes unpack, measure and draw a study one after the other."""
    runs.mkdir(parents=True, exist_ok=True)
    return FileLock(runs / f".{name}.lock")


def restore(name: str, runs: Path) -> None:
    """Unpack the parts of a study of which `runs` has no folder, if they are in the archive.

    Parts whose study file has changed are not unpacked, so that they are trained again.
    """
    archive_file = KEPT / f"{name}.tar.xz"
    if not archive_file.exists():
        return
    with lock_study(name, runs), TemporaryDirectory(dir=runs) as folder:
        unpack(archive_file, Path(folder))
        for part in STUDIES[name].parts:
            unpacked = Path(folder, part)
            recorded = read_json_if_exists(unpacked / STUDY)
            is_same = recorded == read_study(ROOT / "analyses" / f"{part}.toml")
            if is_same and not (runs / part).exists():
                unpacked.rename(runs / part)


def unpack(archive_file: Path, folder: Path) -> None:
    what = f"{archive_file} cannot be unpacked."
    readable = explained(what, "the file of the repository", error=BadArgument)
    with readable, tarfile.open(archive_file) as archive:
        archive.extractall(folder, filter="data")


def train_study(name: str, *, novels: Path, runs: Path) -> None:
    """Train all runs of a study that are not finished. Runs that diverge are left out."""
    for part in STUDIES[name].parts:
        with suppress(TrainingFailed):  # it is printed, and the pages name the runs
            train_part(STUDIES[name], part, novels=novels, runs=runs)


def train_part(study: Study, part: str, *, novels: Path, runs: Path) -> None:
    file = ROOT / "analyses" / f"{part}.toml"
    text = [novels / "train"]
    valid = [novels / "valid"]
    if study.mixture:
        tokens = runs / f"{study.mixture}-mixture"
        if not (tokens / DATA).exists():
            make_mixture(*text, *valid, tokens, recipe=study.mixture)
        run_study(file, out=runs / part, tokens=tokens)
    else:
        run_study(file, out=runs / part, text=text, valid=valid)


def is_busy(folder: Path) -> bool:
    """Whether another process works on a run of the study in `folder`."""
    for record in folder.rglob(RECORD):
        try:
            with lock_run(record.parent):
                pass
        except Busy:
            return True
    return False


def answer(name: str, folders: Sequence[Path]) -> None:
    """Measure the runs in `folders`, unless they are measured, and draw the pages."""
    for script in STUDIES[name].scripts:
        out = f"reports/{Path(script).stem}/{name}"
        command = [sys.executable, f"analyses/{script}", "--out", out]
        for folder in folders:
            command += ["--runs", str(folder)]
        subprocess.run(command, check=True)


def draw(name: str, folder: Path) -> None:
    """Draw the pages of a study from its archive, which is unpacked in `folder`."""
    archive_file = KEPT / f"{name}.tar.xz"
    if not archive_file.exists():
        raise BadArgument(
            f"The study {name} is not finished: there is no {archive_file}.",
            hint="make study NOVELS=FOLDER (tools/README.md), which trains and keeps it",
        )
    unpacked = [folder / part for part in STUDIES[name].parts]
    for part in unpacked:
        remove_folder(part)
    folder.mkdir(parents=True, exist_ok=True)
    unpack(archive_file, folder)
    answer(name, [part for part in unpacked if part.exists()])


def remove_folder(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def keep(folders: Sequence[Path], archive: Path) -> None:
    """Write the numbers that the pages of finished studies need to `archive`.

    Numbers have 5 digits, and numbers of early checkpoints have 4 digits. Induction scores of
    trials, the largest variable of early checkpoints, have 3 digits.
    """
    with whole_file(archive) as path, tarfile.open(path, "w:xz", preset=9) as tar:
        for folder in folders:
            kept = folder.parent / "kept" / folder.name
            remove_folder(kept)
            copy_study(folder, kept)
            tar.add(kept, folder.name, filter=without_owner)


def copy_study(folder: Path, kept: Path) -> None:
    """Copy the kept numbers, and make folders of early checkpoints, named by their steps."""
    for file in sorted(folder.rglob("*")):
        part = file.relative_to(folder)
        if is_kept(part):
            copy_smaller(file, kept / part)
    for step in folder.glob("*/*/*/history/step-*"):
        (kept / step.relative_to(folder)).mkdir(parents=True)


def is_kept(part: Path) -> bool:
    """Whether a file of a study, named from its folder, is read without weights and text."""
    if part.parts[0] == MEASURED:
        return part.suffix in (".nc", ".json")
    return part.name in KEPT_OF_RUNS and "history" not in part.parts


def copy_smaller(file: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".nc":
        rl.save(smaller_measurement(file), copy)
    elif file.name == "metrics.csv":
        metrics = pd.read_csv(file)
        columns = [name for name in LOSSES if name in metrics]
        metrics[columns].to_csv(copy, index=False, float_format="%.5g")
    elif file.name == RECORD:
        record = read_json(file)
        record.pop("command", None)  # it names folders of the machine
        write_json(copy, record)
    else:
        shutil.copyfile(file, copy)


def smaller_measurement(file: Path) -> xr.Dataset:
    """The measurement in `file` without numbers that follow from others, in less precision."""
    measured = open_results(file)
    profile_file = file.with_name(PROFILE)
    is_early = file.name.startswith("step-")
    if file.name == PROFILE:
        needed = [
            name
            for name, variable in measured.data_vars.items()
            if set(variable.dims) <= OF_LABELS or name in compared("final", "growth")
        ]
        measured = measured[needed]
    elif is_early:
        measured = measured.drop_vars(NOT_COMPARED, errors="ignore")
    elif file.name == FINAL and profile_file.exists():
        of_profile = head_measures(open_results(profile_file))
        names = set(of_profile) - {"loss", "loss_se"}
        measured = measured.drop_vars(names, errors="ignore")
    if not is_early:
        return with_digits(measured, FIVE_DIGITS)
    smaller = with_digits(measured, FOUR_DIGITS)
    if BY_TRIAL in smaller:
        trials = smaller[BY_TRIAL]
        smaller[BY_TRIAL] = trials.copy(data=rounded(trials.values, THREE_DIGITS))
    return smaller


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The entry of an archive without time and owner, for equal bytes each time."""
    member.mtime = 0
    member.uid = 0
    member.gid = 0
    member.uname = ""
    member.gname = ""
    return member


if __name__ == "__main__":
    run_script(main)
