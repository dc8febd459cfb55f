"""The work of measuring a checkpoint: batches, memory and time, before weights are read."""

import math
import sys
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedConfig

from ropelens import config_facts
from ropelens.analysis.options import Options
from ropelens.attention.exchange import DRAWS
from ropelens.budget.held_out import fitted_sequences, scored_rows
from ropelens.checkpoints.load import Opened
from ropelens.checkpoints.names import short_name
from ropelens.profiles.costs import OBSERVED, exchange_cost, fit_cost
from ropelens.profiles.measurement import sequences_at_once
from ropelens.profiles.measures import find_statistics
from ropelens.runtime.devices import LIBRARIES, free_bytes, pass_bytes
from ropelens.text.rows import rows_for
from ropelens.text.text import Text

STATISTIC_COST = 0.3  # time of an added statistic, in profiles without a budget
RESULTS_OF_HEAD = 200_000  # bytes of the numbers of a head, which are resampled


def head_dim(config: PreTrainedConfig) -> int:
    """Number of coordinates of a head."""
    heads = config_facts.stated_number(config, "num_attention_heads", 1)
    width = config.get_text_config().hidden_size
    return config_facts.stated_number(config, "head_dim", width // max(1, heads))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Measuring the checkpoint `source` on `text`. Bytes are estimates.

    Costs are numbers of tokens that pass the model plainly in the same time.
    """

    source: Opened
    text: Text
    options: Options

    @cached_property
    def batch_size(self) -> int:
        """Sequences that run together."""
        if self.options.batch_size:
            return self.options.batch_size
        return sequences_at_once(
            self.source.config,
            sequences=len(self.text),
            free=self._free_for_passes // len(self.source.devices),
            context=self._width,
            width=self.source.torch_dtype.itemsize,
            device=self.source.devices[0].type,
            scores=self.options.uses_bridge,  # which stores all scores of a layer
        )

    @cached_property
    def _free(self) -> int:
        """Free bytes of all devices; `sys.maxsize` or more if they are not known."""
        return sum(free_bytes(device) for device in self.source.devices)

    @property
    def _free_for_passes(self) -> int:
        return self._free - self.source.weight_bytes

    @cached_property
    def _largest_pass(self) -> int:
        """Bytes of a pass that sums or of a pass that fits, without weights."""
        summed = min(self.batch_size, len(self.text))
        fitted = fitted_sequences(len(self.text), self._width)
        return max(
            self._pass_bytes(summed, logits=True),
            self._pass_bytes(fitted, logits=False),
        )

    def _pass_bytes(self, sequences: int, *, logits: bool) -> int:
        return pass_bytes(
            self.source.config,
            sequences=sequences,
            context=self._width,
            width=self.source.torch_dtype.itemsize,
            device=self.source.devices[0].type,
            scores=self.options.uses_bridge,
            logits=logits,
        )

    @property
    def _width(self) -> int:
        """Positions of a sequence, with padding."""
        return self.text.ids.shape[1]

    @property
    def memory_shortage(self) -> str:
        """The memory that may not suffice, and the remedy; "" if all fits."""
        if self.source.required_bytes > self._free:
            remedy = f"the weights do not fit; use {self.source.memory_remedy}"
        elif self._largest_pass > self._free_for_passes:
            remedy = (
                "a smaller --context, --batch-size 1 or --dtype bfloat16 reduces it"
            )
        else:
            return ""
        return f"memory may not suffice: {self._memory}; {remedy}"

    @property
    def _memory(self) -> str:
        heads = len(config_facts.attending_layers(self.source.config)) * self._heads
        results = heads * RESULTS_OF_HEAD
        measuring = self.source.weight_bytes + self._largest_pass + results
        needed = max(self.source.loading_bytes, measuring)
        if self.source.devices[0].type == "cpu":
            needed += LIBRARIES
        words = f"about {needed / 1e9:.1f} GB"
        if self._free < sys.maxsize:
            words += f" of {self._free / 1e9:.1f} GB free"
        return words

    @property
    def cost(self) -> float:
        """Cost of the profile."""
        passes = 1 + OBSERVED
        tokens = int(self.text.lengths.sum())
        sums = (1 + self._statistics_cost) * passes * tokens
        return sums + self._fits_cost + self._exchange_cost

    @property
    def _statistics_cost(self) -> float:
        """Time of the added statistics, in profiles without a budget."""
        return STATISTIC_COST * len(find_statistics(self.options.statistics or ()))

    @property
    def _fits_cost(self) -> float:
        config = self.source.config
        of_layer = fit_cost(
            self.source.parameters,
            self._heads,
            head_dim(config) // 2,
            self.text.context,
            self.options.surrogates,
        )
        return len(config_facts.attending_layers(config)) * of_layer

    @property
    def _exchange_cost(self) -> float:
        draws = DRAWS if self.text.single_long_sequence else 1
        rows = scored_rows(self.text) * len(self.text) * draws
        of_layer = exchange_cost(
            self.source.parameters, self._heads, rows, self.text.context
        )
        return len(config_facts.attending_layers(self.source.config)) * of_layer

    @property
    def _heads(self) -> int:
        return config_facts.stated_number(self.source.config, "num_attention_heads", 0)

    @property
    def facts(self) -> dict[str, str]:
        """The work in words, by the names that `--plan` prints."""
        facts = {
            "model": self._model_words,
            "tokens": self._token_words,
            "rows": self._row_words,
            "batch": self._batch_words,
            "budget": "fits and surrogates take as long as a plain pass of "
            f"{self._fits_cost:,.0f} tokens, exchanged keys of {self._exchange_cost:,.0f}; "
            "in Python, rl.profile(..., budget=False) omits them",
            "memory": f"{self._memory} on {', '.join(map(str, self.source.devices))}",
        }
        if self._statistics_cost:
            added = f"{self._statistics_cost:.1f} times the time of budget=False"
            facts["added"] = f"statistics add {added}"
        return facts

    @property
    def _model_words(self) -> str:
        layers = self.source.config.get_text_config().num_hidden_layers
        precision = str(self.source.torch_dtype).removeprefix("torch.")
        if self.options.quantize is not None:
            precision = f"{self.options.quantize}, computed in {precision}"
        return (
            f"{short_name(self.source.checkpoint.name)}, {layers} layers x "
            f"{self._heads} heads, {self.source.parameters:,} parameters in {precision}"
        )

    @property
    def _token_words(self) -> str:
        tokens = int(self.text.lengths.sum())
        sequences = f"{len(self.text):,} sequences of up to {self.text.context:,}"
        return f"{tokens:,} tokens ({sequences})"

    @property
    def _row_words(self) -> str:
        rows = rows_for(self.options.rows, self.text.context)
        return "all rows" if rows == "all" else f"{rows:,} rows of each sequence"

    @property
    def _batch_words(self) -> str:
        batches = math.ceil(len(self.text) / self.batch_size)
        sequence = "sequence" if self.batch_size == 1 else "sequences"
        batch = "batch" if batches == 1 else "batches"
        return f"{self.batch_size:,} {sequence} at a time, {batches:,} {batch}"
