# SPDX-License-Identifier: Apache-2.0
"""Names the globals of modules in python/lamina that can change and have no reason here. State belongs to an object
that somebody owns: the job (`Job.own`), the cut, an optimizer. A new job then finds nothing of the last one.

A global that can change is one whose name is no constant's, that a function sets by `global`, or that a function puts
something into. So is a container in a class, where a function puts something into that.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "python" / "lamina"

# By module: the globals that it may have, and why nobody owns them.
REASONS = {
    "__init__": ("cmake_prefix_path", "a name that users read, as torch.utils has it"),
    "deferred_init.delayed": ("_delayed _active", "models are made before there is a job"),
    "dist.signal_files": ("_waits", "a number in the store, which outlives jobs"),
    "dist.starting": ("_maker", "torch's own group of processes, which outlives jobs"),
    "exits.device_errors": ("_of_full_memory _of_failed_kernel", "packages above say the lines, for they know the job"),
    "exits.excepthook": ("_installed _session _remedies", "Python has one hook for exceptions, which outlives the job"),
    "libraries.replacements": ("module_manager", "a name that scripts import"),
    "job.backend": ("_making", "torch knows a function of ours for its groups, and hands it nothing of ours"),
    "job.current": ("_beginnings _job", "the current job, as the API has it, and what begins with each"),
    "job.lifetime": ("_process _stuck _left _ends", "what of ended jobs still runs in this process"),
    "modules.placement": ("_index", "models are made before there is a job"),
    "optim.engine_optimizer": ("_turn", "a lock of the process"),
    "optim.local_optimizer": ("_said", "a warning is given once"),
    "optim.registry": ("_forms _needs", "scripts register their optimizers before there is a job"),
    "pipeline.other_random": ("_told", "a warning is given once"),
    "planning.others": ("_planners", "packages above say how models of theirs are planned"),
    "state": ("cfg", "a name that scripts import"),
    "tensor_parallel.partial": ("_here", "modules below a region ask whether they are in it"),
    "tensor_parallel.turns": ("_taken", "a context variable: modules below a region ask whether they are in it"),
    "tensor_parallel.marks": ("_enabled", "models are made before there is a job"),
    "tensorflow.running": (
        "_traces",
        "gradients of operators are TensorFlow's to call, and it hands them nothing of ours",
    ),
    "tensorflow.taken": (
        "_NOTED _calling",
        "graphs are TensorFlow's, and hold nothing of ours; types of operations stay",
    ),
    "torch_patches.clipping": ("_norms", "torch's functions, which are the process's, ask for the current model"),
    "torch_patches.module_call": ("_current", "calls of modules, which are the process's, ask for the current model"),
    "torch_patches.scoped": ("_lock _makers _original_init", "threads make models at the same time, without a job"),
    "tracing.trace": ("_running", "what is traced asks, whoever traces"),
}


MUTATORS = {"append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "clear", "update"}
MUTATORS |= {"setdefault", "add", "discard", "sort", "reverse"}
CONSTANT = re.compile(r"_*[A-Z][A-Z0-9_]*")
CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """The names that statements bind, with their values, in the branches of `if`, `try`, `with` and loops, too."""
    for statement in body:
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for node in (node for target in targets for node in ast.walk(target)):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id, statement.value
        elif not isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            branches = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
            branches += [handler.body for handler in getattr(statement, "handlers", [])]
            for branch in branches:
                yield from bound(branch)


def put_into(tree: ast.AST) -> Iterator[str]:
    """The names of containers whose content functions change."""
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    for node in (node for function in functions for node in ast.walk(function)):
        held = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            held = node.func.value
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            held = node.value
        if isinstance(held, ast.Name):
            yield held.id
        elif isinstance(held, ast.Attribute):
            yield held.attr


def globals_of(tree: ast.Module) -> Iterator[str]:
    """The globals of a module that can change."""
    changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    changed |= set(put_into(tree))
    for name, value in bound(tree.body):
        is_type = name[0].isupper() and not isinstance(value, CONTAINERS)
        if name in changed or not (CONSTANT.fullmatch(name) or name.startswith("__") or is_type):
            yield name
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        held = {name for name, value in bound(kind.body) if isinstance(value, CONTAINERS)}
        yield from (f"{kind.name}.{name}" for name in held & changed)


def main() -> int:
    problems = []
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found, known = set(globals_of(ast.parse(path.read_text()))), set(REASONS.get(module, ("",))[0].split())
        problems += [
            f"lamina.{module}.{name}: a global that can change: see scripts/check_globals.py"
            for name in sorted(found - known)
        ]
        problems += [f"scripts/check_globals.py: lamina.{module}.{name} is gone" for name in sorted(known - found)]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
