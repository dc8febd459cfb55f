"""ropelens: how a language model uses the frequencies of its rotary position embedding.

    import ropelens as rl
    model, tokenizer = rl.load("bundled")
    text = rl.tokenize(documents, tokenizer, context=512)
    profile = rl.profile(model, text)
    heads = rl.classify_heads(profile)

__init__.pyi lists the public names. They are imported when first used, so that
`ropelens --help` does not wait for torch. When transformers is imported, before or after
ropelens, the rope types that only ropelens knows are registered.
"""

import lazy_loader
import wrapt

from ropelens.compatibility import refuse_old_transformers

refuse_old_transformers()

wrapt.register_post_import_hook(
    "ropelens.rope.rope_types:register", "transformers.modeling_rope_utils"
)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
