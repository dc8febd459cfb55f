"""Published claims about the lengths of queries, keys and values in each plane."""

from functools import partial

from ropelens.claims import nulls, numbers, papers
from ropelens.claims.claim import Claim, Floor, OtherStatistic

SLOW_NORMS = Claim(
    name="slow_norms",
    statement="Slow planes have the longest queries and keys",
    paper=papers.BARBERO,
    figure="Figs 3, 4",
    original="not stated as a number: the lowest frequencies dominate in every layer",
    original_model="Gemma 7B; Llama 3.1 8B (Fig 10)",
    conditions="mean |q| and |k| of each plane over 10 quotes of Shakespeare",
    nearness="conceptual",
    deviation=(
        "The paper shows the norms of all planes, and we test their share in the "
        "slower half."
    ),
    what="share of |q||k| in the slower half of the planes",
    number=numbers.slow_half,
    null=nulls.PLANES,
    arrays=("length",),
    other=OtherStatistic(
        what="rank correlation of a plane's |q||k| with its wavelength",
        number=numbers.rank_of_lengths,
    ),
    floor=Floor(
        what="lengths that differ by less than 0.1 (sd over mean)",
        day="2026-11-25",
    ),
    within_kind=True,
    missing="queries and keys are about equally long in every plane",
    call="rl.plot_norms(profile)",
)

FAST_AT_THE_ENDS = Claim(
    name="fast_at_the_ends",
    statement="The first and last layers use fast planes more than the others",
    paper=papers.BARBERO,
    figure="Figs 3, 4",
    original=(
        "not stated as a number: the highest frequencies are used in the first and "
        "last layers"
    ),
    original_model="Gemma 7B",
    conditions="mean |q| and |k| of each plane over 10 quotes of Shakespeare",
    nearness="conceptual",
    deviation=(
        "The paper shows the norms of all planes, and we test the share of the fastest "
        "quarter."
    ),
    what="share of |q||k| in the fastest quarter: first and last layer minus the others",
    number=numbers.fast_at_the_ends,
    null=nulls.PAIRS,
    arrays=("length",),
    other=OtherStatistic(
        what="the same share of the fastest eighth",
        number=partial(numbers.fast_at_the_ends, part=8),
    ),
    within_kind=True,
    call="rl.plot_norms(profile)",
)

FLAT_VALUES = Claim(
    name="flat_values",
    statement="Values are spread over the planes more evenly than queries and keys",
    paper=papers.BARBERO,
    figure="Figs 10, 13",
    original="not stated as a number: values show no frequency structure",
    original_model="Llama 3.1 8B (Fig 10)",
    conditions="not stated",
    nearness="conceptual",
    deviation=(
        "The paper shows the norms of values, and we compare their spread with the "
        "spread of queries and keys."
    ),
    what="sd over mean of the planes' lengths: q and k minus v",
    number=numbers.more_than_values,
    null=nulls.ROLES,
    arrays=("q_uneven", "k_uneven", "v_uneven"),
    other=OtherStatistic(
        what="the same, with the smaller number of q and k instead of their mean",
        number=partial(numbers.more_than_values, smaller=True),
    ),
    floor=Floor(
        what="numbers within ±0.1",
        day="2026-11-25",
        beyond=0.1,
    ),
    missing="values have another size than keys",
    alike="queries, keys and values differ by less than 0.1 in this number",
    call="rl.plot_norms(profile)",
)

BAND = Claim(
    name="band",
    statement="Queries and keys are longest in the band at plane (D/2) log_b(L / 3.657)",
    paper=papers.OKA,
    figure="not stated",
    original="measured plane over predicted plane: 0.67 to 1.19",
    original_model="Llama-3 and Gemma among others",
    conditions="trained length L; second-hand",
    nearness="close",
    deviation=(
        "The paper compares the planes of long norms with the formula, and we count "
        "the planes between the longest plane and the formula."
    ),
    families=("llama", "gemma"),
    what="planes between a layer's longest plane and the predicted plane",
    number=numbers.distance_to_band,
    null=nulls.PLANES,
    arrays=("length", "band"),
    sign=-1,
    other=OtherStatistic(
        what="root mean square over layers of the same number",
        number=partial(numbers.distance_to_band, power=2),
    ),
    floor=Floor(
        what="lengths that differ by less than 0.1 (sd over mean)",
        day="2026-11-25",
    ),
    within_kind=True,
    missing="queries and keys are about equally long in every plane",
    min_size="10 planes and layers whose longest planes differ, or 50 planes",
    call="rl.plot_norms(profile)",
)

MASSIVE_SLOW = Claim(
    name="massive_slow",
    statement="Massive values of queries and keys are in slow planes",
    paper=papers.JIN,
    figure="not stated",
    original=(
        "not stated as a number: values over 5 times the mean are in the same slow "
        "planes across heads"
    ),
    original_model="not stated",
    conditions="second-hand",
    nearness="conceptual",
    deviation=(
        "The paper counts single coordinates of 5 times the mean, and we count planes "
        "of 3.5 times the mean."
    ),
    what=(
        "share of slow planes (slower half) among planes that are 3.5 times as long as "
        "a head's mean plane"
    ),
    number=numbers.slow_half_of_all,
    null=nulls.PLANES,
    arrays=("massive",),
    other=OtherStatistic(
        what="the same share, as the mean over layers that have such planes",
        number=partial(numbers.slow_half_of_all, by_layer=True),
    ),
    floor=Floor(
        what="planes shorter than 3.5 times the mean",
        day="2026-11-25",
    ),
    within_kind=True,
    missing="no plane is 3.5 times as long as the mean",
    min_size="6 such planes or more",
    call="rl.plot_norms(profile)",
)

MASSIVE_NOT_IN_VALUES = Claim(
    name="massive_not_in_values",
    statement="Queries and keys have massive values, and values have none",
    paper=papers.JIN,
    figure="not stated",
    original="not stated as a number: values over 5 times the mean are not in v",
    original_model="not stated",
    conditions="second-hand",
    nearness="conceptual",
    deviation=(
        "The paper counts single coordinates of 5 times the mean, and we count planes "
        "of 3.5 times the mean."
    ),
    what="number of planes 3.5 times as long as a head's mean plane: q and k minus v",
    number=numbers.more_than_values,
    null=nulls.ROLES,
    arrays=("q_count", "k_count", "v_count"),
    other=OtherStatistic(
        what="the same, with the smaller number of q and k instead of their mean",
        number=partial(numbers.more_than_values, smaller=True),
    ),
    floor=Floor(
        what="numbers within ±0.1",
        day="2026-11-25",
        beyond=0.1,
    ),
    missing="values have another size than keys",
    alike="queries, keys and values differ by less than 0.1 in this number",
    min_size="4 layers with such planes in q and k, or 10 in one of the two",
    call="rl.plot_norms(profile)",
)
