"""Measurements of a model while it trains, which do not change the training."""

import random
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from transformers import Trainer, TrainerCallback

from ropelens.arguments import Positive, public
from ropelens.errors import BadArgument, RopelensError
from ropelens.model.as_live_model import Model, unwrapped
from ropelens.model.whole_weights import require_whole_weights
from ropelens.profiles.measurement import versions
from ropelens.profiles.measures import find_statistics
from ropelens.profiles.profile import profile
from ropelens.runtime.devices import devices_of, explain_full_memory
from ropelens.runtime.folder import make_parents, new_folder, numbered
from ropelens.runtime.netcdf import save
from ropelens.runtime.records import log_line
from ropelens.runtime.result_folder import ResultFolder, check_out
from ropelens.runtime.run_record import read_record
from ropelens.text.tokenize import TextInput
from ropelens.train.watched_numbers import step_folders, watched_numbers

RUN = "rope_run"  # the name of a run in its run.json and in the log of the Trainer
DEFAULT = ("reversal", "position_sensitivity")


class RopeCallback(TrainerCallback):
    """Measure a model while transformers' `Trainer` trains it, and log about twelve numbers.

        rl.RopeCallback(text).attach(trainer)
        trainer.train()

    `attach` sends the numbers ("rope/induction") through the log of the Trainer to tensorboard,
    wandb and trackio. In `callbacks=[...]` the callback does not know the Trainer, and the
    numbers are only in `trainer.state.log_history`. The first measurement is before training.
    If a later measurement fails, a warning replaces it.

    Training is bit-identical to training without the callback. Only the first process measures,
    in eager mode and under the Trainer's mixed precision.

    Parameters
    ----------
    text
        A `Text`, token ids [sequence, position], a BatchEncoding, or a string, which the
        processing class of the Trainer tokenizes.
    every
        Steps between two measurements; None measures at each evaluation. With `every=100`, the
        default measures take at most 3 % of the time if a step of the training has 2,000 tokens
        or more, and the text at most half as many as a step.
    measures
        Statistics as in `ropelens.profile`, and "labels", which fits the attention budget and
        takes much longer.
    out
        Folder for the profiles, out/step-000100/profile.nc. By default, each training gets its
        own folder in the output folder of the Trainer: "rope", then "rope-2", ... A training
        that resumes continues the folder of its own steps. In a folder that you name, a new
        training replaces the earlier steps; further trainings of the same callback get
        out-2, ... The attribute `out` is the folder of the present training. `ropelens report
        out` draws the page over the steps, and `ropelens.open(out)` returns the numbers.

    Raises before the training: `UnsupportedModel` for a model without RoPE, or if processes
    hold parts of the weights (FSDP, ZeRO-3), and `BadArgument` if the Trainer does not evaluate
    and `every` is None, and for a folder `out` that holds something else.
    """

    @public
    def __init__(
        self,
        text: TextInput,
        *,
        every: Positive | None = None,
        measures: str | Sequence[str] = DEFAULT,
        out: str | Path | None = None,
    ) -> None:
        names = [measures] if isinstance(measures, str) else measures
        statistics = find_statistics([name for name in names if name != "labels"])
        self.text = text
        self.every = every
        self.out: Path | None = None
        self.numbers: dict[str, float] = {}
        self.steps = 0
        self._named_out = None if out is None else Path(out)
        self._run = ""
        self._begun = 0
        self._statistics = statistics
        self._budget = "labels" in names
        self._tokenizer: Any = None
        self._model: Any = None
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> "RopeCallback":
        """Add the callback to `trainer`, whose log gets the numbers; return the callback."""
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._trainer = trainer
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.every is None and args.eval_strategy == "no":
            raise BadArgument(
                "RopeCallback measures at each evaluation, but this Trainer has none.",
                hint="RopeCallback(text, every=100)",
            )
        if self._trainer is None and state.is_world_process_zero:
            log_line(
                "for tensorboard, wandb and trackio: RopeCallback(...).attach(trainer)"
            )
        self._tokenizer = more["processing_class"]
        step = state.global_step
        earlier_runs = _resumed_runs(state.log_history, step)
        default = Path(args.output_dir, "rope")
        numbers = self._begin(more["model"], step, default, earlier_runs)
        if numbers:
            # A checkpoint of the Trainer saves the log, so that a resumed training finds it.
            state.log_history.append({RUN: self._run, "step": step})
        self._log(numbers, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.every is not None and state.global_step % self.every == 0:
            self._log(self.measure(state.global_step), state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.every is None and self._model is not None:  # not before the training
            self._log(self.measure(state.global_step), state, control)

    def _log(self, numbers: dict[str, float], state: Any, control: Any) -> None:
        if not numbers:
            return
        if self._trainer is None:
            state.log_history.append(numbers | {"step": state.global_step})
        else:
            due = control.should_log
            self._trainer.log(numbers)
            control.should_log = due  # `log` cancels the log of the training loss

    def begin(self, model: Model, step: int = 0) -> dict[str, float]:
        """Measure `model` before a training that starts, or resumes, after `step`."""
        return self._begin(model, step, Path("watch"), earlier_runs=[])

    def _begin(
        self, model: Model, step: int, default: Path, earlier_runs: Sequence[str]
    ) -> dict[str, float]:
        """As `begin`, in the folder of an earlier run that resumes, or one like `default`."""
        self._model = model
        self.steps = step
        require_whole_weights(model)
        if not is_first_process():
            return {}
        named = self._named_out
        out = self._folder_of_earlier(named or default, earlier_runs)
        if out is None:
            self._run = secrets.token_hex(8)
            out = new_folder(default) if named is None else self._next_of(named)
        if out != (named or default):
            log_line(f"the measurements of this training are in {out}")
        self.out = out
        check_out(out, "watch")
        for measured_step, folder in step_folders(out).items():
            if measured_step > step:  # of an earlier run
                shutil.rmtree(folder)
        try:
            numbers = self.measure(step, first=True)
        except BaseException:
            with suppress(OSError):
                out.rmdir()  # only if it is empty
            raise
        record = {"command": sys.argv, "versions": versions(), RUN: self._run}
        results = ResultFolder("watch", findings=(), files={}, record=record)
        results.write_numbers(out)
        if self._run not in earlier_runs:
            self._begun += 1
        return numbers

    def _folder_of_earlier(self, first: Path, runs: Sequence[str]) -> Path | None:
        """The folder of the first of the `runs` that has one with a name like `first`."""
        folders = {}
        for folder in first.parent.glob("*"):
            if re.fullmatch(re.escape(first.name) + r"(-\d+)?", folder.name):
                folders[read_record(folder).get(RUN)] = folder
        for run in runs:
            if run in folders:
                self._run = run
                return folders[run]
        return None

    def _next_of(self, named: Path) -> Path:
        """The folder that the user named, or FOLDER-2, ... for further trainings."""
        folder = next(islice(numbered(named), self._begun, None))
        make_parents(folder)
        return folder

    def step(self) -> dict[str, float]:
        """Count a step of a training loop; return its numbers, or {} if it is not measured."""
        self.steps += 1
        if self.every is not None and self.steps % self.every != 0:
            return {}
        return self.measure(self.steps)

    def measure(self, step: int, *, first: bool = False) -> dict[str, float]:
        """Measure the model after `step`, and save its profile; {} in other processes."""
        if not is_first_process():
            return {}
        assert self.out is not None, "begin was called"
        try:
            with training_unchanged(self._model):
                measured = profile(
                    self._model,
                    self.text,
                    statistics=self._statistics,
                    budget=self._budget,
                    tokenizer=self._tokenizer,
                )
        except RopelensError as error:
            if first:
                raise
            warnings.warn(f"step {step} was not measured: {error.line}", stacklevel=2)
            return {}
        save(measured, self.out / f"step-{step:06d}" / "profile.nc")
        numbers = watched_numbers(measured)
        self.numbers = {f"rope/{name}": number for name, number in numbers.items()}
        return self.numbers


def _resumed_runs(log_history: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """The runs that a Trainer had logged when it was stopped, in their order.

    Another callback of the Trainer may have resumed a run already. It is logged at this `step`.
    """
    steps_of_runs: dict[str, list[int]] = {}
    for row in log_history:
        if RUN in row:
            steps_of_runs.setdefault(row[RUN], []).append(row["step"])
    return [run for run, steps in steps_of_runs.items() if step not in steps]


@public
@contextmanager
def watch(
    model: Model,
    text: TextInput,
    *,
    every: Positive = 100,
    measures: str | Sequence[str] = DEFAULT,
    out: str | Path | None = None,
) -> Iterator[RopeCallback]:
    """Measure `model` in your own training loop, as `RopeCallback` does in a Trainer.

        with rl.watch(model, text, every=100) as watching:
            for batch in batches:
                ...
                numbers = watching.step()  # {} between the measured steps

    The first measurement is at the start of the block, at step 0. `watching.numbers` has the
    numbers of the latest measurement, and `watching.out` is the folder: `out`, whose earlier
    steps are replaced; by default "watch", or "watch-2", ... if another run has written there.
    `RopeCallback` describes the other arguments and the errors.
    """
    watching = RopeCallback(text, every=every, measures=measures, out=out)
    watching.begin(model)
    yield watching


def is_first_process() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0)


@contextmanager
def training_unchanged(model: Any) -> Iterator[None]:
    """Restore random states after the block, and run compiled models in eager mode in it."""
    devices = devices_of(unwrapped(model))
    gpus = [device for device in devices if device.type == "cuda"]
    state_of_python = random.getstate()
    state_of_numpy = np.random.get_state()
    full_memory = explain_full_memory(
        "A measurement", seen="during training", hint="a shorter text"
    )
    try:
        with (
            torch.random.fork_rng(gpus),
            torch.compiler.set_stance("force_eager"),
            full_memory,
        ):
            yield
    finally:
        random.setstate(state_of_python)
        np.random.set_state(state_of_numpy)
