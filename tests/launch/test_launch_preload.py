# SPDX-License-Identifier: Apache-2.0
"""`lamina run --preload`: ranks that are copies of one process are ranks as any others, and where they cannot be made
so, they are started as ever."""

import json
import os
import signal

import pytest
from launch.launcher_harness import PRELOAD_COMPILER, eventually
from launch.test_launch_watch import guardian

# A module that is slow to import, in effect: it says in which process it was imported.
SLOW = "import os\nwhere = os.getpid()\n"

# Everything that a rank is told and can find out of itself, but for numbers that differ from start to start.
LOOK = """
import json, os, random, signal, sys
main = sys.modules["__main__"]
class Mine:
    pass
def where(number):
    return os.stat(number).st_mode
own = {
    "argv": sys.argv, "words": sys.orig_argv, "path": sys.path, "name": __name__, "file": __file__,
    "package": __package__, "cached": __cached__, "spec": getattr(__spec__, "name", None),
    "loader": type(__loader__).__name__, "names": sorted(vars(main)), "flags": list(sys.flags),
    "folder": os.getcwd(), "class": Mine.__module__, "found": main.Mine is Mine,
    "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getpgid(0), "parent": os.getppid() > 1,
    "kinds": [where(number) for number in range(3)], "input": sys.stdin.read(), "input_name": sys.stdin.name,
    "flushes": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.line_buffering],
    "handlers": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "descriptors": len(os.listdir("/proc/self/fd")), "inheritable": [os.get_inheritable(int(os.environ[name]))
        for name in ("LAMINA_SECRET_FD", "LAMINA_PROGRESS_FD")],
    "secret": len(os.read(int(os.environ["LAMINA_SECRET_FD"]), 100)), "niceness": os.nice(0),
    "environment": {name: text for name, text in os.environ.items()
        if name not in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "LAMINA_SECRET_FD", "LAMINA_PROGRESS_FD")},
}
draws = [random.random(), os.getpid(), sys.modules["slow"].where if "slow" in sys.modules else None]
json.dump([own, draws], open(os.path.join(os.environ["DIR"], "dump-" + os.environ["RANK"]), "w"))
"""


@pytest.fixture
def slow(launcher):
    (launcher.folder / "slow.py").write_text(SLOW)
    return launcher


def write(launcher, text, name="program.py"):
    path = launcher.folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return name


def both(launcher, *words, **options):
    """The results without and with a process that is copied."""
    return [launcher.run("run", *flags, *words, **options) for flags in ([], ["--preload", "slow"])]


def looks(launcher, *words, ranks=2):
    result = launcher.run("run", "-n", ranks, *words, input="some text", env={"ODD": "a=b\nc", "EMPTY": ""})
    assert (result.returncode, result.stderr) == (0, "")
    return [json.loads((launcher.folder / f"dump-{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    "words", [["program.py"], ["./program.py"], ["-m", "package.program"], ["package"], ["-m", "package"]], ids=" ".join
)
def test_a_rank_finds_all_as_without(slow, words):
    write(slow, LOOK)
    write(slow, LOOK, "package/program.py")
    write(slow, LOOK, "package/__main__.py")
    write(slow, SLOW, "package/slow.py")  # a folder that runs is the one where modules are looked for
    words = [*words, "-x", "", "two words", "$RANK"]
    for (alone, _), (copied, _) in zip(looks(slow, *words), looks(slow, "--preload", "json,slow", *words), strict=True):
        assert copied == alone


def test_ranks_are_copies_of_one_process_and_draw_by_themselves(slow):
    write(slow, LOOK)
    one, two = [draws for _, draws in looks(slow, "--preload", "slow,random", "program.py")]
    assert one[2] == two[2] is not None, "one process imported it"
    assert one[2] not in (one[1], two[1]), "which was none of the ranks"
    assert one[0] != two[0]


@pytest.mark.parametrize(
    "ends",
    [
        "sys.exit(3)",
        "sys.exit('words')",
        "os._exit(4)",
        "raise ValueError('no')",
        "def f(): 1 / 0\nf()",
        "raise KeyboardInterrupt",
        "os.kill(os.getpid(), 9)",
        "os.abort()",
        "import atexit; atexit.register(print, 'at the end'); raise SystemExit",
        "sys.excepthook = lambda kind, error, trace: print(kind, trace.tb_lineno, not trace.tb_next)\n1 / 0",
        "import threading; threading.Timer(0.2, print, ['later']).start()",
        "no syntax",
        "print('out'); print('error', file=sys.stderr); os.system('echo child'); print('out again')",
    ],
)
@pytest.mark.parametrize("buffered", [None, ""])
def test_a_program_ends_as_without(slow, ends, buffered):
    write(slow, f"import os, sys\n{ends}\n")
    for script in (["program.py"], ["-m", "program"]):
        alone, copied = both(slow, *script, env={"PYTHONUNBUFFERED": buffered})
        assert (copied.returncode, copied.stdout, copied.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_classes_of_the_program_travel_to_processes_that_it_spawns(slow):
    write(
        slow,
        "import multiprocessing, slow\n"
        "class Mine:\n"
        "    pass\n"
        "def work(where, one):\n"
        "    print(type(one).__module__, type(one) is Mine, slow.where == where, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work, args=(slow.where, Mine()))\n"
        "    child.start()\n"
        "    child.join()\n",
    )
    for result in both(slow, "program.py"):
        assert (result.stdout, result.stderr) == ("__mp_main__ True False\n", "")


def test_the_rank_that_fails_is_named_and_the_others_are_ended(slow):
    write(slow, "import os, signal, sys\nif os.environ['RANK'] == '1': sys.exit('the reason')\nsignal.pause()\n")
    result = slow.run("run", "-n", 3, "--preload", "slow", "program.py")
    assert result.returncode == 1
    assert result.stderr.splitlines()[:5] == [
        "lamina run: rank 1 failed: exit code 1",
        "---- the last lines of rank 1 ----",
        "the reason",
        "---- end of rank 1 ----",
        "lamina run: 2 other ranks ended because of this",
    ]


WAITS = """
import os, pathlib, signal
pathlib.Path(os.environ["DIR"], "ready-" + os.environ.get("RANK", "imports")).touch()
signal.pause()
"""


def waiting(launcher, ranks, *flags, preload="slow"):
    write(launcher, WAITS)
    job = launcher.start("run", "-n", ranks, "--preload", preload, *flags, "program.py")
    eventually(lambda: all((launcher.folder / f"ready-{rank}").exists() for rank in range(ranks)))
    return job


def test_a_signal_to_the_launcher_ends_all(slow):
    job = waiting(slow, 2)
    assert len(slow.processes()) == 5, "the launcher, its guardian, the process that is copied, and two ranks"
    job.send_signal(signal.SIGTERM)
    assert job.wait(10) == 143
    assert slow.processes() == []


@pytest.mark.parametrize("killed", ["launcher", "guardian"])
def test_whoever_is_killed_nobody_lives_on(slow, killed):
    job = waiting(slow, 2)
    os.kill(job.pid if killed == "launcher" else guardian(job), signal.SIGKILL)
    job.wait(10)
    eventually(lambda: not slow.processes(), within_s=1)


def test_a_signal_during_the_imports_ends_the_job(launcher):
    write(launcher, WAITS, "slow.py")
    write(launcher, WAITS)
    job = launcher.start("run", "--preload", "slow", "program.py")
    eventually((launcher.folder / "ready-imports").exists)
    job.send_signal(signal.SIGINT)
    assert job.wait(10) == 130
    assert launcher.processes() == []


def test_imports_that_hang_are_given_up_after_the_hang_timeout(launcher):
    write(launcher, "import os, signal\nif 'RANK' not in os.environ: signal.pause()\n", "slow.py")
    write(launcher, "import slow; print('ran')\n")
    result = launcher.run("run", "--preload", "slow", "--hang-timeout", 1, "program.py")
    assert (result.returncode, result.stdout) == (0, "ran\n")
    assert "ranks start without --preload: the imports did not end within 1 s" in result.stderr


FAILS_TWICE = """
import os, slow, time
with open(os.environ["DIR"] + "/starts", "a") as file:
    print(os.environ["LAMINA_RESTART"], os.environ["RANK"], slow.where, os.getpid(), file=file)
if os.environ["LAMINA_RESTART"] != "2":
    if os.environ["RANK"] == "1":
        os._exit(5 + int(os.environ["LAMINA_RESTART"]))
    time.sleep(100)
"""


def starts(launcher):
    lines = map(str.split, (launcher.folder / "starts").read_text().splitlines())
    return {(int(restart), int(rank)): (int(where), int(pid)) for restart, rank, where, pid in lines}


def test_restarts_import_nothing_again(slow):
    write(slow, FAILS_TWICE)
    result = slow.run("run", "-n", 2, "--preload", "slow", "--restarts", 2, "program.py")
    assert result.returncode == 0
    assert "without --preload" not in result.stderr
    found = starts(slow)
    assert {(2, 0), (2, 1), (0, 1), (1, 1)} <= found.keys()
    assert len({where for where, _ in found.values()}) == 1


def test_what_ranks_leave_behind_is_ended_between_starts(slow):
    family = "\nimport subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
    write(slow, FAILS_TWICE.replace("\nif", family + "if", 1) + "\nfrom pathlib import Path\n")
    slow.run("run", "-n", 2, "--preload", "slow", "--restarts", 2, "program.py")
    assert slow.processes() == []


def test_without_the_process_that_is_copied_ranks_start_as_ever(slow):
    write(slow, FAILS_TWICE.replace("os._exit(5", "os.kill(slow.where, 9); os._exit(5"))
    result = slow.run("run", "-n", 2, "--preload", "slow", "--restarts", 2, "program.py")
    assert result.returncode == 0
    said = [line for line in result.stderr.splitlines() if "without --preload" in line]
    assert len(said) == 1
    assert said[0].startswith("lamina run: warning: ranks start without --preload: the process that imports for them")
    found = starts(slow)
    assert found[0, 1][0] != found[0, 1][1] and found[2, 1][0] == found[2, 1][1]


@pytest.mark.parametrize(
    "module, why",
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=[100], daemon=True).start()",
         "the import of slow starts a thread"),
        ("import os\nif 'RANK' not in os.environ: os._exit(7)",
         "has ended: exit code 7"),
        ("import os\nif 'RANK' not in os.environ: os.kill(os.getpid(), 9)",
         "has ended: killed by signal 9 (SIGKILL)"),
        ("import sys, types\n"
         "cuda = types.SimpleNamespace(is_initialized=lambda: True, _is_in_bad_fork=lambda: False)\n"
         "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda)",
         "the import of slow opens a device"),
    ],
)  # fmt: skip
def test_where_ranks_cannot_be_copied_one_line_says_why(launcher, module, why):
    write(launcher, module + "\n", "slow.py")
    write(launcher, "print('ran')\n")
    result = launcher.run("run", "-n", 2, "--preload", "slow", "program.py")
    assert (result.returncode, result.stdout) == (0, "ran\n")
    [line] = result.stderr.splitlines()
    assert line.startswith("lamina run: warning: ranks start without --preload: ") and why in line


def test_threads_that_end_before_a_fork_do_not_matter(launcher):
    """numpy's OpenBLAS has some."""
    write(launcher, "import numpy\nprint((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum())\n")
    result = launcher.run("run", "--preload", "numpy", "program.py", env={"OMP_NUM_THREADS": "2"})
    assert (result.returncode, result.stdout, result.stderr) == (0, "27000000.0\n", "")


def test_numpy_draws_differ(launcher):
    write(launcher, "import os, numpy\nopen(os.environ['DIR'] + '/drawn', 'a').write(f'{numpy.random.rand()}\\n')\n")
    assert launcher.run("run", "-n", 4, "--preload", "numpy", "program.py").returncode == 0
    assert len(set((launcher.folder / "drawn").read_text().split())) == 4


def test_a_program_without_python_says_that_it_is_none(launcher):
    result = launcher.run("run", "--preload", "slow", "-c", "echo", "ran")
    assert (result.returncode, result.stdout) == (0, "ran\n")
    assert result.stderr == ("lamina run: warning: ranks start without --preload: -c starts a program without Python\n")


def test_a_module_that_is_not_there_starts_nothing(launcher):
    write(launcher, "print('ran')\n")
    result = launcher.run("run", "--preload", "no_such_module", "program.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "lamina run: --preload cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module': "
        "correct the name, or start without --preload [run-preload]\nmore: lamina explain run-preload\n"
    )


def test_a_module_that_fails_shows_where(launcher):
    write(launcher, "def fail(): raise RuntimeError('it is\\nbroken')\nfail()\n", "slow.py")
    write(launcher, "print('ran')\n")
    result = launcher.run("run", "--preload", "slow", "program.py")
    assert (result.returncode, result.stdout) == (2, "")
    *trace, line, more = result.stderr.splitlines()
    assert more == "more: lamina explain run-preload"
    assert line.startswith("lamina run: --preload cannot import slow: RuntimeError: it is broken: correct")
    assert any("in fail" in each for each in trace)


def test_modules_that_a_module_names_are_imported_with_it(slow):
    write(slow, SLOW + "__preload__ = ['later']\n", "slow.py")
    write(slow, SLOW, "later.py")
    write(slow, "import sys, slow\nprint(sys.modules['later'].where == slow.where)\n")
    result = slow.run("run", "--preload", "slow", "program.py")
    assert (result.stdout, result.stderr) == ("True\n", "")


def test_one_of_them_that_is_not_there_is_named(slow):
    write(slow, "__preload__ = ['no_such_module']\n", "slow.py")
    write(slow, "print('ran')\n")
    result = slow.run("run", "--preload", "slow", "program.py")
    assert result.returncode == 2
    assert result.stderr.startswith("lamina run: --preload cannot import no_such_module: ModuleNotFoundError")


TRAINS = """
import sys
before = set(sys.modules)
import torch, lamina
lamina.init(partitions=2)
model = lamina.distribute(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
@lamina.step
def step(x):
    loss = model(x).sum()
    model.backward(loss)
    return loss
step(torch.ones(2, 4))
optimizer.step()
late = [name for name in ("torch._dynamo", "sympy") if name in sys.modules and name not in before]
assert not late, f"rank {lamina.rank()} has imported {late}"
lamina.shutdown()
"""


def test_with_lamina_ranks_need_not_import_torchs_compiler_to_train(launcher):
    write(launcher, TRAINS)
    result = launcher.run("run", "-n", 2, *PRELOAD_COMPILER, "program.py")
    assert result.returncode == 0, result.stderr


def test_no_name_is_refused(launcher):
    result = launcher.run("run", "--preload", "", "program.py")
    assert result.returncode == 2 and "--preload must name Python modules" in result.stderr


def test_modules_are_imported_with_the_variables_that_all_ranks_have(launcher):
    write(
        launcher,
        "import os\nseen = [os.environ.get(name) for name in ('COLOUR', 'UCX_MEM_EVENTS', 'RANK')]\n",
        "slow.py",
    )
    write(launcher, "import slow; print(slow.seen)\n")
    result = launcher.run("run", "--preload", "slow", "-x", "COLOUR=red", "program.py", env={"RANK": "7"})
    assert (result.stdout, result.stderr) == ("['red', 'n', None]\n", "")
