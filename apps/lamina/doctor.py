# SPDX-License-Identifier: Apache-2.0
"""doctor.py VERSION COMMAND [--json]: what a report of a fault needs to say of this machine, and whether two ranks work
here. `lamina doctor` has this file with it and runs it, so that it works where the package cannot be imported."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_S = 120

# The program of the two ranks. Rank 0 writes what works into a file, for lines on stdout may be anybody's.
RANKS = r"""
import ctypes, json, os, re, sys, time
begin = time.monotonic()
import torch, lamina
found = {"import_s": round(time.monotonic() - begin, 2)}
def write():
    if lamina.rank() == 0:
        with open(sys.argv[1], "w") as file: json.dump(found, file)
def works(name, value=True):
    found[name] = value
    write()
def begun():
    return round(time.monotonic() - begin, 2)
def all_reduce(device):
    value = torch.full((1000,), float(lamina.rank() + 1), device=device)
    torch.distributed.all_reduce(value, group=lamina.get_world_process_group())
    assert bool((value == 3).all())
@lamina.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss
def step(model, device):
    torch.manual_seed(0)
    loss = train(lamina.distribute(model), torch.ones(4, 8, device=device)).reduce_mean()
    assert loss.device == device and float(loss) > 0
def pipeline():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))

asked, host = os.environ.get("LAMINA_DEVICE", "auto"), torch.device("cpu")
os.environ["LAMINA_DEVICE"] = "cpu"
begin = time.monotonic()
lamina.init(partitions=2, microbatches=2, ddp=True, timeout_s=30)
found["start_s"] = begun()
paths = sorted(set(re.findall(r"/\S*libucp\S*", open("/proc/self/maps").read())))
version = ctypes.CDLL(paths[0]).ucp_get_version_string
version.restype = ctypes.c_char_p
found["ucx"] = {"library": paths[0], "version": version().decode()}
assert lamina.allgather({"rank": lamina.rank()}, lamina.WORLD) == [{"rank": 0}, {"rank": 1}]
works("objects")
all_reduce(host)
works("all_reduce")
begin = time.monotonic()
step(pipeline(), host)
works("pipeline_step_s", begun())
lamina.shutdown()

os.environ["LAMINA_DEVICE"] = asked
begin = time.monotonic()
lamina.init(ddp=True, timeout_s=30)
device = lamina.device()
if device != host:
    works("devices", lamina.allgather(str(device), lamina.WORLD))
    all_reduce(device)
    works("device_all_reduce")
    step(torch.nn.Linear(8, 8), device)
    works("device_step_s", begun())
    lamina.shutdown()
    begin = time.monotonic()
    lamina.init(partitions=2, microbatches=2, timeout_s=30)
    step(pipeline(), device)
    works("device_pipeline_step_s", begun())
lamina.shutdown()
"""

# Says what torch was built for, and what it sees.
TORCH = r"""
import json, torch
found = torch.accelerator.current_accelerator(check_available=True)
devices = torch.accelerator.device_count() if found else 0
names = {"cuda": torch.version.cuda, "accelerator": found and found.type, "devices": devices}
print(json.dumps(names | {"threads": torch.get_num_threads()}))
"""


def text_of(path):
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def last_line(text):
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def error_in(text):
    """The last error that a rank has raised, its lines as one. With process groups torch puts the rank before each."""
    text = re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.MULTILINE)
    raised = re.findall(r"^\S*Error: .*(?:\n(?!lamina run: |----).+)*", text, re.MULTILINE)
    return " ".join(raised[-1].splitlines()) if raised else last_line(text)


def version_of(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_python(code):
    """Runs a program of ours, which must find nothing in the current folder: that may be anybody's."""
    words = [sys.executable, "-c", "import sys; sys.path[:] = filter(None, sys.path)\n" + code]
    return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)


def torch_facts():
    version = version_of("torch")
    if version is None:
        return {"version": None}
    done = run_python(TORCH)
    if done.returncode:
        return {"version": version, "error": last_line(done.stderr)}
    return {"version": version} | json.loads(last_line(done.stdout))


def lamina_facts():
    spec = importlib.util.find_spec("lamina")
    if spec is None:
        return {"version": None}
    done = run_python("import lamina")
    facts = {"version": version_of("lamina"), "folder": str(Path(spec.origin).parent)}
    return facts | ({"error": last_line(done.stderr)} if done.returncode else {})


def limits():
    def shown(name):
        soft, hard = resource.getrlimit(getattr(resource, name))
        return ["unlimited" if each == resource.RLIM_INFINITY else each for each in (soft, hard)]

    return {name.lower(): shown(f"RLIMIT_{name}") for name in ("NOFILE", "NPROC", "MEMLOCK", "CORE")}


def distribution():
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def system_facts():
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    memory = dict(line.split(":") for line in (text_of("/proc/meminfo") or "").splitlines())
    return {
        "python": platform.python_version(),
        "system": distribution(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": int(memory["MemTotal"].split()[0]) // 1024 if "MemTotal" in memory else None,
        "free_memory_mib": int(memory["MemAvailable"].split()[0]) // 1024 if "MemAvailable" in memory else None,
        "shared_memory_mib": shm and shm.total >> 20,
        "free_shared_memory_mib": shm and shm.free >> 20,
        "cgroup": {name: text_of(f"/sys/fs/cgroup/{name}") for name in ("cpu.max", "memory.max", "pids.max")},
        "limits": limits(),
    }


def two_ranks(command):
    with tempfile.TemporaryDirectory(prefix="lamina-doctor-") as folder:
        program, answer = Path(folder, "ranks.py"), Path(folder, "answer")
        program.write_text(RANKS)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LAMINA_PYTHON": sys.executable}
        words = [command, "run", "-n", "2", str(program), str(answer)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, cwd=folder)
        except subprocess.TimeoutExpired:
            return {"error": f"two ranks had not ended after {TIMEOUT_S} s"}
        facts = json.loads(text_of(answer) or "{}")
        if done.returncode:
            facts |= {"error": error_in(done.stderr), "log": done.stderr[-4000:]}
        return facts


def advice(facts):
    """Yields what is wrong, as a line each that says what to do."""
    if facts["torch"]["version"] is None:
        yield f"there is no torch in {sys.executable}: pip install torch"
    elif "error" in facts["torch"]:
        yield f"torch cannot be imported: {facts['torch']['error']}"
    elif facts["lamina"]["version"] is None:
        yield f"there is no lamina in {sys.executable}: install it there, or name another Python in LAMINA_PYTHON"
    elif "error" in facts["lamina"]:
        yield f"lamina cannot be imported: {facts['lamina']['error']}"
    elif facts["lamina"]["version"] != facts["command"]:
        both = f"{facts['command']}, the package is {facts['lamina']['version']}"
        yield f"the command is of lamina {both}: install one of them again"
    elif "error" in facts["ranks"]:
        yield f"two ranks do not work: {facts['ranks']['error']}"
    shared = facts["system"]["free_shared_memory_mib"]
    if shared is None or shared < 64:
        yield f"/dev/shm has {shared or 0} MiB free, and a rank takes up to 64: give the container more (--shm-size)"
    files = facts["system"]["limits"]["nofile"][0]
    if files != "unlimited" and files < 1024:
        yield f"a process may open {files} files only: ulimit -n 1024"


def described(facts):
    def lines(values, indent="  "):
        for name, value in values.items():
            if isinstance(value, dict):
                yield f"{indent}{name}"
                yield from lines(value, indent + "  ")
            elif name != "log" and value is not None:
                shown = " / ".join(map(str, value)) if isinstance(value, list) else "works" if value is True else value
                yield f"{indent}{name:<24}{shown}"

    for name in ("lamina", "torch", "system", "ranks"):
        yield {"ranks": "two ranks on this machine"}.get(name, name)
        yield from lines(facts[name])


def main():
    version, command, *options = sys.argv[1:]
    facts = {"command": version, "lamina": lamina_facts(), "torch": torch_facts(), "system": system_facts()}
    usable = "error" not in facts["lamina"] and facts["lamina"]["version"] and facts["torch"]["version"]
    facts["ranks"] = two_ranks(command) if usable else {}
    facts["advice"] = list(advice(facts))
    if "--json" in options:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(described(facts)))
        print("\n" + ("\n".join(facts["advice"]) or "All of this works here."))
    return 1 if facts["advice"] else 0


if __name__ == "__main__":
    sys.exit(main())
