# The public names, each written once: type checkers read them here, and __init__.py imports
# each when it is first used.

# load
from .analysis.analysis import Analysis as Analysis
from .analysis.analysis import open_analysis as open_analysis
from .analysis.analyze import analyze as analyze
from .analysis.folders import Answer as Answer
from .analysis.folders import write_answer as write_answer
from .analysis.folders import write_comparison as write_comparison
from .commands.script import run_analysis as run_analysis
from .commands.terminal import run_script as run_script
from .comparison.compare import compare as compare
from .comparison.table import summarize_comparison as summarize_comparison

# edit
from .edit.rope import Edit as Edit
from .edit.rope import drop as drop
from .edit.rope import edit_rope as edit_rope
from .edit.rope import mean_ablate as mean_ablate
from .edit.rope import rescale as rescale
from .edit.rope import stop as stop
from .edit.rope import stop_fastest as stop_fastest
from .edit.rope import stop_planes as stop_planes
from .edit.rope import stop_slowest as stop_slowest
from .edit.rope import stop_wavelengths as stop_wavelengths
from .errors import RopelensError as RopelensError
from .errors import UnsupportedModel as UnsupportedModel

# plot
from .figures import plot_attention as plot_attention
from .figures import plot_bands as plot_bands
from .figures import plot_budget_triangle as plot_budget_triangle
from .figures import plot_changed_heads as plot_changed_heads
from .figures import plot_claim as plot_claim
from .figures import plot_comparison_planes as plot_comparison_planes
from .figures import plot_growth as plot_growth
from .figures import plot_growth_planes as plot_growth_planes
from .figures import plot_head_map as plot_head_map
from .figures import plot_head_norms as plot_head_norms
from .figures import plot_horizons as plot_horizons
from .figures import plot_kernel as plot_kernel
from .figures import plot_label_counts as plot_label_counts
from .figures import plot_label_selectivity as plot_label_selectivity
from .figures import plot_loss_change as plot_loss_change
from .figures import plot_norms as plot_norms
from .figures import plot_position_loss as plot_position_loss
from .figures import plot_reach as plot_reach
from .figures import plot_selectivity as plot_selectivity
from .figures import plot_truncation as plot_truncation
from .files.progress import show_progress as show_progress
from .files.results import open_comparison as open_comparison
from .files.results import open_profile as open_profile
from .files.results import open_truncation as open_truncation
from .files.results import save_profile as save_profile
from .files.results import save_results as save_results
from .measure.evaluate import evaluate as evaluate
from .measure.heads import Thresholds as Thresholds
from .measure.heads import classify_heads as classify_heads
from .measure.means import plane_means as plane_means
from .measure.profile import profile as profile
from .measure.reach import reach as reach
from .measure.tasks import Retrieval as Retrieval
from .measure.truncate import truncate as truncate
from .measure.truncation_table import summarize_truncation as summarize_truncation
from .models.bundled import sample_path as sample_path
from .models.load import load as load

# measure
from .models.rotation import measure_rope as measure_rope
from .models.texts import read_documents as read_documents
from .models.texts import tokenize as tokenize
from .models.variants import variant_config as variant_config

# write and read
from .report import describe_reach as describe_reach
from .report import describe_truncation as describe_truncation
from .report import write_index as write_index
from .report import write_report as write_report
from .rope.select import Every as Every
from .rope.select import Fastest as Fastest
from .rope.select import PlaneNumbers as PlaneNumbers
from .rope.select import Slowest as Slowest
from .rope.select import Wavelengths as Wavelengths
from .rope.variants import VARIANTS as VARIANTS
from .rope.variants import parse_variant as parse_variant

# train and compare
from .train.study import run_study as run_study
