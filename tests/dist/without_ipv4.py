# SPDX-License-Identifier: Apache-2.0
"""Runs a command where the loopback device is all there is and has no IPv4 address, in a network namespace of its own;
ends with 77 where the system allows none. As `without_ipv4.py COMMAND...`."""

import os
import subprocess
import sys

SKIPPED = 77


def main() -> None:
    if os.environ.get("INSIDE") is None:
        allowed = subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0
        if not allowed:
            sys.exit(SKIPPED)
        os.environ["INSIDE"] = "1"
        os.execvp("unshare", ["unshare", "-n", sys.executable, *sys.argv])
    for words in ("link set lo up", "addr del 127.0.0.1/8 dev lo"):
        subprocess.run(["ip", *words.split()], check=True)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
