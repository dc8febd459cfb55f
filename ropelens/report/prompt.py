"""The page of a prompt: sentences, a table of heads, and figures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ropelens.figures.effects import plot_effects, plot_top_planes
from ropelens.interventions.top_planes import top_planes
from ropelens.profiles.measures import MEASURES
from ropelens.report.catalog import PROFILE_FIGURES, PageFigure, draw
from ropelens.report.page import render_page
from ropelens.report.sentences import describe
from ropelens.report.sentences.results import prompt_sentence
from ropelens.runtime.result_folder import ResultFolder, Results
from ropelens.schema.rows import labelled

HEAD_FIGURES = ("selectivity", "attention", "pair")
HEAD_SCORES = ("previous_token", "self_mass", "sink_mass", "entropy_bits", "induction")
NO_LABELS: dict[str, Any] = {"cautions": [], "scope": ""}  # of a page without labels
EFFECTS_MAP = PageFigure("map", plot_effects, section="all", words="effects")


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
        sentences = [prompt_sentence(self.facts)]
        for results in (self.attribution, *self.patches):
            sentences += describe(results)
        return sentences

    def save(self, folder: str | Path) -> Path:
        """Write the page, the numbers and run.json to `folder`; return the page."""
        attrs = self.profile.attrs
        files: dict[str, Results] = {
            "attribution.nc": self.attribution,
            "planes.csv": top_planes(self.attribution),
        }
        for patched in self.patches:
            files[f"patched_{patched.attrs['over']}.nc"] = patched
        results = ResultFolder(
            kind="prompt",
            findings=self.findings,
            files=files,
            record={
                "command": attrs["command"],
                "model": {"name": attrs["model"]},
                "versions": json.loads(attrs["versions"]),
            },
            page=self.page,
        )
        return results.write(folder)

    def page(self) -> str:
        """The page as HTML."""
        missing = [
            row for row in MEASURES if row.saved and row.name not in self.profile
        ]
        shapes = {
            x.name: [self.profile.sizes.get(d, 1) for d in x.saved_dims]
            for x in missing
        }
        values = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
        profile = self.profile.assign(labelled(values, missing))
        total = self.attribution["attribution"].sum("frequency", min_count=1)
        effects = (
            profile[[*HEAD_SCORES]].assign(attribution=total).reset_coords(drop=True)
        )
        heads = effects.to_dataframe(["layer", "head"]).dropna(subset="attribution")
        layer, head = map(int, heads["attribution"].abs().idxmax())  # type: ignore[call-overload]
        heads = heads.reset_index().assign(label="untested")
        drawn = {"top": plot_top_planes(self.attribution)}
        drawn |= {f"patched_{x.attrs['over']}": plot_effects(x) for x in self.patches}
        figures = {EFFECTS_MAP: plot_effects(self.attribution, selected=(layer, head))}
        figures |= {
            PageFigure(n, plot_effects, section="all"): x for n, x in drawn.items()
        }
        rows = [row for row in PROFILE_FIGURES if row.name in HEAD_FIGURES]
        figures |= draw(rows, profile, layer=layer, head=head)
        headline, *notes = self.findings
        prompt: dict[str, Any] = {"headline": headline, "notes": notes} | NO_LABELS
        prompt |= {"figures": figures, "selected": (layer, head)}
        prompt["planes"] = top_planes(self.attribution).to_dict("records")
        return render_page(profile, heads, prompt=prompt)
