# SPDX-License-Identifier: Apache-2.0
"""installed_wheel.py SOURCE BUILD WHERE: makes the wheel as `pip install .` does, from what is built, installs it in a
folder and imports it from there. Every other test has the package that `make build` installs, whose Python files are
those of the checkout."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Without `site`, which would put the checkout's package first.
USE = """
import sys
sys.path += {places}
import lamina
print(lamina.__file__, lamina._lamina.__file__, lamina.__version__)
"""


def run(*words: str | Path) -> str:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def python_files(package: Path) -> set[Path]:
    return {path.relative_to(package) for kind in ("*.py", "*.pyi", "py.typed") for path in package.rglob(kind)}


def main() -> None:
    source, build, where = map(Path, sys.argv[1:])
    shutil.rmtree(where, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    folder = ["-C", f"build-dir={build}", "-C", "cmake.build-type=Release", "-C", "cmake.define.LAMINA_TESTS=ON"]
    run(*pip, "wheel", *offline, "--no-build-isolation", *folder, "-w", where, source)
    (wheel,) = where.glob("lamina-*.whl")
    site = where / "site"
    run(*pip, "install", "-q", *offline, "--target", site, wheel)

    package = site / "lamina"
    missing = python_files(source / "python/lamina") ^ python_files(package)
    assert not missing, f"in the checkout or in the wheel, but not in both: {sorted(map(str, missing))}"
    assert all((package / name).exists() for name in ("liblamina.so", "liblamina_ucx.so")), list(package.iterdir())

    places = [str(site), sysconfig.get_path("purelib")]
    module, extension, version = run(sys.executable, "-S", "-c", USE.format(places=places)).split()
    assert Path(module).parent == package and Path(extension).parent == package, (module, extension)
    assert version == (source / "VERSION").read_text().strip()
    assert version in run(site / "bin/lamina", "--version")
    shutil.rmtree(where)


if __name__ == "__main__":
    main()
