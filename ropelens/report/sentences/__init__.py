"""Results as sentences with numbers. Each file describes one kind of results."""

import pandas as pd
import xarray as xr

from ropelens.arguments import public
from ropelens.claims.classify import classify_heads
from ropelens.comparison.summary import summarize_comparison
from ropelens.interventions.truncation_table import summarize_truncation
from ropelens.profiles.measures import complete_profile
from ropelens.report.sentences.comparison import comparison_sentences
from ropelens.report.sentences.heads import heads_sentences
from ropelens.report.sentences.profile import (
    attention_sentences,
    idle_sentence,
    kinds_sentence,
)
from ropelens.report.sentences.reach import reach_sentences
from ropelens.report.sentences.results import (
    attribution_sentences,
    capture_sentences,
    evaluation_sentences,
    patch_sentences,
)
from ropelens.report.sentences.truncation import sweep_sentences


@public
def describe(results: xr.Dataset | pd.DataFrame) -> list[str]:
    """Describe results in sentences with numbers. The most important sentence comes first.

    `results` is a profile, a table of heads, or a result of `truncate`, `reach`, `compare`,
    `evaluate`, `capture`, `attribute_planes` or `patch_each`.
    """
    if isinstance(results, pd.DataFrame):
        return heads_sentences(results)
    results = complete_profile(results)
    match results.attrs.get("kind"):
        case "truncation":
            return sweep_sentences(results, summarize_truncation(results))
        case "reach":
            return reach_sentences(results)
        case "comparison":
            return comparison_sentences(results, summarize_comparison(results))
        case "evaluation":
            return evaluation_sentences(results)
        case "attribution":
            return attribution_sentences(results)
        case "patches":
            return patch_sentences(results)
        case "capture":
            return capture_sentences(results)
    return _profile_sentences(results)


def _profile_sentences(profile: xr.Dataset) -> list[str]:
    sentences = heads_sentences(classify_heads(profile))
    sentences += attention_sentences(profile)
    sentences += [kinds_sentence(profile), idle_sentence(profile)]
    return [sentence for sentence in sentences if sentence]
