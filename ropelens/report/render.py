"""Fill templates. Hostile text is escaped, and pages contain their scripts and arrays."""

import base64
import functools
import hashlib
import json
import lzma
import zlib
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup

from ropelens.figures import formats

TEMPLATES = Path(__file__).parent / "templates"
PLOTLY = "plotly/plotly.min.js"  # in pages, which work without a network
LZMA_SIZE = slice(5, 13)  # bytes of the header with the size of the contents
COMMON_SCRIPTS = ("arrays.js", "plots.js", "save.js")  # of all pages with figures


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
def packed_plotly() -> str:
    """plotly.js, packed with LZMA. lzma.js needs its size in the header."""
    script = asset(PLOTLY).encode()
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]
    packed = bytearray(lzma.compress(script, format=lzma.FORMAT_ALONE, filters=filters))
    packed[LZMA_SIZE] = len(script).to_bytes(8, "little")
    return _digits(bytes(packed))


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
    """Compress bytes with zlib and encode them."""
    gzip = zlib.compressobj(wbits=31, level=9, strategy=strategy)
    return _digits(gzip.compress(data) + gzip.flush())


def _digits(data: bytes) -> str:
    """Bytes in base85 without characters of HTML."""
    text = base64.b85encode(data).decode()
    return text.translate(str.maketrans("<>&", "/,."))


def packed(values: np.ndarray, *, dims: tuple[str, ...] = ()) -> dict[str, object]:
    """Array for the payload. Bytes and short integers keep their dtype, others become float32.

    The lowest bytes of all numbers come first, because similar bytes compress well. The script
    indexes the leading dimensions `dims` to find one head.
    """
    dtype = np.dtype("<f4")
    if values.dtype in (np.uint8, np.int16):
        dtype = values.dtype.newbyteorder("<")
    data = np.ascontiguousarray(values, dtype=dtype)
    by_number = data.view(np.uint8).reshape(-1, dtype.itemsize)
    return {
        "dtype": dtype.name,
        "shape": list(data.shape),
        "dims": dims,
        "data": by_number.T.tobytes(),
    }


def content_policy(*scripts: str) -> str:
    """Content security policy of a page that runs only these scripts and loads nothing."""
    sources = []
    for script in scripts:
        digest = hashlib.sha256(script.encode()).digest()
        sources.append(f"'sha256-{base64.b64encode(digest).decode()}'")
    run = " ".join(sources)
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
    page = environment().get_template(template)
    style = asset("page.css")
    if not scripts:
        return page.render(policy=content_policy(), style=style, **values)
    body = "\n".join(asset(name) for name in scripts)
    script = Markup(f'"use strict";\n(async () => {{\n{body}\n}})();')
    unpack = Markup("\n").join([asset("unpack.js"), asset("lzma.js")])
    return page.render(
        policy=content_policy(asset(PLOTLY), unpack, script),
        style=style,
        plotly=packed_plotly(),
        unpack=unpack,
        script=script,
        payload=packed_payload(payload),
        **values,
    )
