"""The page of a prompt: sentences, a table of heads, and figures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from ropelens.interventions.top_planes import top_planes
from ropelens.profiles.measures import MEASURES, with_nan
from ropelens.report.catalog import (
    EFFECTS_FIGURE,
    PATCH_FIGURES,
    PROMPT_HEAD_FIGURES,
    TOP_PLANES_FIGURE,
)
from ropelens.report.drawing import DrawnFigure, ProfileFigures, draw_chosen_head
from ropelens.report.page import PageContents, render_contents
from ropelens.report.payload import build_payload
from ropelens.report.sentences import describe
from ropelens.report.sentences.results import prompt_sentence
from ropelens.runtime.result_folder import ResultFolder, Results

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
        profile = with_nan(self.profile, missing)
        heads = self._effects_of_heads(profile)
        strongest = heads.iloc[int(heads["attribution"].abs().argmax())]
        selected = (int(strongest["layer"]), int(strongest["head"]))
        headline, *notes = self.findings
        contents = PageContents(
            headline=headline,
            notes=notes,
            selected=selected,
            figures=self._figures(profile, selected),
            is_prompt=True,
            top_planes=top_planes(self.attribution).to_dict("records"),
        )
        payload = build_payload(profile, heads, contents.figures, selected=selected)
        return render_contents(profile, heads, contents, payload)

    def _effects_of_heads(self, profile: xr.Dataset) -> pd.DataFrame:
        """A table of heads with the sum of the attributions of their planes."""
        total = self.attribution["attribution"].sum("frequency", min_count=1)
        effects = profile[[*HEAD_SCORES]].assign(attribution=total)
        heads = effects.reset_coords(drop=True).to_dataframe(["layer", "head"])
        heads = heads.dropna(subset="attribution").reset_index()
        return heads.assign(label="untested")

    def _figures(
        self, profile: xr.Dataset, selected: tuple[int, int]
    ) -> ProfileFigures:
        """The effects of heads, planes and patches, and the figures of the selected head."""
        effects = EFFECTS_FIGURE.draw(self.attribution, selected=selected)
        planes = TOP_PLANES_FIGURE.draw(self.attribution)
        figures = [
            DrawnFigure(EFFECTS_FIGURE.name, EFFECTS_FIGURE, effects),
            DrawnFigure(TOP_PLANES_FIGURE.name, TOP_PLANES_FIGURE, planes),
        ]
        for patched in self.patches:
            row = PATCH_FIGURES[patched.attrs["over"]]
            figure = row.draw(patched)
            figures.append(DrawnFigure(row.name, row, figure))
        return ProfileFigures(
            all_heads=figures,
            chosen_head=draw_chosen_head(PROMPT_HEAD_FIGURES, profile, selected),
            model=[],
        )
