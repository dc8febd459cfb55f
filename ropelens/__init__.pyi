# The public names, in groups. Type checkers read this file. __init__.py imports a name when it
# is first used. The reference has a chapter for each group.

# load
from .measured_rotation.load import load as load
from .text.documents import read_documents as read_documents
from .text.text import Text as Text
from .text.tokenize import tokenize as tokenize

# measure
from .analysis.run_plan import analyze as analyze
from .analysis.analysis_result import Analysis as Analysis
from .analysis.options import Options as Options
from .measured_rotation.measure import measure_rope as measure_rope
from .measured_rotation.compare import compare_rope as compare_rope
from .profiles.capture import capture as capture
from .interventions.attribute import attribute_planes as attribute_planes
from .interventions.top_planes import top_planes as top_planes
from .interventions.patch_each import patch_each as patch_each
from .measured_rotation.measure import observe as observe
from .rope.planes import Planes as Planes
from .profiles.profile import profile as profile
from .analysis.prompt import explain_prompt as explain_prompt
from .schema.rows import Statistic as Statistic
from .profiles.token_sets import attention_on as attention_on
from .claims.classify import classify_heads as classify_heads
from .claims.claim_runs import test_claims as test_claims
from .interventions.reach import reach as reach
from .interventions.evaluate import evaluate as evaluate
from .interventions.truncate import truncate as truncate
from .interventions.position_losses import position_losses as position_losses
from .train.watch import RopeCallback as RopeCallback
from .train.watch import watch as watch

# edit
from .interventions.edit import edit_rope as edit_rope
from .interventions.silence import silence_heads as silence_heads
from .interventions.patch import patch_planes as patch_planes
from .interventions.edit import stop as stop
from .interventions.edit import stop_slowest as stop_slowest
from .interventions.edit import rescale as rescale
from .interventions.edit import drop as drop
from .interventions.edit import scale as scale
from .interventions.export import export as export
from .rope.select import Slowest as Slowest
from .rope.select import Fastest as Fastest
from .rope.select import PlaneNumbers as PlaneNumbers
from .rope.variant_config import variant_config as variant_config

# compare
from .comparison.compare import compare as compare
from .comparison.pairs import paired_changes as paired_changes

# plot
from .figures.attention import plot_attention as plot_attention
from .figures.claim import plot_claim as plot_claim
from .figures.follow import plot_follow as plot_follow
from .figures.head_map import plot_head_map as plot_head_map
from .figures.kernel import plot_kernel as plot_kernel
from .figures.effects import plot_effects as plot_effects
from .figures.norms import plot_norms as plot_norms
from .figures.position_losses import plot_position_losses as plot_position_losses
from .figures.effects import plot_top_planes as plot_top_planes
from .figures.head_planes import plot_selectivity as plot_selectivity
from .figures.truncation import plot_truncation as plot_truncation

# write and read
from .report import write_report as write_report
from .report.notebook import show as show
from .runtime.netcdf import save as save
from .analysis.open_folder import open as open

# errors
from .errors import RopelensError as RopelensError
from .errors import UnsupportedModel as UnsupportedModel
from .errors import BadCheckpoint as BadCheckpoint
from .errors import BadText as BadText
from .errors import BadArgument as BadArgument
