# SPDX-License-Identifier: Apache-2.0
"""Names the modules of python/lamina that import one from a package that is not below their own, and those that import
each other in a circle. Imports in functions count, those under TYPE_CHECKING, and `import_module`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from circles import circles

ROOT = Path(__file__).resolve().parent.parent / "python" / "lamina"

# Packages, and the modules beside them, lowest first.
ORDER = (
    "torch_version",
    "_lamina",
    "errors",
    "util",
    "script_state",
    "libraries",
    "exits",
    "job",
    "torch_patches",
    "shared_state",
    "tensor_parallel",
    "modules",
    "remote",
    "deferred_init",
    "tracing",
    "model",
    "proof",
    "calls",
    "saved_state",
    "optim",
    "amp",
    "optimizers",
    "layers",
    "planning",
    "nn",
    "data_parallel",
    "pipeline",
    "checkpoints",
    "verification",
    "callbacks",
    "activation_checkpointing",
    "observe",
    "dist",
    "elastic",
    "trainer",
    "composer",
    "state",
    "hugging_face",
    "__init__",
    "tensorflow",  # the other half of the original's names, for scripts that import TensorFlow
    "integrations",  # imports lamina as a script does
)

PATHS = "trainer"  # its stubs tell type checkers where the names are that scripts import from there; nobody runs them


def module_of(path: Path) -> str:
    """Its name below `lamina`: "job.current", "job" for the package itself, "__init__" for lamina's own."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """The modules of ours that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        else:
            continue
        for name in names:
            if name.startswith("."):
                raise SystemExit(f"python/lamina: line {node.lineno} imports {name}: give the whole path")
            if name.partition(".")[0] == "lamina":
                below = name.partition(".")[2]
                while below and below not in known:  # a name in a module
                    below = below.rpartition(".")[0]
                yield below or "__init__"


def main() -> int:
    height = {name: place for place, name in enumerate(ORDER)}
    files = (path for suffix in ("py", "pyi") for path in sorted(ROOT.rglob(f"*.{suffix}")))
    paths = {module_of(path): path for path in files if not (path.suffix == ".pyi" and path.parent.name == PATHS)}
    known, problems = {*paths, "_lamina"}, []  # the build makes the engine's stub, and may not have yet
    imports = {module: set(imported(ast.parse(path.read_text()), known)) for module, path in paths.items()}
    for module, others in imports.items():
        own = module.partition(".")[0]
        if own not in height:
            problems.append(f"python/lamina/{own} is not listed in scripts/check_python_layers.py")
            continue
        for other in sorted(others):
            package = other.partition(".")[0]
            if package != own and height.get(package, len(ORDER)) > height[own]:
                problems.append(f"lamina.{module}: {own} stands below {package} and may not import lamina.{other}")
    problems += [f"{', '.join(found)}: import each other in a circle" for found in sorted(circles(imports))]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
