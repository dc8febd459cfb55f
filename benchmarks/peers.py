"""What measuring costs beside other libraries' ways to the same attention, over the length.

Each way at each length has a process of its own, one after the other: a plain forward pass;
ropelens, which sums all its statistics on the way (all rows, and 512); transformers'
`output_attentions=True`; TransformerLens' `run_with_cache` of rotated queries, keys and
patterns; nnsight's `trace` of patterns. The last three only collect, and have yet to compute.
The model is that of cost.py. Memory is the peak of the first run above what stood before,
seconds the median of the runs after it; a way that cannot run has a row that says why.

    python benchmarks/peers.py [--lengths 512,1024,2048,4096,8192] [--out reports/peers]

Writes peers.csv and index.html. Takes about 15 minutes on 2 CPU cores; measure on a quiet
machine. nnsight has dependencies of its own, so it may stand in an environment of its own:

    python -m venv .venv-nnsight && .venv-nnsight/bin/pip install nnsight -e .
    python benchmarks/peers.py --nnsight-python .venv-nnsight/bin/python
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cost
import pandas as pd
import plotly.graph_objects as go
import torch
import typer
from torch import Tensor

from ropelens.figures.style import COLORS, log_axis, new_figure

RUNS = 3
SLOWEST = 1800
"""Seconds after which a process is given up."""


def _nnsight(tokens: Tensor) -> Callable[[], object]:
    """Every attention pattern, saved in a trace."""
    import nnsight

    model = cost.random_llama()
    model.set_attn_implementation("eager")
    traced = nnsight.NNsight(model)

    def trace() -> object:
        with traced.trace(tokens, use_cache=False):
            found = nnsight.save([layer.self_attn.output[1] for layer in traced.model.layers])
        return list(found)

    return trace


def _of_cost(name: str) -> Callable[[Tensor], Callable[[], object]]:
    return lambda tokens: cost.ways_of(cost.random_llama(), tokens)[name]


def _of_others(name: str) -> Callable[[Tensor], Callable[[], object]]:
    return lambda tokens: cost.other_ways(tokens)[name]


WAYS: dict[str, Callable[[Tensor], Callable[[], object]]] = {
    "plain forward": _of_cost("plain forward"),
    "ropelens, all rows": _of_cost("measured, all rows"),
    "ropelens, 512 rows": _of_cost("measured, 512 rows"),
    "transformers, output_attentions": _of_others("transformers, output_attentions"),
    "TransformerLens, run_with_cache": _of_others("TransformerLens, run_with_cache"),
    "nnsight, trace": _nnsight,
}
"""Each way by its name: made ready for some tokens, then run."""


def main(
    lengths: str = typer.Option("512,1024,2048,4096,8192", help="Tokens of the sequence."),
    out: Path = typer.Option(Path("reports/peers"), help="Folder for peers.csv and the page."),
    nnsight_python: Path = typer.Option(
        Path(sys.executable), help="The Python of the environment that nnsight stands in."
    ),
    only: str = typer.Option("", hidden=True, help="Run this way here, and print its cost."),
) -> None:
    counts = [int(length) for length in lengths.split(",")]
    if only:
        typer.echo(json.dumps(cost_of(only, counts[0])))
        return
    rows = []
    for length in counts:
        for way in WAYS:
            python = nnsight_python if way.startswith("nnsight") else Path(sys.executable)
            rows.append(row(python, way, length))
            typer.echo(rows[-1])
    table = pd.DataFrame(rows)
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / "peers.csv", index=False)
    draw(table).write_html(out / "index.html")


def row(python: Path, way: str, length: int) -> dict[str, object]:
    """The cost of one way in a process of its own, or its problem."""
    command = [python, __file__, "--only", way, "--lengths", str(length)]
    found: dict[str, object] = {"length": length, "way": way}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SLOWEST)
    except subprocess.TimeoutExpired:
        return found | {"problem": f"not done after {SLOWEST:,} s"}
    if ended.returncode == 0:
        return found | json.loads(ended.stdout.splitlines()[-1])
    if ended.returncode < 0:
        return found | {"problem": "killed, as a process is that takes all memory"}
    said = [line.strip(" │") for line in ended.stderr.splitlines()]
    return found | {"problem": next((line for line in reversed(said) if "Error" in line), "")}


def cost_of(way: str, length: int) -> dict[str, float]:
    """Seconds and peak memory (MiB) of a way in this process."""
    tokens = torch.randint(32000, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        run = WAYS[way](tokens)
        with cost.Peak(torch.device("cpu")) as peak:
            run()
        seconds = []
        for _ in range(RUNS):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(seconds), "peak_mib": peak.bytes / cost.MIB}


def draw(table: pd.DataFrame) -> go.Figure:
    """Time and memory over the length, a line a way; below, what could not run."""
    figure = new_figure("What measuring costs", height=720, rows=2, cols=1, shared_xaxes=True)
    colors = ["#80868d", *COLORS.values()]
    done = table.reindex(columns=["length", "way", "seconds", "peak_mib", "problem"])
    for panel, name in ((1, "seconds"), (2, "peak_mib")):
        for way, color in zip(WAYS, colors, strict=True):
            own = done[(done["way"] == way) & done["seconds"].notna()]
            if len(own):
                line = go.Scatter(
                    x=own["length"], y=own[name], name=way, legendgroup=way, line_color=color
                )
                figure.add_trace(line.update(showlegend=panel == 1), row=panel, col=1)
    figure.update_yaxes(type="log", title_text="time (s)", row=1)
    figure.update_yaxes(type="log", title_text="peak memory above its beginning (MiB)", row=2)
    ticks = {length: f"{length:,}" for length in sorted(set(table["length"]))}
    figure.update_xaxes(**log_axis(ticks))
    figure.update_xaxes(title_text="length (token)", row=2)
    problems = [
        f"{one.way} at {one.length:,}: {one.problem}"
        for one in done[done["seconds"].isna()].itertuples()
    ]
    place = {"x": 0, "y": -0.1, "xref": "paper", "yref": "paper", "yanchor": "top"}
    figure.add_annotation(place, text="<br>".join(problems), align="left", name="problems")
    return figure.update_layout(margin_b=60 + 16 * len(problems))


if __name__ == "__main__":
    typer.run(main)
