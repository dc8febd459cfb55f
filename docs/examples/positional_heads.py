"""Which heads of the bundled checkpoint are positional, and through which wavelengths?

A positional head chooses its keys by position, and a semantic head chooses them by content. The
attention budget splits the bits of this choice. The strongest plane of a head pushes it hardest
toward its keys. `top_wavelength` is its wavelength in tokens, and `top_share` is its share of
the push.
"""

import ropelens as rl

analysis = rl.analyze("bundled", options=rl.Options(context=256, sequences=24))
heads = analysis.heads

positional = heads[heads["label"] == "positional"].sort_values("positional_fraction")
columns = ["layer", "head", "confidence", "positional_fraction", "offset"]
columns += ["top_wavelength", "top_share"]
print(positional[columns].iloc[::-1].round(2).to_string(index=False))
print()
claim = heads.attrs["claim"]
print(f"Positional heads use shorter wavelengths: {claim['verdict']} ({claim['why']})")

rl.plot_head_map(analysis.profile, heads).write_html("head_map.html")
