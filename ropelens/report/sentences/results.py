"""Sentences about a prompt, and about results of evaluate, attribute_planes and capture."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from ropelens.figures.formats import number, plural, short_count, signed, visible_token
from ropelens.interventions.changes import changes_of_edits
from ropelens.interventions.top_planes import top_planes
from ropelens.report.sentences.wording import change_in, one_line, percent

NAMED_PLANES = 5
NAMED_HEADS = 4


def prompt_sentence(facts: Mapping[str, Any]) -> str:
    """The likeliest token after a prompt, and the difference of logits that a page explains.

    `facts` are the facts of `PromptResults`. `versus` is "" without another prompt.
    """
    other = ""
    if facts["versus"]:
        other = f" (after “{facts['versus']}” it is {signed(facts['source_answer'])})"
    return one_line(
        f"After “{facts['prompt']}”, the likeliest next token is “{facts['next']}” "
        f"({percent(facts['share'])}). This page explains the logit of "
        f"“{facts['first']}” minus the logit of “{facts['second']}”: "
        f"{signed(facts['answer'])}{other}."
    )


def evaluation_sentences(results: xr.Dataset) -> list[str]:
    """The changes of each edit, without its controls."""
    table = changes_of_edits(results).iloc[1:]
    edits = plural(len(table), "edit")
    verb = "was" if len(table) == 1 else "were"
    parts = [f"{edits} {verb} compared with the unmodified model."]
    for row in table.to_dict("records"):
        if row.get("control_of"):
            continue
        if "loss_change" in row:
            loss = change_in(row, "loss_change").in_words(" nats/token")
            parts.append(f"Under {row['edit']}, the loss changes by {loss}.")
        if "induction_change" in row:
            score = change_in(row, "induction_change").in_words()
            parts.append(
                f"Under {row['edit']}, the induction score changes by {score}."
            )
    return [one_line(" ".join(parts))]


def attribution_sentences(results: xr.Dataset) -> list[str]:
    """The planes with the largest attribution, and the check of their effects."""
    planes = []
    for row in top_planes(results, NAMED_PLANES).to_dict("records"):
        where = "its unrotated part"
        if not np.isnan(row["wavelength"]):
            where = f"wavelength {short_count(row['wavelength'])}"
        planes.append(f"head {row['head']} at {where} ({signed(row['attribution'])})")
    sentences = []
    if planes:
        sentences.append(
            f"The answer is {signed(results.attrs['answer'])}. The planes with the largest "
            f"attribution to it are {', '.join(planes)}."
        )
    if "dropped" in results:
        wrong = results.attrs.get("wrong_signs", np.nan)
        rank = results.attrs.get("rank_correlation", np.nan)
        worst = results.attrs.get("worst", np.nan)
        sentences.append(
            "The planes with the largest attribution were also dropped, one at a time. The "
            f"rank correlation of attributions and effects is {number(rank)}, and {wrong} "
            f"of them {'has' if wrong == 1 else 'have'} the wrong sign. The largest error "
            f"of an attribution is {signed(worst)}."
        )
    return sentences


def patch_sentences(results: xr.Dataset) -> list[str]:
    """The head, layer or position whose patch changes the answer most."""
    change = results["change"]
    largest = change[abs(change).fillna(-1).argmax(...)]
    place = ", ".join(f"{dim} {largest[dim].item()}" for dim in change.dims)
    attrs = results.attrs
    sentence = (
        f"If the queries and keys of one {attrs['over']} come from the other prompt, "
        f"{place} changes the answer most, by {signed(largest.item())}. The answer is "
        f"{signed(attrs['answer'])}, and {signed(attrs['source_answer'])} for the other "
        "prompt."
    )
    return [one_line(sentence)]


def capture_sentences(results: xr.Dataset) -> list[str]:
    """The heads that attend most to one key, in the last row."""
    results = results.isel(prompt=0, missing_dims="ignore")
    tokens = [visible_token(str(token)) for token in results["key_token"].values]
    last = results["attention"].isel(query=-1)
    from_sharpest = np.argsort(-last.max("key").values)
    heads = []
    for index in from_sharpest[:NAMED_HEADS]:
        key = int(np.nanargmax(last.values[index]))
        share = number(float(last.values[index, key]), ".0%")
        heads.append(f"{last['head'].values[index]} ({share} on “{tokens[key]}”)")
    count = plural(results.sizes["head"], "head")
    sentence = (
        f"The capture has {count} on {len(tokens)} tokens. In the last row, "
        f"“{tokens[-1]}”, the sharpest heads are {', '.join(heads)}."
    )
    return [one_line(sentence)]
