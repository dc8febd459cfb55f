"""Time and peak memory of measuring, compared with a plain forward pass.

One process runs all ways in turn and prints medians of 5, on a random 8-layer Llama of width
512 with 8 query and 4 key-value heads, and one sequence. "measured" is the work that streams
over all text: norms, selectivity, offsets, entropy and the loss. The second table has the parts
of a whole profile of the bundled checkpoint on 64 sequences of 512 tokens: the work that is
done once for a text of any length (probe, excerpt and repeats, fits, surrogates), and the work
for each token. With --others the first table also has transformers' `output_attentions=True`
and TransformerLens' `run_with_cache`, which only collect attention and compute no statistics.

With --large the model has 1.1 billion parameters in bfloat16 (22 layers of width 2,048, 32
query and 4 key-value heads), 256 rows are measured, and the second table is omitted.

With --model there is one table of processor time: the whole `rl.profile` of any model, its fits
and surrogates, its exchanged keys, and a plain forward pass of the same sequences. Each runs
once.

    python benchmarks/cost.py [--others] [--contexts 1024,4096] [--device cuda]
    python benchmarks/cost.py --large [--contexts 1024]
    python benchmarks/cost.py --model MODEL [--text FILE] [--contexts 512] [--sequences 8]

Takes about 4 minutes on 2 CPU cores (7 with --others or --large).
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ropelens as rl
from ropelens.attention.exchange import follow_sums
from ropelens.budget import held_out
from ropelens.budget.held_out import LayerFit
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.profiles.layer_fits import LayerFitter
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.passes import collect
from ropelens.profiles.tasks import Repeats

RUNS = 5
SAMPLE = Path(rl.__file__).parent / "bundled/rope/sample.jsonl"
MIB = 2**20


@dataclass(frozen=True)
class Cost:
    """Seconds, and peak memory above the memory at the start, in bytes: one run, or medians."""

    seconds: float
    peak: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--others", action="store_true", help="also transformers and TransformerLens"
    )
    parser.add_argument(
        "--large", action="store_true", help="1.1 billion parameters, bfloat16"
    )
    parser.add_argument("--contexts", help="[default: 1024,4096; with --large 1024]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--model", help="whole profiles of this model: a folder, file or Hub id"
    )
    parser.add_argument("--text", type=Path, default=SAMPLE, help="with --model")
    parser.add_argument("--sequences", type=int, default=8, help="with --model")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    if arguments.model:
        Console(width=100).print(whole_profiles(arguments))
        return
    large = arguments.large
    contexts = arguments.contexts or ("1024" if large else "1024,4096")
    model = (random_llama(**LARGE) if large else random_llama()).to(device)
    table = empty_table(device)
    for context in map(int, contexts.split(",")):
        ids = torch.randint(model.config.vocab_size, (1, context), device=device)
        ways = ways_of(model, ids, rows=(256,) if large else ("all", 512))
        if arguments.others:
            ways |= other_ways(ids)
        add_costs(table, context, compare(ways, device))
    Console(width=100).print(table)
    if not large:
        Console(width=100).print(parts_of_a_profile(device))


def empty_table(device: torch.device) -> Table:
    """A table of costs, next to the cost of a plain forward pass."""
    threads = torch.get_num_threads()
    table = Table(title=f"median of {RUNS}, {device}, {threads} threads")
    table.add_column("context", justify="right")
    table.add_column("what", justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("time ratio", justify="right")
    table.add_column("peak MiB", justify="right")
    table.add_column("above plain MiB", justify="right")
    return table


def add_costs(table: Table, context: int, costs: dict[str, Cost]) -> None:
    """Add a row for each way to process a sequence of this length."""
    plain = costs["plain forward"]
    for way, cost in costs.items():
        table.add_row(
            f"{context:,}",
            way,
            f"{cost.seconds:.3f}",
            f"{cost.seconds / plain.seconds:.2f}",
            f"{cost.peak / MIB:,.0f}",
            f"{(cost.peak - plain.peak) / MIB:+,.0f}",
        )
    table.add_section()


def whole_profiles(options: argparse.Namespace) -> Table:
    """Processor time of profiles of a model, and of its plain forward pass."""
    model, tokenizer = rl.load(options.model, device=options.device)
    documents = rl.read_documents([options.text])
    table = Table(title=f"{options.model}, {torch.get_num_threads()} threads")
    for heading in ("sequences", "what", "seconds of CPU", "of plain forward"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for context in map(int, (options.contexts or "512").split(",")):
        text = rl.tokenize(documents, tokenizer, context=context)[: options.sequences]
        costs = cost_of_profile(as_live_model(model), text)
        for way, seconds in costs.items():
            ratio = f"{seconds / costs['plain forward']:.2f}"
            table.add_row(f"{len(text)} x {context:,}", way, f"{seconds:.1f}", ratio)
        table.add_section()
    return table


@torch.no_grad()
def cost_of_profile(live: LiveModel, text: rl.Text) -> dict[str, float]:
    """Processor time of a profile and of its parts, in seconds: each runs once."""
    model = live.model
    measurement = Measurement.of(live, text)
    planes = RotationProbe(live).planes(text.context)
    ways: dict[str, Callable[[], object]] = {
        "plain forward": lambda: [
            model(ids, use_cache=False) for ids in text.ids.split(1)
        ],
        "fits and 40 surrogates": lambda: LayerFitter(
            measurement, planes, surrogates=40
        ).fit_layers(),
        "rl.profile": lambda: rl.profile(model, text),
    }
    seconds = {"exchanged keys, in rl.profile": 0.0}

    def timed(*arguments: Any, **options: Any) -> Any:
        begin = time.process_time()
        sums = follow_sums(*arguments, **options)
        seconds["exchanged keys, in rl.profile"] += time.process_time() - begin
        return sums

    with mock.patch.object(held_out, "follow_sums", timed):
        for name, way in ways.items():
            begin = time.process_time()
            way()
            seconds[name] = time.process_time() - begin
    return seconds


def parts_of_a_profile(device: torch.device) -> Table:
    """Cost of a profile of the bundled checkpoint: once for a text, and for each token."""
    model, tokenizer = rl.load("bundled", device=str(device))
    live = as_live_model(model)
    context = 512
    text = rl.tokenize(rl.read_documents([SAMPLE]), tokenizer, context=context)
    measurement = Measurement.of(live, text)
    planes = RotationProbe(live).planes(context)

    def fit(surrogates: int) -> list[LayerFit]:
        return LayerFitter(measurement, planes, surrogates=surrogates).fit_layers()

    fits = fit(0)
    repeated = Repeats(measurement, planes)
    ways: dict[str, Callable[[], object]] = {
        "plain forward": lambda: [
            model(ids, use_cache=False) for ids in text.ids.split(8)
        ],
        "probe of the rotation": lambda: RotationProbe(live).layers(context),
        "repeated tokens": lambda: repeated.measure(lambda _: None),
        "fits": lambda: fit(0),
        "fits and 40 surrogates": lambda: fit(40),
        "all text: sums": lambda: collect(measurement, planes),
        "all text: sums and scores": lambda: collect(measurement, planes, fits=fits),
        "rl.profile": lambda: rl.profile(model, text),
    }
    costs = compare(ways, device)
    table = Table(title="a profile of bundled, 64 sequences of 512 tokens")
    for heading in ("what", "seconds", "of plain forward"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for what, cost in costs.items():
        ratio = cost.seconds / costs["plain forward"].seconds
        table.add_row(what, f"{cost.seconds:.2f}", f"{ratio:.2f}")
    return table


SMALL: dict[str, int] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LARGE: dict[str, int | torch.dtype] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "dtype": torch.bfloat16,
}


def random_llama(**proportions: Any) -> LlamaForCausalLM:
    """A Llama with random weights of std 0.05; by default the small model."""
    torch.manual_seed(0)
    defaults = {"vocab_size": 32000, "max_position_embeddings": 8192}
    config = LlamaConfig(**defaults | (proportions or SMALL), initializer_range=0.05)
    return AutoModelForCausalLM.from_config(config).eval()


def ways_of(
    model: LlamaForCausalLM, ids: torch.Tensor, rows: Sequence[int | str] = ("all", 512)
) -> dict[str, Callable[[], object]]:
    """The plain pass, and measuring each number of `rows`."""
    live = as_live_model(model)
    planes = RotationProbe(live).planes(ids.shape[1])

    def measured(count: int | str) -> Callable[[], object]:
        measurement = Measurement.of(live, ids, rows=count)
        return lambda: collect(measurement, planes)

    plain = {"plain forward": lambda: model(ids, use_cache=False)}
    return plain | {f"measured, {count} rows": measured(count) for count in rows}


def other_ways(ids: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Collecting every attention matrix with transformers and with TransformerLens."""
    import tempfile

    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedTokenizerFast

    eager = random_llama().to(ids.device)
    eager.set_attn_implementation("eager")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="a", eos_token="a", pad_token="a"
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        wrapped = random_llama().to(ids.device)
        wrapped.save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(
            folder, hf_model=wrapped, tokenizer=tokenizer, device=str(ids.device)
        )

    def needed(name: str) -> bool:
        return name.endswith(("hook_rot_q", "hook_rot_k", "hook_pattern"))

    return {
        "transformers, output_attentions": lambda: eager(
            ids, output_attentions=True, use_cache=False
        ),
        "TransformerLens, run_with_cache": lambda: bridge.run_with_cache(
            ids, names_filter=needed
        ),
    }


def compare(
    ways: dict[str, Callable[[], object]], device: torch.device
) -> dict[str, Cost]:
    """Run every way RUNS times, in turn, after one run that does not count."""
    seconds: dict[str, list[float]] = {what: [] for what in ways}
    peaks: dict[str, list[int]] = {what: [] for what in ways}
    with torch.no_grad():
        for run in range(RUNS + 1):
            for what, way in ways.items():
                cost = run_once(way, device)
                if run > 0:
                    seconds[what].append(cost.seconds)
                    peaks[what].append(cost.peak)
    return {
        what: Cost(
            statistics.median(seconds[what]), int(statistics.median(peaks[what]))
        )
        for what in ways
    }


def run_once(way: Callable[[], object], device: torch.device) -> Cost:
    """Time and peak memory of one run."""
    with Peak(device) as peak:
        begin = time.perf_counter()
        way()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    return Cost(seconds, peak.bytes)


class Peak:
    """Peak memory of a block above its start, in bytes: resident memory, or GPU memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0

    def __enter__(self) -> "Peak":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            return self
        self._before = _resident()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, _resident() - self._before)

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._done.set()
        self._watcher.join()


def _resident() -> int:
    """Resident memory of this process in bytes (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
