# SPDX-License-Identifier: Apache-2.0
"""installed_wheel.py SOURCE BUILD: makes the wheels as `make wheel` does, from what is built, and installs them in
an environment of their own, which has nothing else but torch. What a user does first works there. Every other test has
the package that `make build` installs, whose Python files are those of the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from auditwheel.wheeltools import InWheel

MIB = 1 << 20
# The oldest systems that the wheel is for, as its name and docs/installing.md say.
OLDEST = "manylinux_2_35"
OTHER_ENGINE = "torch2.99"

TRAIN = """
import re, sys, torch, lamina
kind, folder = sys.argv[1:]
pipeline = kind == "pipeline"
keys = {"partitions": 2} if pipeline else {"ddp": True, "sharded_data_parallel_degree": 2}
lamina.init(microbatches=2, **keys)
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
model = lamina.DistributedModel(plain)
optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

@lamina.step
def train(x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

losses = []
for _ in range(20):
    losses.append(float(train(torch.ones(4, 8)).reduce_mean()))
    optimizer.step()
    optimizer.zero_grad()
assert losses[-1] < losses[0] / 2, losses
lamina.save_checkpoint(folder, "last")
(library,) = set(re.findall(r"/\\S*libucp\\S*", open("/proc/self/maps").read()))
print("ucx", library)
"""


def run(*words: str | Path, **options) -> str:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def python_files(package: Path) -> set[Path]:
    return {path.relative_to(package) for kind in ("*.py", "*.pyi", "py.typed") for path in package.rglob(kind)}


def make_wheels(source: Path, build: Path, where: Path) -> list[Path]:
    """Makes those of `make wheel`, and gives lamina's an engine for a torch that does not exist, as for another one."""
    run(source / "scripts/wheel.sh", build, where)
    (alone,) = where.glob("lamina-*.whl")
    assert alone.stat().st_size < 15 * MIB, alone.stat().st_size
    (where / "other").mkdir()
    with InWheel(alone, where / "other" / alone.name) as tree:
        (engine,) = Path(tree).absolute().glob("lamina/torch[0-9]*")
        engine.rename(engine.with_name(OTHER_ENGINE))
    run(sys.executable, source / "scripts/merge_wheels.py", where, alone, where / "other" / alone.name)
    (ours,) = where.glob("lamina-*.whl")
    (names,) = where.glob("lamina_compat-*.whl")
    assert OLDEST in ours.name, ours.name
    return [ours, names]


def environment_with_torch(folder: Path) -> Path:
    """Makes an environment that has only what this interpreter has beside lamina, such as torch; returns its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")  # .pth files in there are not read
    return folder / "bin/python"


def check_package(source: Path, python: Path) -> Path:
    where = (
        "import lamina, torch; print(lamina.__file__, lamina._lamina.__file__, lamina.__version__, torch.__version__)"
    )
    module, extension, version, torch = run(python, "-c", where, cwd=python.parent).split()
    package = Path(module).parent
    engine = package / f"torch{'.'.join(torch.split('.')[:2])}"
    assert package.is_relative_to(python.parent.parent) and Path(extension).parent == engine, (module, extension)
    assert version == (source / "VERSION").read_text().strip()
    missing = python_files(source / "python/lamina") ^ python_files(package)
    assert not missing, f"in the checkout or in the wheel, but not in both: {sorted(map(str, missing))}"
    for library in package.glob("torch[0-9]*/*.so"):
        for path in re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", run("readelf", "-d", library)):
            assert all(entry.startswith("$ORIGIN") for entry in path.split(":") if entry), (library, path)
    return package


def check_training(python: Path, package: Path, folder: Path) -> None:
    program, lamina = folder / "train.py", python.parent / "lamina"
    program.write_text(TRAIN)
    beside = package.parent / "libucx/lib"  # as the package libucx has it
    shutil.copytree(package / "ucx", beside)
    for kind, ucx, named in (("pipeline", beside, ""), ("sharded", package / "ucx", package / "ucx")):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LAMINA_UCX": str(named)}
        said = run(lamina, "run", "-n", "2", program, kind, folder / kind, env=environment, cwd=folder)
        assert f"ucx {ucx}/" in said, said
        run(lamina, "checkpoint", "verify", folder / kind, cwd=folder)
    costs = folder / "costs.json"
    node = {
        "name": "",
        "forward_us": 0,
        "backward_us": 0,
        "parameter_bytes": 0,
        "activation_bytes": 0,
        "output_bytes": 0,
    }
    nodes = [{"id": 0, "parent": None, **node}] + [
        {"id": number, "parent": 0, **node, "name": f"h.{number}", "forward_us": 10, "backward_us": 20}
        for number in range(1, 5)
    ]
    plan = {
        "partitions": 2,
        "microbatches": 4,
        "schedule": "simple",
        "memory_weight": 0.2,
        "nodes": nodes,
        "shared": [],
    }
    costs.write_text(json.dumps(plan))
    assert "predicted step" in run(lamina, "plan", costs, cwd=folder)
    version = run(python, "-c", "import lamina; print(lamina.__version__)", cwd=folder).strip()
    assert run(lamina, "--version").strip() == f"lamina {version}"


def check_cpp(source: Path, python: Path, package: Path, folder: Path) -> None:
    shutil.copytree(source / "examples/cmake_project", folder / "project")
    ccache = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={path}"] if (path := shutil.which("ccache")) else []
    environment = os.environ | {
        "CCACHE_SLOPPINESS": "include_file_mtime,include_file_ctime",
        "CCACHE_BASEDIR": str(folder),
        "CCACHE_NOHASHDIR": "1",
    }
    page = (source / "docs/installing.md").read_text()
    told = run(python, "-c", re.search(r"CMAKE_PREFIX_PATH=\"\$\(python -c '(.*)'\)\"", page)[1], cwd=folder).strip()
    assert Path(told) == package
    place = [f"-DCMAKE_PREFIX_PATH={told}", f"-DPython3_EXECUTABLE={python}", "-DCMAKE_BUILD_TYPE=Debug", *ccache]
    run("cmake", "-S", folder / "project", "-B", folder / "made", *place, env=environment)
    run("cmake", "--build", folder / "made", env=environment)
    run(python.parent / "lamina", "run", "-n", "2", "-c", folder / "made/train", cwd=folder)


def check_another_torch(python: Path, package: Path) -> None:
    """Tells in one line which torch it takes, and loads nothing. Afterwards there is no engine for the torch here."""
    needs = "from importlib.metadata import requires; print(*requires('lamina'))"
    (torch,) = re.findall(r"torch\S+", run(python, "-c", needs, cwd=python.parent))
    assert "<2.100" in torch and ">=2." in torch and "!=2.98.*" in torch, torch
    (engine,) = set(package.glob("torch[0-9]*")) - {package / OTHER_ENGINE}
    shutil.rmtree(engine)
    words = [python, "-c", "import lamina"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=python.parent)
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1, done.stderr
    assert line.startswith("ImportError: this lamina was built for torch 2.99, and 2."), line
    assert "pip install 'torch>=2.99,<2.100'" in line and f"wheel for {engine.name.replace('h', 'h ')}" in line, line


def check_sdist(source: Path, folder: Path) -> None:
    """Has all that CMake asks for."""
    make = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", make, folder, cwd=source)
    (archive,) = folder.glob("lamina-*.tar.gz")
    assert archive.stat().st_size < 5 * MIB, archive.stat().st_size
    run("tar", "-xzf", archive, "-C", folder)
    unpacked = archive.with_name(archive.name.removesuffix(".tar.gz"))
    run("cmake", "-S", unpacked, "-B", folder / "configured", "-G", "Ninja", f"-DPython3_EXECUTABLE={sys.executable}")


def main() -> None:
    source, build = (Path(word).resolve() for word in sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="lamina-wheel-") as name:
        folder = Path(name)
        wheels = make_wheels(source, build, folder)
        python = environment_with_torch(folder / "environment")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
        run(*pip, "install", "-q", "--no-deps", "--no-index", *wheels)
        package = check_package(source, python)
        check_training(python, package, folder)
        check_cpp(source, python, package, folder)
        check_another_torch(python, package)
        check_sdist(source, folder)


if __name__ == "__main__":
    main()
