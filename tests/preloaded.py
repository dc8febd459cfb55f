"""Modules that the processes of `forked` have imported, first of all ropelens."""

import gc
import sys

gc.disable()

BEFORE = {"torch", "transformers", "transformer_lens"} & {*sys.modules}
"""Slow modules that are imported by ropelens with its figures and pages."""

import ropelens.train.run  # noqa: E402

gc.freeze()
gc.enable()
