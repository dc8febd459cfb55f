"""Approximate costs of a profile, in tokens that pass the model in the same time."""

from ropelens.budget.held_out import FOLD_ROWS

EXCHANGED = 1000.0  # operations per scored row and key
OBSERVED = 2.0  # time of a layer with all statistics, compared with an unobserved layer


def fit_cost(
    parameters: int, heads: int, terms: int, context: int, surrogates: int
) -> float:
    """Approximate number of tokens that pass the model in the time of the fits of a layer."""
    # Half of the rows of both folds is visible; small operations cost as much as 4,000 tokens.
    cells = heads * FOLD_ROWS * (context + 4_000)
    # 93 operations per cell and plane weight, of which 40 surrogates take half
    return 93.0 * ((1 + surrogates / 40) / 2) * cells * terms / parameters


def exchange_cost(parameters: int, heads: int, rows: int, context: int) -> float:
    """Approximate number of tokens that pass the model while a layer exchanges its keys."""
    return EXCHANGED * heads * rows * context / parameters
