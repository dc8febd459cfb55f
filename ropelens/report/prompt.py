"""The page of a prompt: its table of heads, sentences and figures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.attention.variables import labelled
from ropelens.figures.effects import plot_effects, plot_top_planes
from ropelens.figures.formats import number, short_count, signed
from ropelens.interventions.attribute import top_planes
from ropelens.profiles.measures import MEASURES
from ropelens.report import words
from ropelens.report.catalog import PROFILE_FIGURES, PageFigure, draw
from ropelens.report.page import render_page
from ropelens.report.render import write_sentence
from ropelens.runtime.results import write_folder

HEAD_FIGURES = ("selectivity", "attention", "pair")
HEAD_SCORES = ("previous_token", "self_mass", "sink_mass", "entropy_bits", "induction")
WRITTEN: dict[str, Any] = {"wavelength": short_count, "plane": str, "head": str}


@dataclass(frozen=True, eq=False)
class PromptResults:
    """Results of `explain_prompt`: datasets of a prompt, and `facts` about its next token.

    `profile` has no budget. `patches` are the results of `patch_each` over heads and positions,
    if the prompt was compared with another one.
    """

    profile: xr.Dataset
    attribution: xr.Dataset
    patches: Sequence[xr.Dataset]
    facts: dict[str, Any]

    @property
    def planes(self) -> pd.DataFrame:
        """The table of `top_planes`."""
        return top_planes(self.attribution)

    @property
    def findings(self) -> list[str]:
        """Sentences about the next token, the planes and the patches."""
        attrs = self.attribution.attrs
        numbers = {name: attrs.get(name, np.nan) for name in ("answer", "source_answer")}
        first = write_sentence("results", "prompt", **self.facts, **numbers)
        planes = words.describe(self.attribution)
        return [first, *planes, *(line for x in self.patches for line in words.describe(x))]

    def save(self, folder: str | Path) -> Path:
        """Write the page, the numbers and run.json to `folder`; return the page."""
        attrs, folder = self.profile.attrs, Path(folder)
        record = {"kind": "prompt", "findings": self.findings, "command": attrs.get("command")}
        record |= {"model": {"name": attrs["model"]}, "versions": json.loads(attrs["versions"])}
        results: dict[str, Any] = {
            "attribution.nc": self.attribution,
            "planes.csv": self.planes,
        }
        results |= {f"patched_{x.attrs['over']}.nc": x for x in self.patches}
        folder.parent.mkdir(parents=True, exist_ok=True)
        return write_folder(folder, record=record | self.facts, results=results, page=self.page)

    def page(self) -> str:
        """The page as HTML."""
        missing = [row for row in MEASURES if row.saved and row.name not in self.profile]
        shapes = ([self.profile.sizes.get(d, 1) for d in row.saved_dims] for row in missing)
        values = {row.name: np.full(s, np.nan) for row, s in zip(missing, shapes, strict=True)}
        profile = self.profile.assign(labelled(values, missing))
        effects = self.attribution["attribution"].sum("frequency", min_count=1)
        columns = {"attribution": effects} | {name: profile[name] for name in HEAD_SCORES}
        table = xr.Dataset(columns).to_dataframe(["layer", "head"])[[*columns]].reset_index()
        heads = table.dropna(subset="attribution").assign(label="untested")
        heads = heads.reset_index(drop=True)
        first, *notes = self.findings
        planes = [
            {name: WRITTEN.get(name, signed)(value) for name, value in row.items()}
            for row in self.planes.to_dict("records")
        ]
        section = {"headline": first, "notes": notes, "planes": planes}
        section |= {"figures": partial(self._figures, profile), "about": self._about(heads)}
        selected = heads.loc[heads["attribution"].abs().idxmax(), ["layer", "head"]]
        return render_page(profile, heads, prompt=section, selected=tuple(selected.astype(int)))

    def _figures(
        self, profile: xr.Dataset, selected: tuple[int, int]
    ) -> dict[PageFigure, go.Figure]:
        """Figures of all heads, then of the selected head."""
        place = {"layer": selected[0], "head": selected[1]}
        figures = {
            PageFigure("map", plot_effects, section="all", words="effects"): plot_effects(
                self.attribution, selected=selected
            ),
            PageFigure("top", plot_top_planes, section="all"): plot_top_planes(
                self.attribution
            ),
        }
        for patches in self.patches:
            row = PageFigure(f"patched_{patches.attrs['over']}", plot_effects, section="all")
            figures[row] = plot_effects(patches)
        rows = [row for row in PROFILE_FIGURES if row.name in HEAD_FIGURES]
        return figures | draw(rows, profile, **place)

    def _about(self, heads: pd.DataFrame) -> list[str]:
        """A sentence about each head of the table."""
        by_head = top_planes(self.attribution, self.attribution["attribution"].size)
        largest = by_head.groupby("head").first()
        names = heads["layer"].astype(str) + "." + heads["head"].astype(str)
        return [
            f"Attribution {signed(total)}; the largest is {signed(row['attribution'])} from the "
            f"plane of {short_count(row['wavelength'])} tokens. Attention on the previous "
            f"token {number(previous, '.0%')}, on sinks {number(sink, '.0%')}."
            for total, previous, sink, (_, row) in zip(
                heads["attribution"],
                heads["previous_token"],
                heads["sink_mass"],
                largest.loc[names].iterrows(),
                strict=True,
            )
        ]
