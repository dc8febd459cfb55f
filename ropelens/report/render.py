"""Templates to text: safe against hostile text, with arrays and scripts packed in the page."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from ropelens.figures import formats

TEMPLATES = Path(__file__).parent / "templates"
PLOTLY = "plotly/plotly-cartesian.min.js"
"""plotly.js with the traces that pages have: a page must work where there is no network."""


@functools.cache
def environment(folder: str = "") -> jinja2.Environment:
    """The templates of pages, which escape every value, or the plain ones of a `folder`.

    An unknown name is an error.
    """
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES / folder),
        autoescape=not folder,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "number": formats.number,
        "signed": formats.signed,
        "short": formats.short_count,
        "mean_count": formats.mean_count,
        "percent": lambda share: f"{100 * share:.3g}%",
        "plural": formats.plural,
        "in_words": formats.in_words,
        "ranges": formats.ranges,
    }
    numbers = {"NOTHING": formats.NO_NUMBER, "nan": math.nan}
    templates.globals |= numbers | {"change_and_interval": formats.change_and_interval}
    return templates


@functools.cache
def asset(name: str) -> Markup:
    """A style sheet or script of this package as it stands, for a <style> or <script>."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


@functools.cache
def page_words() -> dict[str, Any]:
    """The words around figures and the columns of tables, of templates/words.toml."""
    return tomllib.loads(str(asset("words.toml")))


@functools.cache
def packed_plotly() -> str:
    """The script, packed: as it is it would be most of a page."""
    return packed_bytes(asset(PLOTLY).encode())


def packed_payload(value: object) -> str:
    """`value` as JSON, a zero, and the bytes of its arrays, packed. NaN raises ValueError.

    Of an array JSON has the place of its bytes: packed, they take a tenth less than in base64.
    """
    arrays = bytearray()

    def place(data: bytes) -> int:
        arrays.extend(data)
        return len(arrays) - len(data)

    text = json.dumps(value, allow_nan=False, separators=(",", ":"), default=place)
    return packed_bytes(text.encode() + b"\0" + arrays, zlib.Z_FILTERED)


def packed_bytes(data: bytes, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> str:
    """Bytes, compressed by a `strategy` of zlib's, as base85 in characters that HTML keeps."""
    gzip = zlib.compressobj(wbits=31, level=9, strategy=strategy)
    text = base64.b85encode(gzip.compress(data) + gzip.flush()).decode()
    return text.translate(str.maketrans("<>&", "/,."))


def packed(values: np.ndarray, *, dims: tuple[str, ...] = ()) -> dict[str, object]:
    """An array for the payload: bytes and short integers as they are, else float32.

    The lowest bytes of all numbers come first, then the next ones, for they pack well together.
    `dims` are the leading dimensions by which the script finds a head's part.
    """
    dtype = np.dtype({"u1": "u1", "i2": "<i2"}.get(values.dtype.str[1:], "<f4"))
    data = np.ascontiguousarray(values, dtype=dtype)
    bytewise = data.view(np.uint8).reshape(-1, dtype.itemsize).T.tobytes()
    return {"dtype": dtype.name, "shape": list(data.shape), "dims": dims, "data": bytewise}


def content_policy(*scripts: str) -> str:
    """The policy of a page that runs these inline scripts, no other, and loads nothing."""
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    run = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        f"form-action 'none'; script-src {run}"
    )


def render(
    template: str, *, scripts: Sequence[str] = (), payload: object = None, **values: object
) -> str:
    """A page: `template` with `values`, plotly, the files `scripts` and what they read.

    The scripts become one that leaves no names on the page.
    """
    parts = "\n".join(map(asset, scripts))
    script = Markup(f'"use strict";\n(async () => {{\n{parts}\n}})();')
    run = (asset(PLOTLY), asset("unpack.js"), script) if scripts else ()
    return (
        environment()
        .get_template(template)
        .render(
            policy=content_policy(*run),
            plotly=packed_plotly(),
            unpack=asset("unpack.js"),
            script=script,
            style=asset("page.css"),
            payload=packed_payload(payload) if scripts else "",
            **values,
        )
    )


# ---- sentences


def say(live: str, sentence: str, /, **record: object) -> str:
    """The sentence, no HTML, that a macro of `live` makes; "" where it says nothing."""
    macros = environment("sentences").get_template(f"{live}.txt").module
    words = str(getattr(macros, sentence)(**record)).split()
    return re.sub(r" (?=[,;.:)])", "", " ".join(words))


def say_all(live: str, records: Mapping[str, dict[str, Any] | None]) -> dict[str, str]:
    """The sentences of the records that there are, by their macros."""
    return {name: say(live, name, **record) for name, record in records.items() if record}
