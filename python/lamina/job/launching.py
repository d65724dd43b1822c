# SPDX-License-Identifier: Apache-2.0
"""Jobs that a program starts, as a notebook does: a function on several ranks, under the launcher of `lamina run`."""

import ctypes
import multiprocessing.spawn
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lamina.errors import Error, UsageError
from lamina.exits.failures import rebuild

# Names of variables by which this process, or its machine, has a place in another job.
_PLACES = re.compile(r"(RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|NODE|BASE)_\w+|MASTER_(ADDR|PORT)|(PET|TORCHELASTIC)_\w+)$")
_MAIN = {"init_main_from_name", "init_main_from_path"}  # how multiprocessing says which script began this process
_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def launch(function: Callable, ranks: int, /, *args: Any, options: Sequence[str] = (), **keywords: Any) -> list[Any]:
    """Runs a function on several new ranks of this machine, as `lamina run -n RANKS` runs a script, and waits for them.
    Each calls `lamina.init` itself. For notebooks, and for programs that do more than train.

    Without the package cloudpickle a rank imports the module that has the function; the main script, too, where the
    call then stands below `if __name__ == "__main__":`. With cloudpickle the function may be of a notebook.

    Args:
        function: what each rank calls. It and its results are pickled.
        args, keywords: its arguments, which are pickled, too.
        ranks: how many.
        options: further ones of `lamina run`, as `["--timeline", "steps.json"]`.

    Returns:
        What the function returned on each rank, by rank.

    Errors:
        UsageError: what cannot be pickled; a number of ranks below 1; the call is made as a rank imports the script.
        RemoteError: a rank raised this, with its traceback; the others have been ended.
        Error: the job failed otherwise: the launcher has said how.
    """
    if type(ranks) is not int or ranks < 1:
        raise UsageError(
            f"launch() takes a function and how many ranks run it, not {ranks!r}", code="run-function-ranks"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            'launch() was called as a rank imports this script: put the call below `if __name__ == "__main__":`',
            code="run-function-import",
        )
    with tempfile.TemporaryDirectory(prefix="lamina-launch-") as name:
        folder = Path(name)
        _write_call(folder, function, args, keywords)
        words = ["--nnodes", "1", "-n", str(ranks), *options, "-m", "lamina.job.launched", name]
        code = _run([_command(), "run", *words])
        return _results(folder, ranks, code)


def by_value() -> ModuleType:
    """The module that pickles: cloudpickle, which takes functions of notebooks, if it is installed."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def _write_call(folder: Path, function: Callable, args: tuple, keywords: dict[str, Any]) -> None:
    pickler = by_value()
    facts = multiprocessing.spawn.get_preparation_data("rank")
    facts = {name: facts[name] for name in facts.keys() - {"authkey", "name"}}
    is_file = os.path.exists(facts.get("init_main_from_path", os.curdir))  # of standard input it is no file
    if pickler is not pickle or not is_file:
        facts = {name: facts[name] for name in facts.keys() - _MAIN}
    if pickler is pickle and getattr(function, "__module__", None) == "__main__" and not facts.keys() & _MAIN:
        raise UsageError(
            f"{_name(function)} is of a notebook or of a console, from which ranks cannot import it: "
            "pip install cloudpickle, or put it into a module",
            code="run-function-pickle",
        )
    try:
        call = pickler.dumps((function, args, keywords))
    except Exception as error:
        raise UsageError(
            f"{_name(function)} and its arguments go to the ranks, and cannot be pickled: {error}: take a function "
            "that stands by itself in a module" + ("" if pickler is not pickle else ", or pip install cloudpickle"),
            code="run-function-pickle",
        ) from None
    (folder / "facts").write_bytes(pickle.dumps(facts))
    (folder / "call").write_bytes(call)


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _command() -> str:
    beside = Path(sys.executable).with_name("lamina")
    if beside.exists():
        return str(beside)
    if found := shutil.which("lamina"):
        return found
    raise Error(f"there is no command `lamina` beside {sys.executable}, nor in PATH: install the package's wheel")


def _run(words: list[str]) -> int:
    """The exit code of the launcher. Ctrl-C is handed on, and waited for: a second one ends the ranks at once."""
    variables = {name: value for name, value in os.environ.items() if not _PLACES.fullmatch(name)}
    prctl = ctypes.CDLL(None).prctl
    end_with_us = lambda: prctl(_DEATH_OF_PARENT, signal.SIGTERM)  # noqa: E731 -- a kernel of a notebook is killed
    launcher = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        env=variables | {"LAMINA_PYTHON": sys.executable},
        start_new_session=True,
        preexec_fn=end_with_us,
    )
    interrupt = None
    while True:
        try:
            code = launcher.wait()
        except KeyboardInterrupt as caught:
            interrupt = caught
            launcher.send_signal(signal.SIGINT)
        except BaseException:
            launcher.terminate()
            launcher.wait()
            raise
        else:
            if interrupt is not None:
                raise interrupt
            return code


def _results(folder: Path, ranks: int, code: int) -> list[Any]:
    errors = [pickle.loads(path.read_bytes()) for path in folder.glob("error.*")]
    if errors:
        _, _, failure = min(errors, key=lambda each: each[:2])
        raise rebuild(*failure) from None
    if code != 0:
        raise Error(
            f"the job of launch() ended with exit code {code}: its launcher has said why", code="run-function-failed"
        )
    values = []
    for rank in range(ranks):
        try:
            values.append(by_value().loads((folder / f"result.{rank}").read_bytes()))
        except FileNotFoundError:
            raise Error(
                f"rank {rank} ended without a result: it left Python by itself", code="run-function-failed"
            ) from None
    return values
