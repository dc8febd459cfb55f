"""One page that lists many: <analysis>/<model>/index.html, with what each found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ropelens.files.folder import write_whole
from ropelens.files.results import read_record
from ropelens.report.render import asset, content_policy, environment
from ropelens.report.sentences import plural


@dataclass(frozen=True)
class Entry:
    """A line of the index: a page, the model it is about, what it found."""

    analysis: str
    model: str
    link: str
    finding: str


def write_index(folder: str | Path) -> Path:
    """Write `folder`/index.html, linking every `folder`/<analysis>/<model>/index.html.

    Model and finding are those of the run.json beside a page, of its "findings" the first.
    A page without that file is listed by its place.
    """
    folder = Path(folder)
    pages = sorted(folder.glob("*/*/index.html"))
    analyses: dict[str, list[Entry]] = {}
    for page in pages:
        entry = _entry(page, folder)
        analyses.setdefault(entry.analysis, []).append(entry)
    template = environment().get_template("index.html")
    text = template.render(
        analyses=analyses,
        facts=[plural(len(pages), "page")],
        policy=content_policy(),
        style=asset("page.css"),
    )
    return write_whole(folder / "index.html", text)


def _entry(page: Path, folder: Path) -> Entry:
    place = page.parent
    run = read_record(place)
    findings = run.get("findings") or [""]
    name = run.get("model", {}).get("name") or place.name
    return Entry(
        analysis=place.parent.name,
        model=name,
        link=quote(page.relative_to(folder).as_posix()),
        finding=findings[0],
    )
