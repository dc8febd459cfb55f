"""Entries of a comparison: analyses, or trained runs with their measurement."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from transformers import PreTrainedModel

from ropelens.checkpoints.names import short_names
from ropelens.errors import BadArgument
from ropelens.interventions.evaluate import evaluate
from ropelens.profiles.heads import head_values
from ropelens.profiles.measures import compared
from ropelens.profiles.needles import SHORTEST_PROMPT
from ropelens.profiles.profile import profile
from ropelens.profiles.tasks import NEAREST, doublings
from ropelens.runtime.folder import RECORD
from ropelens.runtime.keys import differences
from ropelens.runtime.records import read_json
from ropelens.text.text import Text
from ropelens.train.data import documents_of, held_out_sequences, spread
from ropelens.train.run import STUDY, runs_of
from ropelens.train.settings import Size, size_name

TEXT_SETTINGS = ("valid_sha256", "text_sha256", "tokenizer_sha256")
# Settings that must be equal in all runs, so that their losses can be compared
SHARED_SETTINGS = ("context", "vocabulary", *TEXT_SETTINGS, "steps", "precision")
SHARED_WITHIN_SIZE = ("size", "learning_rate", "warmup_steps")
TIMES_CONTEXT = 4  # length of long texts, in trained contexts


@dataclass(frozen=True)
class ComparisonEntry:
    """An analysis, or a finished run with `steps`. Only the seed differs within a `group`."""

    name: str
    group: str
    folder: Path
    size: str = ""
    variant: str = ""
    seed: int = 0
    data: Path = Path()
    context: int = 0
    steps: int = 0
    tokens_per_step: int = 0

    def checkpoints(self) -> dict[int, Path]:
        """Folders of the early checkpoints and the finished run, by step."""
        early = sorted((self.folder / "history").glob("step-*"))
        models = {int(path.name.removeprefix("step-")): path for path in early}
        return models | {self.steps: self.folder}


def find_entries(
    paths: Sequence[str | Path],
) -> tuple[list[ComparisonEntry], list[str]]:
    """The runs or analyses in `paths` in order, and the names of unfinished runs of studies."""
    records: dict[Path, dict[str, Any]] = {}
    unfinished: list[str] = []
    for path in map(Path, paths):
        study = read_json(path / STUDY) if (path / STUDY).exists() else None
        for run in [Path()] if study is None else runs_of(study):
            folder = (path / run).resolve()
            record = read_json(folder / RECORD) if (folder / RECORD).exists() else {}
            if study is not None and "finished" not in record:
                unfinished.append(str(run))
            else:
                records[folder] = record
    if unfinished:  # the warning names the line that called `compare`
        warnings.warn(
            f"unfinished runs are left out: {', '.join(unfinished)}", stacklevel=3
        )
    trained = [folder for folder, record in records.items() if "finished" in record]
    profiles = [folder for folder in records if (folder / "profile.nc").exists()]
    others = [folder for folder in records if folder not in (trained or profiles)]
    if others or len(records) < 2:
        few = "A comparison needs two or more folders."
        fault = f"{others[0]} cannot be compared with the rest." if others else few
        wanted = (
            "only finished runs of ropelens train, or only folders of ropelens analyze"
        )
        raise BadArgument(fault, hint=wanted)
    if trained:
        return _runs(records), unfinished
    names = short_names(list(records))
    return [
        ComparisonEntry(n, n, folder) for n, folder in zip(names, records, strict=True)
    ], []


def _runs(records: dict[Path, dict[str, Any]]) -> list[ComparisonEntry]:
    """Entries of runs, after checking that they have the same settings and text."""
    sizes = [
        size_name(Size(**record["settings"]["size"])) for record in records.values()
    ]
    runs: dict[str, ComparisonEntry] = {}
    first = next(iter(records))
    first_of: dict[str, Path] = {}
    for size, (folder, record) in zip(sizes, records.items(), strict=True):
        settings = record["settings"]
        variant, seed = settings["variant"], settings["seed"]
        group = f"{size} {variant}" if len(set(sizes)) > 1 else variant
        name = f"{group} seed {seed}"
        like = first_of.setdefault(size, folder)
        for other, names in ((first, SHARED_SETTINGS), (like, SHARED_WITHIN_SIZE)):
            differ = differences(
                records[other]["settings"], settings, names, between=" and "
            )
            if name in runs or differ:
                what = f"The runs in {other} and {folder} cannot be compared."
                hint = "the folders that ropelens analyze writes for the same text"
                raise BadArgument(
                    what, seen=differ or f"both runs are {name}", hint=hint
                )
        same = {key: settings[key] for key in ("variant", "seed", "context", "steps")}
        data, per_step = folder / record["data"], record["tokens"] // settings["steps"]
        facts = same | {
            "size": size,
            "data": data.resolve(),
            "tokens_per_step": per_step,
        }
        runs[name] = ComparisonEntry(name, group, folder, **facts)
    return list(runs.values())


def measure(
    run: ComparisonEntry,
    model: PreTrainedModel,
    *,
    sequences: int,
    seed: int,
    final: bool,
) -> xr.Dataset:
    """Measure a checkpoint of `run`, with fewer variables and sequences if not `final`."""

    def on(text: Text, *measures: str, **options: Any) -> xr.Dataset:
        evaluated = evaluate(model, text, measures=measures, seed=seed, **options)
        return evaluated.isel(edit=0, drop=True)

    per, per_long = (8, 8) if final else (32, 64)  # see the table in `compare`
    text = validation(run, sequences=sequences)  # the same needles for all checkpoints
    fewer = validation(run, sequences=max(2, sequences // per))
    measured = profile(model, fewer, seed=seed, surrogates=0)
    longer = on(past_context(run, sequences=max(2, sequences // per_long)), "loss")
    tasks = on(text, "induction", "retrieval")
    added = {name: tasks[name] for name in ("first_loss", "repeat_loss", "retrieval")}
    added["position_loss"] = longer["position_loss"]
    dataset = head_measures(measured, final=final).assign(added)
    if not final:
        return dataset.drop_vars(("inv_freq", "wavelength"))
    losses = on(text, "loss").reset_coords("group")
    longest = TIMES_CONTEXT * run.context
    lengths, distances = (
        doublings(SHORTEST_PROMPT, longest),
        doublings(NEAREST, longest // 2),
    )
    far = on(text, "copying", "retrieval", prompt_lengths=lengths, distances=distances)
    return dataset.assign(
        loss=losses["mean_loss"],
        loss_se=losses["mean_loss_se"],
        sequence_loss=losses["loss"],
        sequence_group=losses["group"],
        position_loss_se=longer["position_loss_se"],
        retrieval_hit=tasks["retrieval_hit"],
        copy_loss=far["copy_loss"],
        far_retrieval=far["retrieval"]
        .mean("depth")
        .rename(retrieval_length="prompt_length"),
    ).assign_attrs(documents=losses.attrs["documents"])


def head_measures(profile: xr.Dataset, *, final: bool = True) -> xr.Dataset:
    """Variables of a profile for a comparison, and the labels of its heads ("" if missing)."""
    dataset = profile[compared("final", "growth") if final else compared("growth")]
    dataset = dataset.drop_vars(set(dataset.coords) - {"inv_freq", "wavelength"})
    dataset = dataset.reset_coords(("inv_freq", "wavelength"))
    values, heads = head_values(profile), ("layer", "head")
    columns = ("label", "positional_fraction", "mean_wavelength")  # of heads.csv
    dataset = dataset.assign({name: (heads, values[name]) for name in columns})
    losses = {name: float(profile.attrs[name]) for name in ("loss", "loss_se")}
    return dataset.assign(losses)


def validation(run: ComparisonEntry, *, sequences: int) -> Text:
    """Sequences from the whole validation text of `run`, evenly spread."""
    held_out = held_out_sequences(run.data)
    documents = spread(documents_of(held_out, run.data), sequences)
    tokens = torch.from_numpy(spread(held_out, sequences).astype(np.int64))
    return Text(tokens, documents=torch.from_numpy(documents))


def past_context(run: ComparisonEntry, *, sequences: int) -> Text:
    """Consecutive validation sequences as sequences of up to `TIMES_CONTEXT` contexts."""
    held_out = held_out_sequences(run.data)
    documents = documents_of(held_out, run.data)
    body = run.context - 1
    times = min(TIMES_CONTEXT, max(1, len(held_out) // 2 - 1))
    length = times * run.context - 1
    rows = -(-length // body)
    count = min(sequences, len(held_out) // rows)
    starts = np.linspace(0, len(held_out) - rows, count, dtype=int)
    texts = [held_out[start : start + rows, 1:].ravel()[:length] for start in starts]
    tokens = torch.from_numpy(
        np.insert(texts, 0, held_out[0, 0], axis=1).astype(np.int64)
    )
    return Text(tokens, documents=torch.from_numpy(documents[starts]))
