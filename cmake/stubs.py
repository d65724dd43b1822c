# SPDX-License-Identifier: Apache-2.0
"""stubs.py MODULE OUT: writes the signatures and docstrings of the built engine for type checkers and readers, by
pybind11-stubgen. An argument without a name, or of a type that is not bound, is an error."""

import ast
import importlib.util
import re
import sys
import tempfile
import types
from pathlib import Path

HEADER = "# SPDX-License-Identifier: Apache-2.0\n# Made from python/bindings by cmake/stubs.py.\n"


def load(path: Path) -> None:
    """Imports the engine as the package does, without the package."""
    import torch  # noqa: F401  (the engine's libraries need it)

    package = types.ModuleType("lamina")
    package.__path__ = []
    sys.modules["lamina"] = package
    spec = importlib.util.spec_from_file_location("lamina._lamina", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["lamina._lamina"] = package._lamina = module
    spec.loader.exec_module(module)


def main(module: Path, out: Path) -> None:
    from pybind11_stubgen import main as write

    load(module)
    with tempfile.TemporaryDirectory() as folder:
        write(["lamina._lamina", "--output-dir", folder, "--print-invalid-expressions-as-is"])
        text = HEADER + Path(folder, "lamina/_lamina.pyi").read_text()
    # A class that is bound after a function with one among its arguments has its name of C++ there.
    text = re.sub(r"\blamina::(?:\w+::)*(\w+)", r"\1", text)
    tree = ast.parse(text)
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    types = [each.annotation for each in ast.walk(tree) if isinstance(each, ast.arg) and each.annotation]
    named = {node.id for each in types for node in ast.walk(each) if isinstance(node, ast.Name)}
    if unbound := {name for name in named - classes if name[0].isupper()}:
        sys.exit(f"stubs.py: no class is bound as {', '.join(sorted(unbound))}")
    functions = [
        each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and not each.name.startswith("__")
    ]
    unnamed = [
        each.name
        for each in functions
        if any(re.fullmatch(r"arg\d+", arg.arg) for arg in each.args.args)
        and not any(ast.unparse(decorator).endswith(".setter") for decorator in each.decorator_list)
    ]
    if unnamed:
        sys.exit(f"stubs.py: arguments without names (py::arg): {', '.join(unnamed)}")
    out.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
