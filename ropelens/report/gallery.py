"""The gallery of all pages in a folder."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from ropelens.arguments import public
from ropelens.figures.formats import plural
from ropelens.report.gallery_picture import picture_of
from ropelens.report.model_order import in_model_order
from ropelens.report.render import render
from ropelens.report.run_facts import PageFacts
from ropelens.runtime.folder import file_name, write_whole
from ropelens.runtime.run_record import read_record


@dataclass(frozen=True)
class GalleryEntry:
    """A page in a gallery: its model, address and picture, and its first sentence."""

    model: str
    folder: str
    link: str
    finding: str
    picture: Markup


@public
def write_index(folder: str | Path) -> Path:
    """Write `folder`/index.html, a gallery of every `folder`/<analysis>/<model>/index.html.

    The model and the sentence come from the run.json of a page, if it has one. All analyses
    have their models in the same order (`in_model_order`).
    """
    folder = Path(folder)
    pages = sorted(page for page in folder.glob("*/*/index.html") if page.is_file())
    models_of: dict[str, list[Path]] = {}  # folders with a page, by analysis
    for page in pages:
        models_of.setdefault(page.parent.parent.name, []).append(page.parent)
    analyses: dict[str, list[GalleryEntry]] = {}
    for analysis, models in models_of.items():
        of_name = {model.name: model for model in models}
        entries = []
        for name in in_model_order(of_name):
            entries.append(_gallery_entry(of_name[name] / "index.html", folder))
        analyses[analysis] = _with_different_names(entries)
    about = PageFacts(facts=[plural(len(pages), "page")])
    text = render("index.html", about=about, analyses=analyses)
    return write_whole(folder / "index.html", text)


def _with_different_names(entries: list[GalleryEntry]) -> list[GalleryEntry]:
    """The entries of an analysis; those of the same model are named after their folders."""
    counts = Counter(entry.model for entry in entries)
    named = []
    for entry in entries:
        if counts[entry.model] > 1:
            entry = replace(entry, model=entry.folder)
        named.append(entry)
    return named


def _gallery_entry(page: Path, folder: Path) -> GalleryEntry:
    record = read_record(page.parent)
    name = page.parent.name
    model = record.get("model", {}).get("name")
    is_named_after_model = name.startswith(file_name(str(model)))
    compares = record.get("kind") == "comparison"  # its model is a list of variants
    findings = record.get("findings") or [""]
    return GalleryEntry(
        model=name if is_named_after_model or compares else model or name,
        folder=name,
        link=quote(page.relative_to(folder).as_posix()),
        finding=re.split(r"(?<=\.) (?=[A-Z])", findings[0])[0],
        picture=picture_of(page.parent),
    )
