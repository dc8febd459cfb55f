"""The parts of a page: words, numbers, bytes, and how the file is written."""

import base64
import gzip
import html
import json
import re

import numpy as np
import pytest
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

BACK = str.maketrans(
    "/,.", "<>&"
)  # undoes the replacement of characters that HTML escapes


def test_one_file_with_everything_and_nothing_to_load(tmp_path):
    sizes = {"layers": 6, "heads": 6, "kv_heads": 2, "frequencies": 32, "excerpt": 40}
    profile, heads = synthetic_profile(**sizes)
    profile.attrs["documents"] = 7
    path = write_report(profile, tmp_path / "deep" / "page.html", heads=heads)
    with pytest.raises(BadArgument, match="do not describe the same model"):
        write_report(profile, path, heads=heads.assign(label="odd"))
    assert path.stat().st_size < 1.5e6
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
    version = f"plotly.js (cartesian - minified) v{get_plotlyjs_version()}"
    assert version in render.asset(render.PLOTLY)[:200], (
        "Python checks figures of this version"
    )
    page = path.read_text(encoding="utf-8")
    assert page.count(render.packed_plotly()) == 1
    page = page.replace(render.packed_plotly(), "")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:|//)", page)
    assert "default-src 'none'" in html.unescape(page)
    for fact in (
        *("toy/llama-5l", "0123abcd", "1.234 ± 0.012 nats per token", "torch 2.13.0"),
        "ropelens analyze toy/llama-5l --text stories --out out",
        "All text is from 7 documents: the numbers",
        "at least 66.7% of the bits",
    ):
        assert fact in page


def test_arrays_travel_as_bytes(small):
    profile, heads = small
    sent = packed(np.array([[1.5, np.nan]]), dims=("layer",))
    assert (sent["shape"], len(sent["data"])) == ([1, 2], 8)
    figures = draw_profile(profile, heads, (0, 0))
    sent = render.packed_payload(
        build_payload(profile, heads, figures, selected=(0, 0))
    )
    assert sent == html.escape(sent), "no character can end the script"
    text, arrays = gzip.decompress(base64.b85decode(sent.translate(BACK))).split(
        b"\0", 1
    )
    read = json.loads(text)
    side = read["excerpts"][0]["query"]["steps"]
    data = arrays[side["data"] :][: 2 * int(np.prod(side["shape"]))]
    low, high = np.frombuffer(data, "u1").reshape(2, -1)
    steps = (
        np.stack([low, high], axis=-1).view("<i2").reshape(side["shape"]).astype(int)
    )
    assert np.abs(steps).max((1, 2)).tolist() == [2**13 - 1] * len(steps)
    assert np.all(read["live"])
    blind = profile.assign(excerpt_query_still=np.nan * profile["excerpt_query_still"])
    given = excerpt_payload(blind)["excerpts"][0]["attention"]
    cells = np.frombuffer(given["data"], "u1").reshape(given["shape"])
    weights = profile["excerpt_attention"].values[0][..., *np.triu_indices(48)[::-1]]
    np.testing.assert_allclose(
        (cells / 255) ** 2, weights.reshape(cells.shape), atol=0.004
    )


def test_words_count_labels_and_state_the_verdict(small):
    _, heads = small
    assert sum(label_counts(heads).values()) == len(heads) == 40
    headline, claim = labels_sentence(heads), claim_sentence(heads)
    counts = (
        "Of 40 heads, 17 are semantic, 10 positional, 5 mixed, 4 sink and 4 diffuse."
    )
    assert headline == counts
    where = "Positional heads are in layers 0–2 and 4. Their"
    assert any(words.startswith(where) for words in detail_sentences(heads))
    sinks = detail_sentences(heads[heads.label == "sink"])
    assert not any("Positional heads are in" in words for words in sinks)
    assert f" {heads.attrs['claim']['verdict']} here. Over " in claim
    assert describe(heads)[0] == f"{headline} {claim}"


def test_the_scope_names_few_documents_and_short_text():
    only = "the numbers and intervals describe only this text, and not similar text."
    assert (
        scope_sentence({"documents": 0})
        == f"The text was not split into documents: {only}"
    )
    assert scope_sentence({"documents": 7}) == f"All text is from 7 documents: {only}"
    assert scope_sentence({"documents": 8, "context": 64, "trained_context": 64}) == ""
    short = scope_sentence({"context": 256, "trained_context": 8192})
    assert short.startswith(
        "Sequences have up to 256 tokens, but the model was trained for 8,"
    )


def test_cautions_list_warnings_and_weak_labels(small):
    profile, heads = small
    profile = profile.assign_attrs(warnings="context beyond the model's maximum\n")
    cautions = caution_sentences(profile, heads.assign(confidence=[0.5] + [1.0] * 39))
    doubt = "1 of 40 heads has a label with confidence below 0.8. Other text may give another"
    assert cautions == ["context beyond the model's maximum", f"{doubt} label."]
    named = heads.index[heads.label.isin(["positional", "semantic", "mixed"])]
    heads = heads.assign(confidence=1.0)
    heads.loc[named[:2], "total_bits"] = 0.49
    (_, faint) = caution_sentences(profile, heads)
    assert faint.startswith(
        f"2 of {len(named)} heads labelled positional, semantic or mixed"
    )


def test_a_text_of_one_repeated_token_has_a_page(tmp_path, small):
    profile = small[0].assign(selectivity_keys=0 * small[0]["selectivity_keys"])
    path = write_report(profile, tmp_path / "page.html")
    packed = re.search('id="payload">([^<]+)', path.read_text())[1].translate(BACK)
    assert b"no data: no head prefers" in gzip.decompress(base64.b85decode(packed))


def test_facts_of_the_run(small):
    profile, heads = small
    facts = dict(run_facts(profile, heads))
    assert (facts["context"], facts["rows"]) == ("512 tokens", "all of each sequence")
    blank = dict(run_facts(profile.assign_attrs(revision=""), heads))
    assert (facts["revision"], blank["revision"]) == ("0123abcd", "not recorded")
    assert facts["key-value heads"] == "4 per layer"
    assert "named 0.667" in facts["label thresholds"]
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
    record = {"kind": "answer", "model": {"name": "a/b"}, "labels": {"mixed": 3}}
    record["findings"] = ["Slow planes win. By 0.5 bits", "and fast ones"]
    (tmp_path / "norms/two/run.json").write_text(json.dumps(record))
    named = record | {"model": {"name": "a:one"}}
    (tmp_path / "norms/a-one/run.json").write_text(json.dumps(named))
    (tmp_path / "norms/three/run.json").write_text("[broken")
    text = write_index(tmp_path).read_text()
    for shown in (
        *(
            'href="norms/a-one/index.html"',
            "Slow planes win.<",
            ">a/b</a>",
            ">three</a>",
        ),
        *('href="other/%3Cb%3E/index.html"', ">a-one</a>"),
    ):
        assert shown in text
    assert "and fast ones" not in text
    assert "<b>" not in text
    assert "No reports yet" in write_index(tmp_path / "empty").read_text()


def test_a_change_is_as_precise_as_its_interval():
    small = {0.8942: "+0.894", 0.0004999: "+0.0005", -2.34e-5: "−0.00002", 1e-9: "±0"}
    small |= {0.0: "+0.000", float("nan"): "–"}
    assert {value: signed(value) for value in small} == small
    assert (signed(6.4e-5, ".3g"), signed(-0.02854, ".3g")) == ("0.00006", "−0.0285")
    nan = float("nan")
    for values, shown in (
        ((-2e-5, -0.0031, 0.003), ("−0.000", "−0.003 to +0.003")),
        ((-2e-5, -3e-5, 1e-4), ("−0.00002", "−0.00003 to +0.0001")),
        ((0.25, nan, nan), ("+0.250", "–")),
    ):
        assert change_and_interval(*values) == shown
