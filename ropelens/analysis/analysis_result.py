"""The result of an analysis: numbers, labels and sentences, which can be saved with a page.

Saved results are opened without torch.
"""

import shutil
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pandas as pd
import xarray as xr

from ropelens.analysis import hub
from ropelens.analysis.saved_numbers import SavedNumbers, check_model, earlier_numbers
from ropelens.claims.classify import classify_heads
from ropelens.errors import BadArgument, explained
from ropelens.interventions.truncation_table import summarize_truncation
from ropelens.profiles.measures import complete_profile
from ropelens.report.notebook import display
from ropelens.report.page import render_page
from ropelens.report.sentences.heads import heads_sentences
from ropelens.report.sentences.profile import attention_sentences, scope_sentence
from ropelens.report.sentences.truncation import sweep_sentences
from ropelens.runtime.folder import PAGE, UNFINISHED, locked, write_whole
from ropelens.runtime.result_folder import ResultFolder, Results, write_page

if TYPE_CHECKING:
    from torch import nn

    from ropelens.text.text import Text

SWEEP_SENTENCES = 4  # at most, in the findings


@dataclass(frozen=True, eq=False, repr=False)
class Analysis:
    """Result of `ropelens.analyze`: the numbers of a model and their provenance.

    `heads` is the result of `classify_heads`; `profile`, `truncation` and `reach` come from the
    functions of these names. `provenance` is run.json without `kind` and `findings`. An
    analysis from a folder has no `model`, `tokenizer` and `text`. `pages` are the paths of the
    pages that were written. A notebook shows the findings, a map of the heads, and the path of
    the last page.
    """

    profile: xr.Dataset
    heads: pd.DataFrame
    provenance: dict[str, Any]
    truncation: xr.Dataset | None = None
    model: "nn.Module | None" = None
    text: "Text | None" = None
    reach: xr.Dataset | None = None
    tokenizer: Any = None
    pages: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", complete_profile(self.profile))

    @cached_property
    def truncation_table(self) -> pd.DataFrame | None:
        """The table in truncation.csv, with a row for each edit; None without a sweep."""
        return (
            None if self.truncation is None else summarize_truncation(self.truncation)
        )

    @property
    def results(self) -> dict[str, Results]:
        """All datasets and tables, by the names of their files."""
        results: dict[str, Results] = {
            "profile.nc": self.profile,
            "heads.csv": self.heads,
        }
        if self.reach is not None:
            results["reach.nc"] = self.reach
        if self.truncation is not None and self.truncation_table is not None:
            results["truncation.nc"] = self.truncation
            results["truncation.csv"] = self.truncation_table
        return results

    @property
    def findings(self) -> list[str]:
        """Sentences about the sweep, the labels, the verdict of the claim and the scope."""
        sentences: list[str] = []
        if self.truncation is not None and self.truncation_table is not None:
            of_sweep = sweep_sentences(self.truncation, self.truncation_table)
            sentences += of_sweep[:SWEEP_SENTENCES]
        about_labels, *about_claim = heads_sentences(self.heads)
        sentences.append(about_labels)
        sentences += attention_sentences(self.profile)
        sentences += about_claim
        sentences.append(scope_sentence(self.profile.attrs))
        return [sentence for sentence in sentences if sentence]

    def page(self) -> str:
        """The page as HTML."""
        return render_page(
            self.profile,
            self.heads,
            self.truncation,
            self.reach,
            self.truncation_table,
        )

    def report(self, path: str | Path) -> Path:
        """Write only the page to the file `path`, completely or not at all; return `path`."""
        page = write_whole(path, self.page())
        self.pages.append(page)
        return page

    def save(self, folder: str | Path, *, again: str = "") -> Path:
        """Write the page, `results` and run.json to `folder`; return the page.

        A sweep or a reach of the same model in `folder` is kept and shown on the page. Either
        all numbers are written or none; then the page is drawn. Raises `BadArgument` for a
        folder that cannot be written to, or that holds something else, such as results of
        another model; but results of the model argument `again` are replaced.
        """
        folder = Path(folder)
        model = self.provenance.get("model", {})
        unfinished = folder / UNFINISHED
        with locked(folder):
            check_model(folder, model, again=again)
            earlier = earlier_numbers(folder, model.get("fingerprint"))
            joined = self if earlier is None else self._joined_with(earlier)
            what = f"Not all results could be written to {folder}."
            hint = ""
            if unfinished.exists():
                hint = f"the same command continues from {unfinished}"
            with explained(what, hint, error=BadArgument, catch=OSError):
                joined._contents.write_numbers(folder)
                shutil.rmtree(unfinished, ignore_errors=True)
                if joined.reach is None:  # a reach of another model
                    (folder / "reach.nc").unlink(missing_ok=True)
                page = write_page(folder, joined.page)
        self.pages.append(page)
        return page

    @property
    def _contents(self) -> ResultFolder:
        """The contents of a folder with this analysis."""
        return ResultFolder(
            kind="analysis" if self.truncation is None else "truncation",
            findings=self.findings,
            files=self.results,
            record=self.provenance,
            page=self.page,
        )

    def _joined_with(self, earlier: SavedNumbers) -> "Analysis":
        """This analysis with the sweep and the reach that it lacks, if they were saved."""
        sweep = earlier.truncation if self.truncation is None else self.truncation
        reach = earlier.reach if self.reach is None else self.reach
        return replace(self, truncation=sweep, reach=reach)

    def push_to_hub(self, repo: str, *, private: bool = True) -> str:
        """Upload the files of `save` as the dataset `repo` (name/dataset); return its address.

        A card is added. The page and profile.nc contain excerpts of the text. Raises
        `BadArgument` if `private`, and the dataset is public, or if it has other files.
        """
        with TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            replace(self, pages=[]).save(results)
            return hub.upload(
                results, repo, self.provenance, self.findings, private=private
            )

    def _repr_html_(self) -> str:
        page = self.pages[-1] if self.pages else None
        return display(self.findings, self.heads, self.profile, page=page).html

    def __repr__(self) -> str:
        return f"<Analysis of {self.profile.attrs['model']}: {self.findings[0]}>"


def open_analysis(folder: str | Path) -> Analysis:
    """Read an analysis that `Analysis.save` wrote, and label its heads."""
    folder = Path(folder)
    return label_numbers(SavedNumbers.read(folder), folder)


def label_numbers(numbers: SavedNumbers, folder: Path) -> Analysis:
    """The analysis whose `numbers` were read in `folder`, with labels of its heads."""
    what = f"{folder / 'profile.nc'} lacks numbers that labels are computed from."
    with explained(what, "measure again", error=BadArgument):
        heads = classify_heads(numbers.profile, seed=numbers.profile.attrs["seed"])
    return Analysis(
        numbers.profile,
        heads,
        numbers.provenance,
        truncation=numbers.truncation,
        reach=numbers.reach,
        pages=list(folder.glob(PAGE)),
    )
