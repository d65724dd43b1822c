# SPDX-License-Identifier: Apache-2.0
"""Names the globals of modules in python/lamina that can change and have no reason here. State belongs to an object
that somebody owns: the job (`Job.own`), the cut, an optimizer. A new job then finds nothing of the last one.

A global that can change is one whose name is no constant's, or that a function sets by `global`.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "python" / "lamina"

# By module: the globals that it may have, and why nobody owns them.
REASONS = {
    "deferred_init.delayed": ("_delayed _active", "models are made before there is a job"),
    "dist.signal_files": ("_waits", "a number in the store, which outlives jobs"),
    "dist.starting": ("_meetings _maker", "torch's own group of processes, which outlives jobs"),
    "exits.excepthook": ("_installed _session", "Python has one hook for exceptions, which outlives the job"),
    "integrations.replacements": ("module_manager", "a name that scripts import"),
    "job.backend": ("_making", "torch knows a function of ours for its groups, and hands it nothing of ours"),
    "job.current": ("_job", "the current job, as the API has it"),
    "job.groups": ("_jobs", "a number in the store, which outlives jobs"),
    "job.lifetime": ("_process _stuck _left _ends", "what of ended jobs still runs in this process"),
    "modules.placement": ("_index", "models are made before there is a job"),
    "optim.engine_optimizer": ("_turn", "a lock of the process"),
    "optim.local_optimizer": ("_said", "a warning is given once"),
    "optim.registry": ("_forms _needs", "scripts register their optimizers before there is a job"),
    "pipeline.other_random": ("_told", "a warning is given once"),
    "state": ("cfg", "a name that scripts import"),
    "torch_patches.clipping": ("_norms", "torch's functions, which are the process's, ask for the current model"),
    "torch_patches.module_call": ("_current", "calls of modules, which are the process's, ask for the current model"),
    "torch_patches.scoped": ("_lock _makers _original_init", "threads make models at the same time, without a job"),
    "tracing.trace": ("_running", "what is traced asks, whoever traces"),
}


def globals_of(tree: ast.Module) -> Iterator[str]:
    """The globals of a module that can change."""
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        else:
            continue
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            if name in rebound or (name.islower() and not name.startswith("__")):
                yield name


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
