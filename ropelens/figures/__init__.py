"""Labelled arrays -> plotly figures, one family a file; never shown, never written."""

from ropelens.figures.attention import plot_attention as plot_attention
from ropelens.figures.bands import plot_bands as plot_bands
from ropelens.figures.changed_heads import plot_changed_heads as plot_changed_heads
from ropelens.figures.claim import plot_claim as plot_claim
from ropelens.figures.comparison import plot_label_counts as plot_label_counts
from ropelens.figures.comparison import plot_loss_change as plot_loss_change
from ropelens.figures.comparison import plot_position_loss as plot_position_loss
from ropelens.figures.comparison_planes import (
    plot_comparison_planes as plot_comparison_planes,
)
from ropelens.figures.comparison_planes import plot_growth_planes as plot_growth_planes
from ropelens.figures.growth import plot_growth as plot_growth
from ropelens.figures.head_map import plot_head_map as plot_head_map
from ropelens.figures.kernel import plot_kernel as plot_kernel
from ropelens.figures.label_selectivity import (
    plot_label_selectivity as plot_label_selectivity,
)
from ropelens.figures.norms import plot_head_norms as plot_head_norms
from ropelens.figures.norms import plot_norms as plot_norms
from ropelens.figures.reach import plot_horizons as plot_horizons
from ropelens.figures.reach import plot_reach as plot_reach
from ropelens.figures.selectivity import plot_selectivity as plot_selectivity
from ropelens.figures.triangle import plot_budget_triangle as plot_budget_triangle
from ropelens.figures.truncation import plot_truncation as plot_truncation
