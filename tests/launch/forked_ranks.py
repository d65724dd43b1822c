# SPDX-License-Identifier: Apache-2.0
"""Ranks that start in a tenth of a second: `lamina run` needs two, in which each rank imports torch.

There is a fork server for each rank of a job, because what differs between processes, as the order of sets does,
should differ between ranks.
"""

import atexit
import contextlib
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
from collections.abc import Iterator

SERVER = pathlib.Path(__file__).with_name("fork_server.py")
START_S = 60.0  # until a fork server has imported torch; only a hang reaches it


class ForkServer:
    """A process that is copied."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="lamina-ranks-")
        self.path = os.path.join(self.folder.name, "socket")
        environment = {name: text for name, text in os.environ.items() if name != "RANK"} | {"OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(SERVER), self.path]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        atexit.register(self.close)

    def connect(self) -> socket.socket:
        deadline = time.monotonic() + START_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self.path)
                return connection
            except OSError:
                connection.close()
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


@functools.cache
def fork_server(rank: int) -> ForkServer:
    return ForkServer()


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

    def __init__(self, words: list[str], environment: dict[str, str], folder: pathlib.Path):
        self.returncode = None
        rank = environment["RANK"]
        self._output = {name: folder / f"{name}-{rank}" for name in ("stdout", "stderr")}
        self._connection = fork_server(int(rank)).connect()
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
