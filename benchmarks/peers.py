"""Cost of measuring, compared with other libraries that give the same attention, by length.

Each way runs at each length in a separate process, one after another: a plain forward pass;
ropelens, which sums all its statistics during the pass (all rows, and 512); transformers'
`output_attentions=True`, without further work and with the main sums computed from it
(dense.py); TransformerLens' `run_with_cache` of rotated queries, keys and patterns; nnsight's
`trace` of patterns. Ways that only collect attention compute no statistics. The model is the
model of cost.py. Memory is the peak of the first run above the memory before it. Seconds are
the median of the runs after it. If a way cannot run, its row has the reason.

    python benchmarks/peers.py [--lengths 512,1024,2048,4096,8192] [--out DIR]

Writes peers.csv, index.html and the findings (run.json) to DIR, reports/peers/random-llama.
Takes about 15 minutes on 2 CPU cores; measure on a quiet machine. nnsight has other
dependencies, so it may need a separate environment:

    python -m venv .venv-nnsight && .venv-nnsight/bin/pip install nnsight -e .
    python benchmarks/peers.py --nnsight-python .venv-nnsight/bin/python
"""

import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import cost
import dense
import pandas as pd
import plotly.graph_objects as go
import torch
import typer
from torch import Tensor

from ropelens.figures.style import new_figure, set_log_ticks
from ropelens.report.figure_page import render_figures
from ropelens.report.run_facts import PageFacts

PACKAGES = ("ropelens", "torch", "transformers", "transformer-lens")
RUNS = 3
SAME_SUMS = "output_attentions, same sums"
SLOWEST = 1800  # seconds after which a process is stopped


def _nnsight(ids: Tensor) -> Callable[[], object]:
    """Every attention pattern, saved in a trace."""
    import nnsight

    model = cost.random_llama()
    model.set_attn_implementation("eager")
    traced = nnsight.NNsight(model)

    def trace() -> object:
        with traced.trace(ids, use_cache=False):
            attention = nnsight.save(
                [layer.self_attn.output[1] for layer in traced.model.layers]
            )
        return list(attention)

    return trace


def _same_sums(ids: Tensor) -> Callable[[], object]:
    """`output_attentions`, and the sums of a profile computed from it."""
    model = cost.random_llama()
    model.set_attn_implementation("eager")
    return lambda: dense.dense_sums(model, ids)


def _of_cost(name: str) -> Callable[[Tensor], Callable[[], object]]:
    return lambda ids: cost.ways_of(cost.random_llama(), ids)[name]


def _of_others(name: str) -> Callable[[Tensor], Callable[[], object]]:
    return lambda ids: cost.other_ways(ids)[name]


WAYS: dict[str, Callable[[Tensor], Callable[[], object]]] = {
    "plain forward": _of_cost("plain forward"),
    "ropelens, all rows": _of_cost("measured, all rows"),
    "ropelens, 512 rows": _of_cost("measured, 512 rows"),
    "transformers, output_attentions": _of_others("transformers, output_attentions"),
    SAME_SUMS: _same_sums,
    "TransformerLens, run_with_cache": _of_others("TransformerLens, run_with_cache"),
    "nnsight, trace": _nnsight,
}
"""Each way by its name: a function of token ids that returns the function to run."""


def main(
    lengths: str = typer.Option(
        "512,1024,2048,4096,8192", help="Tokens of the sequence."
    ),
    out: Path = typer.Option(
        Path("reports/peers/random-llama"), help="Folder for the page."
    ),
    nnsight_python: Path = typer.Option(
        Path(sys.executable), help="The Python of an environment with nnsight."
    ),
    only: str = typer.Option(
        "", hidden=True, help="Run only this way, and print its cost."
    ),
) -> None:
    counts = [int(length) for length in lengths.split(",")]
    if only:
        typer.echo(json.dumps(cost_of(only, counts[0])))
        return
    rows = []
    for length in counts:
        for way in WAYS:
            python = Path(sys.executable)
            if way.startswith("nnsight"):
                python = nnsight_python
            cells = row(python, way, length)
            rows.append(cells)
            typer.echo(cells)
    table = pd.DataFrame(rows)
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / "peers.csv", index=False)
    (out / "index.html").write_text(page(table), encoding="utf-8")
    record = {"kind": "answer", "model": {"name": MODEL}, "findings": findings(table)}
    text = json.dumps(record, indent=2) + "\n"
    (out / "run.json").write_text(text, encoding="utf-8")


def row(python: Path, way: str, length: int) -> dict[str, object]:
    """The cost of one way in a separate process, or the problem."""
    command = [python, __file__, "--only", way, "--lengths", str(length)]
    cells: dict[str, object] = {"length": length, "way": way}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SLOWEST)
    except subprocess.TimeoutExpired:
        return cells | {"problem": f"not done after {SLOWEST:,} s"}
    if ended.returncode == 0:
        return cells | json.loads(ended.stdout.splitlines()[-1])
    if ended.returncode < 0:
        return cells | {"problem": "killed, probably because it used all memory"}
    lines = [line.strip(" │") for line in ended.stderr.splitlines()]
    errors = [line for line in lines if "Error" in line]
    return cells | {"problem": errors[-1] if errors else ""}


def cost_of(way: str, length: int) -> dict[str, float]:
    """Seconds and peak memory (MiB) of a way in this process."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(32000, (1, length), generator=generator)
    with torch.no_grad():
        run = WAYS[way](ids)
        with cost.Peak(torch.device("cpu")) as peak:
            run()
        seconds = []
        for _ in range(RUNS):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(seconds), "peak_mib": peak.bytes / cost.MIB}


MODEL = "a random Llama of 8 layers"

LOOKS = {
    "plain forward": ("#80868d", "dash", "circle"),
    "ropelens, all rows": ("#0072b2", "solid", "square"),
    "ropelens, 512 rows": ("#56b4e9", "solid", "diamond"),
    "transformers, output_attentions": ("#d55e00", "solid", "x"),
    SAME_SUMS: ("#d55e00", "dot", "x-open"),
    "TransformerLens, run_with_cache": ("#cc79a7", "solid", "triangle-up"),
    "nnsight, trace": ("#b58900", "solid", "triangle-down"),
}
"""Colour, dash and symbol of each way; lines overlap, so they differ in all three."""


def draw(
    table: pd.DataFrame, name: str, title: str, ticks: dict[float, str]
) -> go.Figure:
    """Figure of the column `name` by length, a line per way, on log scales."""
    figure = new_figure(title, height=420)
    for way in WAYS:
        color, dash, symbol = LOOKS[way]
        rows = table[(table["way"] == way) & table["seconds"].notna()]
        if len(rows):
            line = {"color": color, "dash": dash}
            marker = {"symbol": symbol, "size": 9}
            figure.add_scatter(
                x=rows["length"], y=rows[name], name=way, line=line, marker=marker
            )
    lengths = {length: f"{length:,}" for length in sorted(set(table["length"]))}
    figure.update_yaxes(
        type="log",
        tickmode="array",
        tickvals=list(ticks),
        ticktext=list(ticks.values()),
        title_text=title,
    )
    set_log_ticks(figure, lengths)
    return figure.update_xaxes(title_text="length (tokens)")


def findings(table: pd.DataFrame) -> list[str]:
    """Sentences about the longest length at which all ways ran, and about failed runs."""
    done = table[table["seconds"].notna()]
    ran = done.groupby("length")["way"].count()
    longest = int(ran[ran == ran.max()].index.max())
    rows = done[done["length"] == longest].set_index("way")
    ours = rows.loc["ropelens, all rows"]
    not_collecting = [
        way for way in rows.index if way.startswith(("plain", "ropelens"))
    ]
    others = rows.drop(index=[*not_collecting, SAME_SUMS], errors="ignore")
    sentence = (
        f"At {longest:,} tokens ropelens measures all rows in "
        f"{ours.seconds / rows.seconds['plain forward']:.1f} times the time of a plain forward "
        f"pass and in {ours.peak_mib:,.0f} MiB"
    )
    if len(others):
        slower = others.seconds / ours.seconds
        larger = others.peak_mib / ours.peak_mib
        sentence += (
            f"; only collecting attention with other libraries takes {slower.min():.1f} to "
            f"{slower.max():.1f} times as long and {larger.min():.0f} to {larger.max():.0f} "
            "times the memory"
        )
    if SAME_SUMS in rows.index:
        same = rows.loc[SAME_SUMS]
        sentence += (
            f"; computing the main sums from output_attentions takes "
            f"{same.seconds / ours.seconds:.1f} times as long and "
            f"{same.peak_mib / ours.peak_mib:.0f} times the memory"
        )
    failed = table[table["seconds"].isna()].itertuples()
    return [
        f"{sentence}.",
        *(f"{row.way} at {row.length:,}: {row.problem}" for row in failed),
    ]


def page(table: pd.DataFrame) -> str:
    """The page as text."""
    mebibytes = {4**n: f"{4**n:,}" for n in range(2, 9)}
    figures = {
        "Median of 3 runs after a run that does not count. The plain pass makes all logits; "
        "ropelens makes them piece by piece.":
            draw(table, "seconds", "time (s)", {n: f"{n:g}" for n in (0.1, 0.3, 1, 3, 10, 30)}),
        "Peak of the first run, above the memory that the process held before.":
            draw(table, "peak_mib", "peak memory (MiB)", mebibytes),
    }  # fmt: skip
    threads = torch.get_num_threads()
    processor = platform.processor() or platform.machine()
    return render_figures(
        "answer.html",
        figures,
        about=PageFacts(
            facts=["8 layers × 8 heads", "width 512", "float32", "one sequence"],
            model=MODEL,
            run=[("machine", f"{threads} threads, {processor}")],
            versions=", ".join(f"{name} {version(name)}" for name in PACKAGES),
            command=shlex.join(["python", *sys.argv]),
        ),
        question="How much time and memory does measuring take?",
        findings=findings(table),
    )


if __name__ == "__main__":
    typer.run(main)
