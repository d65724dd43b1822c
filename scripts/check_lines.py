# SPDX-License-Identifier: Apache-2.0
"""Counts the lines of each package of python/lamina against what it may have. The face translates, the engine decides
(see CONTRIBUTING.md): a package that grows beyond its number needs a reason why that cannot be C++."""

import sys
from collections import Counter

from tree import ROOT, tracked

FACE = ROOT / "python" / "lamina"

# By package: the most lines, and what of Python it has to do with.
MOST = {
    "": (600, "names that scripts import, and their signatures for type checkers"),
    "activation_checkpointing": (350, "torch's hooks of saved tensors, and checkpoint functions that scripts bring"),
    "calls": (
        490,
        "arguments and results of Python calls as values of the engine, and back: few functions a call",
    ),
    "checkpoints": (1200, "pickles of torch and of the original, state dicts as scripts have them"),
    "composer": (4660, "Composer's names: models, schedules, metrics, loggers, devices, arguments"),
    "data_parallel": (250, "communication hooks in Python"),
    "deferred_init": (450, "constructors of Python, recorded and run later"),
    "dist": (830, "Composer's names of collectives, torch's samplers, workers of torch's loaders"),
    "elastic": (1150, "objects of a script, and its loader, that go on in another layout, or with other ranks"),
    "exits": (490, "exceptions and tracebacks of Python, in which the module stands that a device had no room for"),
    "integrations": (600, "loops of Lightning, accelerate and transformers"),
    "job": (1900, "the original's names of ranks, torch's process groups, pickled messages, a launch from a notebook"),
    "layers": (1450, "the original's layers as nn.Modules, and models of transformers that become them"),
    "libraries": (150, "hooks of other libraries, and parameters that they register apart"),
    "model": (810, "the user's nn.Modules and state dicts in place of the engine's tables"),
    "modules": (550, "the walk over nn.Modules that fills the engine's tree"),
    "observe": (250, "names of metrics, contexts of timelines"),
    "optim": (2600, "torch.optim's interface, and optimizers that users write in Python"),
    "pipeline": (3285, "what a script calls: the wrapped model, step functions and their batches, outputs, gradients"),
    "planning": (
        600,
        "models in Python that `lamina plan` builds and traces, or has others trace; graphs of torch.export as rows of "
        "the engine's, and as modules",
    ),
    "proof": (1350, "calls of nn.Modules that are made again with whole values"),
    "remote": (400, "nn.Modules that another rank owns"),
    "saved_state": (600, "state dicts and files as torch writes them"),
    "script_state": (2165, "a script's objects, functions and code: walked, read, compared, put back, led to"),
    "shared_state": (1450, "attributes, names and context variables of Python that ranks would see in another way"),
    "tensorflow": (
        4450,
        "graphs and gradients of TensorFlow as rows of the engine's, what runs in their place, operations that average "
        "gradients over copies, its checkpoints, the own loops of two versions of Keras over all of that",
    ),
    "tensor_parallel": (
        2990,
        "nn.Modules read into rows of the engine's plans, what stands in their place, and what they become in a change",
    ),
    "torch_patches": (1480, "what is replaced in torch, and what its scalers tell nobody"),
    "tracing": (1590, "a first call of Python modules with what it costs, changes and draws"),
    "trainer": (
        4290,
        "the loop over a user's loader, model and callbacks, where it goes on, batches on their way to others, whose"
        " microbatches others share out; what of a script's objects goes back with a version",
    ),
    "util": (450, "checks of arguments, files, lines that are said once"),
    "verification": (750, "the user's plain model, called again"),
}


def lines() -> Counter[str]:
    """The lines of each package; those of files beside packages count as those of ""."""
    found = Counter()
    for name in tracked(".py", ".pyi", below=str(FACE.relative_to(ROOT))):
        package, *rest = (ROOT / name).relative_to(FACE).parts
        found[package if rest else ""] += (ROOT / name).read_text().count("\n")
    return found


def main() -> int:
    problems = []
    for package, count in sorted(lines().items()):
        name = f"python/lamina/{package}"
        if package not in MOST:
            problems.append(f"{name} is not listed in scripts/check_lines.py")
        elif count > MOST[package][0]:
            problems.append(
                f"{name} has {count} lines, {MOST[package][0]} are the most: decide in lamina/, so that programs in "
                "C++ have it, too, or raise the number in scripts/check_lines.py with the reason"
            )
    problems += [f"scripts/check_lines.py: there is no package {package}" for package in MOST.keys() - lines().keys()]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
