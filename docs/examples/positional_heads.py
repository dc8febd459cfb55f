"""Which heads of the bundled checkpoint are positional, and through which wavelengths?

A positional head chooses its keys by where they stand, a semantic one by what they are. The
budget splits the bits in that choice; `top_wavelength`, in tokens, is that of the plane that
pushes the head hardest toward its keys, `top_share` the plane's share of that push.
"""

import ropelens as rl

model, tokenizer = rl.load("bundled")
documents = rl.read_documents([rl.sample_path()])
text = rl.tokenize(documents, tokenizer, context=256, sequences=24)

profile = rl.profile(
    model,
    text.tokens,
    lengths=text.lengths,
    documents=text.documents,  # intervals draw documents again, not sequences
    tokenizer=tokenizer,
)
heads = rl.classify_heads(profile)

positional = heads[heads["label"] == "positional"].sort_values("positional_fraction")
columns = ["layer", "head", "confidence", "positional_fraction", "offset"]
columns += ["top_wavelength", "top_share"]
print(positional[columns].iloc[::-1].round(2).to_string(index=False))
print()
claim = heads.attrs["claim"]
print(f"Positional heads use shorter wavelengths: {claim['verdict']} ({claim['why']})")

rl.plot_head_map(profile, heads).write_html("head_map.html")
