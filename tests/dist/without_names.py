# SPDX-License-Identifier: Apache-2.0
"""Runs a command where the name server takes questions and answers none, in namespaces of its own; ends with 77 where
the system allows none. As `without_names.py COMMAND...`."""

import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile

SKIPPED = 77
NAME_SERVER = "127.0.0.53"
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def main() -> None:
    if os.environ.get("INSIDE") is None:
        allowed = subprocess.run(["unshare", "-mn", "true"], capture_output=True).returncode == 0
        if not allowed:
            sys.exit(SKIPPED)
        os.environ["INSIDE"] = "1"
        os.execvp("unshare", ["unshare", "-mn", sys.executable, *sys.argv])
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fcntl.ioctl(silent, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
    silent.bind((NAME_SERVER, 53))
    with tempfile.NamedTemporaryFile("w") as names:
        names.write(f"nameserver {NAME_SERVER}\n")
        names.flush()
        subprocess.run(["mount", "--bind", names.name, os.path.realpath("/etc/resolv.conf")], check=True)
        sys.exit(subprocess.run(sys.argv[1:]).returncode)


if __name__ == "__main__":
    main()
