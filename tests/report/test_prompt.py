"""The page of a prompt, figures of captures, and sentences about results of a prompt."""

import numpy as np
import pytest
import torch
from in_browser import Opened, idle, values
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.report import describe
from ropelens.report.excerpt_payload import excerpt_payload

HOSTILE = "The <script>alert(1)</script> man & the old <b> man"


@pytest.fixture(scope="module")
def bundled():
    return rl.load("bundled")


@pytest.fixture(scope="module")
def results(bundled):
    model, tokenizer = bundled
    other = "Two men and a dog went to the sea"
    return rl.explain_prompt(model, HOSTILE, other, tokenizer=tokenizer)


def test_all_heads_of_the_page_can_stop_their_planes(
    browser, results, tmp_path, monkeypatch
):
    monkeypatch.setattr("ropelens.report.excerpt_payload.FINE_NUMBERS", 0)
    path = results.save(tmp_path / "out")
    names = {"attribution.nc", "planes.csv", "patched_head.nc", "patched_position.nc"}
    assert names < {file.name for file in path.parent.iterdir()}
    assert "<script>alert" not in path.read_text()
    assert np.all(excerpt_payload(results.profile)["live"])
    with Opened(browser, path) as opened:
        page = opened.at("#L1H2&tab=attention")
        drawn = np.nan_to_num(values(page, "plot-attention", "z"))
        weights = results.profile["excerpt_attention"][0, 1, 2]
        np.testing.assert_allclose(drawn, weights, atol=0.01)
        page = opened.at("#L1H2&tab=attention&drop=0-3")
        idle(page)
        assert "removed in this head" in page.inner_text("#live-words")
        page = opened.at("#L1H2&view=top")
        drawn = page.evaluate("[...document.getElementById('plot-top')._fullData[0].x]")
        expected = rl.top_planes(results.attribution)["attribution"]
        np.testing.assert_allclose(drawn, expected)
        assert page.locator("#all-top tbody tr").count() == 12


def test_the_answer_is_the_logit_difference_of_tokens_that_the_prompts_favour(
    bundled, results
):
    model, tokenizer = bundled
    first, *more = describe(results.attribution)
    assert first.startswith(f"The answer is {results.attribution.attrs['answer']:+.3f}")
    assert "wrong sign" in more[0]
    assert "budget" not in " ".join([first, *more])
    assert results.facts["answer"] > results.facts["source_answer"]
    second = results.facts["second"]
    of_token = rl.explain_prompt(
        model, HOSTILE, second.replace("␣", " "), tokenizer=tokenizer
    )
    assert not of_token.patches
    assert of_token.facts["second"] == second
    with pytest.raises(BadArgument, match="prompts are the same"):
        rl.explain_prompt(model, HOSTILE, HOSTILE, tokenizer=tokenizer)


def test_64_tokens_of_72_heads_of_256_are_live():
    model = tiny("qwen3", num_hidden_layers=18, head_dim=256, num_key_value_heads=1)
    ids = random_tokens(sequences=1, length=64)
    profile = rl.profile(model, ids, excerpts=[ids[0]], budget=False)
    assert np.all(excerpt_payload(profile)["live"])


def test_figures_of_a_head_accept_a_capture_and_its_name():
    model = tiny("llama_gqa")
    ids = random_tokens(sequences=1, length=12)
    seen = rl.capture(model, ids, heads="1.*")
    of_head = seen.sel(head="1.2")
    weights = np.nan_to_num(rl.plot_attention(seen, head="1.2").data[0].z)
    np.testing.assert_allclose(weights, of_head["attention"])
    several = rl.capture(model, [ids[0], ids[0, :8]], heads="1.*")
    of_second = rl.plot_attention(several, layer=1, head=2, excerpt=1)
    assert of_second.data[0].z.shape == (8, 8)
    lines = rl.plot_selectivity(seen, head="1.2").data
    np.testing.assert_allclose(lines[2].y, of_head["q_norm"].mean("query"))
    profile = rl.profile(model, ids, budget=False)
    selectivity = profile["selectivity"][1, 2]
    np.testing.assert_allclose(lines[0].y, selectivity, rtol=1e-4, atol=1e-5)
    assert "the sharpest heads are 1." in describe(seen)[0]
    refusals = "no fitted kernel|needs its layer|does not have head"
    with pytest.raises(BadArgument, match=refusals):
        rl.plot_kernel(seen, head="1.2")
    for head in (2, "0.1"):
        with pytest.raises(BadArgument, match=refusals):
            rl.plot_attention(seen, head=head)


def test_no_share_is_foretold_beyond_the_window_of_a_layer():
    model = tiny("gemma3")  # layer 0 sees 12 tokens
    text = random_tokens(sequences=2, length=40)
    reach = rl.reach(model, text, copied=6, copies=(6, 9, 18), draws=2, distances=[40])
    shares = reach["foretold_share"][0, 0].values
    assert np.isfinite(shares[:, 1]).all()
    assert np.isnan(shares[:, 2]).all()
    assert np.isfinite(reach["foretold_share"][0, 1, :, 1:]).all()
    short = rl.reach(model, text, copied=6, copies=(6,), draws=2, distances=[9, 40])
    assert np.isnan(short["extrapolated_share"][0, 0, :, 1]).all()
    assert np.isfinite(short["extrapolated_share"][0, 0, :, 0]).all()
    found = short["found_share"][0, ..., 0].values
    layer, head = np.unravel_index(np.nanargmax(found), (2, 4))
    words = describe(short)[0]
    assert f"The best head, {layer}.{head}, finds" in words or "none of" in words


@pytest.mark.thorough
def test_an_induction_head_first_shows_a_key_after_a_copy(browser, bundled, tmp_path):
    model, tokenizer = bundled
    text = torch.randint(5, 90, (6, 60), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([text[0, :20], text[0, :20]])
    profile = rl.profile(model, text, excerpts=[ids], tokenizer=tokenizer, surrogates=0)
    heads = profile["induction"].values
    layer, head = np.unravel_index(heads.argmax(), heads.shape)
    with Opened(browser, rl.write_report(profile, tmp_path / "page.html")) as opened:
        page = opened.at(f"#L{layer}H{head}&tab=pair")
        query = int(page.input_value("#pair-query"))
        key = int(page.input_value("#pair-key"))
        assert ids[key - 1] == ids[query]
        assert key <= query
