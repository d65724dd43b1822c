# SPDX-License-Identifier: Apache-2.0
"""Imported first: a rank reports to its launcher while it starts, which takes longer than a short --hang-timeout where
many tests run."""

import os
import socket
import struct
import threading

started = threading.Event()


def report_until_started():
    launcher = socket.socket(fileno=os.dup(int(os.environ["LAMINA_PROGRESS_FD"])))
    while not started.wait(0.5):
        launcher.send(struct.pack("qii", -1, os.getpid(), 0))


if "LAMINA_PROGRESS_FD" in os.environ:
    threading.Thread(target=report_until_started, daemon=True).start()
