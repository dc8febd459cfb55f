"""Processes that work together, as torchrun starts them, on a CPU by gloo."""

from __future__ import annotations

import os
import subprocess
import sys

# What torchrun tells each of its processes, told to copies of one that has imported everything.
FORKS = """
import atexit, os, socket, sys, traceback
import ropelens.analysis.analyze, ropelens.commands.truncate, ropelens.train.study
with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
count, code, *sys.argv[1:] = sys.argv[1:]
os.environ |= {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
for rank in map(str, range(int(count))):
    if not os.fork():
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        try:
            exec(code, {"__name__": "__main__"})
            ended = 0
        except SystemExit as left:
            ended = left.code
        except BaseException:
            traceback.print_exc()
            ended = 1
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(ended)  # leaving torch takes seconds
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(int(count))))
"""


def together(*args: object) -> subprocess.CompletedProcess[str]:
    """Python with `args`, which start processes."""
    return subprocess.run(
        [sys.executable, *map(str, args)],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},  # where the tests import from
        capture_output=True,
        text=True,
        timeout=300,
    )


def forked(count: int, code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """`code` in so many processes, with `args` in their `sys.argv`."""
    return together("-c", FORKS, count, code, *args)
