"""Sentences about the verdicts on claims, for one model or for several models."""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from ropelens.claims.claims import CLAIMS
from ropelens.claims.verdict import VERDICTS
from ropelens.figures.formats import in_words
from ropelens.report.sentences.wording import is_or_are, one_line
from ropelens.runtime.run_record import read_record

TABLE_COLUMNS = (
    "null_low to null_high: the middle 95% of the null, which shows the effect of chance "
    "and geometry. q_value: among claims with this q or a lower q, the expected share that "
    "holds only by chance. number (a share, a correlation or a count, unless a unit is "
    "named):"
)
"""The meaning of columns, above the table that a terminal shows."""


def claims_sentences(
    table: pd.DataFrame, folders: Mapping[str, str] | None = None
) -> list[str]:
    """Sentences that count verdicts; with `folders` of models, also about missing claims."""
    several = table["model"].nunique() > 1
    sentences = []
    for model, rows in table.groupby("model", sort=False):
        sentences += _model_sentences(rows, f" in {model}" if several else "")
    if several:
        sentences.insert(0, _models_sentence(table))
    if folders is not None:
        sentences.insert(1, _left_out_sentence(table, folders))
    return [one_line(sentence) for sentence in sentences if sentence]


def shown_statement(row: Mapping[Any, Any]) -> str:
    """The statement of a claim, with the kind of layers if it is tested within kinds."""
    layer_type = row.get("layers", "all")
    if layer_type == "all":
        return row["statement"]
    return f"{row['statement']} ({layer_type} layers)"


def _model_sentences(rows: pd.DataFrame, where: str) -> list[str]:
    """Sentences about the claims of one model; `where` is " in" and its name, or ""."""
    sentences = [_counts_sentence(rows, where), _contradicted_sentence(rows, where)]
    if "robust" in rows and rows["robust"].notna().any():
        sentences.append(_settings_sentence(rows, where))
    return sentences


def _counts_sentence(rows: pd.DataFrame, where: str) -> str:
    parts = []
    for verdict in VERDICTS:
        count = int((rows["verdict"] == verdict).sum())
        if count:
            parts.append(f"{count} {_verb(verdict, count)}")
    tests = int(rows["verdict"].isin(VERDICTS).sum())
    claims = rows["claim"].nunique()
    tested = "" if tests == claims else f"tests of {claims} "
    return f"Of {tests} {tested}claims{where}, {in_words(parts)}."


def _verb(verdict: str, count: int) -> str:
    """The verdict as the verb of this many claims: "hold", "are unresolved"."""
    if verdict == "holds":
        return "holds" if count == 1 else "hold"
    return f"{is_or_are(count)} {verdict}"


def _contradicted_sentence(rows: pd.DataFrame, where: str) -> str:
    contradicted = rows[rows["verdict"] == "contradicted"].to_dict("records")
    if not contradicted:
        return ""
    return f"Contradicted{where}: {'; '.join(map(shown_statement, contradicted))}."


def _settings_sentence(rows: pd.DataFrame, where: str) -> str:
    """Verdicts that are the same in all settings, and settings that were omitted."""
    same = int((rows["robust"] == 1).sum())
    sentences = [f"{same} of {len(rows)} verdicts{where} are the same in all settings."]
    reversed_claims = _distinct(rows["claim"][rows["reversed"].astype(bool)])
    if reversed_claims:
        sentences.append(
            "Contradicted in most settings (reversed): "
            + ", ".join(reversed_claims)
            + "."
        )
    omitted = []
    has_other = rows["other"].astype(bool)
    if rows["settings"][has_other].nunique(dropna=False) > 1:
        omitted.append("shorter contexts for claims that need more runs of the model")
    single = _distinct(rows["claim"][~has_other])
    if single:
        omitted.append(f"another statistic for {in_words(single)}")
    if omitted:
        sentences.append(f"Omitted: {'; '.join(omitted)}.")
    return " ".join(sentences)


def _models_sentence(table: pd.DataFrame) -> str:
    """How many claims hold in each model, the largest number first."""
    total = table["claim"].nunique()
    held: dict[str, int] = {}
    tested: dict[str, int] = {}
    for name, rows in table.groupby("model", sort=False):
        held[str(name)] = _held_claims(rows)
        tested[str(name)] = rows["claim"].nunique()
    parts: list[str] = []
    for model in sorted(held, key=lambda model: -held[model]):
        count = str(held[model]) if held[model] else "none"
        if not parts:
            count = f"{count} {'holds' if held[model] == 1 else 'hold'}"
        fewer = ""
        if tested[model] < total:
            fewer = f" (where only {tested[model]} were tested)"
        by_kind = _kinds_words(table[table["model"] == model])
        parts.append(f"{count} in {model}{fewer}{by_kind}")
    return f"Of {total} claims, {in_words(parts)}."


def _kinds_words(rows: pd.DataFrame) -> str:
    """How many claims hold in each kind of layers, in brackets; "" for one kind."""
    if "layers" not in rows:  # an early ledger
        return ""
    by_kind = rows[rows["layers"] != "all"]
    counts = []
    for kind, of_kind in by_kind.groupby("layers", sort=False):
        held = int((of_kind["verdict"] == "holds").sum())
        counts.append(f"{held} of {len(of_kind)} in {kind} layers")
    if not counts:
        return ""
    return f" (tested apart: {in_words(counts)})"


def _held_claims(rows: pd.DataFrame) -> int:
    """Number of claims that hold in all kinds of layers in which they can be tested."""
    testable = rows[rows["verdict"] != "not testable"]
    holds = (testable["verdict"] == "holds").groupby(testable["claim"]).all()
    return int(holds.sum())


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _left_out_sentence(table: pd.DataFrame, folders: Mapping[str, str]) -> str:
    """The claims that were not tested, and commands that test them; "" if there are none."""
    names: list[str] = []
    commands: list[str] = []
    for model, tested in table.groupby("model")["claim"]:
        missing = [c.name for c in CLAIMS if c.name not in set(tested)]
        if missing:
            names += missing
            folder = folders.get(str(model))
            commands.append(_command(folder))
    if not names:
        return ""
    return (
        "Left out, because they need more runs of the model: "
        f"{in_words(_distinct(names))}. To test them: {'; '.join(_distinct(commands))} "
        "(with your MODEL and FILE)."
    )


def _command(folder: str | None) -> str:
    """The command that tests all claims on the model of a ledger. No folder names a model."""
    if folder is None:
        return "ropelens claims MODEL --text FILE"
    record = read_record(folder)
    if record.get("kind") == "claims":
        return "ropelens claims MODEL --text FILE"
    model = " --model MODEL" if record else ""
    return f"ropelens claims {shlex.quote(folder)}{model} --text FILE"
