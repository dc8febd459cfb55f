"""What was found, in about five lines: how a command ends."""

from __future__ import annotations

import pandas as pd

from ropelens.analysis.analysis import Analysis
from ropelens.report.truncation_words import describe_truncation
from ropelens.report.words import (
    claim_sentence,
    describe_attention_on,
    headline,
    where_positional,
)

MOST = 5
BITS_OF = {"positional": "position_bits", "semantic": "content_bits", "sink": "sink_bits"}
"""The bits that give a head each label, and by which the strongest is told."""


def summarize(analysis: Analysis) -> list[str]:
    """How many heads do what, the verdict of the claim, the strongest, the main change."""
    heads, swept = analysis.heads, analysis.truncation
    lines = [headline(heads), claim_sentence(heads.attrs.get("claim")), strongest_heads(heads)]
    if swept is None:
        lines.append(where_positional(heads))
    else:
        lines += describe_truncation(swept, table=analysis.truncation_table)[:2]
    searched = describe_attention_on(analysis.profile)
    most = max(2, MOST - len(searched))  # the verdict among them
    return [*[line for line in lines if line][:most], *searched]


def strongest_heads(heads: pd.DataFrame) -> str:
    """The head of each label with most bits of its kind; "" where there is none."""
    found = []
    for label, column in BITS_OF.items():
        own = heads[heads["label"] == label]
        if len(own):
            row = own.iloc[int(own[column].to_numpy().argmax())]
            of_all = f"{row[column]:.2f} of {row['total_bits']:.2f} bits"
            at = "" if pd.isna(row["offset"]) else f", offset {row['offset']:.0f}"
            found.append(f"{label} {row['layer']}.{row['head']} ({of_all}{at})")
    return f"Strongest heads: {'; '.join(found)}." if found else ""
