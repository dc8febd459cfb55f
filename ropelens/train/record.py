"""What a run says about itself: metrics.csv, run.json, and progress on the terminal."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.utils import logging as transformers_logging

from ropelens.errors import BadArgument
from ropelens.files.folder import write_whole

COLUMNS = ("step", "tokens", "train_loss", "valid_loss", "learning_rate", "tokens_per_second")


class Metrics(TrainerCallback):
    """Keeps metrics.csv in step with the Trainer's own history, which checkpoints hold."""

    def __init__(self, path: Path, *, tokens_per_step: int) -> None:
        self.path = path
        self.tokens_per_step = tokens_per_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Write the whole file anew: after a resume it holds no row of what was lost."""
        if not state.is_world_process_zero:
            return
        text = io.StringIO()
        table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(history_rows(state.log_history, tokens_per_step=self.tokens_per_step))
        write_whole(self.path, text.getvalue())


def history_rows(
    history: Sequence[dict[str, float]], *, tokens_per_step: int
) -> list[dict[str, Any]]:
    """One row a logged step, with the columns of metrics.csv, from the Trainer's history.

    Losses in nats per token; `train_loss` is the mean since the row before.
    """
    rows: dict[int, dict[str, Any]] = {}
    for entry in history:
        step = int(entry["step"])
        row = rows.setdefault(step, {"step": step, "tokens": step * tokens_per_step})
        if "loss" in entry:
            row["train_loss"] = entry["loss"]
            row["learning_rate"] = entry["learning_rate"]
            row["tokens_per_second"] = round(entry["tokens_per_second"])
        if "eval_loss" in entry:
            row["valid_loss"] = entry["eval_loss"]
    return [rows[step] for step in sorted(rows)]


class ShownProgress(TrainerCallback):
    """Progress on stderr: a bar on a terminal, at most a plain line a minute elsewhere."""

    def __init__(self, *, tokens_per_step: int, seconds: float = 60.0) -> None:
        self.tokens_per_step = tokens_per_step
        self.seconds = seconds
        self.printed_at = -math.inf
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.task = TaskID(0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Open the bar, where there is a terminal to draw it on."""
        # Not as rich judges it: FORCE_COLOR, which CI services set, makes no log a terminal.
        if not (sys.stderr.isatty() and state.is_world_process_zero):
            return
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.bar.add_task(
            "training", total=state.max_steps, completed=state.global_step
        )
        self.bar.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **event: Any,
    ) -> None:
        """Show the newest loss and rate."""
        logs: dict[str, float] = event["logs"]
        if not state.is_world_process_zero:
            return
        if "eval_loss" in logs:
            line = f"validation loss {logs['eval_loss']:.4f}"
        elif "loss" in logs:
            rate = logs["tokens_per_second"]
            line = f"loss {logs['loss']:.4f}  {rate:,.0f} tokens/s"
        else:
            return
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step, description=line)
        elif "eval_loss" in logs or time.monotonic() - self.printed_at >= self.seconds:
            self.printed_at = time.monotonic()
            to_do = (state.max_steps - state.global_step) * self.tokens_per_step
            if "loss" in logs and to_do:
                line += f", {timedelta(seconds=round(to_do / rate))} left"
            say(f"step {state.global_step}/{state.max_steps}  {line}")

    def close(self) -> None:
        """Take the bar away; called whether training ended or failed."""
        if self.bar is not None:
            self.bar.stop()


def say(line: str) -> None:
    """One plain line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def transformers_bars_off() -> Iterator[None]:
    """transformers draws a bar a checkpoint, terminal or not; none inside this block."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote; BadArgument for anything else."""
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadArgument(f"{path} is damaged.", seen=str(error)) from error
    if not isinstance(value, dict):
        raise BadArgument(f"{path} is damaged.", seen=f"a {type(value).__name__}, no object")
    return value


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str], *, between: str
) -> str:
    """The values of `names` that differ: "steps: 3, now 4", by what stands `between` them."""
    return "; ".join(
        f"{name}: {_short(one.get(name))}{between}{_short(other.get(name))}"
        for name in names
        if one.get(name) != other.get(name)
    )


def _short(value: object) -> str:
    """A value as text; of a fingerprint the first digits tell enough."""
    text = str(value)
    return text[:8] if len(text) == 64 else text


def write_json(path: Path, value: Any) -> None:
    """`write_whole` for JSON."""
    write_whole(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Save `model` as safetensors with its config, written aside first.

    The weights take their name last: a folder that has them is complete.
    """
    aside = folder / "model.partial"
    with transformers_bars_off():
        model.save_pretrained(aside)
    readers = (aside / "config.json").stat().st_mode  # safetensors lets in its owner alone
    for file in sorted(aside.iterdir(), key=lambda f: f.suffix == ".safetensors"):
        file.chmod(readers)
        file.replace(folder / file.name)
    aside.rmdir()
