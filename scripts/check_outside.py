# SPDX-License-Identifier: Apache-2.0
"""Names code of lamina that opens a file to write, or starts a program, elsewhere than in the one place for it. That
one does as SECURITY.md says: no link is followed, and nothing of the current folder is imported.

Files: `open_output` of base/output_file.h in C++, `own` and `replacing` of util/files.py in Python, and for new files
of saves archive/posix_file_system.cc. Interpreters: `own_script` of launch/options/program.h, `run_python` of
apps/lamina/doctor.py.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tree import ROOT, tracked

# By file: parts of lines that may do so, and why.
REASONS = {
    "apps/lamina/doctor.py": {
        "program.write_text(": "in a new folder of its own",
        "subprocess.run(words": "run_python itself, and `lamina run`",
    },
    "apps/lamina/picture.py": {"open(int(": "a descriptor of open_output()"},
    "apps/lamina/model_costs.cc": {"posix_spawn(": "words of own_script()"},
    "apps/lamina/embedded_script.cc": {"execv(": "words of own_script()"},
    "lamina/archive/posix_file_system.cc": {"O_EXCL": "a new file", "open_output": "through it"},
    "lamina/base/output_file.cc": {"O_CREAT": "it itself", "mkostemp": "a new file"},
    "lamina/launch/options/program.cc": {'"-c"': "own_script itself", '"-m"': "the user's program"},
    "lamina/launch/ranks/rank_log.cc": {
        "O_TMPFILE": "it has no name",
        "O_EXCL": "a new file",
        "mkostemp": "a new file",
    },
    "lamina/launch/ranks/rank_process.cc": {"execve(": "the user's program, or words of own_script()"},
    "lamina/observe/timeline_part.cc": {"/proc/self/fd/": "a descriptor of open_output()"},
    "python/compat/composer/cli/launcher.py": {"os.execv(": "`lamina run`"},
    "python/lamina/job/launched.py": {"new.write_bytes(": "in the new folder of launching.py"},
    "python/lamina/job/launching.py": {
        ".write_bytes(": "in a new folder of its own",
        "subprocess.Popen(": "`lamina run`",
    },
    "python/lamina/composer/loggers/progress_bar_logger.py": {"os.fdopen(": "a descriptor of the terminal"},
    "python/lamina/composer/huggingface.py": {".write_text(": "in a new folder of its own"},
    "python/lamina/util/files.py": {'"x+b"': "a new file", "O_RDONLY": "a folder"},
}
EVERYWHERE = ("open_output(", "/dev/null")
FOLDERS = ("lamina/", "apps/", "python/lamina/", "python/bindings/", "python/compat/")

CPP = re.compile(
    r"\bofstream\b|\bfopen\(|\bcreat\(|O_WRONLY|O_RDWR|O_CREAT|\bmkostemp|\bexec[lv]\w*\(|\bposix_spawnp?\(|\bpopen\(|"
    r'\bsystem\(|"-c"|"-m"'
)
PYTHON = re.compile(
    r"os\.(open|fdopen|popen|system|exec\w+|spawn\w+|posix_spawn\w*)|subprocess\.\w+|.*\.(write_text|write_bytes)|"
    r"(np|numpy)\.save\w*|shutil\.(copy\w*|move)"
)


def lines_of_cpp(text: str) -> Iterator[int]:
    for number, line in enumerate(text.splitlines(), 1):
        if CPP.search(line) and not re.match(r"\s*(#include|//|using )", line):
            yield number


def writes(call: ast.Call) -> bool:
    """True of an `open` that may write, without the opener of util/files.py."""
    named = {word.arg: word.value for word in call.keywords}
    mode = call.args[1] if len(call.args) > 1 else named.get("mode", ast.Constant("r"))
    reads = isinstance(mode, ast.Constant) and not set("wax+") & set(str(mode.value))
    return not reads and ast.unparse(named.get("opener", ast.Constant(None))) != "own"


def lines_of_python(text: str) -> Iterator[int]:
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        by_path = name == "torch.save" and len(call.args) > 1 and not isinstance(call.args[1], ast.Name)
        if by_path or PYTHON.fullmatch(name) or (name in ("open", "io.open") and writes(call)):
            yield call.lineno


def problems_of(path: Path) -> Iterator[str]:
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    allowed = (*EVERYWHERE, *REASONS.get(str(path), ()))
    for number in (lines_of_python if path.suffix == ".py" else lines_of_cpp)(text):
        if not any(part in lines[number - 1] for part in allowed):
            yield f"{path}:{number}: writes a file, or starts a program: see scripts/check_outside.py"


def main() -> int:
    paths = [path for path in tracked(".cc", ".h", ".py") if str(path).startswith(FOLDERS)]
    problems = [problem for path in paths for problem in problems_of(path)]
    problems += [f"scripts/check_outside.py: {name} is gone" for name in REASONS if not (ROOT / name).exists()]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
