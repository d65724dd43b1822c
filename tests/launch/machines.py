# SPDX-License-Identifier: Apache-2.0
"""A job that needs all its ranks to find each other, with nothing but Python: rank 0 waits for the others to call."""

import os
import pathlib
import socket
import struct
import sys
import time


def answer(server, size):
    """-> the ranks that called, and from where."""
    callers = {}
    while len(callers) < size - 1:
        connection, (address, _) = server.accept()
        with connection:
            callers[struct.unpack("i", connection.recv(4, socket.MSG_WAITALL))[0]] = address
    return callers


def call(place, rank, source):
    """Rank 0 may not listen yet."""
    while True:
        try:
            with socket.create_connection(place, source_address=source) as connection:
                return connection.sendall(struct.pack("i", rank))
        except ConnectionRefusedError:
            time.sleep(0.005)


def main():
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(place) as server:
            callers = answer(server, size)
        text = " ".join(f"{caller}@{callers[caller]}" for caller in sorted(callers))
        pathlib.Path(os.environ["DIR"], "met").write_text(text)
    else:
        own = os.environ.get("OWN_ADDRESS")
        call(place, rank, (own, 0) if own else None)
    if sys.argv[1:] == ["fail"] and rank == size - 1:
        sys.exit(9)


if __name__ == "__main__":
    main()
