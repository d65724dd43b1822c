# SPDX-License-Identifier: Apache-2.0
"""Ranks that start in a tenth of a second: `lamina run` needs two, in which each rank imports torch.

There are several fork servers, because what differs between processes, as the order of sets does, should differ between
ranks. With three it does between the neighbours of each axis of a job, which lie a power of two apart.
"""

import atexit
import contextlib
import fcntl
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping

SERVER = pathlib.Path(__file__).with_name("fork_server.py")
SERVERS = 3
START_S = 180.0  # until a fork server has imported torch; only a hang reaches it
FOLDER = "LAMINA_TEST_FOLDER"
PRELOAD = "LD_PRELOAD"  # ranks with such a library are copies of a server with it


@functools.cache
def run_folder() -> pathlib.Path:
    """The folder of this run of tests, which all its processes share; the first one that asks makes it. Whoever reads
    its file `alive` hears when that one ends."""
    if FOLDER not in os.environ:
        made = tempfile.TemporaryDirectory(prefix="lamina-ranks-")
        os.mkfifo(alive := pathlib.Path(made.name, "alive"))
        os.open(alive, os.O_RDWR)  # until this process ends
        atexit.register(made.cleanup)
        os.environ[FOLDER] = made.name
    return pathlib.Path(os.environ[FOLDER])


def made_once(name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """The path of a file in that folder, which one process makes and the others wait for."""
    path = run_folder() / name
    with path.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
    return path


class ForkServer:
    """A process that is copied; it ends with the run."""

    def __init__(self, number: int, preload: str):
        self.path = str(run_folder() / f"socket-{number}{pathlib.Path(preload).stem}")
        self.process = None  # where this one started it
        self._preload = preload
        made_once(f"server-{number}{pathlib.Path(preload).stem}", self._start)

    def _start(self, started: pathlib.Path) -> None:
        environment = {name: text for name, text in os.environ.items() if name != "RANK"} | {"OMP_NUM_THREADS": "1"}
        environment |= {PRELOAD: self._preload} if self._preload else {}
        words = [sys.executable, str(SERVER), self.path]
        with (run_folder() / "alive").open() as alive:
            self.process = subprocess.Popen(words, stdin=alive, env=environment, start_new_session=True)
        started.touch()

    def connect(self) -> socket.socket:
        deadline = time.monotonic() + START_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self.path)
                return connection
            except OSError:
                connection.close()
                if (self.process and self.process.poll() is not None) or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)


def fork_server(rank: int, environment: Mapping[str, str]) -> ForkServer:
    return _fork_server(rank % SERVERS, environment.get(PRELOAD, ""))


@functools.cache
def _fork_server(number: int, preload: str) -> ForkServer:
    return ForkServer(number, preload)


def stacks(pid: int) -> str:
    """Says what each thread of a process does, as far as this machine can tell."""
    lines = []
    for thread in sorted(pathlib.Path(f"/proc/{pid}/task").iterdir()):
        with contextlib.suppress(OSError):
            lines.append(f"{thread.name} {(thread / 'comm').read_text().strip()}: {(thread / 'wchan').read_text()}")
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words = ["gdb", "-p", str(pid), "-batch", "-nx", "-ex", "set print frame-arguments none"]
        gdb = subprocess.run(
            [*words, "-ex", "thread apply all backtrace 40"], capture_output=True, text=True, timeout=120
        )
        lines.append(gdb.stdout)
    return "\n".join(lines)


class ForkedRank:
    """A rank, with what we need of subprocess.Popen. Its output is kept in files."""

    stdin = stdout = stderr = None

    def __init__(self, words: list[str], environment: dict[str, str], folder: pathlib.Path, rank: int | None = None):
        """A rank's number is in its environment, or goes by another name there."""
        self.returncode = None
        rank = environment["RANK"] if rank is None else rank
        self._output = {name: folder / f"{name}-{rank}" for name in ("stdout", "stderr")}
        self._connection = fork_server(int(rank), environment).connect()
        request = {"words": words, "environment": environment, "folder": folder} | self._output
        self._connection.sendall((json.dumps(request, default=str) + "\n").encode())
        self._answers = self._read_answers()
        self.pid = next(self._answers)

    def _read_answers(self) -> Iterator[int | None]:
        """The numbers that the server says; None where it says nothing in time."""
        text = b""
        while True:
            while b"\n" not in text:
                try:
                    text += (got := self._connection.recv(100))
                    if not got:
                        raise ChildProcessError("the fork server ended")
                except (TimeoutError, BlockingIOError):
                    yield None
            line, text = text.split(b"\n", 1)
            yield int(line)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            self.returncode = next(self._answers)
            if self.returncode is None:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._connection.close()
        return self.returncode

    def communicate(self, _=None, timeout: float | None = None) -> tuple[str, str]:
        """As Popen's, for a rank that is expected to end in time: where it hangs is part of the error."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired as error:
            error.add_note(self._output["stderr"].read_text() + stacks(self.pid))
            raise
        return self._output["stdout"].read_text(), self._output["stderr"].read_text()

    def send_signal(self, number: int) -> None:
        """Does nothing to a rank that has ended, which another's end may do before anybody waits for it."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ReservedPort:
    """A port that only those get who ask for it."""

    def __init__(self):
        self._socket = socket.socket()
        # Reserves it on every address: rank 0 listens on all of them, which one listener on another would prevent.
        self._socket.bind(("", 0))
        # After bind: before it, the kernel may choose a port that someone else reserved in this same way.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.number = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()
