"""How do variants of RoPE differ after training, and what do planes carry that do not rotate?

Sources: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), section 6: p-RoPE,
which stops the slowest planes, trains as well as RoPE or better, and NoPE trains worse. The
paper trains each variant once, and does not analyse its heads. Khan et al. 2026 (arXiv
2603.11611): a rotation of about 10 % of the dimensions converges like full RoPE, and some runs
without positions are unstable.

Method: several seeds of each variant. Runs of one seed start from the same weights and read the
same text in the same order, so differences are paired. Heads and planes are compared too.

Expectation: nope is much worse than rope; p-rope:0.75 and p-rope:0.5 are within noise of rope
at this scale; p-rope:0.125 and p-rope-reversed:0.75 are worse. nope has no previous-token head
in the first layer. Positional heads use short wavelengths, and planes that do not rotate carry
content.

    python analyses/variants.py --runs runs/variants
    python analyses/variants.py --text FOLDER --valid FOLDER [--study analyses/variants.toml]
    python analyses/variants.py --tokens FOLDER --study STUDY.toml --runs runs/study

The first command reads finished runs; a second --runs adds a study with other seeds. The other
commands train the runs and skip finished runs, so that the same command continues after a stop.
Writes reports/variants/<study>/, where <study> is the name of the study file or the first
folder of finished runs.
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import typer
import xarray as xr

import ropelens as rl
from ropelens.analysis.answer import Answer, comparison_folder
from ropelens.commands.terminal import run_script
from ropelens.report import write_index
from ropelens.report.sentences.compared_heads import compared_heads_sentences
from ropelens.train.run import run_study

HERE = Path(__file__).parent
REPORTS = HERE.parent / "reports"
# Differences of ln(perplexity on Wiki) of Gemma 2B, table 2 of Barbero et al. 2024
PUBLISHED = (
    "Published: in models of 2 billion parameters, one run each, the loss changes from RoPE "
    "by −0.005 nats/token for 0.75-RoPE, +0.015 for 0.25-RoPE, −0.001 for reversed "
    "0.75-RoPE, −0.003 for a base of 500,000 and +0.085 for NoPE (Barbero et al. 2024, Wiki). "
    "A rotation of about 10% of the dimensions converges like full RoPE, and some runs "
    "without positions are unstable (Khan et al. 2026)."
)


def main(
    text: list[Path] = typer.Option([], help="Text to learn from."),
    valid: list[Path] = typer.Option(
        [], help="Validation text; else a share of the text."
    ),
    tokens: Path | None = typer.Option(
        None, help="Tokens that were made before, instead of text."
    ),
    study: Path = typer.Option(
        HERE / "variants.toml", help="Variants, seeds and sizes; also names the report."
    ),
    runs: list[Path] = typer.Option(
        [Path("runs/variants")],
        help="Folders of studies. Runs are trained in the first one.",
    ),
    sequences: int = typer.Option(
        512, help="Sequences of validation text for the loss."
    ),
    out: Path | None = typer.Option(
        None, help="Folder of the page. [default: a free name in reports/variants]"
    ),
) -> None:
    first = runs[0]
    name = first.name
    if text or tokens is not None:
        run_study(study, out=first, text=text, valid=valid, tokens=tokens)
        name = study.stem
    comparison = rl.compare(runs, cache=first / "measured", sequences=sequences)
    comparison = comparison.drop_vars("profile")  # the reports do not have the runs
    findings = [
        PUBLISHED,
        *how_stable(comparison, runs),
        *compared_heads_sentences(comparison),
        where_norms_peak(comparison),
        *stopped_planes(comparison),
    ]
    question = "How do variants of RoPE differ after training?"
    answer = Answer(question, findings, figures={})
    folder = out or comparison_folder(REPORTS / "variants" / name, comparison)
    page = answer.save(folder, comparison)
    write_index(REPORTS)
    typer.echo(page)


def how_stable(comparison: xr.Dataset, runs: list[Path]) -> list[str]:
    """How far the losses of seeds differ, and how far the training loss rises again."""
    parts = []
    for group, losses in groups(comparison["loss"]):
        if losses.sizes["entry"] > 1:
            spread = float(losses.std("entry", ddof=1))
            parts.append(f"{group} {spread:.3f} ({losses.sizes['entry']})")
    if not parts:
        return []
    sentence = (
        "Standard deviation of the loss over seeds, nats/token, and in brackets the number of "
        f"seeds: {', '.join(parts)}."
    )
    rises = largest_rises(runs)
    if rises:
        listed = ", ".join(f"{variant} {rise:.2f}" for variant, rise in rises.items())
        sentence += (
            " Largest rise of the training loss above its lowest value before, in any "
            f"seed: {listed}."
        )
    return [sentence]


def largest_rises(studies: list[Path]) -> dict[str, float]:
    """The largest rise of the training loss of each variant (nats/token).

    The loss is a mean over 10 steps. A mixture of several stages has no such number, because
    each stage has another loss.
    """
    rises: dict[str, float] = {}
    folders = [run for study in studies for run in sorted(study.glob("*/*/seed-*"))]
    for folder in folders:
        if not (folder / "metrics.csv").exists():  # a run that was stopped at its begin
            continue
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        settings = record["settings"]
        if len(settings.get("stages", [])) > 1:
            return {}
        metrics = pd.read_csv(folder / "metrics.csv")
        loss = metrics["train_loss"].dropna()
        rise = float((loss - loss.cummin()).max())
        variant = settings["variant"]
        rises[variant] = max(rise, rises.get(variant, 0.0))
    return rises


def where_norms_peak(comparison: xr.Dataset) -> str:
    """The plane with the largest share of |q||k| in each variant, a mean over layers."""
    product = comparison["q_norm"].mean("head") * comparison["k_norm"].mean("kv_head")
    share = (product / product.sum("frequency")).mean("layer")
    peaks = []
    for group, runs in groups(share):
        mean = runs.mean("entry")
        peak = int(mean.argmax("frequency"))
        first = runs["entry"].values[0]
        wavelength = float(comparison["wavelength"].sel(entry=first)[0, peak])
        place = "does not rotate"
        if np.isfinite(wavelength):
            place = f"{wavelength:,.0f} tokens"
        peaks.append(f"{group} {mean[peak]:.0%} ({place})")
    even = 1 / np.isfinite(share).sum("frequency").max()
    return (
        f"The largest share of |q||k| in one plane, by its wavelength: {', '.join(peaks)}; "
        f"evenly spread: {even:.0%}."
    )


def stopped_planes(comparison: xr.Dataset) -> list[str]:
    """Shares of each variant's stopped planes, and shares of these planes in the baseline."""
    sentences = []
    for group, entries in groups(comparison):
        entries = entries.isel(entry=entries["partner"].values >= 0)
        if not entries.sizes["entry"]:
            continue
        partners = comparison.isel(entry=entries["partner"].values)
        wavelength = entries["wavelength"].isel(entry=slice(1), layer=0)
        wavelength = wavelength.max("entry").dropna(
            "frequency"
        )  # planes that this size has
        still = np.isinf(wavelength)
        if not still.any() or still.all():
            continue
        baseline = partners["group"].values[0]
        sentences.append(
            f"The {int(still.sum())} planes of {len(still)} that {group} stops carry "
            f"{shares(entries, still)}; in {baseline}, which turns them, "
            f"{shares(partners, still)}."
        )
    return sentences


def groups(compared):
    """Each group of a comparison or a variable, with its entries."""
    names = compared["group"].values
    for group in dict.fromkeys(names.tolist()):
        yield group, compared.isel(entry=np.flatnonzero(names == group))


def shares(entries: xr.Dataset, still: xr.DataArray) -> str:
    """Shares of the squared norms and the selectivity in the planes `still`, in words."""
    parts = {"the squared query norm": entries["q_norm"] ** 2}
    for label in ("positional", "semantic"):
        known = entries["selectivity_keys"].where(entries["label"] == label)
        if known.notnull().any():
            parts[f"the selectivity of {label} heads"] = known
    words = []
    for name, part in parts.items():
        share = float(part.where(still).sum() / part.sum())
        words.append(f"{share:.0%} of {name}")
    return ", ".join(words)


if __name__ == "__main__":
    run_script(main)
