"""Sentences about compared runs or models. A group is a row of the table of a comparison."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.comparison.best import rank_groups
from ropelens.comparison.pairs import group_entries
from ropelens.figures.formats import in_words, mean_count, number, short_count
from ropelens.report.sentences.best import GroupChange, best_sentences
from ropelens.report.sentences.truncation import CHANCE
from ropelens.report.sentences.wording import Change, one_line


def comparison_sentences(comparison: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """Sentences about a comparison and its `table`, and the sentences of its author."""
    sentences = [sampled_sentence(comparison)]
    rankings = rank_groups(comparison, table)
    if rankings:
        sentences += best_sentences(comparison, rankings)
        sentences.append(_losses_sentence(comparison, table))
    else:
        sentences.append(_unpaired_losses_sentence(comparison, table))
    sentences.append(_unequal_runs_sentence(table))
    if "loss_past_context" in table and table["loss_past_context"].notna().any():
        sentences.append(_past_context_sentence(table))
    if "repeat_gain" in table:
        sentences.append(_repeats_sentence(table))
    sentences.append(_previous_token_sentence(table))
    sentences.append(_without_rotation_sentence(comparison, table))
    sentences.append(stopped_planes_sentence(table))
    unfinished = comparison.attrs.get("unfinished")
    if unfinished:
        sentences.append(f"These runs of the study are not finished: {unfinished}.")
    lead = str(comparison.attrs.get("lead", ""))
    findings = str(comparison.attrs.get("findings", "")).splitlines()
    written = [lead, *map(one_line, sentences)]
    return [sentence for sentence in written if sentence] + findings


def sampled_sentence(comparison: xr.Dataset) -> str:
    """The compared models that wrote the text; "" if there are none."""
    if "source" not in comparison.coords:
        return ""
    models = set(comparison["model"].values.tolist())
    sources = comparison["source"].values.astype(str)
    sampled = {source.rpartition(", sampled from ")[2] for source in sources}
    writers = sorted(models & sampled)
    if len(models) < 2 or not writers:
        return ""
    text = "The text" if len(set(sources)) == 1 else "A text of this comparison"
    return (
        f"{text} was sampled from {', '.join(writers)}. Every comparison favours a model "
        "on its own text: compare on text that no compared model wrote."
    )


def _losses_sentence(comparison: xr.Dataset, table: pd.DataFrame) -> str:
    """The changes of the loss from the baseline, the smallest change first."""
    changes = _changes(table, "loss_change", "low", "high", over=table["over"])
    changes = [change for change in changes if change.change.measured]
    changes.sort(key=lambda change: change.change.value)
    listed = "; ".join(change.in_words() for change in changes)
    sentence = (
        f"Change of the loss from {comparison.attrs['baseline']}, in nats per token with "
        f"95% intervals: {listed}."
    )
    if all(change.over != "sequences" for change in changes):
        return sentence
    return (
        f"{sentence} An interval over the text of one seed does not include the variation "
        "between training runs."
    )


def _unpaired_losses_sentence(comparison: xr.Dataset, table: pd.DataFrame) -> str:
    """The loss of each group, and the reason why there are no differences."""
    losses = f"The loss is {_by_group(table, 'loss', '.3f')} nats per token"
    if "bits_per_byte" in table and not np.isnan(table["bits_per_byte"].iloc[0]):
        bits = _by_group(table, "bits_per_byte", ".3f")
        losses = f"{losses}, and {bits} bits per byte of text"
    baseline = comparison.attrs["baseline"]
    reason = f"no other model read the same tokens as {baseline}"
    if "context" in comparison.attrs:
        reason = (
            f"no run of another variant has the size and seed of a run of {baseline}"
        )
    return f"{losses}. There are no paired differences, because {reason}."


def _unequal_runs_sentence(table: pd.DataFrame) -> str:
    """How means and changes differ if groups have different numbers of runs; "" otherwise."""
    if table["entries"].nunique() == 1:
        return ""
    return (
        f"The numbers of runs differ: {_by_group(table, 'entries', '.0f')}. A mean is over all "
        "runs of a group, and a change only over its pairs with the baseline, so a change may "
        "differ from the difference of two means."
    )


def _past_context_sentence(table: pd.DataFrame) -> str:
    losses = _by_group(table, "loss_past_context", ".2f")
    return (
        "Beyond the trained context, up to four times its length, the loss is "
        f"{losses} nats per token{_clear_changes(table, 'loss_past_context')}."
    )


def _repeats_sentence(table: pd.DataFrame) -> str:
    """The gain of repeats, and the share of needles that are found."""
    gains = _by_group(table, "repeat_gain", ".2f")
    shares = _by_group(table, "retrieval", ".1%")
    return (
        f"If random tokens are repeated, their loss falls by {gains} nats per token"
        f"{_clear_changes(table, 'repeat_gain')}. Share of needles whose value is "
        f"retrieved: {shares} (chance {number(CHANCE, '.1%')})"
        f"{_clear_changes(table, 'retrieval')}."
    )


def _previous_token_sentence(table: pd.DataFrame) -> str:
    heads = _counts_by_group(table, "previous_token_heads")
    first_layer = _counts_by_group(table, "previous_token_layer_0")
    return (
        "Heads with at least half of their attention on the previous token: "
        f"{heads}; in the first layer: {first_layer}."
    )


def _without_rotation_sentence(comparison: xr.Dataset, table: pd.DataFrame) -> str:
    """The groups in which no plane rotates; "" if there are none."""
    fastest = comparison["wavelength"].min(("layer", "frequency"))
    turns = fastest < np.inf  # False for NaN as well
    still = [group for group in table["group"] if not group_entries(turns, group).any()]
    if not still:
        return ""
    return (
        f"No plane rotates in {in_words(still)}. No head there can be positional through "
        "rotation, and positions that lower layers compute count as content."
    )


def stopped_planes_sentence(table: pd.DataFrame) -> str:
    """The wavelengths to which variants that stop planes limit their heads; "" if none do."""
    limits = []
    for row in table.to_dict("records"):
        stopped = row["stopped_planes"]
        if 0 < stopped < row["planes"]:
            shortest = short_count(row["shortest_wavelength"])
            longest = short_count(row["longest_wavelength"])
            limits.append(
                f"{row['group']} stops {stopped} of {row['planes']} planes, and the others "
                f"have wavelengths from {shortest} to {longest} tokens"
            )
    if not limits:
        return ""
    return (
        "A variant that stops planes limits the wavelengths that its heads can use: "
        f"{'; '.join(limits)}. A mean wavelength of its heads lies in this range, whatever "
        "the heads prefer."
    )


def _by_group(table: pd.DataFrame, column: str, form: str) -> str:
    """The numbers of a column as "3.412 (rope), 3.500 (nope)"."""
    pairs = zip(table[column], table["group"], strict=True)
    return ", ".join(f"{number(value, form)} ({group})" for value, group in pairs)


def _counts_by_group(table: pd.DataFrame, column: str) -> str:
    pairs = zip(table[column], table["group"], strict=True)
    return ", ".join(f"{mean_count(value)} ({group})" for value, group in pairs)


def _changes(
    table: pd.DataFrame, value: str, low: str, high: str, *, over: pd.Series
) -> list[GroupChange]:
    """The changes in three columns of the table, with their intervals `over` something."""
    return [
        GroupChange(
            group=row["group"],
            change=Change(row[value], row[low], row[high]),
            over=source,
            pairs=row["pairs"],
        )
        for row, source in zip(table.to_dict("records"), over, strict=True)
    ]


def _clear_changes(table: pd.DataFrame, name: str) -> str:
    """Words about changes of `name` whose interval excludes 0, and about missing intervals."""
    over = table["pairs"].gt(1).map({True: "seeds", False: "trials"})
    columns = (f"{name}_change", f"{name}_low", f"{name}_high")
    changes = _changes(table, *columns, over=over)
    paired = [change for change in changes if change.change.measured]
    known = [change for change in paired if change.change.low < change.change.high]
    clear = [change.in_words() for change in known if change.excludes_zero]
    baseline = table["group"].iloc[0]
    words = ""
    if clear:
        words = (
            f"; the 95% interval of the change from {baseline} excludes 0 for "
            f"{', '.join(clear)}"
        )
    elif known:
        words = f"; no 95% interval of a change from {baseline} excludes 0"
    return words + _missing_intervals(paired)


def _missing_intervals(changes: Sequence[GroupChange]) -> str:
    """Words about groups whose change has no interval.

    Shares of few needles may change alike in all pairs: then the interval has the width 0.
    """
    words = ""
    alike = [c.group for c in changes if c.change.low == c.change.high]
    if alike:
        units = "pairs" if any(change.pairs > 1 for change in changes) else "trials"
        words = f"; {', '.join(alike)}: no interval, because all {units} show the same change"
    single = [c.group for c in changes if np.isnan(c.change.low)]
    if single:
        words += f"; {', '.join(single)}: no interval, because there is only one pair"
    return words
