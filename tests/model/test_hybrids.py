"""Hybrid models, in which only some layers attend, and vision models, match transformers."""

from pathlib import Path

import families
import numpy as np
import pytest
import torch
from oracles.tiny import sighted
from tiny_checkpoints import save_tiny
from transformers import AutoModelForImageTextToText, PreTrainedModel

import ropelens as rl
from ropelens.analysis.options import Options
from ropelens.analysis.plan import plan_analysis
from ropelens.errors import BadArgument

HYBRIDS = (
    *("Qwen3_5", "Qwen3Next", "Lfm2", "Lfm3", "FalconH1", "Bamba", "GraniteMoeHybrid"),
    *("MiniMax", "OlmoHybrid"),
)
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
TOKENS = torch.randint(3, 39, (4, 24), generator=torch.Generator().manual_seed(0))


def attend_alike(model: PreTrainedModel, plain: PreTrainedModel) -> list[int]:
    seen = rl.capture(model, TOKENS[0])
    layers = sorted(set(seen["layer"].values.tolist()))
    with torch.no_grad():
        given = plain(TOKENS[:1], output_attentions=True, use_cache=False).attentions
    theirs = [x for x in given if x is not None and x.shape[-1] == TOKENS.shape[1]]
    assert len(theirs) == len(layers)
    np.testing.assert_allclose(seen["attention"], torch.cat(theirs, 1)[0], atol=1e-5)
    return layers


@pytest.mark.thorough
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_of_a_hybrid_that_attend_are_measured(name: str):
    model = families.tiny(f"{name}ForCausalLM")
    layers = attend_alike(model, model)
    kinds = model.config.get_text_config().layer_types
    assert layers == [n for n, kind in enumerate(kinds) if "linear" not in kind != "conv"]
    rope = rl.measure_rope(model)
    assert rope["residual"].notnull().values.nonzero()[0].tolist() == layers
    assert rope["inv_freq"].notnull().any("frequency").values.nonzero()[0].tolist() == layers
    last = int((rope["inv_freq"] > 0).sum("frequency").max()) - 1
    with torch.no_grad():
        with rl.edit_rope(model, rl.stop(rl.PlaneNumbers((last,)))):
            edited = model(TOKENS, use_cache=False).logits
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("inv_freq") and len(buffer) > last:
                buffer[last] = 0
        plain = model(TOKENS, use_cache=False).logits
    torch.testing.assert_close(edited, plain, rtol=1e-5, atol=1e-4)


def test_layers_that_do_not_attend_are_empty_in_all_results():
    model = families.tiny("Lfm2ForCausalLM")
    profile = rl.profile(model, TOKENS, surrogates=2)
    for name in ("q_norm", "selectivity", "induction", "total_bits", "excerpt_attention"):
        by_layer = profile[name].notnull().any([d for d in profile[name].dims if d != "layer"])
        assert by_layer.values.tolist() == [False, True, False, True], name
    assert profile["layer_type"].values.tolist() == ["recurrent", "full"] * 2
    grey = [x for x in rl.plot_head_map(profile).data if x.name == "no attention"]
    assert np.isnan(grey[0].z).all(1).tolist() == [False, True, False, True]
    assert set(grey[0].customdata[0]) == {"recurrent"}
    heads = rl.classify_heads(profile)
    assert heads["layer"].tolist() == [1] * 4 + [3] * 4
    swept = rl.truncate(model, TOKENS, keep=[1, 0.5], controls=0, measures=["change", "labels"])
    assert swept["attention_change"][:, [0, 2]].isnull().all()
    assert (swept["attention_change"][1:, [1, 3]] > 0).all()
    found_share = rl.reach(model, TOKENS, copies=[48])["found_share"]
    reached = found_share.notnull().any(("variant", "run_distance"))
    assert reached.all("head").values.tolist() == [False, True, False, True]
    edits = {"dropped": rl.drop(rl.Slowest(1.0)), "nope": "nope"}
    losses = rl.evaluate(model, TOKENS, edits=edits, measures=["loss"])["mean_loss"].values
    assert len(set(losses.round(6))) == 3
    assert set(rl.capture(model, TOKENS[0], heads="*.1")["head"].values) == {"1.1", "3.1"}
    for heads in ("0.1", "0.*", "1.0,2.3"):
        with pytest.raises(BadArgument, match=r"(?s)has no head .*attend\)"):
            rl.capture(model, TOKENS[0], heads=heads)
        with pytest.raises(BadArgument, match=r"has no head .*that rotates"):
            plan_analysis(model, TOKENS, Options(), truncation={"heads": heads})


@pytest.mark.parametrize("name", SEEING)
def test_a_vision_model_is_loaded_and_measured_on_text(name: str, tmp_path: Path):
    folder = save_tiny(tmp_path)
    sighted(name).save_pretrained(folder)
    loaded, tokenizer = rl.load(folder)
    plain = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    assert attend_alike(loaded, plain.eval()) == [0, 1]
    assert tokenizer is not None
    assert rl.profile(loaded, TOKENS, surrogates=2)["total_bits"].notnull().all()
    assert rl.measure_rope(loaded).sizes["frequency"] == 8
