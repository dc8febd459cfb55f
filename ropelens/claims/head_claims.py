"""Published claims about heads: their sinks, wavelengths, kernels and mean vectors."""

from functools import partial

from ropelens.claims import nulls, numbers, papers
from ropelens.claims.claim import Claim, Floor, OtherStatistic, Reasons

SINKS_SLOW = Claim(
    name="sinks_slow",
    statement="Sinks are held by planes that do not turn once in the context",
    paper=papers.JONASSON,
    figure="not stated",
    original="not stated",
    original_model="not stated",
    conditions="only the abstract is known",
    nearness="conceptual",
    deviation=(
        "The paper finds large constant features in these planes, and we measure their "
        "share in the push toward sinks."
    ),
    what="share of slow planes in the push toward sinks",
    number=numbers.push_of_long_planes,
    null=nulls.PLANES,
    arrays=("sink_push", "slow"),
    other=OtherStatistic(
        what="the same share, as the mean over layers",
        number=partial(numbers.push_of_long_planes, by_layer=True),
    ),
    floor=Floor(
        what="sinks that explain less than 5 % of the bits",
        day="2026-11-25",
    ),
    within_kind=True,
    objection=numbers.why_no_sinks,
    missing="no plane pushes toward sinks",
    min_size="2 of 10 planes that do not turn once, or 1 of 50",
    call="rl.plot_selectivity(profile, layer=0, head=0)",
)

SINKS_SHORTEN = Claim(
    name="sinks_shorten",
    statement="Heads with sinks look less far back at other keys",
    paper=papers.SINKS,
    figure="not stated",
    original="not stated",
    original_model="not stated",
    conditions="not known to this project",
    nearness="conceptual",
    deviation="We correlate two numbers of trained heads, and change no sink.",
    what=(
        "rank correlation over heads of the attention on sinks and the median offset "
        "of other attention"
    ),
    number=numbers.rank_correlation,
    null=nulls.HEADS,
    arrays=("range", "sink_mass"),
    sign=-1,
    other=OtherStatistic(
        what="Kendall's tau of the same two numbers",
        number=partial(numbers.rank_correlation, kendall=True),
    ),
    floor=Floor(
        what="numbers within ±0.1",
        day="2026-11-28",
        beyond=0.1,
    ),
    within_kind=True,
    missing=(
        "sinks explain less than 5 % of the bits, or fewer than 4 heads attend to "
        "other keys"
    ),
    call='heads.nlargest(3, "sink_mass")',
)

POSITIONAL_FAST = Claim(
    name="positional_fast",
    statement="Positional heads use short wavelengths, semantic heads use long wavelengths",
    paper=papers.BARBERO,
    figure="sections 5, 6",
    original="not stated as a number: positional heads were found by eye",
    original_model="Gemma 7B, Llama 3.1 8B",
    conditions="attention of single heads",
    nearness="conceptual",
    deviation="The paper shows single heads, and we correlate two numbers over all heads.",
    what=(
        "rank correlation of the share that the offset explains with the mean log "
        "wavelength"
    ),
    number=numbers.rank_over_heads,
    null=nulls.FREQUENCIES,
    arrays=("head_numbers", "scored_rows"),
    sign=-1,
    other=OtherStatistic(
        what="Kendall's tau of the same two numbers",
        number=partial(numbers.rank_over_heads, kendall=True),
    ),
    floor=Floor(
        what="fewer than 3 heads of a kind",
        day="2026-11-22",
    ),
    limit=1.0,
    interval=numbers.correlation_interval,
    objection=numbers.why_no_two_kinds,
    missing="the order of the frequencies makes no difference",
    alike="the order of the frequencies makes no difference",
    reasons=Reasons(
        holds=(
            "{number:+.2f}, compared with {low:+.2f} to {high:+.2f} of {draws} "
            "surrogates: more negative than a random order of frequencies gives"
        ),
        contradicted=(
            "{number:+.2f}, compared with {low:+.2f} to {high:+.2f} of {draws} "
            "surrogates: less negative than a random order of frequencies gives"
        ),
        unresolved=(
            "{number:+.2f}, compared with {low:+.2f} to {high:+.2f} of {draws} "
            "surrogates: a random order of frequencies can give this number"
        ),
    ),
    call='rl.plot_claim(profile), heads.attrs["claim"]',
)

POSITIONAL_EARLY = Claim(
    name="positional_early",
    statement="Early layers are positional, and late layers are not",
    paper=papers.URRUTIA,
    figure="not stated",
    original="median positional score of early layers 0.83, of late layers 0.56",
    original_model="gemma-2-2b-it",
    conditions="contents of keys permuted between blocks; second-hand",
    nearness="conceptual",
    deviation=(
        "The paper scores heads by permuted blocks, and we use the share of bits that "
        "the offset explains."
    ),
    what="rank correlation of a layer's median positional share with its index",
    number=numbers.rank_with_depth,
    null=nulls.LAYERS,
    arrays=("positional",),
    sign=-1,
    other=OtherStatistic(
        what="Kendall's tau of the same two numbers",
        number=partial(numbers.rank_with_depth, kendall=True),
    ),
    missing="all layers have the same share",
    call="rl.plot_head_map(profile)",
)

FIXED_VECTORS = Claim(
    name="fixed_vectors",
    statement="The longest planes of most heads carry a fixed vector",
    paper=papers.TRIATTENTION,
    figure="not stated",
    original="|E q| / E|q| is mostly above 0.95 in the dominant planes",
    original_model="LLMs",
    conditions="second-hand",
    nearness="close",
    deviation="We count the heads whose longest plane exceeds 0.95.",
    what="share of heads whose queries' longest plane has a coherence above 0.95",
    number=numbers.fixed_in_longest,
    null=nulls.PLANES,
    arrays=("q_coherence", "q_norm"),
    other=OtherStatistic(
        what="the same share for a coherence above 0.9",
        number=partial(numbers.fixed_in_longest, above=0.9),
    ),
    floor=Floor(
        what="numbers below 0.5",
        day="2026-11-25",
        at_least=0.5,
    ),
    within_kind=True,
    missing="the coherence of no plane is known",
    alike="the share is the same for planes in any order",
    min_size="10 planes and heads whose longest planes differ, or 50 planes",
    call="rl.plot_selectivity(profile, layer=0, head=0)",
)

MEAN_VECTORS_PREDICT = Claim(
    name="mean_vectors_predict",
    statement="Mean queries and keys predict most of how heads look back",
    paper=papers.TRIATTENTION,
    figure="not stated",
    original="correlation 0.72 of the curve of the centres with the real curve",
    original_model="not stated",
    conditions="one example; second-hand",
    nearness="conceptual",
    deviation=(
        "The paper correlates curves of one example, and we average r|r| with the log "
        "of the fitted kernel over heads."
    ),
    what="share that the predicted kernel explains of the log of the fitted kernel",
    number=numbers.predicted_share,
    null=nulls.PARTNERS,
    arrays=("agreement",),
    other=OtherStatistic(
        what="the same, with the median over heads instead of the mean",
        number=partial(numbers.predicted_share, median=True),
    ),
    floor=Floor(
        what="numbers below 0.5",
        day="2026-11-25",
        at_least=0.5,
    ),
    missing="every head is diffuse",
    call="rl.plot_kernel(profile, layer=0, head=0)",
)

DECAY = Claim(
    name="decay",
    statement="Scores decay with distance",
    paper=papers.SU,
    figure="not stated",
    original="not stated as a number: an upper bound of the score falls with distance",
    original_model="none (mathematics)",
    conditions="equal queries and keys; refuted by Barbero et al. 2024, Prop 3.1",
    nearness="conceptual",
    deviation=(
        "The paper bounds scores of any vectors, and we follow the score of the mean "
        "query and key."
    ),
    what="rank correlation of the mean vectors' score with nearness",
    number=numbers.average,
    null=nulls.SIGNS,
    arrays=("nearness",),
    other=OtherStatistic(
        what="the same, averaged over layers as Fisher's z",
        number=partial(numbers.average, fisher=True),
    ),
    floor=Floor(
        what="numbers within ±0.2",
        day="2026-11-25",
        beyond=0.2,
    ),
    alike="the mean rank correlation is below 0.2, whichever curves are reversed",
    call="rl.plot_kernel(profile, layer=0, head=0)",
)

PREVIOUS_TOKEN = Claim(
    name="previous_token",
    statement="Some head attends to the previous token",
    paper=papers.BARBERO,
    figure="section 5",
    original="not stated as a number: layer 1 head 8, found by eye",
    original_model="Gemma 7B",
    conditions="attention of single heads",
    nearness="conceptual",
    deviation="The paper shows the attention of one head, and we fit a kernel to every head.",
    what="largest weight of offset 1 in a head's kernel",
    number=partial(numbers.largest_at, index=1),
    null=nulls.OFFSETS,
    arrays=("kernel",),
    other=OtherStatistic(
        what="mean of the three largest weights",
        number=partial(numbers.largest_at, index=1, heads=3),
    ),
    floor=Floor(
        what="numbers below 0.3",
        day="2026-11-25",
        at_least=0.3,
    ),
    call='heads.nlargest(3, "previous_token")',
)

DIAGONAL = Claim(
    name="diagonal",
    statement="Some head attends to its own token",
    paper=papers.BARBERO,
    figure="section 5",
    original="not stated as a number: layer 1 head 5 and layer 27 head 8, found by eye",
    original_model="Gemma 7B; Llama 3.1 8B (layer 32)",
    conditions="attention of single heads",
    nearness="conceptual",
    deviation=(
        "The paper shows the attention of single heads, and we fit a kernel to every "
        "head."
    ),
    what="largest weight of offset 0 in a head's kernel",
    number=partial(numbers.largest_at, index=0),
    null=nulls.OFFSETS,
    arrays=("kernel",),
    other=OtherStatistic(
        what="mean of the three largest weights",
        number=partial(numbers.largest_at, index=0, heads=3),
    ),
    floor=Floor(
        what="numbers below 0.3",
        day="2026-11-25",
        at_least=0.3,
    ),
    call='heads.nlargest(3, "self_mass")',
)
