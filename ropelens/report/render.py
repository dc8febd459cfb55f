"""Fill templates. Hostile text is escaped, and pages contain their scripts and arrays."""

import base64
import functools
import hashlib
import json
import tomllib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from ropelens.figures import formats

TEMPLATES = Path(__file__).parent / "templates"
PLOTLY = "plotly/plotly-cartesian.min.js"  # in pages, which work without a network


@functools.cache
def environment() -> jinja2.Environment:
    """Environment of page templates, which escapes their values."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["number"] = formats.number
    templates.filters["signed"] = formats.signed
    templates.filters["short_count"] = formats.short_count
    templates.globals["NOTHING"] = formats.NO_NUMBER
    return templates


@functools.cache
def asset(name: str) -> Markup:
    """Unescaped text of a style sheet, script or other file in the folder of templates."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


@functools.cache
def page_words() -> dict[str, Any]:
    """Words around figures and columns of tables, from templates/words.toml."""
    return tomllib.loads(str(asset("words.toml")))


@functools.cache
def packed_plotly() -> str:
    return packed_bytes(asset(PLOTLY).encode())


def packed_payload(value: object) -> str:
    """Compress `value` as JSON, a zero byte, and the bytes of its arrays.

    The JSON has the index of the first byte of each array. Raises `ValueError` for NaN.
    """
    arrays = bytearray()

    def append(data: bytes) -> int:
        arrays.extend(data)
        return len(arrays) - len(data)

    text = json.dumps(value, allow_nan=False, separators=(",", ":"), default=append)
    return packed_bytes(text.encode() + b"\0" + arrays, zlib.Z_FILTERED)


def packed_bytes(data: bytes, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> str:
    """Compress bytes with zlib and encode them in base85 without characters of HTML."""
    gzip = zlib.compressobj(wbits=31, level=9, strategy=strategy)
    text = base64.b85encode(gzip.compress(data) + gzip.flush()).decode()
    return text.translate(str.maketrans("<>&", "/,."))


def packed(values: np.ndarray, *, dims: tuple[str, ...] = ()) -> dict[str, object]:
    """Array for the payload. Bytes and short integers keep their dtype, others become float32.

    The lowest bytes of all numbers come first, because similar bytes compress well. The script
    indexes the leading dimensions `dims` to find one head.
    """
    dtype = np.dtype({"u1": "u1", "i2": "<i2"}.get(values.dtype.str[1:], "<f4"))
    data = np.ascontiguousarray(values, dtype=dtype)
    bytewise = data.view(np.uint8).reshape(-1, dtype.itemsize).T.tobytes()
    return {
        "dtype": dtype.name,
        "shape": list(data.shape),
        "dims": dims,
        "data": bytewise,
    }


def content_policy(*scripts: str) -> str:
    """Content security policy of a page that runs only these scripts and loads nothing."""
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    run = " ".join(
        f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests
    )
    images = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    return f"default-src 'none'; {images}; form-action 'none'; script-src {run}"


def render(
    template: str,
    *,
    scripts: Sequence[str] = (),
    payload: object = None,
    **values: object,
) -> str:
    """Render a page from `template` with `values`, `scripts` (files) and their payload."""
    parts = "\n".join(map(asset, scripts))
    script = Markup(f'"use strict";\n(async () => {{\n{parts}\n}})();')
    run = (asset(PLOTLY), asset("unpack.js"), script) if scripts else ()
    page = environment().get_template(template)
    return page.render(
        policy=content_policy(*run),
        plotly=packed_plotly(),
        unpack=asset("unpack.js"),
        script=script,
        style=asset("page.css"),
        payload=packed_payload(payload) if scripts else "",
        **values,
    )
