"""The page of a prompt: sentences, a table of heads, and figures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.attention.variables import labelled
from ropelens.figures.effects import plot_effects, plot_top_planes
from ropelens.interventions.truncation_table import top_planes
from ropelens.profiles.measures import MEASURES
from ropelens.report import words
from ropelens.report.catalog import PROFILE_FIGURES, PageFigure, draw
from ropelens.report.page import render_page
from ropelens.report.render import write_sentence
from ropelens.runtime.results import write_folder

HEAD_FIGURES = ("selectivity", "attention", "pair")
HEAD_SCORES = ("previous_token", "self_mass", "sink_mass", "entropy_bits", "induction")


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
    def findings(self) -> list[str]:
        """Sentences about the next token, the planes and the patches."""
        first = write_sentence("results", "prompt", **self.facts)
        results = (self.attribution, *self.patches)
        return [first, *(line for result in results for line in words.describe(result))]

    def save(self, folder: str | Path) -> Path:
        """Write the page, the numbers and run.json to `folder`; return the page."""
        attrs, folder = self.profile.attrs, Path(folder)
        record = {"kind": "prompt", "findings": self.findings, "command": attrs["command"]}
        record |= {"model": {"name": attrs["model"]}, "versions": json.loads(attrs["versions"])}
        results: dict[str, Any] = {"attribution.nc": self.attribution}
        results["planes.csv"] = top_planes(self.attribution)
        results |= {f"patched_{x.attrs['over']}.nc": x for x in self.patches}
        folder.parent.mkdir(parents=True, exist_ok=True)
        return write_folder(folder, record=record, results=results, page=self.page)

    def page(self) -> str:
        """The page as HTML."""
        missing = [row for row in MEASURES if row.saved and row.name not in self.profile]
        shapes = {x.name: [self.profile.sizes.get(d, 1) for d in x.saved_dims] for x in missing}
        values = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
        profile = self.profile.assign(labelled(values, missing))
        total = self.attribution["attribution"].sum("frequency", min_count=1)
        effects = profile[[*HEAD_SCORES]].assign(attribution=total).reset_coords(drop=True)
        heads = effects.to_dataframe(["layer", "head"]).dropna(subset="attribution")
        place: Any = heads["attribution"].abs().idxmax()
        selected = int(place[0]), int(place[1])
        heads = heads.reset_index().assign(label="untested")
        rows = [row for row in PROFILE_FIGURES if row.name in HEAD_FIGURES]
        headline, *notes = self.findings
        prompt: dict[str, Any] = {"headline": headline, "notes": notes, "selected": selected}
        prompt["planes"] = top_planes(self.attribution).to_dict("records")
        prompt["figures"] = self._figures(selected)
        prompt["figures"] |= draw(rows, profile, layer=selected[0], head=selected[1])
        return render_page(profile, heads, prompt=prompt)

    def _figures(self, selected: tuple[int, int]) -> dict[PageFigure, go.Figure]:
        """Figures of all heads; `selected` is the head with a frame."""
        drawn = {"map": plot_effects(self.attribution, selected=selected)}
        drawn["top"] = plot_top_planes(self.attribution)
        drawn |= {f"patched_{x.attrs['over']}": plot_effects(x) for x in self.patches}
        words_of = {"map": "effects"}
        return {
            PageFigure(name, plot_effects, section="all", words=words_of.get(name, "")): figure
            for name, figure in drawn.items()
        }
