"""ropelens: how a language model uses the frequencies of its rotary position embedding.

    import ropelens as rl
    model, tokenizer = rl.load("bundled")
    profile = rl.profile(model, tokens)
    heads = rl.classify_heads(profile)

Names are imported when first used, so that `ropelens --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropelens.bundled import sample_path as sample_path
    from ropelens.comparison.compare import compare as compare
    from ropelens.comparison.table import summarize_comparison as summarize_comparison
    from ropelens.edit import Edit as Edit
    from ropelens.edit import drop as drop
    from ropelens.edit import edit_rope as edit_rope
    from ropelens.edit import mean_ablate as mean_ablate
    from ropelens.edit import rescale as rescale
    from ropelens.edit import stop as stop
    from ropelens.edit import stop_fastest as stop_fastest
    from ropelens.edit import stop_planes as stop_planes
    from ropelens.edit import stop_slowest as stop_slowest
    from ropelens.edit import stop_wavelengths as stop_wavelengths
    from ropelens.errors import RopelensError as RopelensError
    from ropelens.errors import UnsupportedModel as UnsupportedModel
    from ropelens.evaluation import evaluate as evaluate
    from ropelens.figures import plot_attention as plot_attention
    from ropelens.figures import plot_bands as plot_bands
    from ropelens.figures import plot_budget_triangle as plot_budget_triangle
    from ropelens.figures import plot_changed_heads as plot_changed_heads
    from ropelens.figures import plot_claim as plot_claim
    from ropelens.figures import plot_comparison_planes as plot_comparison_planes
    from ropelens.figures import plot_growth as plot_growth
    from ropelens.figures import plot_growth_planes as plot_growth_planes
    from ropelens.figures import plot_head_map as plot_head_map
    from ropelens.figures import plot_head_norms as plot_head_norms
    from ropelens.figures import plot_horizons as plot_horizons
    from ropelens.figures import plot_kernel as plot_kernel
    from ropelens.figures import plot_label_counts as plot_label_counts
    from ropelens.figures import plot_label_selectivity as plot_label_selectivity
    from ropelens.figures import plot_loss_change as plot_loss_change
    from ropelens.figures import plot_norms as plot_norms
    from ropelens.figures import plot_position_loss as plot_position_loss
    from ropelens.figures import plot_reach as plot_reach
    from ropelens.figures import plot_selectivity as plot_selectivity
    from ropelens.figures import plot_truncation as plot_truncation
    from ropelens.heads import Thresholds as Thresholds
    from ropelens.heads import classify_heads as classify_heads
    from ropelens.means import plane_means as plane_means
    from ropelens.models.load import load as load
    from ropelens.models.rotation import measure_rope as measure_rope
    from ropelens.models.variants import variant_config as variant_config
    from ropelens.profiling import profile as profile
    from ropelens.reaching import reach as reach
    from ropelens.report import describe_reach as describe_reach
    from ropelens.report import describe_truncation as describe_truncation
    from ropelens.report import write_answer as write_answer
    from ropelens.report import write_comparison as write_comparison
    from ropelens.report import write_index as write_index
    from ropelens.report import write_report as write_report
    from ropelens.results import open_comparison as open_comparison
    from ropelens.results import open_profile as open_profile
    from ropelens.results import open_truncation as open_truncation
    from ropelens.results import save_profile as save_profile
    from ropelens.results import save_results as save_results
    from ropelens.rope.select import Every as Every
    from ropelens.rope.select import Fastest as Fastest
    from ropelens.rope.select import PlaneNumbers as PlaneNumbers
    from ropelens.rope.select import Slowest as Slowest
    from ropelens.rope.select import Wavelengths as Wavelengths
    from ropelens.rope.variants import VARIANTS as VARIANTS
    from ropelens.rope.variants import parse_variant as parse_variant
    from ropelens.tasks import Retrieval as Retrieval
    from ropelens.terminal import run_script as run_script
    from ropelens.text import read_documents as read_documents
    from ropelens.text import tokenize as tokenize
    from ropelens.train.study import run_study as run_study
    from ropelens.truncation import truncate as truncate
    from ropelens.truncation_summary import summarize_truncation as summarize_truncation

_HOME = {
    "sample_path": "bundled",
    "compare": "comparison.compare",
    "summarize_comparison": "comparison.table",
    "edit_rope": "edit",
    "Edit": "edit",
    "stop": "edit",
    "stop_slowest": "edit",
    "stop_fastest": "edit",
    "stop_wavelengths": "edit",
    "stop_planes": "edit",
    "drop": "edit",
    "rescale": "edit",
    "mean_ablate": "edit",
    "RopelensError": "errors",
    "UnsupportedModel": "errors",
    "evaluate": "evaluation",
    "plot_attention": "figures",
    "plot_bands": "figures",
    "plot_budget_triangle": "figures",
    "plot_changed_heads": "figures",
    "plot_claim": "figures",
    "plot_comparison_planes": "figures",
    "plot_growth": "figures",
    "plot_growth_planes": "figures",
    "plot_head_map": "figures",
    "plot_head_norms": "figures",
    "plot_horizons": "figures",
    "plot_kernel": "figures",
    "plot_label_counts": "figures",
    "plot_label_selectivity": "figures",
    "plot_loss_change": "figures",
    "plot_norms": "figures",
    "plot_position_loss": "figures",
    "plot_reach": "figures",
    "plot_selectivity": "figures",
    "plot_truncation": "figures",
    "Thresholds": "heads",
    "classify_heads": "heads",
    "plane_means": "means",
    "load": "models.load",
    "measure_rope": "models.rotation",
    "variant_config": "models.variants",
    "profile": "profiling",
    "reach": "reaching",
    "describe_reach": "report",
    "describe_truncation": "report",
    "write_answer": "report",
    "write_comparison": "report",
    "write_index": "report",
    "write_report": "report",
    "open_comparison": "results",
    "open_profile": "results",
    "open_truncation": "results",
    "save_profile": "results",
    "save_results": "results",
    "Every": "rope.select",
    "Fastest": "rope.select",
    "PlaneNumbers": "rope.select",
    "Slowest": "rope.select",
    "Wavelengths": "rope.select",
    "VARIANTS": "rope.variants",
    "parse_variant": "rope.variants",
    "Retrieval": "tasks",
    "run_script": "terminal",
    "read_documents": "text",
    "tokenize": "text",
    "run_study": "train.study",
    "truncate": "truncation",
    "summarize_truncation": "truncation_summary",
}
"""The public names, and the module of the package that each stands in."""

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
