"""Labels of the same heads before and after a change of the model, and what decides them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Shaped

from ropelens.budget.labels import Thresholds

# Share of the resamples in which the labels of a head must differ, to count as changed
CERTAIN = 0.95
UNLABELLED = ("", "untested")


@dataclass(frozen=True)
class LabelRule:
    """The number and the threshold that decide whether a head has a label."""

    label: str
    number: str
    threshold: float


# In the order in which `label_heads` tries them. A head is mixed if no rule fits.
LABEL_RULES = (
    LabelRule("diffuse", "total_bits", Thresholds.diffuse),
    LabelRule("sink", "sink_fraction", Thresholds.sink),
    LabelRule("positional", "positional_fraction", Thresholds.named),
    LabelRule("semantic", "content_fraction", Thresholds.named),
)


@dataclass(frozen=True)
class LabelledHeads:
    """Labels of heads, and the numbers of `LABEL_RULES` by name; NaN if they are unknown."""

    label: Shaped[np.ndarray, "*shape"]
    numbers: Mapping[str, Float[np.ndarray, "*shape"]]

    @classmethod
    def of(
        cls,
        label: Shaped[np.ndarray, "*shape"],
        *,
        total_bits: Float[np.ndarray, "*shape"],
        sink_bits: Float[np.ndarray, "*shape"],
        interaction_bits: Float[np.ndarray, "*shape"],
        positional_fraction: Float[np.ndarray, "*shape"],
    ) -> "LabelledHeads":
        """Heads with these bits. The three fractions of a head add up to 1."""
        with np.errstate(invalid="ignore", divide="ignore"):  # NaN without any bits
            sink_fraction = sink_bits / total_bits
            interaction_fraction = interaction_bits / (total_bits - sink_bits)
        numbers = {
            "total_bits": total_bits,
            "sink_fraction": sink_fraction,
            "positional_fraction": positional_fraction,
            "content_fraction": 1 - positional_fraction - interaction_fraction,
        }
        return cls(label.astype(str), numbers)

    @property
    def tested(self) -> Bool[np.ndarray, "*shape"]:
        """Heads that have a label."""
        return ~np.isin(self.label, UNLABELLED)


@dataclass(frozen=True)
class LabelComparison:
    """Labels of the same heads before and after a change of the model.

    `confidence` is the share of resamples of the groups of sequences, the same before and
    after, in which the labels of a head differ. It is NaN if nothing can be resampled.
    """

    before: LabelledHeads
    after: LabelledHeads
    confidence: Float[np.ndarray, "*shape"]

    @property
    def tested(self) -> Bool[np.ndarray, "*shape"]:
        """Heads that have a label both times."""
        return self.before.tested & self.after.tested

    @property
    def differs(self) -> Bool[np.ndarray, "*shape"]:
        """Heads that have two different labels."""
        return self.tested & (self.before.label != self.after.label)

    @property
    def changed(self) -> Float[np.ndarray, "*shape"]:
        """1 if the label changed by more than its uncertainty, 0 if not; NaN if undecided.

        The label is undecided for heads without a label, and for heads whose labels differ if
        nothing can be resampled.
        """
        is_certain = self.confidence >= CERTAIN
        undecided = ~self.tested | (self.differs & np.isnan(self.confidence))
        return np.where(undecided, np.nan, self.differs & is_certain)

    def deciding(self) -> "DecidingNumbers":
        """The number that decides each head's labels: the first rule that differs.

        If the labels are equal, it is the number of the label's own rule, and for a mixed head
        the larger one of `positional_fraction` and `content_fraction`.
        """
        shape = self.before.label.shape
        name = np.full(shape, "", dtype=object)
        threshold = np.full(shape, np.nan)
        before = np.full(shape, np.nan)
        after = np.full(shape, np.nan)
        rule_of_head = self._rules()
        for index, rule in enumerate(LABEL_RULES):
            decided = rule_of_head == index
            name[decided] = rule.number
            threshold[decided] = rule.threshold
            before[decided] = self.before.numbers[rule.number][decided]
            after[decided] = self.after.numbers[rule.number][decided]
        return DecidingNumbers(name, before, after, threshold)

    def _rules(self) -> Shaped[np.ndarray, "*shape"]:
        """The index in `LABEL_RULES` of the rule that decides; -1 without a label."""
        numbers = self.before.numbers
        leans = numbers["positional_fraction"] >= numbers["content_fraction"]
        nearest = np.where(leans, "positional", "semantic")
        is_mixed = (self.before.label == "mixed") & ~self.differs
        label = np.where(is_mixed, nearest, self.before.label)
        rules = np.minimum(_first_rule(label), _first_rule(self.after.label))
        return np.where(self.tested, rules, -1)


@dataclass(frozen=True)
class DecidingNumbers:
    """The number of each head whose threshold decides its label, before and after."""

    name: Shaped[np.ndarray, "*shape"]
    before: Float[np.ndarray, "*shape"]
    after: Float[np.ndarray, "*shape"]
    threshold: Float[np.ndarray, "*shape"]

    @property
    def margin(self) -> Float[np.ndarray, "*shape"]:
        """Distance from the threshold to the nearer one of both numbers."""
        distance_before = np.abs(self.before - self.threshold)
        distance_after = np.abs(self.after - self.threshold)
        return np.fmin(distance_before, distance_after)


def _first_rule(label: Shaped[np.ndarray, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """The index of the rule of each label; the number of rules for "mixed"."""
    index = np.full(label.shape, len(LABEL_RULES))
    for number, rule in enumerate(LABEL_RULES):
        index[label == rule.label] = number
    return index
