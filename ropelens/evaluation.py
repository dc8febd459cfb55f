"""What edits of the rotation do to a model: the same measures, on the same tokens, for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropelens.collect import Batch, Progress, batches, repeat_scores, token_losses
from ropelens.edit import Edit, edit_rope
from ropelens.errors import BadArgument
from ropelens.heads import Thresholds, label_heads, positional_fraction
from ropelens.models.doorway import AttentionEdit, by_itself, edit_attention, open_edit
from ropelens.models.rotation import read_layers
from ropelens.models.subject import Subject, as_subject, check_layers, trained_context
from ropelens.profiling import REPEATED_TOKENS, check_tokens, model_name, versions
from ropelens.rope.planes import Planes
from ropelens.statistics.bins import sum_bins
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.change import attention_change, without_values
from ropelens.statistics.ragged import stack
from ropelens.statistics.sums import LayerSums, LossSums, Sums, no_sums
from ropelens.summary import DESCRIBED as PROFILED
from ropelens.summary import summarize

MEASURES = ("loss", "induction", "retrieval", "change", "labels")
NONE = "none"
"""The entry of `edit` that is the model as it is."""

BITS = ("total_bits", "sink_bits", "position_bits", "content_bits")
OF_NONE = ("selectivity", "q_norm", "k_norm")
"""What is told of the model as it is only."""

DESCRIBED = {name: PROFILED[name] for name in (*BITS, *OF_NONE, "inv_freq", "wavelength")} | {
    "edit": ("name of the edit", ""),
    "layer": PROFILED["layer"],
    "head": PROFILED["head"],
    "kv_head": PROFILED["kv_head"],
    "frequency": PROFILED["frequency"],
    "predicted_tokens": ("tokens of the sequence that are predicted", "token"),
    "loss": ("mean loss of the sequence's predicted tokens", "nat/token"),
    "position_loss": ("mean loss of the tokens at the bin's positions", "nat/token"),
    "position_loss_se": ("its standard error over sequences", "nat/token"),
    "position_start": ("first position of the bin", "token"),
    "position_stop": ("first position beyond the bin", "token"),
    "induction": ("mean attention on the token after the earlier occurrence", "1"),
    "duplicate_token": ("mean attention on the earlier occurrence of the token", "1"),
    "first_loss": ("mean loss of random tokens, the first time", "nat/token"),
    "repeat_loss": ("mean loss of the same tokens, repeated", "nat/token"),
    "attention_change": ("divergence of the attention from that of the model as it is", "bit"),
    "label": ("label of the head", ""),
    "positional_fraction": ("share of position bits in position and content bits", "1"),
}


def evaluate(
    model: nn.Module,
    tokens: Int[Tensor, "sequence position"],
    *,
    lengths: Int[Tensor, " sequence"] | None = None,
    edits: Mapping[str, Edit | str | Sequence[Edit | str]] | None = None,
    measures: Sequence[str] = MEASURES,
    rows: int | Literal["all"] = "all",
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure `model` as it is and under each of `edits`, on the same tokens.

    `edits` names what `edit_rope` takes: an edit, the name of a variant such as
    "p-rope:0.75", or several together. The result's `edit` starts with "none", the model as
    it is (under what is open around the call); the others follow in order. Sequences, rows
    and random tokens are the same for all, so differences are paired. `tokens`, `lengths`,
    `rows` and `batch_size` are as for `profile`; sequences may be longer than the trained
    context. `progress` is told the tokens of each batch done, once for each entry.

    `measures` is any of:

    - "loss": `loss` (edit, sequence) in nats/token, `predicted_tokens` (sequence), and
      `position_loss` (edit, position_bin) with its standard error over sequences.
    - "induction": `induction` and `duplicate_token` (edit, layer, head), as in a profile,
      and the loss of the random tokens the first time and when repeated (edit, trial).
    - "change": `attention_change` (edit, layer, head) in bits, the mean over rows of
      KL(A of the model as it is || A under the edit).
    - "labels": the attention budget and `label` (edit, layer, head), with `Thresholds()`;
      `selectivity`, `q_norm` and `k_norm` of the model as it is. An edit under which heads of
      one layer rotate differently has no budget: its bits are NaN, its labels "".

    See docs/measures.md for definitions. All measures on the text come from one forward pass
    of an entry. The model is left as it was, on errors too.

    Raises `BadArgument` for measures, tokens, lengths, rows or edits out of range, and
    otherwise as `profile` and `edit_rope` do.
    """
    subject = as_subject(model)
    tokens = torch.as_tensor(tokens)
    whole = torch.full(tokens.shape[:1], tokens.shape[-1])
    lengths = whole if lengths is None else torch.as_tensor(lengths)
    check_tokens(tokens, lengths, rows, subject.model.config.get_text_config().vocab_size)
    if batch_size is not None and batch_size < 1:
        raise BadArgument("batch_size must be a number, 1 or more.", seen=repr(batch_size))
    wanted = _wanted(measures)
    own, entries = _entries(subject, model, edits or {}, context=int(lengths.max()))

    dataset = xr.Dataset(coords={"edit": np.array([e.name for e in entries], dtype=object)})
    if wanted & {"loss", "change", "labels"}:
        text = [_Text(entry, wanted, int(lengths.max())) for entry in entries]
        for batch in batches(
            subject, tokens, lengths, rows=rows, seed=seed, batch_size=batch_size
        ):
            _measure_batch(subject, batch, text, progress)
        dataset = dataset.assign(_label_text(text, lengths, wanted))
    if "induction" in wanted:
        found = _measure_repeats(subject, entries, own, int(tokens[0, 0]), seed)
        dataset = dataset.assign(found)
    dataset = dataset.assign_coords(
        {dim: range(dataset.sizes[dim]) for dim in ("layer", "head") if dim in dataset.sizes}
    )
    for name in set(dataset.variables):
        long_name, units = DESCRIBED[str(name)]
        dataset[name].attrs = {"long_name": long_name, "units": units}
    dataset.attrs = _facts(subject.model, tokens, lengths) | {"rows": rows, "seed": seed}
    return dataset


def _wanted(measures: Sequence[str]) -> set[str]:
    """The measures asked for; refuses those that do not exist."""
    names = (measures,) if isinstance(measures, str) else tuple(measures)
    unknown = [name for name in names if name not in MEASURES]
    if unknown or not names:
        raise BadArgument(
            f"There is no measure {unknown[0]!r}." if unknown else "Nothing is to be measured.",
            attempt=f"measures: any of {', '.join(MEASURES)}",
        )
    return set(names)


def _facts(model: PreTrainedModel, tokens: Tensor, lengths: Tensor) -> dict[str, str | int]:
    """What was measured, as a profile says it."""
    return {
        "model": model_name(model),
        "revision": str(model.config.to_dict().get("_commit_hash") or ""),
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": tokens.shape[1],
        "trained_context": trained_context(model),
        "sequences": len(tokens),
        "tokens": int(lengths.sum()),
        "versions": json.dumps(versions()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@dataclass(frozen=True)
class _Entry:
    """The model as it is, or under an edit; `planes` is None where heads of a layer differ."""

    name: str
    edit: AttentionEdit | None
    planes: list[Planes] | None

    def open(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """`model` is so while the block runs."""
        return nullcontext() if self.edit is None else edit_attention(model, self.edit)


def _entries(
    subject: Subject,
    model: nn.Module,
    edits: Mapping[str, Edit | str | Sequence[Edit | str]],
    *,
    context: int,
) -> tuple[list[Planes], list[_Entry]]:
    """How the model rotates by itself, and the entries, every edit checked and ready."""
    with by_itself(subject.model):
        own = [layer.planes for layer in read_layers(subject, context=context)]
    around = open_edit(subject.model)
    entries = [_Entry(NONE, None, _planes_under(around, own, context))]
    for name, given in edits.items():
        if name == NONE:
            raise BadArgument(
                f'An edit cannot be called "{NONE}": that is the model as it is.',
                attempt="another name for the edit",
            )
        together = (given,) if isinstance(given, Edit | str) else tuple(given)
        with edit_rope(model, *together):
            edit = open_edit(subject.model)
        entries.append(_Entry(name, edit, _planes_under(edit, own, context)))
    return own, entries


def _planes_under(
    edit: AttentionEdit | None, own: list[Planes], context: int
) -> list[Planes] | None:
    """How each layer rotates under `edit`; None where the heads of one rotate differently."""
    if edit is None:
        return own
    try:
        return [edit.planes(layer, p, length=context) for layer, p in enumerate(own)]
    except BadArgument:
        return None


@dataclass
class _Text:
    """What is found on the text for one entry; grows with every batch."""

    entry: _Entry
    wanted: set[str]
    longest: int
    sums: Sums = field(default_factory=no_sums)
    losses: list[Float[Tensor, "sequence bin"]] = field(default_factory=list)
    predicted: list[Int[Tensor, "sequence bin"]] = field(default_factory=list)
    change: dict[int, Float[Tensor, " head"]] = field(default_factory=dict)
    rows: float = 0.0

    @property
    def edges(self) -> Int[Tensor, " edge"]:
        """Edges of the bins of positions, two an octave: a power of two is one of them."""
        edges = {round(2 ** (half / 2)) for half in range(2 * self.longest.bit_length() + 1)}
        inner = [edge for edge in sorted(edges) if edge < self.longest]
        return torch.tensor([*inner, self.longest])

    @property
    def by_bin(self) -> list[LossSums]:
        """Moments of loss and predicted tokens over the sequences that reach each bin."""
        losses, predicted = torch.cat(self.losses), torch.cat(self.predicted)
        reached = predicted > 0
        return [
            LossSums.of(losses[in_bin, number], predicted[in_bin, number])
            for number, in_bin in enumerate(reached.T)
        ]

    def add_losses(self, losses: Float[Tensor, "sequence position"]) -> None:
        """Add the losses of a batch, summed over the bins of positions."""
        edges, losses = self.edges - 1, losses[:, 1:]  # position 0 is not predicted
        self.losses.append(sum_bins(losses.nan_to_num(), edges))
        self.predicted.append(sum_bins((~losses.isnan()).long(), edges))


def _measure_batch(
    subject: Subject, batch: Batch, text: list[_Text], progress: Progress | None
) -> None:
    """One forward pass of each entry over a batch, every measure beside it."""
    kept: dict[int, AttentionCall] = {}
    for found in text:
        with found.entry.open(subject.model):
            _measure_entry(subject, batch, found, kept)
        if progress is not None:
            progress(int(batch.lengths.sum()))


def _measure_entry(
    subject: Subject, batch: Batch, found: _Text, kept: dict[int, AttentionCall]
) -> None:
    """The measures of one entry on a batch; `kept` is the attention of the model as it is."""
    layers: dict[int, LayerSums] = {}
    planes = found.entry.planes if "labels" in found.wanted else None
    seen: set[int] = set()

    def observe(call: AttentionCall) -> None:
        seen.add(call.layer)
        if planes is not None:
            layers[call.layer] = batch.add_up(call, planes[call.layer])
        if "change" in found.wanted:
            if found.entry.name == NONE:
                kept[call.layer] = without_values(call)
                change = torch.zeros(call.query.shape[1], dtype=torch.float64)
            else:
                change = attention_change(kept[call.layer], call, batch.rows).sum(0)
            found.change[call.layer] = found.change.get(call.layer, 0) + change

    with torch.no_grad(), subject.observe(observe):
        losses = token_losses(subject.forward(batch.tokens), batch.tokens, batch.lengths)
    check_layers(subject.model, seen)
    found.add_losses(losses)
    found.rows += float(batch.rows.weight.sum())
    if planes is not None:
        found.sums = found.sums + batch.sums(layers, losses.nansum(1))


Labelled = dict[str, tuple[tuple[str, ...], np.ndarray]]


def _label_text(text: list[_Text], lengths: Tensor, wanted: set[str]) -> xr.Dataset:
    """What was found on the text, as labelled arrays."""
    found: Labelled = {}
    coords: Labelled = {}
    if "loss" in wanted:
        found, coords = _label_losses(text, lengths)
    if "change" in wanted:
        of_entries = [
            stack(entry.change[layer] for layer in sorted(entry.change)) / entry.rows
            for entry in text
        ]
        change = np.stack(of_entries) / np.log(2)
        found["attention_change"] = (("edit", "layer", "head"), change)
    dataset = xr.Dataset(found, coords=coords)
    return dataset.merge(_label_budgets(text)) if "labels" in wanted else dataset


def _label_losses(text: list[_Text], lengths: Tensor) -> tuple[Labelled, Labelled]:
    """Loss by sequence and by position of every entry; the bins of positions."""
    predicted = lengths.double().numpy() - 1
    by_sequence = [torch.cat(entry.losses).sum(1).numpy() / predicted for entry in text]
    by_bin = [entry.by_bin for entry in text]
    edges = text[0].edges.numpy()
    means = np.array([[sums.mean for sums in bins] for bins in by_bin])
    errors = np.array([[sums.standard_error for sums in bins] for bins in by_bin])
    found: Labelled = {
        "loss": (("edit", "sequence"), np.stack(by_sequence)),
        "predicted_tokens": (("sequence",), lengths.numpy() - 1),
        "position_loss": (("edit", "position_bin"), means),
        "position_loss_se": (("edit", "position_bin"), errors),
    }
    coords: Labelled = {
        "position_start": (("position_bin",), edges[:-1]),
        "position_stop": (("position_bin",), edges[1:]),
    }
    return found, coords


def _label_budgets(text: list[_Text]) -> xr.Dataset:
    """The budget and label of every head of every entry, and how the model as it is rotates."""
    profiles = [
        None if entry.entry.planes is None else summarize(entry.sums, entry.entry.planes)
        for entry in text
    ]
    known = [profile for profile in profiles if profile is not None]
    if not known:
        return xr.Dataset()
    shape = known[0]["total_bits"].shape
    bits = {
        name: np.stack([np.full(shape, np.nan) if p is None else p[name] for p in profiles])
        for name in BITS
    }
    budget = {name.removesuffix("_bits"): values for name, values in bits.items()}
    labels = label_heads(Thresholds(), **budget)
    per_head = bits | {
        "label": np.where(np.isnan(budget["total"]), "", labels).astype(object),
        "positional_fraction": positional_fraction(budget["position"], budget["content"]),
    }
    dataset = xr.Dataset(
        {name: (("edit", "layer", "head"), values) for name, values in per_head.items()}
    )
    return dataset if profiles[0] is None else profiles[0][list(OF_NONE)].merge(dataset)


def _measure_repeats(
    subject: Subject, entries: list[_Entry], own: list[Planes], first_token: int, seed: int
) -> Labelled:
    """Attention and losses on repeated random tokens, as `profile` has them, of every entry."""
    length = max(2, min(REPEATED_TOKENS, (trained_context(subject.model) - 1) // 2))
    found: dict[str, list[np.ndarray]] = {}
    for entry in entries:
        with entry.open(subject.model):
            # Only attention is looked at here, so any planes will do.
            scores = repeat_scores(
                subject, first_token=first_token, planes=own, length=length, seed=seed
            )
        # The repetition's first token is announced by nothing; the others by their past.
        first, second = scores.losses[:, 2 : length + 1], scores.losses[:, length + 2 :]
        measured = {
            "induction": stack(scores.induction),
            "duplicate_token": stack(scores.duplicate_token),
            "first_loss": first.mean(1).numpy(),
            "repeat_loss": second.mean(1).numpy(),
        }
        for name, values in measured.items():
            found.setdefault(name, []).append(values)
    dims = {1: ("edit", "trial"), 2: ("edit", "layer", "head")}
    return {name: (dims[values[0].ndim], np.stack(values)) for name, values in found.items()}
