"""Published claims for which the model runs again (see claim_runs.py)."""

from functools import partial

from ropelens.claims import nulls, numbers, papers
from ropelens.claims.claim import Claim, Floor, OtherStatistic

SLOW_STOP = Claim(
    name="slow_stop",
    statement="Stopping the slowest quarter costs less than stopping random planes",
    paper=papers.BARBERO,
    figure="section 6.1, Table 2",
    original=(
        "perplexity 4.4414 without the rotation of the slowest quarter, 4.4627 with "
        "all (Wiki)"
    ),
    original_model="Gemma 2B, trained from scratch",
    conditions="10,000 steps x 512 sequences x 8,192 tokens, one run each",
    nearness="conceptual",
    deviation=(
        "The paper trains without these rotations, and we stop them in a trained model."
    ),
    what="change of loss if the quarter is stopped, nats/token",
    number=numbers.cost,
    null=nulls.QUARTERS,
    arrays=("slow_loss", "tokens"),
    sign=-1,
    other=OtherStatistic(
        what="median over documents of the same change",
        number=partial(numbers.cost, by_document=True),
    ),
    floor=Floor(
        what="0.01 nats/token for every set of planes",
        day="2026-11-25",
    ),
    within_kind=True,
    missing="no such set of planes is worth 0.01 nats/token",
    call="rl.truncate(model, text, keep=[0.75])",
)

FAST_STOP = Claim(
    name="fast_stop",
    statement="Stopping the fastest quarter costs more than stopping random planes",
    paper=papers.BARBERO,
    figure="section 6.1, Table 2",
    original=(
        "perplexity 4.4592 without the rotation of the fastest quarter, 4.4627 with "
        "all (Wiki)"
    ),
    original_model="Gemma 2B, trained from scratch",
    conditions="10,000 steps x 512 sequences x 8,192 tokens, one run each",
    nearness="conceptual",
    deviation=(
        "The paper trains without these rotations, and we stop them in a trained model."
    ),
    what="change of loss if the quarter is stopped, nats/token",
    number=numbers.cost,
    null=nulls.QUARTERS,
    arrays=("fast_loss", "tokens"),
    other=OtherStatistic(
        what="median over documents of the same change",
        number=partial(numbers.cost, by_document=True),
    ),
    floor=Floor(
        what="0.01 nats/token for every set of planes",
        day="2026-11-25",
    ),
    within_kind=True,
    missing="no such set of planes is worth 0.01 nats/token",
    call="rl.truncate(model, text, keep=[0.75], ends=['fast'])",
)

LONG_PLANES = Claim(
    name="long_planes",
    statement="The longest planes matter more than the same number of other planes",
    paper=papers.JIN,
    figure="not stated",
    original=(
        "perplexity +116,000 % without massive values, +0.6 % without random values (a "
        "replication)"
    ),
    original_model="not stated",
    conditions="massive values of queries and keys replaced; second-hand",
    nearness="conceptual",
    deviation=(
        "The paper replaces massive values, and we drop the longest eighth of the "
        "planes."
    ),
    what=(
        "change of loss without the eighth of the planes with the largest |q||k|, "
        "nats/token"
    ),
    number=numbers.cost,
    null=nulls.EIGHTHS,
    arrays=("long_loss", "tokens"),
    other=OtherStatistic(
        what="median over documents of the same change",
        number=partial(numbers.cost, by_document=True),
    ),
    floor=Floor(
        what="0.01 nats/token for every set of planes",
        day="2026-11-25",
    ),
    within_kind=True,
    missing="no such set of planes is worth 0.01 nats/token",
    call="rl.evaluate(model, text, edits={'without': rl.drop(rl.PlaneNumbers(planes))})",
)

NORMS_NOT_WORTH = Claim(
    name="norms_not_worth",
    statement="Planes of long queries and keys need their rotation less than others",
    paper=papers.RETRIEVAL,
    figure="not stated",
    original="the relation of the norm and the use of a plane has both signs",
    original_model="not stated",
    conditions="second-hand",
    nearness="conceptual",
    deviation=(
        "The paper relates the norm and the use of planes, and we relate the norm of "
        "sets of planes to the loss if they stop."
    ),
    what=(
        "rank correlation over 42 sets of a quarter of the planes: share of |q||k|, "
        "and change of loss if they stop"
    ),
    number=numbers.cost_of_length,
    null=nulls.LENGTHS,
    arrays=("length", "stopped_sets", "stop_loss", "tokens"),
    sign=-1,
    other=OtherStatistic(
        what="Kendall's tau of the same two numbers",
        number=partial(numbers.cost_of_length, kendall=True),
    ),
    floor=Floor(
        what="0.01 nats/token for every set of planes",
        day="2026-11-28",
    ),
    within_kind=True,
    missing="no such set of planes is worth 0.01 nats/token",
    call="rl.plot_norms(profile)",
)

RETRIEVAL_PLANES = Claim(
    name="retrieval_planes",
    statement="Induction heads need the quarter of their planes that select most",
    paper=papers.RETRIEVAL,
    figure="not stated",
    original=(
        "share of needles found 1.00; 0.18 without these planes, 0.98 without random "
        "planes"
    ),
    original_model="not stated",
    conditions="planes in retrieval heads; second-hand",
    nearness="conceptual",
    deviation=(
        "The paper counts needles, and we measure the induction score of heads with a "
        "score of 0.3 or more."
    ),
    what=(
        "loss of induction of the induction heads if the quarter with the most "
        "selectivity in each head stops"
    ),
    number=numbers.cost,
    null=nulls.QUARTERS,
    arrays=("retrieval_lost", "once"),
    floor=Floor(
        what=(
            "heads with an induction score below 0.3; changes below 0.01 for every set "
            "of planes"
        ),
        day="2026-11-28",
    ),
    within_kind=True,
    missing="no such stop changes the mean induction score of these heads by 0.01",
    call='heads.nlargest(3, "induction")',
)

PREFERENCES_REVERSE = Claim(
    name="preferences_reverse",
    statement=(
        "The preference between two keys reverses with distance more than in a random "
        "order of the planes"
    ),
    paper=papers.DU,
    figure="not stated",
    original="not stated as a number: at long distance the preference is near chance (1/2)",
    original_model="not stated",
    conditions="pairs of keys that are drawn evenly; second-hand",
    nearness="conceptual",
    deviation=(
        "The paper asks how often preferences reverse, and we ask whether they reverse "
        "more often than with the planes in another order."
    ),
    what=(
        "share of distances up to the context at which two keys have another order "
        "than at 0, mean over heads"
    ),
    number=numbers.in_own_order,
    null=nulls.ORDERS,
    arrays=("reversal",),
    other=OtherStatistic(
        what="the same, with the median over heads instead of the mean",
        number=partial(numbers.in_own_order, median=True),
    ),
    within_kind=True,
    missing="no row has two keys other than sinks",
    call='rl.profile(model, text, statistics="uniform_reversal")["uniform_reversal"]',
)

SLOW_INDUCTION = Claim(
    name="slow_induction",
    statement="Induction heads need the slowest quarter of their planes",
    paper=papers.CHIANG,
    figure="not stated",
    original=(
        "accuracy 54.1 %; 27.7 % and 15.2 % without the slowest 16 and 32 of 128 "
        "coordinates, 55.0 % and 53.4 % without the fastest"
    ),
    original_model="Llama-3.1",
    conditions="coordinates of retrieval heads masked",
    nearness="conceptual",
    deviation=(
        "The paper masks coordinates in retrieval tasks, and we stop planes on "
        "repeated random tokens."
    ),
    what="loss of induction of the induction heads if the quarter is stopped",
    number=numbers.cost,
    null=nulls.QUARTERS,
    arrays=("induction_lost", "once"),
    floor=Floor(
        what=(
            "heads with an induction score below 0.3; changes below 0.01 for every set "
            "of planes"
        ),
        day="2026-11-25",
    ),
    within_kind=True,
    missing="no such stop changes the mean induction score of these heads by 0.01",
    call=(
        "rl.evaluate(model, text, edits={'slow': rl.stop_slowest(0.25, "
        "heads=induction)})"
    ),
)

SLOW_REACH = Claim(
    name="slow_reach",
    statement="Without slow planes' rotation, induction heads find more far copies",
    paper=papers.BARBERO,
    figure="section 6",
    original="not stated as a number: a theorem about long contexts (Thm 6.1)",
    original_model="none (mathematics)",
    conditions="one rotating plane",
    nearness="conceptual",
    deviation=(
        "The paper proves that no channel survives every long context, and we count "
        "copies that are found."
    ),
    what=(
        "share of copies found, 2/3 of the trained context back (at most 2,048 "
        "tokens): with the slowest quarter stopped minus without an edit"
    ),
    number=numbers.average,
    null=nulls.SWAPPED_RUNS,
    arrays=("more_found",),
    floor=Floor(
        what="numbers within ±0.01",
        day="2026-11-25",
        beyond=0.01,
    ),
    within_kind=True,
    alike="the stop changes the share of copies found by less than 0.01",
    min_size="6 draws that differ",
    call="rl.reach(model, text, variants=['own', 'p-rope:0.75'])",
)

APOSTROPHES = Claim(
    name="apostrophes",
    statement="Some head attends to a class of tokens: apostrophes",
    paper=papers.BARBERO,
    figure="section 6",
    original=(
        "score of the low band: +24.9 for BOS, -85.5 otherwise, before the factor 1/16 "
        "(layer 1 head 10)"
    ),
    original_model="Gemma 7B",
    conditions="one head, found by eye",
    nearness="conceptual",
    deviation=(
        "The paper explains the scores of one head, and we search all heads by their "
        "attention."
    ),
    what=(
        "attention on apostrophes, if a row sees one, minus attention on tokens that "
        "are equally frequent and far"
    ),
    number=partial(numbers.largest_at, index=0),
    null=nulls.TOKENS,
    arrays=("token_lead",),
    other=OtherStatistic(
        what="mean of the three heads with the largest number",
        number=partial(numbers.largest_at, index=0, heads=3),
    ),
    floor=Floor(
        what="numbers below 0.05",
        day="2026-11-25",
        at_least=0.05,
    ),
    call='rl.attention_on(text, "*\'*", tokenizer)',
)
