"""ropelens: how a language model uses the frequencies of its rotary position embedding.

    import ropelens as rl
    model, tokenizer = rl.load("bundled")
    profile = rl.profile(model, tokens)
    heads = rl.classify_heads(profile)

The public names stand in __init__.pyi and are imported when first used, so that
`ropelens --help` does not wait for torch. transformers is told of the rope types that only
ropelens knows when it is imported, before or after this.
"""

import lazy_loader
import wrapt

wrapt.register_post_import_hook(
    "ropelens.rotation.variant_config:register", "transformers.modeling_rope_utils"
)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
