"""A gallery of the pages <analysis>/<model>/index.html, with one sentence for each."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ropelens.errors import public
from ropelens.figures.formats import plural
from ropelens.report.render import render
from ropelens.runtime.folder import file_name, write_whole
from ropelens.runtime.results import read_record


@public
def write_index(folder: str | Path) -> Path:
    """Write `folder`/index.html, a gallery of every `folder`/<analysis>/<model>/index.html.

    The model and the sentence come from the run.json in the folder of the page. Without it, the
    gallery shows only the name of the folder. Large models come first.
    """
    folder = Path(folder)
    analyses: dict[str, list[dict[str, Any]]] = {}
    pages = sorted(page for page in folder.glob("*/*/index.html") if page.is_file())
    for page in pages:
        record = read_record(page.parent)
        first = (record.get("findings") or [""])[0]
        model, name = record.get("model", {}).get("name"), page.parent.name
        entry = {
            "model": name if file_name(str(model)) == name else model or name,
            "link": quote(page.relative_to(folder).as_posix()),
            "finding": re.split(r"(?<=\.) (?=[A-Z])", first)[0],
            "heads": sum(record.get("labels", {}).values()),
        }
        analyses.setdefault(page.parent.parent.name, []).append(entry)
        analyses[page.parent.parent.name].sort(key=lambda entry: -entry["heads"])
    text = render("index.html", analyses=analyses, facts=[plural(len(pages), "page")])
    return write_whole(folder / "index.html", text)
