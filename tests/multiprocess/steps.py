# SPDX-License-Identifier: Apache-2.0
"""Step functions that many cases take, and what they write."""

import contextlib
import os
import tempfile

import lamina


def train_step(model):
    """Trains on the mean of the squares of what the model returns."""

    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return step


@contextlib.contextmanager
def said_on_stderr():
    """A list that holds, afterwards, what was written to the file descriptor of stderr."""
    said, kept = [], os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said.append(file.read())
