"""Processes as torchrun starts them, on a CPU."""

import atexit
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from unittest import mock


def settings():
    limits = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return limits | {"PYTHONPATH": os.pathsep.join(sys.path)}


def together(*args: object) -> subprocess.CompletedProcess[str]:
    options = {"env": os.environ | settings(), "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *map(str, args)], timeout=300, **options)


def forked(count: int, code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run `code` in `count` copies of a process that has imported all modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    place["WORLD_SIZE"] = str(count)
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        processes = []
        for rank in map(str, range(count)):
            environment = {**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank}
            call = (code, [*map(str, args)], environment, out, err)
            processes.append(context.Process(target=_run, args=call))
        with mock.patch.dict(os.environ, settings()):  # for the server of the forks
            for process in processes:
                process.start()
        for process in processes:
            process.join(timeout=300)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert None not in codes, f"some hang: {codes}"
        ended = max(codes, key=abs), out.read_text(), err.read_text()
        return subprocess.CompletedProcess([code, *args], *ended)


def _run(
    code: str, args: list[str], environment: dict[str, str], out: Path, err: Path
) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ |= environment
    sys.argv, ended = ["-c", *args], 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as left:
        ended = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
        ended = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(ended)  # a normal exit of torch takes seconds
