"""The columns of metrics.csv, and the speed of a training."""

import time

METRICS = (
    "step",
    "tokens",
    "train_loss",
    "valid_loss",
    "learning_rate",
    "tokens_per_second",
)


class Speed:
    """Counts steps per second since the last reading."""

    def __init__(self) -> None:
        self.restart(step=0)

    def restart(self, step: int) -> None:
        self.step = step
        self.seconds = time.perf_counter()

    def read(self, step: int) -> float:
        steps = step - self.step
        seconds = time.perf_counter() - self.seconds
        self.restart(step)
        return steps / seconds
