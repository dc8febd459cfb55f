"""The parts of a page: words, numbers, bytes, and how the file is written."""

import base64
import gzip
import html
import json
import re

import numpy as np
import pytest
from oracles.versions import is_at_least
from plotly.offline import get_plotlyjs_version
from synthetic_profile import synthetic_profile

from ropelens.errors import BadArgument
from ropelens.figures.formats import change_and_interval, signed
from ropelens.report import describe, render, write_index, write_report
from ropelens.report.drawing import draw_profile
from ropelens.report.excerpt_payload import excerpt_payload
from ropelens.report.payload import build_payload
from ropelens.report.render import packed
from ropelens.report.run_facts import model_name, run_facts
from ropelens.report.sentences.heads import (
    caution_sentences,
    claim_sentence,
    detail_sentences,
    label_counts,
    labels_sentence,
)
from ropelens.report.sentences.profile import scope_sentence

# Undoes the replacement of characters that HTML escapes.
BACK = str.maketrans("/,.", "<>&")


def unpacked(payload: str) -> bytes:
    return gzip.decompress(base64.b85decode(payload.translate(BACK)))


def test_one_file_with_everything_and_nothing_to_load(tmp_path):
    profile, heads = synthetic_profile(
        layers=6, heads=6, kv_heads=2, frequencies=32, excerpt=40
    )
    profile.attrs["documents"] = 7
    path = write_report(profile, tmp_path / "deep" / "page.html", heads=heads)
    with pytest.raises(BadArgument, match="do not describe the same model"):
        write_report(profile, path, heads=heads.assign(label="odd"))
    assert path.stat().st_size < 1.5e6
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
    version = f"plotly.js (part of ropelens - minified) v{get_plotlyjs_version()}"
    begin = render.asset(render.PLOTLY)[:200]
    if is_at_least("plotly", "7.1"):
        assert version in begin, "Python checks figures of this version"
    page = path.read_text(encoding="utf-8")
    assert page.count(render.packed_plotly()) == 1
    page = page.replace(render.packed_plotly(), "")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:|//)", page)
    assert "default-src 'none'" in html.unescape(page)
    for fact in (
        "toy/llama-5l",
        "0123abcd",
        "1.234 ± 0.012 nats per token",
        "torch 2.13.0",
        "ropelens analyze toy/llama-5l --text stories --out out",
        "All text is from 7 documents: the numbers",
        "at least 66.7% of the bits",
    ):
        assert fact in page


def test_arrays_travel_as_bytes(small):
    profile, heads = small
    sent = packed(np.array([[1.5, np.nan]]), dims=("layer",))
    assert sent["shape"] == [1, 2]
    assert len(sent["data"]) == 8
    figures = draw_profile(profile, heads, (0, 0))
    payload = build_payload(profile, heads, figures, selected=(0, 0))
    sent = render.packed_payload(payload)
    assert sent == html.escape(sent), "no character can end the script"
    text, arrays = unpacked(sent).split(b"\0", 1)
    read = json.loads(text)
    assert np.all(read["live"])
    steps = signed_steps(read["excerpts"][0]["query"]["steps"], arrays)
    largest = np.abs(steps).max((1, 2))
    assert largest.tolist() == [2**13 - 1] * len(steps)


def test_without_vectors_the_page_gets_the_square_root_of_each_weight_in_a_byte(small):
    profile, _ = small
    blind = profile.assign(excerpt_query_still=np.nan * profile["excerpt_query_still"])
    given = excerpt_payload(blind)["excerpts"][0]["attention"]
    cells = np.frombuffer(given["data"], "u1").reshape(given["shape"])
    key, query = np.triu_indices(48)  # the queries from each key on
    weights = profile["excerpt_attention"].values[0][..., query, key]
    expected = weights.reshape(cells.shape)
    np.testing.assert_allclose((cells / 255) ** 2, expected, atol=0.004)


def signed_steps(described: dict, arrays: bytes) -> np.ndarray:
    """Numbers of two bytes, of which all low bytes are sent before all high bytes."""
    count = int(np.prod(described["shape"]))
    data = arrays[described["data"] :][: 2 * count]
    low, high = np.frombuffer(data, "u1").reshape(2, -1)
    numbers = np.stack([low, high], axis=-1).view("<i2")
    return numbers.reshape(described["shape"]).astype(int)


def test_words_count_labels_and_state_the_verdict(small):
    _, heads = small
    assert sum(label_counts(heads).values()) == len(heads) == 40
    headline = labels_sentence(heads)
    claim = claim_sentence(heads)
    counts = "17 are semantic, 10 positional, 5 mixed, 4 sink and 4 diffuse."
    assert headline == f"Of 40 heads, {counts}"
    where = "Positional heads are in layers 0–2 and 4. Their"
    assert any(words.startswith(where) for words in detail_sentences(heads))
    sinks = detail_sentences(heads[heads.label == "sink"])
    assert not any("Positional heads are in" in words for words in sinks)
    assert f" {heads.attrs['claim']['verdict']} here. Over " in claim
    assert describe(heads)[0] == f"{headline} {claim}"


def test_the_scope_names_few_documents_and_short_text():
    only = "the numbers and intervals describe only this text, and not similar text."
    unsplit = scope_sentence({"documents": 0})
    assert unsplit == f"The text was not split into documents: {only}"
    few = scope_sentence({"documents": 7})
    assert few == f"All text is from 7 documents: {only}"
    assert scope_sentence({"documents": 8, "context": 64, "trained_context": 64}) == ""
    short = scope_sentence({"context": 256, "trained_context": 8192})
    begin = "Sequences have up to 256 tokens, but the model was trained for 8,"
    assert short.startswith(begin)


def test_cautions_list_warnings_and_weak_labels(small):
    profile, heads = small
    profile = profile.assign_attrs(warnings="context beyond the model's maximum\n")
    assert caution_sentences(profile, heads) == ["context beyond the model's maximum"]
    named = heads.index[heads.label.isin(["positional", "semantic", "mixed"])]
    heads = heads.copy()
    heads.loc[named[:2], "total_bits"] = 0.49
    (_, faint) = caution_sentences(profile, heads)
    begin = f"2 of {len(named)} heads labelled positional, semantic or mixed"
    assert faint.startswith(begin)


def test_a_text_of_one_repeated_token_has_a_page(tmp_path, small):
    profile = small[0].assign(selectivity_keys=0 * small[0]["selectivity_keys"])
    path = write_report(profile, tmp_path / "page.html")
    payload = re.search('id="payload">([^<]+)', path.read_text())[1]
    assert b"no data: no head prefers" in unpacked(payload)


def test_facts_of_the_run(small):
    profile, heads = small
    facts = dict(run_facts(profile, heads))
    assert facts["context"] == "512 tokens"
    assert facts["rows"] == "all of each sequence"
    assert facts["revision"] == "0123abcd"
    assert facts["key-value heads"] == "4 per layer"
    assert "named 0.667" in facts["label thresholds"]
    blank = dict(run_facts(profile.assign_attrs(revision=""), heads))
    assert blank["revision"] == "not recorded"
    for name, shown in (
        ("org/model", "org/model"),
        ("../a/b/", "b"),
        ("", "unnamed model"),
    ):
        assert model_name(profile.assign_attrs(model=name)) == shown


def test_the_gallery_has_a_sentence_for_each_page(tmp_path):
    for place in ("norms/a-one", "norms/two", "norms/three", "other/<b>"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "index.html").write_text("page")
    record = {
        "kind": "answer",
        "model": {"name": "a/b"},
        "labels": {"mixed": 3},
        "findings": ["Slow planes win. By 0.5 bits", "and fast ones"],
    }
    named = {**record, "model": {"name": "a:one"}}
    (tmp_path / "norms/two/run.json").write_text(json.dumps(record))
    (tmp_path / "norms/a-one/run.json").write_text(json.dumps(named))
    (tmp_path / "norms/three/run.json").write_text("[broken")
    text = write_index(tmp_path).read_text()
    for shown in (
        'href="norms/a-one/index.html"',
        "Slow planes win.<",
        ">a/b</a>",
        ">three</a>",
        'href="other/%3Cb%3E/index.html"',
        ">a-one</a>",
    ):
        assert shown in text
    assert "and fast ones" not in text
    assert "<b>" not in text
    assert "No reports yet" in write_index(tmp_path / "empty").read_text()


def test_the_gallery_has_a_picture_for_each_page(tmp_path):
    for place in ("norms/bundled-rope", "norms/alike", "norms/other", "claims/one"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "index.html").write_text("page")
    record = json.dumps({"kind": "answer", "model": {"name": "gemma3"}})
    for name in ("alike", "other"):
        (tmp_path / "norms" / name / "run.json").write_text(record)
    (tmp_path / "norms/other/picture.webp").write_bytes(b"RIFF")
    (tmp_path / "norms/gemma3-robust").mkdir()
    (tmp_path / "norms/gemma3-robust/index.html").write_text("page")
    (tmp_path / "norms/gemma3-robust/run.json").write_text(record)
    verdicts = "model,verdict\nm,unresolved\nm,holds\nm,not testable\nn,holds\n"
    (tmp_path / "claims/one/claims.csv").write_text(verdicts)
    text = write_index(tmp_path).read_text()
    other = text.index('href="norms/other/index.html"')
    picture = text.index('<img src="data:image/webp;base64,UklGRg==" alt="">')
    assert text.index('href="norms/bundled-rope/index.html"') < other < picture
    assert ">alike<" in text
    assert ">other<" in text
    assert ">gemma3-robust<" in text
    assert 'aria-label="2 holds, 1 unresolved, 1 not testable"' in text
    squares = re.findall(r'<path class="([a-z-]+)" d="M\d+ (\d+)', text)
    first = [("holds", "3"), ("unresolved", "3"), ("not-testable", "10")]
    assert squares == [*first, ("holds", "23")], "a line of squares for each model"


def test_a_change_is_as_precise_as_its_interval():
    nan = float("nan")
    for value, shown in (
        (0.8942, "+0.894"),
        (0.0004999, "+0.0005"),
        (-2.34e-5, "−0.00002"),
        (1e-9, "±0"),
        (0.0, "+0.000"),
        (nan, "–"),
    ):
        assert signed(value) == shown
    assert signed(6.4e-5, ".3g") == "0.00006"
    assert signed(-0.02854, ".3g") == "−0.0285"
    for values, shown in (
        ((-2e-5, -0.0031, 0.003), ("−0.000", "−0.003 to +0.003")),
        ((-2e-5, -3e-5, 1e-4), ("−0.00002", "−0.00003 to +0.0001")),
        ((0.25, nan, nan), ("+0.250", "–")),
    ):
        assert change_and_interval(*values) == shown
