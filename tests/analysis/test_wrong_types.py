"""Types that no function takes, and arrays, from a script, where nothing else checks them."""

from __future__ import annotations

import json
import subprocess
import sys

CALLS = {
    "rl.profile('bundled', tokens)": "A model that is loaded is needed here.",
    "rl.capture(None, 'a fox', tokenizer=tokenizer)": "A model that is loaded is needed here.",
    "rl.evaluate(5, tokens, edits={})": "A model that is loaded is needed here.",
    "rl.reach('bundled', tokens)": "A model that is loaded is needed here.",
    "rl.truncate('bundled', tokens)": "A model that is loaded is needed here.",
    "rl.analyze(model, 5)": "The text is a document, a Path, a list of these, or tokens.",
    "rl.analyze(model, [5])": "The text is a document, a Path, a list of these, or tokens.",
    "rl.analyze(model, b'abc')": "The text is a document, a Path, a list of these, or tokens.",
    "rl.profile(model, tokens, seed='x')": "seed is 'x'; it is a whole number.",
    "rl.evaluate(model, tokens, edits={}, seed=None)": "seed is None; it is a whole number.",
    "rl.reach(model, tokens, seed=[1])": "seed is [1]; it is a whole number.",
    "rl.evaluate(model, tokens, edits={}, retrieval=5)": "retrieval says what needles to look "
    "for.",
    "rl.evaluate(model, tokens, measures=5)": "There is no measure 5.",
    "rl.evaluate(model, tokens, measures=['copying'], distances=[10**9])": "Distances of "
    "copies are whole numbers of tokens, 2 or more.",
    "rl.evaluate(model, tokens, distances=[8])": "distances are those of copies, which are "
    "not measured.",
    "rl.Retrieval(lengths=64)": "A prompt that hides needles has 32 tokens or more.",
    "rl.Retrieval(trials='x')": "trials must be a whole number, 1 or more.",
    "rl.profile(model, tokens, surrogates='x')": "surrogates must be a whole number, 0 or "
    "more.",
    "rl.reach(model, tokens, resamples='x')": "resamples must be a whole number, 0 or more.",
    "rl.reach(model, tokens, variants=5)": "No RoPE variant is called '5'.",
    "rl.profile(model, tokens, excerpts=5)": "excerpts lists sequences of tokens.",
    "rl.truncate(model, tokens, keep=['x'])": "A kept share of the planes lies between 0 "
    "and 1.",
    "rl.truncate(model, tokens, keep=None)": "keep lists shares of the planes.",
    "rl.profile(model, tokens, tokenizer='x')": "Tokens are named by the tokenizer of the "
    "model.",
    "rl.classify_heads(None)": "This is no profile, or one of an earlier version.",
    "rl.PlaneNumbers(3)": "Planes are listed by their numbers.",
    "rl.PlaneNumbers('')": "Planes are listed by their numbers.",
    "rl.Wavelengths('x')": "A range of wavelengths goes from a low to a higher one, in tokens.",
    "rl.stop_slowest(None)": "A fraction of the planes is a number from 0 to 1.",
    "rl.truncate(model, tokens, keep=(x for x in [0.5]))": "keep lists shares of the planes.",
    "rl.truncate(model, tokens, keep=np.array(0.5))": "keep lists shares of the planes.",
    "rl.truncate(model, tokens, ends=(x for x in ['slow']))": "ends lists ends of the planes.",
    "rl.truncate(model, tokens, seed='x')": "seed is 'x'; it is a whole number.",
    "rl.PlaneNumbers(n for n in (0, 1))": "Planes are listed by their numbers.",
    "rl.stop_planes(5)": "Planes are listed by their numbers.",
    "rl.stop_planes('')": "Planes are listed by their numbers.",
    "rl.stop(rl.Every)": "An edit is of planes.",
    "rl.rescale([0.1] * 16, select=0)": "An edit is of planes.",
    "rl.rescale([10**400] * 16)": "inv_freq is a list of finite frequencies, one for every "
    "plane.",
    "rl.rescale([0.1] * 16, attention_factor=10**400)": "attention_factor is a number above 0.",
    "rl.mean_ablate('x')": "These are no means of queries and keys.",
    "rl.capture(model, [1, 2, 3], heads='3.4', tokenizer=5)": "Tokens are named by the "
    "tokenizer of the model.",
    "rl.stack([1])": "There is nothing to stack.",
    "rl.variant_config(model.config, 5)": "No RoPE variant is called '5'.",
    "rl.stop('x')": "An edit is of planes.",
    "rl.rescale('x')": "inv_freq is a list of finite frequencies, one for every plane.",
    "rl.truncate(model, tokens, ends='slow')": "ends lists ends of the planes.",
}
SCRIPT = """
import json, sys
import numpy as np
import ropelens as rl
import torch
import xarray as xr
model, tokenizer = rl.load("bundled")
tokens = torch.arange(16)[None]
said = {}
for call in json.load(sys.stdin):
    try:
        said[call] = str(eval(call))
    except rl.RopelensError as error:
        said[call] = error.what
    except Exception as error:
        said[call] = repr(error)
read = rl.tokenize("a fox " * 20, tokenizer, context=8)
rl.analyze(model, read.tokens.numpy(), lengths=read.lengths, tokenizer=tokenizer)
needles = rl.Retrieval(lengths=np.array([32]), depths=np.array([0.1, 0.5]), trials=np.int64(1))
asked = {"measures": ["copying", "retrieval"], "distances": np.array([8, 16])}
rl.evaluate(model, tokens, retrieval=needles, seed=np.int64(3), **asked)
rl.classify_heads(rl.profile(model, tokens, surrogates=2), seed=np.int64(3))
few = {"measures": ["loss"], "controls": 1, "seed": np.int64(-3)}
ends = np.array(["slow"])
assert rl.truncate(model, tokens, keep=np.float32([0.5]), ends=ends, **few).sizes["edit"] == 3
planes = (rl.PlaneNumbers({0, 1}), rl.PlaneNumbers(torch.tensor([0, 1])))
shares = (rl.Slowest(np.array(0.25)), rl.Fastest(np.float16(0.25)))
bands = (rl.Wavelengths(5, np.float64(50)), rl.Wavelengths(torch.tensor(5.0), np.int64(50)))
assert rl.Slowest(np.float32(0.6)) == rl.Slowest(0.6)
longer = rl.rescale([0.1] * 16, attention_factor=torch.tensor(1.2))
for select in (*planes, *bands, *shares):
    with rl.edit_rope(model, longer, rl.stop(select)):
        model(tokens[:, :8])
table = tokens.numpy()
for same in (table[::-1, ::-1], xr.DataArray(table), list(tokens)):
    rl.evaluate(model, same, edits={}, measures=["loss"])
rl.reach(model, tokens, heads="4.4", rows="auto", distances=[2], variants="own")
print(json.dumps(said))
"""


def test_each_is_refused_in_words() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        input=json.dumps(list(CALLS)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == CALLS
