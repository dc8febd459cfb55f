"""Modules that the processes of `forked` have imported, first of all ropelens."""

import gc
import sys

gc.disable()
import ropelens  # noqa: E402
import ropelens.figures  # noqa: E402
import ropelens.report  # noqa: E402

BEFORE = {"torch", "transformers", "transformer_lens"} & {*sys.modules}
"""Slow modules that are imported by ropelens with its figures and pages."""

import ropelens.analysis.analyze  # noqa: E402
import ropelens.commands.app  # noqa: E402
import ropelens.train.run  # noqa: E402, F401

gc.freeze()
gc.enable()
