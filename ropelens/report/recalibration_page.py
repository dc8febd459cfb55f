"""The page of recalibrations: the answer, a picture, tables, and heads by their controls."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from markupsafe import Markup, escape

from ropelens.budget.labels import Thresholds
from ropelens.comparison.recalibration_table import AFTER
from ropelens.figures import style
from ropelens.figures.compared_heads import ComparedHead, plot_compared_head
from ropelens.figures.comparison_planes import plot_comparison_planes
from ropelens.figures.formats import in_words, plural
from ropelens.figures.recalibrated_offsets import plot_changed_followers
from ropelens.figures.recalibration import (
    plot_gaps,
    plot_losses_before_and_after,
    plot_needles_before_and_after,
)
from ropelens.report.columns import compared_head_columns
from ropelens.report.comparison_page import heads_payload, map_payload
from ropelens.report.figure_page import render_figures
from ropelens.report.recalibrated_heads import (
    changed_heads,
    first_runs,
    head_maps,
    most_changed,
    shown_seeds,
)
from ropelens.report.recalibration_tables import recalibration_tables
from ropelens.report.run_facts import PageFacts, version_words
from ropelens.report.sentences.heads import label_meanings
from ropelens.report.sentences.profile import scope_sentence
from ropelens.report.sentences.recalibration import recalibration_sentences

QUESTION = "What does the model need, if it may adapt?"
LONGEST_WHOLE = 16  # characters; a longer name may break, because phones are narrow
CAPTIONS = {
    "Loss by position, before and after": (
        "The loss by the position of the predicted token, in texts of up to four times the "
        "recalibrated context. Right of a dotted line, texts are longer than in that "
        "training. Whiskers show the range over seeds, if there are several."
    ),
    "Retrieval, before and after": (
        "A prompt hides 8 needles in text, which are pairs of a key and a value. The share "
        "whose value the model finds, by the length of the prompt. The horizontal dotted "
        "line is the share that chance finds."
    ),
    "Heads whose follow score changed most": (
        "If keys exchange their contents, the attention of a head with follow score 1 stays at "
        "the same positions, and with −1 it moves with the contents. These heads changed most "
        "during the training of the variant that recovered most. A point is the share of the "
        "attention on keys at this distance, up to the next point; the first token is left out."
    ),
    "Norms and selectivity of planes": (
        "After training. Mean norms show how much a plane can do. Selectivity shows how "
        "much it pushes heads toward the keys they pick. A ring is a plane that does not "
        "rotate. It is drawn where it rotates in another variant: heads of a variant with "
        "stopped planes cannot use these wavelengths."
    ),
}


def render_recalibration(comparison: xr.Dataset, table: pd.DataFrame) -> str:
    """Text of the page of recalibrations and their summary `table`."""
    finished = np.flatnonzero(comparison["phase"].values == AFTER)
    drawn = [
        plot_losses_before_and_after(comparison),
        plot_needles_before_and_after(comparison),
    ]
    if "offset_mass" in comparison:  # older comparisons do not have it
        drawn.append(plot_changed_followers(comparison))
    drawn.append(plot_comparison_planes(comparison.isel(entry=finished)))
    figures: dict[str, go.Figure] = {}
    for figure in drawn:
        figures[CAPTIONS[figure.layout.title.text]] = figure
    maps = head_maps(comparison)
    first, second = _first_heads(comparison, most_changed(maps)[0])
    columns = compared_head_columns(comparison)
    heads = heads_payload(comparison, columns)
    heads["chosen"] = [asdict(first), asdict(second)]
    return render_figures(
        "recalibration.html",
        figures,
        about=_facts(comparison),
        placed={
            "gaps": plot_gaps(comparison),
            "first": plot_compared_head(comparison, first),
            "second": plot_compared_head(comparison, second),
        },
        scripts=["compared.js", "variants.js"],
        payload={"heads": heads, "map": map_payload(comparison)},
        question=str(comparison.attrs.get("question", QUESTION)),
        findings=recalibration_sentences(comparison, table),
        tables=recalibration_tables(comparison, table),
        maps=maps,
        changed=changed_heads(maps),
        first_variants=most_changed(maps),
        looks=style.LABEL_LOOKS,
        head_columns=columns,
        entry_noun="Model",
        entries=comparison["entry"].values.tolist(),
        label_meanings=label_meanings(Thresholds()),
        seeds=shown_seeds(comparison),
        more_seeds=comparison.sizes["seed"] > 1,
        whole=partial(with_whole_names, names=comparison["variant"].values.tolist()),
    )


def with_whole_names(text: str, names: Sequence[str]) -> Markup:
    """Escape `text` for HTML, in which short names of variants do not break at a hyphen."""
    html = str(escape(text))
    short = [name for name in names if "-" in name and len(name) <= LONGEST_WHOLE]
    # A name may begin another one, which is longer.
    short.sort(key=len, reverse=True)
    if short:
        either = "|".join(re.escape(str(escape(name))) for name in short)
        html = re.sub(either, r'<span class="whole">\g<0></span>', html)
    return Markup(html)


def _first_heads(
    comparison: xr.Dataset, variant: int
) -> tuple[ComparedHead, ComparedHead]:
    """The head of the control and of a variant whose attention changed most.

    `variant` is an index of the maps of heads.
    """
    index = first_runs(comparison)[variant]
    control = int(comparison["partner"][index])
    change = comparison["attention_change"].isel(entry=index)
    bits = change.transpose("layer", "head").fillna(0).values
    layer, head = np.unravel_index(bits.argmax(), bits.shape)
    place = (int(layer), int(head))
    return ComparedHead(control, *place), ComparedHead(index, *place)


def _facts(comparison: xr.Dataset) -> PageFacts:
    attrs = comparison.attrs
    variants = comparison["variant"].values.tolist()
    trained = int(attrs["trained_context"])
    contexts = f"context {attrs['context']:,}"
    if trained:
        contexts = f"{contexts} (trained for {trained:,})"
    facts = [
        f"{plural(len(variants) - 1, 'variant')} and the control, "
        f"{plural(comparison.sizes['seed'], 'seed')}",
        contexts,
        f"{attrs['tokens']:,} training tokens each",
        plural(int(attrs["documents"]), "held-out document"),
    ]
    run = [
        ("base", str(attrs["base"])),
        ("fingerprint of the base", str(attrs["base_fingerprint"])),
        ("variants", ", ".join(variants)),
        (
            "trained parameters",
            f"{attrs['trained_parameters']}, of {attrs['parameters']:,}",
        ),
        # Comparisons of the first version do not record the precision, which was fp32
        ("precision of training", str(attrs.get("precision", "fp32"))),
        ("learning rate", f"{attrs['learning_rate']:g}"),
        ("steps", f"{attrs['steps']:,}"),
        (
            "held-out text",
            f"{attrs['sequences']:,} sequences of {attrs['context']:,} tokens for gaps; at "
            f"most {attrs['measured_sequences']:,} for tasks and "
            f"{attrs['head_sequences']:,} for heads",
        ),
        ("training seeds", in_words(comparison["seed"].values.tolist())),
        ("seed of the measurement", str(attrs["seed"])),
        ("created", str(attrs["created"])),
    ]
    return PageFacts(
        facts=facts,
        model=str(attrs["base"]),
        run=run,
        scope=scope_sentence({**attrs, "trained_context": 0}),
        versions=version_words(json.loads(attrs["versions"])),
        command=str(attrs.get("command", "")),
    )
