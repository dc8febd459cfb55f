"""Saved results are opened and drawn again without torch and transformers."""

import subprocess
import sys
from pathlib import Path

from synthetic_profile import synthetic_profile
from synthetic_truncation import synthetic_truncation

import ropelens as rl

READING = """
import sys
from pathlib import Path

import ropelens as rl
from ropelens.commands.app import main

folder = Path(sys.argv[1])
analysis = rl.open(folder / "out")
assert len(analysis.heads) == 40
rl.plot_head_map(analysis.profile)
rl.plot_norms(analysis.profile)
rl.plot_truncation(analysis.truncation)
rl.show(analysis.profile)
rl.write_report(analysis.profile, folder / "page.html")
sys.argv[1:] = ["report", str(folder / "out")]
try:
    main()
finally:
    print({"torch", "transformers", "accelerate"} & {*sys.modules})
"""


def test_results_are_read_and_reported_without_torch(tmp_path: Path):
    profile, heads = synthetic_profile()
    truncation = synthetic_truncation()
    out = tmp_path / "out"
    page = rl.Analysis(profile, heads, {}, truncation=truncation).save(out)
    page.unlink()
    ended = subprocess.run(
        [sys.executable, "-c", READING, str(tmp_path)],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [str(page), "set()"]
    assert page.stat().st_size > 100_000
    assert (tmp_path / "page.html").stat().st_size > 100_000
