# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while TensorFlow runs: Python calls its handlers when TensorFlow's call has returned, which a step that waits
for other ranks does late. A signal is written to a descriptor at once; a thread reads it, and ends the step."""

import signal
import socket
import threading
from typing import Any

from tensorflow.python.eager.context import Context

from lamina import _lamina
from lamina.job import current


def _interrupts_by_name() -> None:
    """Has a function that Ctrl-C ends raise KeyboardInterrupt: Python calls its handler while TensorFlow makes the
    error of the step, and TensorFlow raises another one then. Once."""
    plain = Context.call_function
    if hasattr(plain, "_lamina"):
        return

    def call_function(*arguments: Any, **keywords: Any) -> Any:
        try:
            return plain(*arguments, **keywords)
        except RuntimeError as error:
            if "REPLACED BY KeyboardInterrupt" in str(error):
                raise KeyboardInterrupt from None
            raise

    call_function._lamina = True
    Context.call_function = call_function


def watch() -> None:
    """As long as there is the job. Nothing happens where another library reads the signals' descriptor, or in another
    thread than the main one: Ctrl-C is then noticed once a wait is over."""
    if threading.current_thread() is not threading.main_thread():
        return
    _interrupts_by_name()
    job = current.job()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return

    def read() -> None:
        while written := reader.recv(64):
            if signal.SIGINT in written:
                _lamina.interrupt_graphs(f"rank {job.session.rank} was interrupted (Ctrl-C)")

    thread = threading.Thread(target=read, name="lamina-interrupts", daemon=True)
    thread.start()

    def close(_: bool) -> bool:
        if threading.current_thread() is threading.main_thread() and signal.set_wakeup_fd(-1) != writer.fileno():
            return True  # somebody else has taken it
        writer.close()
        thread.join()
        reader.close()
        return True

    job.closers.append(close)
