"""The table of published claims about RoPE."""

from ropelens.budget.labels import Thresholds
from ropelens.claims import nulls, numbers
from ropelens.claims.verdict import Claim

MOST = 0.5  # a smaller share is not most
TRIFLING = 0.2  # a smaller rank correlation counts as none
INDUCTION = 0.3  # attention of an induction head on the token after the earlier occurrence
FAINT = 0.05  # a smaller share of a head's attention on a set of tokens counts as none

BARBERO, TRI = "Barbero et al. 2024, arXiv 2410.06205", "TriAttention 2026, arXiv 2604.04921"
JIN = "Jin et al. 2025, arXiv 2502.01563"
NORMS, KERNEL = "rl.plot_norms(profile)", "rl.plot_kernel(profile, layer=0, head=0)"
SELECTIVITY = "rl.plot_selectivity(profile, layer=0, head=0)"
NO_VALUES = "values have another size than keys, or do not differ from keys in this number"
EQUAL_LENGTHS = "queries and keys are about equally long in every plane"
CHEAP = f"no such set of planes is worth {numbers.NOTHING} nats/token"
NO_INDUCTION = f"no head has an induction score of {INDUCTION}, or stops change less than 1 %"
DIFFER = "longest planes differ, or 50 planes"
NULL = "{number:+.2f}, compared with {low:+.2f} to {high:+.2f} of {draws} surrogates: "

# fmt: off
CLAIMS: tuple[Claim, ...] = (
    Claim(name="slow_norms", source=f"{BARBERO}, Figs 3, 4",
        statement="Slow planes have the longest queries and keys",
        what="share of |q||k| in the slower half of the planes",
        call=NORMS, null=nulls.PLANES, arrays=("length",), number=numbers.slow_half,
        why_untestable=EQUAL_LENGTHS),
    Claim(name="fast_at_the_ends", source=f"{BARBERO}, Figs 3, 4",
        statement="The first and last layers use fast planes more than the others",
        what="share of |q||k| in the fastest quarter: first and last layer minus the others",
        call=NORMS, null=nulls.PAIRS, arrays=("length",), number=numbers.fast_at_the_ends),
    Claim(name="flat_values", source=f"{BARBERO}, Figs 10, 13",
        statement="Values are spread over the planes more evenly than queries and keys",
        what="sd over mean of the planes' lengths: q and k minus v",
        call=NORMS, null=nulls.ROLES, arrays=("q_uneven", "k_uneven", "v_uneven"),
        number=numbers.more_than_values, why_untestable=NO_VALUES),
    Claim(name="band", source="Oka et al. 2026, ICLR",
        statement="Queries and keys are longest in the band at plane (D/2) log_b(L / 3.657)",
        what="planes between a layer's longest plane and the predicted plane",
        call=NORMS, null=nulls.PLANES, arrays=("length", "band"),
        number=numbers.distance_to_band, sign=-1, why_untestable=EQUAL_LENGTHS,
        min_size=f"10 planes and layers whose {DIFFER}"),
    Claim(name="massive_slow", source=JIN,
        statement="Massive values of queries and keys are in slow planes",
        what="share of slow planes (slower half) among planes that are 3.5 times as long as "
        "a head's mean plane",
        call=NORMS, null=nulls.PLANES, arrays=("massive",), number=numbers.slow_half_of_all,
        why_untestable="no plane is 3.5 times as long as the mean",
        min_size="6 such planes or more"),
    Claim(name="massive_not_in_values", source=JIN,
        statement="Queries and keys have massive values, and values have none",
        what="number of planes 3.5 times as long as a head's mean plane: q and k minus v",
        call=NORMS, null=nulls.ROLES, arrays=("q_count", "k_count", "v_count"),
        number=numbers.more_than_values, why_untestable=NO_VALUES,
        min_size="4 layers with such planes in q and k, or 10 in one of the two"),
    Claim(name="sinks_slow", source="Jonasson 2025, arXiv 2503.01832",
        statement="Sinks are held by planes that do not turn once in the context",
        what="share of slow planes in the push toward sinks",
        call=SELECTIVITY, null=nulls.PLANES, arrays=("sink_push", "slow"),
        number=numbers.push_of_long_planes,
        why_untestable="sinks explain less than 5 % of the bits, or all planes turn, or none",
        min_size="2 of 10 planes that do not turn once, or 1 of 50"),
    Claim(name="positional_fast", source=f"{BARBERO}, sections 5, 6",
        statement="Positional heads use short wavelengths, semantic heads use long wavelengths",
        what="rank correlation of the share that the offset explains with the mean log "
        "wavelength",
        call='rl.plot_claim(profile), heads.attrs["claim"]', null=nulls.FREQUENCIES,
        arrays=("head_numbers", "scored_rows"), number=numbers.rank_over_heads, sign=-1,
        limit=1.0, interval=numbers.correlation_interval, objection=numbers.why_no_two_kinds,
        why_untestable="the order of the frequencies makes no difference",
        words=(
            f"{NULL}more negative than a random order of frequencies gives",
            f"{NULL}less negative than a random order of frequencies gives",
            f"{NULL}a random order of frequencies can give this number",
        )),
    Claim(name="positional_early", source="Urrutia et al. 2025, arXiv 2511.11579",
        statement="Early layers are positional, and late layers are not",
        what="rank correlation of a layer's median positional share with its index",
        call="rl.plot_head_map(profile)", null=nulls.LAYERS, arrays=("positional",),
        number=numbers.rank_with_depth, sign=-1,
        why_untestable="layers do not differ; a verdict needs "
        f"{nulls.LAYERS.min_size} or more"),
    Claim(name="fixed_vectors", source=TRI,
        statement="The longest planes of most heads carry a fixed vector",
        what="share of heads whose queries' longest plane has a coherence above 0.95",
        call=SELECTIVITY, null=nulls.PLANES, arrays=("q_coherence", "q_norm"),
        number=numbers.fixed_in_longest, floor=MOST,
        why_untestable="coherence is above 0.95 in no plane, or in all",
        min_size=f"10 planes and heads whose {DIFFER}"),
    Claim(name="mean_vectors_predict", source=TRI,
        statement="Mean queries and keys predict most of how heads look back",
        what="share that the predicted kernel explains of the log of the fitted kernel",
        call=KERNEL, null=nulls.PARTNERS, arrays=("agreement",),
        number=numbers.predicted_share, floor=MOST, why_untestable="every head is diffuse"),
    Claim(name="decay", source="Su et al. 2021, arXiv 2104.09864",
        statement="Scores decay with distance",
        what="rank correlation of the mean vectors' score with nearness",
        call=KERNEL, null=nulls.SIGNS, arrays=("nearness",),
        number=numbers.mean_beyond(TRIFLING),
        why_untestable=f"curves rise and fall alike: rank correlations below {TRIFLING}"),
    Claim(name="previous_token", source=f"{BARBERO}, section 5",
        statement="Some head attends to the previous token",
        what="largest weight of offset 1 in a head's kernel",
        call='heads.nlargest(3, "previous_token")', null=nulls.OFFSETS, arrays=("kernel",),
        number=numbers.largest_at(1), floor=Thresholds.offset),
    Claim(name="diagonal", source=f"{BARBERO}, section 5",
        statement="Some head attends to its own token",
        what="largest weight of offset 0 in a head's kernel",
        call='heads.nlargest(3, "self_mass")', null=nulls.OFFSETS, arrays=("kernel",),
        number=numbers.largest_at(0), floor=Thresholds.offset),
    # From here on, the arrays come from further runs of the model (claim_runs.py).
    Claim(name="slow_stop", source=f"{BARBERO}, section 6.1",
        statement="Stopping the slowest quarter costs less than stopping random planes",
        what="change of loss if the quarter is stopped, nats/token",
        call="rl.truncate(model, text, keep=[0.75])", null=nulls.QUARTERS,
        arrays=("slow_loss", "tokens"), number=numbers.cost, sign=-1, why_untestable=CHEAP),
    Claim(name="fast_stop", source=f"{BARBERO}, section 6.1",
        statement="Stopping the fastest quarter costs more than stopping random planes",
        what="change of loss if the quarter is stopped, nats/token",
        call="rl.truncate(model, text, keep=[0.75], ends=['fast'])", null=nulls.QUARTERS,
        arrays=("fast_loss", "tokens"), number=numbers.cost, why_untestable=CHEAP),
    Claim(name="long_planes", source=JIN,
        statement="The longest planes matter more than the same number of other planes",
        what="change of loss without the eighth of the planes with the largest |q||k|, "
        "nats/token",
        call="rl.evaluate(model, text, edits={'without': rl.drop(rl.PlaneNumbers(planes))})",
        null=nulls.EIGHTHS, arrays=("long_loss", "tokens"), number=numbers.cost,
        why_untestable=CHEAP),
    Claim(name="slow_induction", source="Chiang and Yogatama 2025, arXiv 2502.11276",
        statement="Induction heads need the slowest quarter of their planes",
        what="loss of induction of the induction heads if the quarter is stopped",
        call="rl.evaluate(model, text, edits={'slow': rl.stop_slowest(0.25, heads=induction)})",
        null=nulls.QUARTERS, arrays=("induction_lost", "once"), number=numbers.cost,
        why_untestable=NO_INDUCTION),
    Claim(name="slow_reach", source=f"{BARBERO}, section 6",
        statement="Without slow planes' rotation, induction heads find more far copies",
        what="share of copies found, 2/3 of the trained context back (at most 2,048 tokens): "
        "with the slowest quarter stopped minus without an edit",
        call="rl.reach(model, text, variants=['own', 'p-rope:0.75'])", null=nulls.SWAPPED_RUNS,
        arrays=("more_found",), number=numbers.mean_beyond(numbers.NOTHING),
        min_size="6 draws that differ", why_untestable=NO_INDUCTION),
    Claim(name="apostrophes", source=f"{BARBERO}, section 6",
        statement="Some head attends to a class of tokens: apostrophes",
        what="attention on apostrophes, if a row sees one, minus attention on tokens that are "
        "equally frequent and far",
        call="rl.attention_on(text, \"*'*\", tokenizer)", null=nulls.TOKENS,
        arrays=("token_lead",), number=numbers.largest_at(0), floor=FAINT,
        why_untestable="the text has fewer than 10 apostrophes, or there is no tokenizer"),
)
# fmt: on
