# SPDX-License-Identifier: Apache-2.0
"""The launcher beside torchrun (and composer, where it is installed), in turns: start, memory, clean-up.

Nothing of torch runs in the ranks: what is measured is the launchers' own.
"""

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from measure import LAMINA, Report, arguments

BESIDE = Path(sys.executable).parent
MARK = "LAMINA_BENCHMARK_MARK"
DIES = {
    "killed": "kill -9 $$",
    "exit code 3": "exit 3",
}


def launchers() -> dict[str, list[str]]:
    """The words of each that are followed by the number of ranks, the program and its arguments."""
    found = {
        "lamina run": [LAMINA, "run", "-c", "-n"],
        "torchrun": [str(BESIDE / "torchrun"), "--standalone", "--no-python", "--nproc-per-node"],
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("mosaicml")  # else `composer` is ours
        found["composer"] = [str(BESIDE / "composer"), "-c", "-n"]
    return found


def processes(mark: str) -> list[int]:
    """Processes that were started with this mark in their environment, and live."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            pass  # it has ended, or is somebody else's
    return found


class Job:
    """A job whose processes can be found."""

    def __init__(self, launcher: list[str], ranks: int, program: str, folder: Path):
        self.mark = str(uuid.uuid4())
        self.folder = folder
        for file in folder.iterdir():
            file.unlink()
        environment = os.environ | {MARK: self.mark, "DIR": str(folder), "OMP_NUM_THREADS": "1"}
        script = folder / "rank.sh"  # torchrun changes `$$` in arguments
        script.write_text(program)
        words = [*launcher, str(ranks), "sh", str(script)]
        self.process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def wait_for_files(self, name: str, count: int) -> None:
        while len(list(self.folder.glob(name))) < count:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.process.args} ended with {self.process.returncode}")
            time.sleep(0.001)

    def kill(self) -> None:
        for pid in processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_for_all_gone()

    def wait_for_all_gone(self) -> None:
        self.process.wait()
        while processes(self.mark):
            time.sleep(0.001)


def start_ms(launcher: list[str], ranks: int, folder: Path) -> float:
    """From the start of the launcher to its end, with ranks that do nothing."""
    begin = time.perf_counter()
    job = Job(launcher, ranks, "exit 0", folder)
    if job.process.wait():
        raise RuntimeError(f"{job.process.args} ended with {job.process.returncode}")
    return 1e3 * (time.perf_counter() - begin)


def memory_mib(launcher: list[str], ranks: int, folder: Path) -> float:
    """Memory of all processes that are no ranks: what they have for themselves and their share of what they share."""
    job = Job(launcher, ranks, "touch $DIR/rank-$$; exec sleep 1000", folder)
    job.wait_for_files("rank-*", ranks)
    of_ranks = {int(path.name.split("-")[1]) for path in folder.glob("rank-*")}
    kib = 0
    for pid in set(processes(job.mark)) - of_ranks:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    job.kill()
    return kib / 1024


def clean_up_ms(launcher: list[str], ranks: int, dies: str, folder: Path) -> float:
    """From the moment before rank 1 dies until nothing of the job is left."""
    program = (
        f"touch $DIR/rank-$$; test $RANK = 1 || exec sleep 1000; until test -e $DIR/go; do sleep 0.01; done; {dies}"
    )
    job = Job(launcher, ranks, program, folder)
    job.wait_for_files("rank-*", ranks)
    begin = time.perf_counter()
    (folder / "go").touch()
    job.wait_for_all_gone()
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    options = arguments(__doc__)
    turns = options.pick(2, 3, 7)
    known = launchers()
    report = Report(options.name or "launch", "A job of processes that do nothing, on one machine")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def compare(case: str, figure: str, unit: str, sample) -> None:
            samples = {name: [] for name in known}
            for _ in range(turns):
                for name, words in known.items():
                    samples[name].append(sample(words))
                    print(f"{case}: {name}: {figure}: {samples[name][-1]:.1f} {unit}", file=sys.stderr, flush=True)
            for name in known:
                report.add(case, f"{name}: {figure}", unit, samples[name])

        for ranks in options.pick((2, 8), (2, 8), (2, 8, 64)):
            compare(f"{ranks} ranks", "start and end", "ms", lambda words, n=ranks: start_ms(words, n, folder))
        compare("2 ranks", "memory of the launcher", "MiB", lambda words: memory_mib(words, 2, folder))
        for how, dies in DIES.items():
            for ranks in (2, 8):
                sample = lambda words, n=ranks, d=dies: clean_up_ms(words, n, d, folder)  # noqa: E731
                compare(f"{ranks} ranks, one {how}", "until all are gone", "ms", sample)
    report.finish()


if __name__ == "__main__":
    main()
