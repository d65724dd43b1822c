# SPDX-License-Identifier: Apache-2.0
"""Makes ranks as copies of one process that has imported what they need: see [Note: preloader] in preloader.h.

The launcher carries this text and starts it with the interpreter and the environment of its ranks, as
`python -c ... CONTROL MODULES PROGRAM...`, without the current folder in sys.path.
"""

import os
import sys

LOOK_AGAIN_S = 0.0005  # whether the parent has changed
PR_SET_PDEATHSIG, SIGKILL = 1, 9
NUMBERED = (b"LAMINA_SECRET_FD", b"LAMINA_PROGRESS_FD", b"LAMINA_DOOR_FD")  # variables that hold a descriptor's number


def is_container(script):
    """Tells a folder or an archive, whose __main__.py runs, from a file."""
    for hook in sys.path_hooks:
        try:
            hook(script)
            return True
        except ImportError:
            pass
    return False


def set_path(words):
    """Puts in front what the interpreter does for that program, so that its folder's modules are found."""
    safe = getattr(sys.flags, "safe_path", False)
    if words[0] != "-m" and is_container(os.path.join(os.getcwd(), words[0])):
        sys.path.insert(0, os.path.join(os.getcwd(), words[0]))
    elif not safe:
        sys.path.insert(0, os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0])))


def lacks():
    """Says what copies of this process would lack; None if nothing."""
    import warnings

    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which are asked for below
        # Libraries that allow for forks end their threads before one (OpenBLAS), and start them again when needed.
        if (copy := os.fork()) == 0:
            os._exit(cuda is not None and cuda._is_in_bad_fork())
    _, bad = os.waitpid(copy, 0)
    if bad or (cuda is not None and cuda.is_initialized()):
        return "opens a device"
    return None if len(os.listdir("/proc/self/task")) == 1 else "starts a thread"


def load(names):
    """Imports the modules, and those that a module says in `__preload__` it will import while it is used. Returns what
    to tell the launcher: R if ranks can be made, else the words behind F for what forbids to fork, behind I for an
    import that failed."""
    import importlib

    names = list(names)
    for name in names:
        try:
            names += getattr(importlib.import_module(name), "__preload__", ())
        except BaseException as error:
            if not (isinstance(error, ModuleNotFoundError) and error.name == name):
                sys.excepthook(*sys.exc_info())
            return f"I{name}: {type(error).__name__}: {' '.join(str(error).split())}"
        if why := lacks():
            return f"Fthe import of {name} {why}"
    return "R"


def serve(control):
    """Forks for each request. Returns in ranks only, the descriptors that came with the request."""
    from socket import recv_fds

    launcher = os.getppid()
    while True:
        message, descriptors, _, _ = recv_fds(control, 1, 16)
        if not message:
            os._exit(0)
        if (middle := os.fork()) == 0:
            middle = os.getpid()
            try:
                orphan = os.fork() == 0  # the launcher adopts it
            except OSError:
                orphan = False
            if not orphan:
                os._exit(0)
            control.close()
            wait_for_adoption(middle, launcher)
            return descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(middle, 0)


def wait_for_adoption(middle, launcher):
    import ctypes
    import time

    while os.getppid() == middle:
        time.sleep(LOOK_AGAIN_S)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)  # it died before the line above could notice


def become(request, descriptors):
    """Gives this process what the launcher gives a rank, and returns the words of its program."""
    count, numbers, *texts = request.split(b"\0")
    words, variables = texts[: int(count)], texts[int(count) :]
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    kept = dict(zip(numbers.split(), descriptors[3:], strict=True))
    for descriptor in kept.values():
        os.set_inheritable(descriptor, True)
    pairs = [variable.partition(b"=") for variable in variables]
    environment = {name: value for name, equals, value in pairs if name and equals}
    for name in NUMBERED:
        if name in environment:
            environment[name] = b"%d" % kept[environment[name]]
    os.environb.clear()
    os.environb.update(environment)
    renew()
    return [os.fsdecode(word) for word in words]


def renew():
    """Makes anew what the import has drawn by lot, or learnt of the environment, and of standard input and output."""
    if os.environ.get("PYTHONFAULTHANDLER"):
        import faulthandler

        faulthandler.enable()
    if random := sys.modules.get("numpy.random"):
        random.seed()  # Python's own does so by itself
    if sys.stdin is not None:
        file = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
        file.buffer.raw.name = "<stdin>"
        sys.stdin = sys.__stdin__ = file
    if sys.stdout is not None and not sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))


def run(words):
    """Runs the program in __main__, as the interpreter would; its traceback begins in the program."""
    frame = sys._getframe()
    try:
        if words[0] == "-m":
            import runpy

            sys.argv = ["-m", *words[2:]]
            runpy._run_module_as_main(words[1])
        elif is_container(os.path.join(os.getcwd(), words[0])):
            import runpy

            runpy._run_module_as_main("__main__", False)
        else:
            run_file(os.path.join(os.getcwd(), words[0]))
    except SystemExit:
        raise
    except BaseException:
        hook = sys.excepthook

        def shorten(kind, error, traceback):
            begun = False
            while traceback and not (begun and traceback.tb_frame.f_globals is not globals()):
                begun = begun or traceback.tb_frame is frame
                traceback = traceback.tb_next
            hook(kind, error.with_traceback(traceback), traceback)

        sys.excepthook = shorten
        raise


def run_file(path):
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    main = sys.modules["__main__"]
    compiled = path.endswith(".pyc")
    main.__file__, main.__cached__ = path, None
    main.__loader__ = loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
    code = loader.get_code("__main__") if compiled else compile(loader.get_data(path), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def start(control, modules, *words):
    """Returns in a rank, when nothing is left but to run its program: the words of it."""
    import gc
    import socket

    sys.argv = list(words)
    control = socket.socket(fileno=int(control))
    control.set_inheritable(False)
    control.send(load(modules.split(",")).encode(errors="replace"))
    gc.freeze()
    request, link, *descriptors = serve(control)
    with open(request, "rb") as file:
        words = become(file.read(), descriptors)
    os.setpgid(0, 0)
    with socket.socket(fileno=link) as launcher:
        launcher.send(b"%d" % os.getpid())
    sys.argv, sys.orig_argv = words, [sys.orig_argv[0], *words]
    return words


if __name__ == "lamina_preload":
    set_path(sys.argv[3:])
    run(start(*sys.argv[1:]))
