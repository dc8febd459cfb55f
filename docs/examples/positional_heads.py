"""Which heads of the bundled checkpoint are positional, and through which wavelengths?

A positional head chooses its keys by where they stand, a semantic one by what they are. The
budget splits the bits in that choice; `mean_wavelength`, in tokens, is that of the planes that
push the head toward its keys.
"""

import ropelens as rl

model, tokenizer = rl.load("bundled")
documents = rl.read_documents([rl.sample_path()])
text = rl.tokenize(documents, tokenizer, context=256, sequences=24)

profile = rl.profile(
    model,
    text.tokens,
    lengths=text.lengths,
    documents=text.documents,  # which are drawn again for the confidence of labels
    tokenizer=tokenizer,
)
heads = rl.classify_heads(profile)

positional = heads[heads["label"] == "positional"].sort_values("positional_fraction")
columns = ["layer", "head", "confidence", "positional_fraction", "offset", "mean_wavelength"]
print(positional[columns].iloc[::-1].round(2).to_string(index=False))
print()
print(heads.groupby("label")["mean_wavelength"].median().round().to_string())

rl.plot_head_map(profile, heads).write_html("head_map.html")
