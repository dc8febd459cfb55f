"""Skips tests for features that an older version of a library lacks."""

from importlib.metadata import version

import families
import pytest
import transformers
from packaging.version import Version
from transformers import PreTrainedModel


def is_at_least(library: str, first: str) -> bool:
    return Version(version(library)) >= Version(first)


def skip_before(library: str, first: str, why: str) -> None:
    """Skip the test if the installed `library` is older than `first`."""
    if not is_at_least(library, first):
        skip_with_older(library, why)


def skip_with_older(library: str, why: str) -> None:
    pytest.skip(f"older version: {library} {version(library)} {why}")


def tiny_class(name: str) -> PreTrainedModel:
    """A tiny model of a class of transformers; skips the test if it has no such class."""
    if not hasattr(transformers, name):
        skip_with_older("transformers", f"has no {name}")
    return families.tiny(name)
