"""Which heads of the bundled checkpoint are positional, and through which wavelengths?

A positional head chooses its keys by position, a semantic one by content. The attention
budget splits the bits in that choice. `top_wavelength`, in tokens, belongs to the plane that
pushes the head hardest toward its keys, and `top_share` is that plane's share of the push.
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
