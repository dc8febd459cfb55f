"""Count the work that a GPU would do for a profile: operations, waits and bytes, without a GPU.

    python benchmarks/launches.py [--shape 8b] [--context 2048] [--json] [--lines 5]

A random Llama with two layers is profiled on one sequence, and 512 rows are measured. The work
in the first layer is not counted, because it includes the tables of rows and keys that all
layers share. All tensors of the model are on the device of device_counter.py, so ropelens
computes in blocks of the size that it uses on a GPU. Each row of the table counts one layer:

    operations  operators that start a kernel or a copy (views do not)
    waits       copies between host and device, operators that need a number from the device
                (nonzero, indices of bools, `equal`, checks of linear algebra), and operators
                that use tensors of the host and of the device together
    bytes       sizes of all inputs and outputs of the operations
    host        operators on tensors of the host, during which a GPU usually has no work
    peak        bytes of the tensors on the device, at most, above the start of a stage

"plain" is the pass of the model over the text with the hooks of ropelens, but without its
observer. "rest" is everything that `rl.profile` does outside this pass: rotation, noise,
excerpts and repeats. "rl.profile" is the sum. With --lines, the lines of ropelens that do the
most work follow.

Takes 6 minutes of a core for all shapes and contexts.
"""

import argparse
import json
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from device_counter import Count, LaunchCounter
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

import ropelens as rl
from ropelens.attention import exchange, fast_products

STAGES = (
    # The work of a function counts for a stage, unless an inner function has its own stage.
    # "result": the function returns the function that works for the stage.
    ("ropelens.profiles.profile.ProfileRun.fit_budget", "plain", "call"),
    ("ropelens.profiles.profile.ProfileRun.sum_text", "plain", "call"),
    ("ropelens.profiles.passes.observer_of_chunks", "sums", "result"),
    ("ropelens.profiles.layer_fits.LayerFitter.fit", "fits", "call"),
    ("ropelens.budget.held_out.LayerFit.score", "scoring", "call"),
    ("ropelens.budget.held_out.Sample.fit", "fits", "call"),
    ("ropelens.budget.held_out.draw_surrogates", "surrogates", "call"),
    ("ropelens.budget.held_out.follow_sums", "exchanged keys", "call"),
)
NAMES = ("plain", "sums", "scoring", "fits", "surrogates", "exchanged keys", "rest")
SUMMED = ("operations", "waits", "bytes", "host")

SHAPES = {
    "8b": {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
    "1b": {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048},
    "smollm2": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
}
CONTEXTS = (512, 2048, 4096)
ROWS = 512
QUERY_STD = (
    1.2  # spread of queries and keys; fits of sharper heads need more evaluations
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", choices=SHAPES, action="append", help="[default: all]"
    )
    parser.add_argument(
        "--context", type=int, action="append", help=f"[default: {CONTEXTS}]"
    )
    parser.add_argument("--json", action="store_true", help="print one list of rows")
    parser.add_argument(
        "--lines", type=int, default=0, help="lines of each stage to print"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for shape in options.shape or SHAPES:
        for context in options.context or CONTEXTS:
            counter = count_profile(shape, context)
            setting = f"{shape} {context:,}"
            rows += rows_of(shape, context, counter.counts)
            lines += [f"{setting} {x}" for x in busiest_lines(counter, options.lines)]
    if options.json:
        print(json.dumps(rows))
        return
    sizes = f"BLOCK_ELEMENTS {fast_products.BLOCK_ELEMENTS['cuda']:,}, BLOCK_ROWS "
    sizes += f"{fast_products.BLOCK_ROWS['cuda']:,}, AT_ONCE {exchange.AT_ONCE['cuda']}"
    table = Table(title=f"one layer, one sequence, {ROWS} rows; {sizes}")
    for heading in rows[0]:
        table.add_column(
            heading, justify="left" if heading in ("shape", "stage") else "right"
        )
    for row in rows:
        cells = [f"{x:,}" if isinstance(x, int) else x for x in row.values()]
        table.add_row(*cells)
        if row["stage"] == "rl.profile":
            table.add_section()
    Console(width=120).print(table)
    print(*lines, sep="\n")


def count_profile(shape: str, context: int, rows: int = ROWS) -> LaunchCounter:
    """Count `rl.profile` of a random Llama without its first layer, on one sequence."""
    torch.manual_seed(0)
    spread = QUERY_STD / SHAPES[shape]["hidden_size"] ** 0.5
    config = LlamaConfig(
        vocab_size=1000,
        intermediate_size=128,
        max_position_embeddings=8192,
        num_hidden_layers=2,
        initializer_range=spread,
        **SHAPES[shape],
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    ids = torch.randint(3, config.vocab_size, (1, context))
    counter = LaunchCounter()
    with ExitStack() as blocks:
        for target, stage, part in STAGES:
            function = in_stage(counter, pkgutil.resolve_name(target), stage, part)
            blocks.enter_context(mock.patch(target, function))
        blocks.enter_context(counter.active())
        counter.place(model)
        first = model.model.layers[0]
        first.forward = counter.uncounted(first.forward)
        rl.profile(model, ids, rows=rows)
    return counter


def in_stage(
    counter: LaunchCounter, function: Callable[..., Any], stage: str, part: str
) -> Callable[..., Any]:
    """The function, if the work of this part of it counts for the stage (see `STAGES`)."""
    if part == "call":
        return counter.staged(function, stage)

    def run(*args: Any, **options: Any) -> Any:
        return counter.staged(function(*args, **options), stage)

    return run


def rows_of(
    shape: str, context: int, counts: Mapping[str, Count]
) -> list[dict[str, Any]]:
    """Rows of the table: the stages, and their sum."""
    assert set(counts) <= set(NAMES), "the stages would not sum to the profile"
    table = [{"stage": name, **vars(counts[name])} for name in NAMES]
    total = {key: sum(row[key] for row in table) for key in SUMMED}
    table.append(
        {"stage": "rl.profile", **total, "peak": max(row["peak"] for row in table)}
    )
    return [{"shape": shape, "context": context, **row} for row in table]


def busiest_lines(counter: LaunchCounter, number: int) -> list[str]:
    """The lines of ropelens with the most operations, waits and work on the host."""
    lines = []
    for stage in NAMES:
        for kind in ("operations", "waits", "host"):
            rows = [
                row
                for row in counter.lines.most_common()
                if row[0][:2] == (stage, kind)
            ]
            lines += [
                f"{stage}: {count:,} {kind} {row[2]}" for row, count in rows[:number]
            ]
    return lines


if __name__ == "__main__":
    main()
