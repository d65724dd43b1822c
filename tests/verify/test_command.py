# SPDX-License-Identifier: Apache-2.0
"""`lamina verify`: its arguments, what it says, and its exit codes."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD, READY, eventually

SCRIPT = Path(__file__).with_name("caused.py")


def verify(launcher, *words, steps=1):
    return launcher.run("verify", *PRELOAD, "-n", 2, "--steps", steps, *words)


def test_it_names_what_a_module_reads(launcher):
    result = verify(launcher, SCRIPT, "reads")
    assert result.returncode == 3, result.stderr
    first, *rest = result.stdout.splitlines()
    assert first.startswith("step 0, microbatch 0: output of 1 on rank 1 differs by ")
    assert first.partition(" (inputs agree): it reads ")[2] == (
        "environment variable SCALE, which is '3' instead of '2' (0 on rank 0 uses it), global SCALE, which is 3 "
        "instead of 2, global TABLE, which has other contents, its attribute factor, which is 0.75 instead of 0.5, "
        "and lamina.rank(), which is 1 instead of 0"
    )
    assert rest[0] == "what differs in all:" and "own words" not in result.stdout


@pytest.mark.parametrize(
    ("cause", "begins", "says"),
    [
        (
            "backward",
            "microbatch 0: gradient of the output of 0 on rank 0 ",
            ", in the code of 1: it reads lamina.rank()",
        ),
        ("rate", "parameter 0.", ": its update took lr, which is 0.2 instead of 0.1"),
    ],
)
def test_it_names_what_a_backward_reads_and_an_update_takes(launcher, cause, begins, says):
    result = verify(launcher, SCRIPT, cause)
    assert result.returncode == 3, result.stderr
    first = result.stdout.partition("\n")[0]
    assert first.startswith(("step 0, " if "microbatch" in begins else "step 0: ") + begins) and says in first


def test_slices_are_compared_as_wholes_and_a_fault_in_one_is_named(launcher):
    script = SCRIPT.with_name("sliced.py")
    result = verify(launcher, "--against", "tp=1", script, steps=2)
    assert result.returncode == 0 and result.stdout.startswith("equal within "), result.stdout + result.stderr
    assert " 30 parameters (and not " in result.stdout and " that lie in slices);" in result.stdout
    result = verify(launcher, "--layout", "prove_slices=0", script, "fault")  # a proof would refuse it before
    assert result.returncode == 3, result.stderr
    assert result.stdout.startswith("step 0, microbatch 0: input of 2.down differs "), result.stdout
    assert ", in the code of 2" in result.stdout.partition("\n")[0]


@pytest.mark.parametrize("kind", ["pipeline", "replicas", "slices"])
def test_devices_are_compared_and_a_fault_on_one_is_named(launcher, kind):
    script = SCRIPT.with_name("on_device.py")
    result = verify(launcher, script, kind, steps=2)
    assert result.returncode == 0 and result.stdout.startswith("equal within "), result.stdout + result.stderr
    result = verify(launcher, script, kind, "fault", steps=2)
    assert result.returncode == 3, result.stderr
    first = result.stdout.partition("\n")[0]
    assert first.startswith("step 0, microbatch ") and ".down" in first, first


def test_a_smaller_layout_is_found_and_can_be_run_again(launcher):
    result = verify(launcher, "--bisect", SCRIPT, "rank", 1)
    assert result.returncode == 3, result.stderr
    assert "it reads lamina.rank(), which is 1 instead of 0\n" in result.stdout
    found = [line for line in result.stdout.splitlines() if line.startswith("the smallest layout")]
    assert found[0].endswith(
        f"lamina verify -n 2 --steps 1 --layout microbatches=1,deterministic_server=1 {' '.join(PRELOAD[:1])}=torch "
        f"--preload=lamina.errors {SCRIPT} rank 1"
    )


def test_layouts_are_compared_with_others(launcher):
    result = verify(launcher, "--layout", "microbatches=4", "--against", "pp=2", SCRIPT, "rank", 1, steps=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("equal within ") and "1 of 2 steps: the script ended" in result.stdout
    assert "lamina verify: 1 of 2: layout microbatches=4, 2 ranks\n" in result.stderr
    assert "lamina verify: 2 of 2: layout pp=2, 2 ranks\n" in result.stderr


@pytest.mark.parametrize(
    ("cause", "code", "says"),
    [
        ("fails", 1, "lamina verify: the run in the layout failed, see above; exit code 1"),
        ("no_steps", 2, "lamina verify: the script has made no step"),
        ("no_lamina", 2, "lamina verify: no rank has recorded anything: the script must call lamina.init()"),
    ],
)
def test_a_run_that_cannot_be_compared_is_told_as_that(launcher, cause, code, says):
    result = launcher.run("verify", *PRELOAD, "-n", 2, SCRIPT, cause)
    assert result.returncode == code and result.stdout == ""
    assert says in result.stderr


def test_a_layout_that_does_not_fit_is_told_once(launcher):
    result = verify(launcher, "--layout", "pp=3", SCRIPT, "none")
    assert result.returncode == 1, result.stderr
    assert result.stdout == "" and result.stderr.count("the run in layout pp=3 failed") == 1
    assert "2 of 2" not in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-n", "2"], "say which script; see `lamina verify --help`"),
        (["--against", "pp=0,partition=2", "x.py"], "layout: 2 errors"),
        (["--layout", "ddp", "x.py"], "ddp: without a value is not allowed; expected KEY=VALUE"),
        (["--steps", "0", "x.py"], "--steps"),
        (["--tolerance", "-1", "x.py"], "--tolerance"),
        (["--compare", "a"], "--compare takes two folders of recordings"),
        (["--compare", "a", "b"], "cannot read a: No such file or directory"),
        (["--compare", "empty", "empty"], "empty has no recording of a run in it"),
        (["--restarts", "2", "x.py"], "--restarts: a run that is compared is not started again"),
        (["--nnodes", "2", "x.py"], "--nnodes"),
        (["--keep", "mine", "x.py"], "--keep mine: there is mine/thesis.txt, which is no recording"),
        (["--keep", "mine2", "x.py"], "--keep mine2: there is mine2/layout/thesis.txt, which is no recording"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(launcher, words, says):
    for folder in ("empty", "mine", "mine2/layout"):
        (launcher.folder / folder).mkdir(parents=True)
    kept = [launcher.folder / "mine" / "thesis.txt", launcher.folder / "mine2" / "layout" / "thesis.txt"]
    for path in kept:
        path.write_text("years of work")
    result = launcher.run("verify", *words)
    assert result.returncode == 2 and result.stdout == ""
    assert says in result.stderr and result.stderr.startswith("lamina verify: "), result.stderr
    assert all(path.read_text() == "years of work" for path in kept)


def recorded(
    folder,
    ranks=(1.0,),
    world=None,
    head=None,
    more="",
    ended=True,
    weight="layer.weight",
    modules=("layer",),
    steps=1,
    **spoilt,
):
    """Writes the recordings of a run in which modules returned these numbers."""
    folder.mkdir()
    for rank, number in enumerate(ranks):
        about = {"rank": rank, "world": world or len(ranks), "copy": rank, "partition": 0, "about": {}} | spoilt
        digest = ["float32", [1], 0, 1, number**2, [number] * 8, 0, abs(number), 0, 0]
        seen = {"step": 0, "microbatch": 0, "name": "layer", "call": 0, "index": 0, "order": 0, "digest": digest}
        alike = {"digest": ["float32", [1], 0, 1, 1.0, [1.0] * 8, 0, 1.0, 0, 0]}
        parameter = {"kind": "parameter"} | seen | alike | {"microbatch": -1, "name": weight}
        lines = [head or {"lamina recording": 1} | about]
        lines += [{"kind": "output"} | seen | {"name": name} for name in modules]
        lines += [parameter | {"step": step} for step in (-1, 0) if weight]
        lines += [{"steps": ended_step + 1} for ended_step in range(steps if rank == 0 else 1)]
        text = "".join(json.dumps(line) + "\n" for line in lines + [{"end": True}] * ended)
        (folder / f"rank-{rank}.jsonl").write_text(text + more)
    return folder


def test_recordings_are_compared(launcher):
    one, other = recorded(launcher.folder / "one"), recorded(launcher.folder / "other", (1.5, 1.5))
    result = launcher.run("verify", "--compare", one, one)
    assert result.returncode == 0 and result.stdout.startswith("equal within ")
    result = launcher.run("verify", "--compare", one, other)
    assert result.returncode == 3 and "output of layer on rank 0 differs by" in result.stdout
    assert "has 1 copy of the model, the second 2" in result.stderr


def test_what_a_killed_run_has_left_is_compared(launcher):
    whole = recorded(launcher.folder / "whole", (1.0, 2.0))
    cut = recorded(launcher.folder / "cut", (1.0,), world=2, ended=False, more='{"kind": "outp')
    result = launcher.run("verify", "--compare", cut, whole)
    assert result.returncode == 2 and "equal within" not in result.stdout, result.stderr
    assert result.stdout.startswith("no difference beyond ") and "does not prove the runs equal" in result.stdout
    assert "first run: the recording of rank 0 breaks off after 1 step\n" in result.stdout
    assert "first run: there is no recording of rank 1\n" in result.stdout


def test_runs_that_lack_something_are_not_called_equal(launcher):
    whole, bare = recorded(launcher.folder / "whole"), recorded(launcher.folder / "bare", weight="")
    other = recorded(launcher.folder / "other", weight="layer.bias")
    for first, second, missing in (
        (whole, bare, ["no parameter was compared", "second run: there is no parameter layer.weight that can be"]),
        (bare, bare, ["no parameter was compared"]),
        (
            whole,
            other,
            ["first run: there is no parameter layer.bias that", "second run: there is no parameter layer.w"],
        ),
    ):
        result = launcher.run("verify", "--compare", first, second)
        assert result.returncode == 2 and "equal within" not in result.stdout, result.stdout
        assert all(each in result.stdout for each in missing), result.stdout


def test_a_module_that_one_run_lacks_is_told(launcher):
    whole = recorded(launcher.folder / "whole", modules=("layer", "layer.norm", "head"))
    lacking = recorded(launcher.folder / "lacking", modules=("layer", "layer.norm"))
    for first, second, which in ((whole, lacking, "second"), (lacking, whole, "first")):
        result = launcher.run("verify", "--compare", first, second)
        assert result.returncode == 2 and "equal within" not in result.stdout, result.stdout
        assert f"{which} run: there is no call of head that can be compared\n" in result.stdout
    bare = recorded(launcher.folder / "bare", modules=())
    result = launcher.run("verify", "--compare", bare, bare)
    assert result.returncode == 2 and "no module was compared" in result.stdout, result.stdout


def test_a_rank_that_has_recorded_fewer_steps_than_another_is_told(launcher):
    uneven = recorded(launcher.folder / "uneven", (1.0, 2.0), steps=2)
    result = launcher.run("verify", "--compare", uneven, uneven)
    assert result.returncode == 2, result.stdout
    assert "first run: rank 1 has recorded 1 step, rank 0 2\n" in result.stdout


def test_a_recording_that_is_there_twice_or_is_no_file_is_refused(launcher):
    folder = recorded(launcher.folder / "twice")
    (folder / "rank-7.jsonl").write_text((folder / "rank-0.jsonl").read_text())
    result = launcher.run("verify", "--compare", folder, folder)
    assert result.returncode == 2 and "two recordings are of rank 0" in result.stderr
    (folder / "rank-7.jsonl").unlink()
    os.mkfifo(folder / "rank-7.jsonl")
    result = launcher.run("verify", "--compare", folder, folder)
    assert result.returncode == 2 and "rank-7.jsonl is no regular file" in result.stderr


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"head": {"lamina recording": 9}}, "line 1: it cannot be read as a recording of a run: it is of version 9"),
        ({"head": {"nothing": 1}}, "line 1: it cannot be read as a recording of a run"),
        ({"head": [3]}, "line 1: it cannot be read as a recording of a run"),
        ({"more": "]]\n"}, "line 7: it cannot be read as a recording of a run"),
        ({"more": '{"kind": "thought"}\n'}, "line 7: it cannot be read as a recording of a run"),
        ({"more": "[" * 1000000 + "\n"}, "line 7: it cannot be read as a recording of a run: lists in more than 100"),
        ({"more": '{"steps": -1}\n'}, "line 7: it cannot be read as a recording of a run: steps: -1 is not allowed"),
        ({"more": "x" * (17 << 20)}, "line 7: it has more than 16777216 bytes"),
        ({"world": 2**60}, "line 1: it cannot be read as a recording of a run: world: 1152921504606846976 is not"),
        (
            {"copy": 2**40},
            "line 1: it cannot be read as a recording of a run: copy: 1099511627776 is not allowed; expected from",
        ),
    ],
)
def test_damaged_recordings_are_refused(launcher, damage, says):
    folder = recorded(launcher.folder / "damaged", **damage)
    result = launcher.run("verify", "--compare", folder, folder)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith(f"lamina verify: {folder}/rank-0.jsonl, {says}")


def test_an_interrupt_ends_the_run_and_no_other_begins(launcher):
    job = launcher.start("verify", "-n", 2, "-c", "sh", "-c", READY + "exec sleep 600")
    eventually(lambda: all((launcher.folder / f"ready-{rank}").exists() for rank in range(2)))
    os.kill(job.pid, signal.SIGINT)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGINT and out == ""
    assert "2 of 2" not in err
    eventually(lambda: not launcher.processes())


def test_a_run_removes_what_killed_ones_have_left(launcher):
    temporary = launcher.folder / "tmp"
    (temporary / "lamina-verify.mine").mkdir(parents=True)
    (temporary / "lamina-verify.abcdef").symlink_to(launcher.folder)
    env = {"TMPDIR": str(temporary)}
    words = ("verify", "-n", 1, "-c", "sh", "-c", READY + "exec sleep 600")
    job = launcher.start(*words, env=env)
    eventually(lambda: (launcher.folder / "ready-0").exists())
    (lives,) = set(temporary.iterdir()) - {temporary / "lamina-verify.mine", temporary / "lamina-verify.abcdef"}
    killed = temporary / "lamina-verify.killed"
    shutil.copytree(lives, killed)
    short = ("verify", "-n", 1, "-c", "true")
    assert launcher.run(*short, env=env).returncode == 2
    assert not killed.exists() and lives.exists()
    assert (temporary / "lamina-verify.mine").exists() and launcher.folder.exists()
    os.kill(job.pid, signal.SIGKILL)
    job.communicate(timeout=60)
    eventually(lambda: not launcher.processes())
    launcher.run(*short, env=env)
    assert not lives.exists()
