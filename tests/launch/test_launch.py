# SPDX-License-Identifier: Apache-2.0
"""`lamina run`: what it starts, and what it refuses to start."""

import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
from launch.launcher_harness import command

DUMP = """
import json, os, sys
name = os.path.join(os.environ["DIR"], "dump-" + os.environ["RANK"])
secret = os.read(int(os.environ["LAMINA_SECRET_FD"]), 100).hex()
json.dump({"argv": sys.argv, "env": dict(os.environ), "secret": secret, "stdin": sys.stdin.read(),
           "group": os.getpgid(0) == os.getpid()}, open(name, "w"))
"""


def dumps(folder, ranks):
    return [json.loads((folder / f"dump-{rank}").read_text()) for rank in range(ranks)]


def test_version(launcher):
    version = (Path(__file__).parents[2] / "VERSION").read_text()
    result = launcher.run("--version")
    assert (result.returncode, result.stdout) == (0, f"lamina {version}")


def test_every_rank_gets_torchruns_environment(launcher, tmp_path):
    (tmp_path / "dump.py").write_text(DUMP)
    assert launcher.run("run", "-n", 3, "dump.py", env={"TORCHELASTIC_USE_AGENT_STORE": "True"}).returncode == 0
    ports = set()
    for rank, dump in enumerate(dumps(tmp_path, 3)):
        env = dump["env"]
        expected = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "GROUP_RANK": 0, "NODE_RANK": 0,
            "ROLE_RANK": rank, "ROLE_WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": 0,
            "PYTHONUNBUFFERED": 1, "LAMINA_LAUNCHER": 1, "UCX_HANDLE_ERRORS": "none", "UCX_MEM_EVENTS": "n",
            "OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // 3),
        }  # fmt: skip
        assert {name: env.get(name) for name in expected} == {name: str(value) for name, value in expected.items()}
        assert env["TORCHELASTIC_RUN_ID"] and "TORCHELASTIC_USE_AGENT_STORE" not in env
        ports.add(env["MASTER_PORT"])
        assert dump["group"], "each rank leads a process group of its own"
    assert len(ports) == 1 and 0 < int(ports.pop()) < 65536


def test_the_secret_is_the_same_for_all_ranks_and_new_for_each_job(launcher, tmp_path):
    (tmp_path / "dump.py").write_text(DUMP)
    secrets = []
    for _ in range(2):
        assert launcher.run("run", "-n", 2, "dump.py").returncode == 0
        one, two = (dump["secret"] for dump in dumps(tmp_path, 2))
        assert one == two and len(one) == 64
        for dump in dumps(tmp_path, 2):
            assert one not in json.dumps([dump["env"], dump["argv"]])
        secrets.append(one)
    assert secrets[0] != secrets[1]


def test_all_words_after_the_script_go_to_it(launcher, tmp_path):
    (tmp_path / "dump.py").write_text(DUMP)
    words = ["-n", "7", "-h", "--", "--version", "-c", "", "a b", "$NOPE"]
    assert launcher.run("run", "dump.py", *words).returncode == 0
    assert dumps(tmp_path, 1)[0]["argv"] == ["dump.py", *words]


def test_names_and_homes_in_arguments_are_those_of_each_rank(launcher, tmp_path):
    (tmp_path / "dump.py").write_text(DUMP)
    words = ["out-$RANK-${LOCAL_RANK}", "~/data", "$COLOUR"]
    assert launcher.run("run", "-n", 2, "-x", "HOME=/the/home", "-x", "COLOUR=red", "dump.py", *words).returncode == 0
    for rank, dump in enumerate(dumps(tmp_path, 2)):
        assert dump["argv"][1:] == [f"out-{rank}-{rank}", "/the/home/data", "red"]


def test_module(launcher, tmp_path):
    (tmp_path / "tool.py").write_text(DUMP)
    assert launcher.run("run", "-n", 2, "-m", "tool", "-m", "x").returncode == 0
    for dump in dumps(tmp_path, 2):
        assert dump["argv"][1:] == ["-m", "x"]


def test_command(launcher, tmp_path):
    result = launcher.run("run", "-c", "-n2", "--", "sh", "-c", 'echo "$0 $RANK $*"', "name", "-c", "--")
    assert (result.returncode, result.stdout, result.stderr) == (0, "name 0 -c --\n", "")


def test_rank_0_reads_our_input_and_the_others_nothing(launcher, tmp_path):
    (tmp_path / "dump.py").write_text(DUMP)
    assert launcher.run("run", "-n", 2, "dump.py", input="some text").returncode == 0
    assert [dump["stdin"] for dump in dumps(tmp_path, 2)] == ["some text", ""]


def test_rank_0_passes_through_and_the_others_are_silent(launcher):
    result = launcher.shell(3, "echo out $RANK; echo err $RANK >&2")
    assert (result.returncode, result.stdout, result.stderr) == (0, "out 0\n", "err 0\n")


def test_the_interpreter_is_the_named_one_else_the_one_beside_the_binary_else_python3(launcher, tmp_path):
    for name in ("env/python", "path/python3", "named"):
        fake = tmp_path / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(f"#!/bin/sh\necho {name} $*\n")
        fake.chmod(0o755)
    beside = shutil.copy(command(), tmp_path / "env/lamina")
    alone = shutil.copy(command(), tmp_path / "lamina")
    path = f"{tmp_path}/path:{os.environ['PATH']}"

    def output(binary, **env):
        return launcher.run("run", "-m", "x", binary=binary, env={"LAMINA_PYTHON": None, "PATH": path} | env).stdout

    assert output(beside, LAMINA_PYTHON=f"{tmp_path}/named") == "named -m x\n"
    assert output(beside) == "env/python -m x\n"
    assert output(alone) == "path/python3 -m x\n"


def test_a_rank_may_listen_on_the_master_port(launcher, tmp_path):
    (tmp_path / "serve.py").write_text(
        "import os, socket\n"
        "if os.environ['RANK'] == '0':\n"
        "    socket.create_server((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])))\n"
    )
    assert launcher.run("run", "-n", 2, "serve.py").returncode == 0


@pytest.mark.parametrize(
    "before, after, late",
    [
        ([], ["-n", 2], "-n comes after words.py, so it is for words.py, which runs on 1 rank"),
        ([], ["--lr", "1", "--nproc-per-node=2"], "--nproc-per-node=2 comes after words.py"),
        (
            ["-n", 2],
            ["--timeline", "a.json"],
            "--timeline comes after words.py, so it is for words.py, which runs on 2",
        ),
        (["-n", 2], ["-n", 5, "--config", "x"], None),
        (["-n", 2], ["-name", "--timelines"], None),
    ],
)
def test_options_after_the_script_are_its_own_and_those_that_look_like_ours_are_told(launcher, before, after, late):
    (launcher.folder / "words.py").write_text("import sys\nprint(sys.argv[1:])\n")
    result = launcher.run("run", *before, "words.py", *after)
    assert (result.returncode, result.stdout) == (0, f"{[str(word) for word in after]}\n")
    if late:
        assert result.stderr.startswith(f"lamina run: warning: {late}")
        assert result.stderr.endswith("come before it, as in `lamina run -n 2 words.py`\n")
    else:
        assert result.stderr == ""


@pytest.mark.parametrize("words", [["python", "words.py"], ["python3", "words.py"], ["python", "-m", "words"]])
def test_the_word_python_may_stand_before_the_script(launcher, words):
    (launcher.folder / "words.py").write_text("import sys\nprint(sys.executable, sys.argv[1:])\n")
    result = launcher.run("run", "-n", 2, *words, "a", env={"LAMINA_PYTHON": sys.executable})
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{sys.executable} ['a']\n", "")


@pytest.mark.parametrize(
    "words, says",
    [
        (["run", "-n", "2", "missing.py"], "missing.py"),
        (["run", "-c", "no-such-program"], "no-such-program"),
        (["run", "-m", "-c", "x"], "-m"),
        (["run", "-n", "0", "-c", "true"], "-n must be 1 or greater, not 0"),
        (["run", "-n", "-2", "-c", "true"], "-n must be 1 or greater, not -2"),
        (["run", "-n", "two", "-c", "true"], "two"),
        (["run", "--world_size", "1", "-n", "2", "-c", "true"], "--world_size 1 is less than the 2 ranks"),
        (["run", "--nnodes", "2", "-c", "true"], "--node_rank or --base_rank"),
        (["run", "--nnodes", "2", "--node_rank", "1", "-c", "true"], "--master_addr"),
        (["run", "--nnodes", "2", "--node_rank", "1", "--master_addr", "x", "-c", "true"], "--master_port"),
        (["run", "--node_rank", "1", "-c", "true"], "--node_rank 1 makes no sense"),
        (["run", "--master_port", "70000", "-c", "true"], "--master_port must be from 1 to 65535, not 70000"),
        (["run", "--base_rank", "-1", "-c", "true"], "--base_rank must be 0 or greater, not -1"),
        (["run", "--rdzv-backend=c10d", "-c", "true"], "--rdzv-backend: there is no rendezvous service"),
        (["run", "-x", "RANK=1", "-c", "true"], "-x RANK cannot be set"),
        (["run", "-x", "=1", "-c", "true"], "-x =1 has no name"),
        (["run", "-x", "NO_SUCH_NAME", "-c", "true"], "-x NO_SUCH_NAME: this variable is not set"),
        (["run", "--config", "/no/file.json", "-c", "true"], "--config /no/file.json: cannot be read"),
        (["run", "--config", "/tmp", "-c", "true"], "--config /tmp: cannot be read: it is a folder"),
        (["run", "--config", "/dev/zero", "-c", "true"], "--config /dev/zero: cannot be read: it is a device"),
        (["run", "--secret-file", "/no/file", "-c", "true"], "--secret-file /no/file: cannot be read"),
        (["run", "--secret-file", "/tmp", "-c", "true"], "--secret-file /tmp: cannot be read: it is a folder"),
        (
            ["run", "--secret-file", "pipe", "-c", "true"],
            "--secret-file pipe: cannot be read: it is a pipe that nobody",
        ),
        (["run", "--timeline", "pipe", "-c", "true"], "--timeline pipe cannot be written: it is a pipe"),
        (["run", "--timeline", "", "-c", "true"], "--timeline  cannot be written: a file name is missing"),
        (["run", "-n", "99999999999", "-c", "true"], "--nproc: 99999999999 is too large a number"),
        (["run", "--nnodes", "99999999999", "-c", "true"], "--nnodes: 99999999999 is too large a number"),
        (["run", "--restarts", "99999999999", "-c", "true"], "--restarts: 99999999999 is too large a number"),
        (["run", "--grace-period", "1.5", "-c", "true"], "--grace-period: 1.5 is not a whole number"),
        (["run", "--hang-timeout", "0", "-c", "true"], "--hang-timeout must be 1 or greater, not 0"),
        (["run", "--log-limit", "0", "-c", "true"], "--log-limit must be 1 or greater, not 0"),
        (["run", "--nnodes", "99999", "-n", "99999", "-c", "true"], "are too many ranks"),
        (["run", "--world_size", "4", "-n", "2", "--node_rank", "2147483647", "-c", "true"], "do not fit into"),
        (["trace", "/tmp"], "lamina trace: /tmp: it is a folder in which no rank has left a timeline"),
        (["trace", "nothing"], "lamina trace: nothing: cannot be read: No such file or directory"),
        (["plan", "nothing"], "lamina plan: nothing: cannot be read: No such file or directory"),
        (["plan", "/tmp"], "lamina plan: /tmp: cannot be read: it is a folder"),
        (["run", "--frob", "-c", "true"], "--frob"),
        (["run"], "say what to run"),
        (["rnu"], "no command rnu; the nearest is run"),
        (["explain", "step-nestd"], "no code or type step-nestd; the nearest is step-nested"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(launcher, words, says):
    os.mkfifo(launcher.folder / "pipe", 0o600)
    result = launcher.run(*words)
    assert result.returncode == 2
    assert says in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_secret_may_come_through_a_pipe(launcher):
    """As `--secret-file <(command)` gives one."""
    pipe = launcher.folder / "pipe"
    os.mkfifo(pipe, 0o600)
    read_it = "import os; print(os.read(int(os.environ['LAMINA_SECRET_FD']), 100).decode())"
    job = launcher.start("run", "--secret-file", pipe, "-c", sys.executable, "-S", "-c", read_it)
    pipe.write_text("0123456789abcdef" * 2 + "more")
    assert job.communicate(timeout=30) == ("0123456789abcdef" * 2 + "\n", "")


@pytest.mark.parametrize("limit", [10, 24])
def test_too_few_open_files_are_named_with_the_remedy(launcher, limit):
    """Too few to begin with, and for all ranks."""

    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    result = launcher.shell(9, "exec sleep 100", preexec_fn=few)
    assert result.returncode in (2, 127)
    assert "Too many open files (`ulimit -n` raises the limit)" in result.stderr and "TMPDIR" not in result.stderr


def test_a_wrong_interpreter_is_found_before_the_start(launcher):
    result = launcher.run("run", "-m", "x", env={"LAMINA_PYTHON": "/no/python"})
    assert result.returncode == 2 and "LAMINA_PYTHON is /no/python" in result.stderr


def test_a_program_that_cannot_be_executed_is_one_line_and_exit_code_127(launcher, tmp_path):
    (tmp_path / "broken").write_text("#!/no/such/interpreter\n")
    (tmp_path / "broken").chmod(0o755)
    result = launcher.run("run", "-n", 2, "-c", "./broken")
    assert result.returncode == 127
    assert result.stderr == "lamina run: cannot start rank 0 (./broken): No such file or directory\n"
