# SPDX-License-Identifier: Apache-2.0
"""Drives the built `lamina run` on small programs and finds what a job leaves behind."""

import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid

from launch.forked_ranks import ForkedRank, ReservedPort, fork_server

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Folders with what was built for this interpreter's torch (`make TORCH=...` keeps both in a folder of their own).
PREFIX = pathlib.Path(sys.prefix)
BUILDS = PREFIX.parent if PREFIX.is_relative_to(ROOT / "build") else ROOT / "build"
# Variables that an outer launcher may have set, and that would change what is tested.
FOREIGN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "BASE_RANK", "NODE_RANK", "MASTER_ADDR",
           "MASTER_PORT", "OMP_NUM_THREADS", "LAMINA_LAUNCHER"}  # fmt: skip
# Modules that the ranks of a job import once. `lamina` would name torch's compiler, too, half of all that: only
# optimizers, compiled code and planning use it.
PRELOAD = ("--preload", "torch,lamina.errors")
PRELOAD_COMPILER = ("--preload", "torch,lamina")
DEADLINE_S = 120.0  # for what has no promised bound; only a hang reaches it


def built(pattern: str) -> pathlib.Path:
    """The newest file in a build folder that matches, such as bin/frontend_rows."""
    found = sorted(BUILDS.glob(f"*/{pattern}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"no {pattern} in {BUILDS}: run `make build-tests`")
    return found[-1]


def command() -> str:
    """The binary under test: $LAMINA_COMMAND, the installed one, else the newest in a build folder."""
    if named := os.environ.get("LAMINA_COMMAND"):
        return named
    installed = PREFIX / "bin/lamina"
    return str(installed if installed.exists() else built("bin/lamina"))


def eventually(condition, within_s: float = DEADLINE_S):
    """The first true value of `condition()`; an AssertionError if there is none in time."""
    end = time.monotonic() + within_s
    while True:
        if value := condition():
            return value
        assert time.monotonic() < end, f"not so within {within_s} s: {condition}"
        time.sleep(0.005)


def _shared_memory() -> set[str]:
    return {str(path) for path in pathlib.Path("/dev/shm").iterdir()}


def _unheld(files: set[str]) -> set[str]:
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        if not files:
            break
        try:
            held = (process / "maps").read_text() + "\n".join(str(link.readlink()) for link in process.glob("fd/*"))
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
        files = {file for file in files if file not in held}
    return {file for file in files if os.path.exists(file)}  # else its process has ended, or let it go, meanwhile


def require_success(jobs):
    """Waits for processes one after the other; each has to end with exit code 0."""
    for job in jobs:
        _, errors = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 0, errors


class Launcher:
    """Starts jobs whose processes can all be found again, by a variable that they inherit."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.temporary = folder / "t"  # short, as paths of sockets in it are to be
        self.temporary.mkdir()
        self.mark = f"LAMINA_TEST_MARK={uuid.uuid4()}"
        self.started = []
        self.ports = []
        self._shared_before = _shared_memory()

    def environment(self, **extra):
        name, value = self.mark.split("=")
        base = {key: text for key, text in os.environ.items() if key not in FOREIGN}
        base |= {name: value, "TMPDIR": str(self.temporary), "LAMINA_PYTHON": sys.executable, "DIR": str(self.folder)}
        return {key: text for key, text in (base | extra).items() if text is not None}

    def reserve_port(self) -> int:
        """A port that nobody else on this machine is given while the test lasts."""
        self.ports.append(port := ReservedPort())
        return port.number

    def start(self, *words, env=None, binary=None, **popen):
        popen = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen
        words = [binary or command(), *map(str, words)]
        job = subprocess.Popen(words, env=self.environment(**(env or {})), cwd=self.folder, text=True, **popen)
        self.started.append(job)
        return job

    def run(self, *words, **options):
        """Runs a job to its end, for which it has `deadline_s`; the result has returncode, stdout and stderr."""
        deadline_s = options.pop("deadline_s", DEADLINE_S)
        stdin = options.pop("input", None)
        if stdin is not None:
            options["stdin"] = subprocess.PIPE
        job = self.start(*words, **options)
        out, err = job.communicate(stdin, timeout=deadline_s)
        return subprocess.CompletedProcess(job.args, job.returncode, out, err)

    def shell(self, ranks: int, program: str, *words, flags=(), **options):
        return self.run("run", "-n", ranks, *flags, "-c", "sh", "-c", program, *words, **options)

    def start_shell(self, ranks: int, program: str, flags=(), **options):
        """As `shell`; returns once every rank has made its file ready-RANK."""
        job = self.start("run", "-n", ranks, *flags, "-c", "sh", "-c", program, **options)
        eventually(lambda: all((self.folder / f"ready-{rank}").exists() for rank in range(ranks)))
        return job

    def start_ranks(self, ranks: int, program: pathlib.Path, *arguments, env=None) -> list[ForkedRank]:
        """The ranks of a job without `lamina run`: nobody ends them but they themselves."""
        port = self.reserve_port()
        sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = self.environment(**{name: str(value) for name, value in sizes.items()}, **(env or {}))
        words = [str(program), *map(str, arguments)]
        for rank in range(ranks):
            fork_server(rank, environment)  # so that they load at the same time
        places = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        started = [ForkedRank(words, place, self.folder) for place in places]
        self.started += started
        return started

    def processes(self):
        """The running processes of all jobs started here, the launchers included."""
        sessions = {job.pid for job in self.started if isinstance(job, ForkedRank)}
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                if marked or os.getsid(int(entry.name)) in sessions:
                    found.append(int(entry.name))
            except OSError:
                pass  # it ended meanwhile, or belongs to somebody else
        return found

    def left_behind(self) -> list[str]:
        """Lists what the jobs started here left: processes, and with them the ports they hold; temporary files; and
        files of shared memory that no process has open. Files of other jobs on this machine are in use."""
        left = [f"process {pid}" for pid in self.processes()]
        # torch's compiler makes its cache folder when it is imported, and optimizers import it. What the ranks of a
        # failed job wrote is kept. torchrun leaves its folder.
        meant = ("torchinductor", "lamina-failed-", "torchelastic_")
        left += [f"file {path}" for path in self.temporary.iterdir() if not path.name.startswith(meant)]
        return left + [f"shared memory {path}" for path in sorted(_unheld(_shared_memory() - self._shared_before))]

    def clean_up(self):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        for job in self.started:
            job.wait(DEADLINE_S)
            for stream in (job.stdin, job.stdout, job.stderr):
                if stream:
                    stream.close()
        for port in self.ports:
            port.close()


READY = "touch $DIR/ready-$RANK; "
