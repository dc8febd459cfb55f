"""The modules whose signatures tests check, for every call: see shapes.py."""

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ropelens"
ROOMS = (
    "rope",
    "attention",
    "budget",
    "text",
    "checkpoints",
    "model",
    "measured_rotation",
    "profiles",
    "interventions",
    "claims",
    "comparison",
    "analysis",
)
# A check would hide the caller from the warnings of these modules.
WITH_WARNINGS = {
    "ropelens.profiles.profile",
    "ropelens.profiles.measurement",
    "ropelens.profiles.capture",
    "ropelens.profiles.token_sets",
    "ropelens.text.text",
    "ropelens.text.tokenize",
    "ropelens.interventions.silence",
    "ropelens.analysis.run_plan",
    "ropelens.analysis.options",
}
# Fits call these many times. Only `make test-slow` checks them.
IN_FITS = {"ropelens.budget.logit", "ropelens.budget.offsets", "ropelens.budget.solver"}


def modules_of_rooms() -> set[str]:
    modules = set()
    for room in ROOMS:
        for file in (PACKAGE / room).rglob("*.py"):
            place = file.relative_to(PACKAGE.parent).with_suffix("")
            modules.add(".".join(place.parts))
    return modules


def checked_modules() -> list[str]:
    if "slow" in sys.argv:  # workers get other arguments, but inherit the environment
        os.environ["ALL_SHAPES"] = "1"
    modules = modules_of_rooms() - WITH_WARNINGS
    if "ALL_SHAPES" not in os.environ:
        modules -= IN_FITS
    return sorted(modules)
