"""What does the model lose when its slowest planes, or its fastest, no longer rotate?

The model was trained with all planes rotating. A plane that no longer rotates still tells what
a token is, but not where it is: the loss shows what the rotation was used for.
"""

import ropelens as rl

analysis = rl.analyze("bundled", options=rl.Options(context=256, sequences=24))
model, text = analysis.model, analysis.sequences

edits = {
    "slowest quarter": rl.stop_slowest(0.25),  # p-RoPE with p = 0.75
    "slowest half": rl.stop_slowest(0.5),
    "fastest quarter": rl.stop(rl.Fastest(0.25)),
    "all": "nope",
}
found = rl.evaluate(
    model,
    text.tokens,
    lengths=text.lengths,
    documents=text.documents,  # which standard errors are over
    edits=edits,
    measures=["loss", "change"],
)
table = found[["mean_loss", "mean_loss_se"]].to_dataframe()
table["attention_change"] = found["attention_change"].mean(["layer", "head"])  # bits
print(table.round(3).to_string())

# Inside the block, everything that runs the model runs the edited one.
with rl.edit_rope(model, rl.stop_slowest(0.25, heads="4.*")):
    wavelength = rl.measure_rope(model)["wavelength"]
print()
print(wavelength.round().to_pandas().loc[[3, 4], 10:].to_string())  # tokens; inf: no rotation
