# SPDX-License-Identifier: Apache-2.0
"""fork_server.py SOCKET: starts ranks as copies of this process, which has imported torch and lamina.

Every connection to SOCKET asks for one rank, by a line of JSON, and is told its process id, and how it ended. The
server ends, and with it its ranks, when its standard input does.
"""

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from pathlib import Path

PRELOAD = Path(__file__).resolve().parents[2] / "lamina/launch/ranks/preload.py"


def serve(path: str) -> dict:
    """Returns in ranks only, with what was asked for."""
    ranks = {}  # by the descriptor that tells of its end: its process and the connection that asked for it
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as waiting:
        listener.bind(path)
        listener.listen(100)
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    request = json.loads(connection.makefile().readline())
                    if (pid := os.fork()) == 0:
                        for end, (_, other) in ranks.items():
                            os.close(end)
                            other.close()
                        connection.close()
                        return request
                    ranks[end := os.pidfd_open(pid)] = pid, connection
                    waiting.register(end, selectors.EVENT_READ)
                    tell(connection, pid)
                elif key.fd in ranks:
                    waiting.unregister(key.fd)
                    pid, connection = ranks.pop(key.fd)
                    os.close(key.fd)
                    tell(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    connection.close()
                else:
                    for pid, _ in ranks.values():
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)


def tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        connection.sendall(f"{number}\n".encode())


def become(request: dict) -> list[str]:
    """Makes this process what `python PROGRAM ARGUMENTS` is when it starts; returns these words."""
    os.setsid()
    for number, name in enumerate((os.devnull, request["stdout"], request["stderr"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["words"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    return sys.argv


if __name__ == "__main__":
    preload = runpy.run_path(str(PRELOAD))
    if (said := preload["load"](["torch", "lamina"])) != "R":
        sys.exit(said)
    gc.freeze()
    words = become(serve(sys.argv[1]))
    del sys.path[0]  # of this file's folder
    preload["set_path"](words)
    preload["run"](words)  # as a rank of `lamina run --preload`
