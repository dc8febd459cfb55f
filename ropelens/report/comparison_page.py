"""The page of a comparison: sentences, a table, figures, and two heads side by side."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.budget.labels import Thresholds
from ropelens.comparison.pairs import NO_PARTNER
from ropelens.figures.compared_heads import (
    COMPARED_LINES,
    ComparedHead,
    kv_heads_by_entry,
    plot_compared_head,
    position_by_entry,
)
from ropelens.figures.formats import plotly_text
from ropelens.figures.head_map import MAX_HEADS_WITH_SIGNS
from ropelens.figures.style import LABEL_LOOKS, LabelLook
from ropelens.report.catalog import LOSS_FIGURES
from ropelens.report.columns import (
    Column,
    compared_head_columns,
    comparison_tables,
)
from ropelens.report.drawing import Card, DrawnFigure, draw_comparison
from ropelens.report.figure_page import render_figures
from ropelens.report.render import packed
from ropelens.report.run_facts import comparison_facts
from ropelens.report.sentences.comparison import (
    comparison_sentences,
    sampled_sentence,
    stopped_planes_sentence,
)
from ropelens.report.sentences.heads import label_rules
from ropelens.runtime.digits import FOUR_DIGITS, rounded

QUESTION = "How do these models differ in their use of RoPE's frequencies?"
BY_HEAD = ("entry", "layer", "head")
MAP_WORDS = (
    "Each cell is a head: on the left its label in the baseline, on the right its label in the "
    "chosen run or model. A frame marks labels that differ. Choose a cell to see both heads "
    "below."
)
RUNS_WORDS = (
    "Runs of one seed start from the same weights, but training may move a task to another "
    "head. The change of attention is not shown, because runs that were trained from the start "
    "have different weights, and the results hold no attention on common text."
)


def render_comparison(comparison: xr.Dataset, table: pd.DataFrame) -> str:
    """Text of the page of a comparison and its summary `table`."""
    drawn_figures = draw_comparison(comparison, table)
    picture = choose_picture(drawn_figures, comparison)
    figures: dict[str, go.Figure] = {}
    for drawn in drawn_figures:
        if drawn is not picture:
            caption = f"{drawn.row.explain} {drawn.row.note}".format_map(
                comparison.attrs
            )
            figures[caption.strip()] = drawn.figure
    first, second = chosen_heads(comparison)
    placed = {
        "first": plot_compared_head(comparison, first),
        "second": plot_compared_head(comparison, second),
    }
    if picture is not None:
        placed[picture.name] = picture.figure
    head_columns = compared_head_columns(comparison)
    heads = heads_payload(comparison, head_columns)
    heads["chosen"] = [asdict(first), asdict(second)]
    of_runs = "context" in comparison.attrs
    return render_figures(
        "comparison.html",
        figures,
        about=comparison_facts(comparison, table),
        placed=placed,
        scripts=["label_map.js", "compared.js"],
        payload={"heads": heads, "map": map_payload(comparison)},
        question=str(comparison.attrs.get("question", QUESTION)),
        findings=comparison_sentences(comparison, table),
        leads=_leads(comparison),
        picture=picture_card(picture, comparison),
        tables=comparison_tables(table, note=stopped_planes_sentence(table)),
        head_columns=head_columns,
        entry_noun="Run" if of_runs else "Model",
        group_noun="variant" if of_runs else "model",
        entries=comparison["entry"].values.tolist(),
        label_looks=looks_in(comparison),
        map_words=f"{MAP_WORDS} {RUNS_WORDS if of_runs else ''}",
        label_rules=label_rules(asdict(Thresholds())),
    )


def choose_picture(
    drawn_figures: Sequence[DrawnFigure], comparison: xr.Dataset
) -> DrawnFigure | None:
    """The picture at the beginning of the page; None if no loss has a pair.

    It is the figure that the author of the comparison chose, or the first figure of losses.
    """
    by_name = {drawn.name: drawn for drawn in drawn_figures}
    chosen = comparison.attrs.get("picture")
    if chosen in by_name:
        return by_name[chosen]
    for row in LOSS_FIGURES:
        if row.name in by_name:
            return by_name[row.name]
    return None


def _leads(comparison: xr.Dataset) -> int:
    """Number of sentences above the picture.

    The last sentence names the group of the lowest loss, unless the picture shows something
    else.
    """
    earlier = [comparison.attrs.get("lead"), sampled_sentence(comparison)]
    leads = len([sentence for sentence in earlier if sentence])
    if comparison.attrs.get("picture"):
        return max(1, leads)
    return 1 + leads


def picture_card(picture: DrawnFigure | None, comparison: xr.Dataset) -> Card | None:
    """The words of the picture at the beginning of the page."""
    if picture is None:
        return None
    return replace(
        picture.card,
        explain=picture.row.explain.format_map(comparison.attrs),
        note=picture.row.note.format_map(comparison.attrs),
    )


def map_payload(comparison: xr.Dataset) -> dict[str, Any]:
    """Names, partners and pages of the entries for the map of labels.

    An entry without a partner is next to the first entry.
    """
    partners = np.zeros(comparison.sizes["entry"], dtype=int)
    if "partner" in comparison.coords:
        partners = comparison["partner"].values
    looks = {
        look.label: {"sign": look.sign, "color": look.color} for look in LABEL_LOOKS
    }
    return {
        "names": comparison["entry"].values.tolist(),
        "partners": np.where(partners == NO_PARTNER, 0, partners).tolist(),
        "pages": page_addresses(comparison),
        "looks": looks,
        "mostWithSigns": MAX_HEADS_WITH_SIGNS,
    }


def looks_in(comparison: xr.Dataset) -> list[LabelLook]:
    """The looks of the labels that heads of a comparison have."""
    labels = set(comparison["label"].values.ravel().tolist())
    return [look for look in LABEL_LOOKS if look.label in labels]


def page_addresses(comparison: xr.Dataset) -> list[str]:
    """The address of the page of each entry, relative to the page; "" if it has none."""
    if "page" not in comparison.coords:
        return [""] * comparison.sizes["entry"]
    addresses = []
    for path in comparison["page"].values.astype(str):
        # A file from elsewhere cannot name another site.
        addresses.append("" if path.startswith("/") else quote(path))
    return addresses


def chosen_heads(comparison: xr.Dataset) -> tuple[ComparedHead, ComparedHead]:
    """The heads that the page shows first: the most positional head of each of two entries.

    If the second model has a head at the same place as the first, this head is shown.
    """
    fractions = comparison["positional_fraction"].transpose(*BY_HEAD).fillna(-1).values
    labels = comparison["label"].transpose(*BY_HEAD).values
    first = _most_positional(fractions[0])
    second = first
    if not labels[1][first]:
        second = _most_positional(fractions[1])
    return ComparedHead(0, *first), ComparedHead(1, *second)


def _most_positional(fractions: np.ndarray) -> tuple[int, int]:
    """The layer and the index of the head with the largest of the fractions [layer, head]."""
    layer, head = np.unravel_index(fractions.argmax(), fractions.shape)
    return int(layer), int(head)


def heads_payload(comparison: xr.Dataset, columns: Sequence[Column]) -> dict[str, Any]:
    """Labels, numbers and planes of all heads, by entry, for the script."""
    names = comparison["entry"].values.astype(str)
    return {
        "titles": [plotly_text(name) for name in names.tolist()],
        "labels": comparison["label"].transpose(*BY_HEAD).values.tolist(),
        "kvHeads": kv_heads_by_entry(comparison).tolist(),
        "numbers": {column.name: _texts(comparison, column) for column in columns},
        "arrays": _plane_arrays(comparison),
    }


def _texts(comparison: xr.Dataset, column: Column) -> list[list[list[str]]]:
    """The numbers of a column as text [entry, layer, head]."""
    write = np.vectorize(column.write, otypes=[object])
    return write(comparison[column.name].transpose(*BY_HEAD).values).tolist()


def _plane_arrays(comparison: xr.Dataset) -> dict[str, dict[str, object]]:
    """The arrays that the figures of heads name."""
    by_layer = ("entry", "layer")
    wavelength = comparison["wavelength"].transpose(*by_layer, "frequency")
    arrays = {
        "wavelength": packed(wavelength.values, dims=by_layer),
        "wavelength_position": packed(position_by_entry(comparison), dims=by_layer),
    }
    for line in COMPARED_LINES:
        values = comparison[line.variable]
        head = "kv_head" if "kv_head" in values.dims else "head"
        dims = (*by_layer, head)
        values = values.transpose(*dims, "frequency")
        arrays[line.variable] = packed(rounded(values.values, FOUR_DIGITS), dims=dims)
    return arrays
