"""How much does the loss rise if the slowest or the fastest planes no longer rotate?

The model was trained with all planes rotating. A plane that no longer rotates still carries the
content of a token but not its position. The loss shows how much the model needs the rotation.
"""

import ropelens as rl

analysis = rl.analyze("bundled", options=rl.Options(context=256, sequences=24))
model, text = analysis.model, analysis.text

edits = {
    "slowest quarter": rl.stop_slowest(0.25),  # p-RoPE with p = 0.75
    "slowest half": rl.stop_slowest(0.5),
    "fastest quarter": rl.stop(rl.Fastest(0.25)),
    "all": "nope",
}
results = rl.evaluate(model, text, edits=edits, measures=["loss", "change"])
table = results[["mean_loss", "mean_loss_se"]].to_dataframe()
table["attention_change"] = results["attention_change"].mean(["layer", "head"])  # bits
print(table.round(3).to_string())

# Inside the block, every run of the model uses the edited rotation.
with rl.edit_rope(model, rl.stop_slowest(0.25, heads="4.*")):
    wavelength = rl.measure_rope(model)["wavelength"]
print()
print(
    wavelength.round().to_pandas().loc[[3, 4], 10:].to_string()
)  # tokens; inf: no rotation
