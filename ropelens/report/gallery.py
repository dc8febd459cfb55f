"""The gallery of all pages in a folder."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ropelens.arguments import public
from ropelens.checkpoints.names import by_step
from ropelens.figures.formats import plural
from ropelens.report.render import render
from ropelens.report.run_facts import PageFacts
from ropelens.runtime.folder import file_name, write_whole
from ropelens.runtime.run_record import read_record


@dataclass(frozen=True)
class GalleryEntry:
    """A page in a gallery: its model, its address, and the first sentence that it states."""

    model: str
    link: str
    finding: str
    heads: int


@public
def write_index(folder: str | Path) -> Path:
    """Write `folder`/index.html, a gallery of every `folder`/<analysis>/<model>/index.html.

    The model and the sentence come from the run.json of a page, if it has one. Large models
    come first.
    """
    folder = Path(folder)
    pages = sorted(page for page in folder.glob("*/*/index.html") if page.is_file())
    models_of: dict[str, list[Path]] = {}  # folders with a page, by analysis
    for page in pages:
        models_of.setdefault(page.parent.parent.name, []).append(page.parent)
    analyses: dict[str, list[GalleryEntry]] = {}
    for analysis, models in models_of.items():
        entries = [
            _gallery_entry(model / "index.html", folder) for model in by_step(models)
        ]
        entries.sort(key=lambda entry: -entry.heads)
        analyses[analysis] = entries
    about = PageFacts(facts=[plural(len(pages), "page")])
    text = render("index.html", about=about, analyses=analyses)
    return write_whole(folder / "index.html", text)


def _gallery_entry(page: Path, folder: Path) -> GalleryEntry:
    record = read_record(page.parent)
    name = page.parent.name
    model = record.get("model", {}).get("name")
    is_named_after_model = file_name(str(model)) == name
    findings = record.get("findings") or [""]
    return GalleryEntry(
        model=name if is_named_after_model else model or name,
        link=quote(page.relative_to(folder).as_posix()),
        finding=re.split(r"(?<=\.) (?=[A-Z])", findings[0])[0],
        heads=sum(record.get("labels", {}).values()),
    )
