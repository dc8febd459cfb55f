"""Processes as torchrun starts them, on a CPU."""

import atexit
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest import mock


def settings() -> dict[str, str]:
    """Variables of the environment of each process."""
    return {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def together(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, args)],
        timeout=300,
        env=os.environ | settings(),
        capture_output=True,
        text=True,
    )


@dataclass(frozen=True)
class Process:
    """What one copy runs, and the files to which it writes its output."""

    code: str
    args: list[str]
    environment: dict[str, str]
    out: Path
    err: Path

    def run(self) -> None:
        """Run the code, and end the process."""
        append_output(1, self.out)
        append_output(2, self.err)
        os.environ |= self.environment
        sys.argv = ["-c", *self.args]
        ended = 0
        try:
            exec(self.code, {"__name__": "__main__"})
        except SystemExit as left:
            ended = int(left.code or 0)
        except BaseException:
            traceback.print_exc()
            ended = 1
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(ended)  # a normal exit of torch takes seconds


def append_output(descriptor: int, path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, descriptor)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def environment_of(rank: int, *, count: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets."""
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def forked(count: int, code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run `code` in `count` copies of a process that has imported all modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        err = Path(folder) / "err"
        processes = []
        for rank in range(count):
            environment = environment_of(rank, count=count, port=port)
            copy = Process(code, [*map(str, args)], environment, out, err)
            processes.append(context.Process(target=copy.run))
        with mock.patch.dict(os.environ, settings()):  # for the server of the forks
            for process in processes:
                process.start()
        for process in processes:
            process.join(timeout=300)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert None not in codes, f"some hang: {codes}"
        return subprocess.CompletedProcess(
            [code, *args],
            returncode=max(codes, key=abs),
            stdout=out.read_text(),
            stderr=err.read_text(),
        )
