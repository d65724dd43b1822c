# SPDX-License-Identifier: Apache-2.0
"""Two ranks, one of which is killed in its third step: lost.py copies pipeline. In the pipeline large values are on
their way to it. The other one names it within 2 s, and ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import device
import torch
import training
from torch import nn

import lamina

FATAL_STEP, MICROBATCHES, MIB = 2, 4, 32
HEARD_S, ENDED_S = 2, 10
LONGEST_S = 40


class Dies(nn.Module):
    """Kills the second rank in the second microbatch, or the only one, of a step."""

    step, calls = 0, 0

    def __init__(self, nth_call, file):
        super().__init__()
        self.weight, self.nth_call, self.file = nn.Parameter(torch.ones(())), nth_call, file

    def forward(self, x):
        if lamina.rank() == 1 and Dies.step == FATAL_STEP:
            Dies.calls += 1
            if Dies.calls == self.nth_call:
                Path(self.file).write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        return x * self.weight


class Net(nn.Module):
    def __init__(self, dies):
        super().__init__()
        self.weight, self.dies = nn.Parameter(torch.ones(())), dies

    def forward(self, x):
        return self.dies(x * self.weight).sum()


def rank(kind, folder):
    """One of the ranks. The one that lives leaves when its error came, and its words."""
    device.find()
    if kind == "copies":
        lamina.init(ddp=True, timeout_s=30)
        model, rows = Net(Dies(1, folder / "death")), 1
    else:
        lamina.init(partitions=2, microbatches=MICROBATCHES, timeout_s=30)
        model, rows = Net(Dies(2, folder / "death")), MICROBATCHES
        lamina.set_partition(model.dies, 1)
        lamina.set_partition(model, 0)
    model = lamina.distribute(model)
    batch = torch.ones(rows, MIB << 18, device=lamina.device())
    try:
        for Dies.step in range(10):
            model.zero_grad()
            training.train(model, batch).reduce_mean()
    except lamina.Error as error:
        told = {"at": time.time(), "text": f"{type(error).__name__}: {error}"}
        (folder / "told").write_text(json.dumps(told))
        raise


def begun(kind, folder, number, port):
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = os.environ | place | {"RANK": str(number), "LOCAL_RANK": str(number)}
    with (folder / f"said-{number}").open("w") as said:
        words = [sys.executable, __file__, "--rank", kind, folder]
        return subprocess.Popen(words, env=variables, stdout=said, stderr=said)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def problems_of(kind, folder):
    port = free_port()
    ranks = [begun(kind, folder, number, port) for number in (0, 1)]
    try:
        ranks[1].wait(LONGEST_S)
        survivor = ranks[0].wait(ENDED_S)
    except subprocess.TimeoutExpired as late:
        yield f"{kind}: a rank had not ended after {late.timeout} s: {said(folder)}"
        return
    finally:
        for each in ranks:
            each.kill()
    if ranks[1].returncode != -signal.SIGKILL or survivor != 1 or not (folder / "told").exists():
        yield f"{kind}: the ranks ended with {survivor} and {ranks[1].returncode}: {said(folder)}"
        return
    print(*lines_of_lamina(folder), sep="\n")
    told = json.loads((folder / "told").read_text())
    after, line = told["at"] - float((folder / "death").read_text()), told["text"].partition("\n")[0]
    print(f"{kind}: after {after:.2f} s: {line}", flush=True)
    if after > HEARD_S or not line.startswith("PeerError") or "rank 1 is lost" not in line:
        yield f"{kind}: after {after:.2f} s rank 0 says {line}"


def lines_of_lamina(folder):
    """The lines that lamina itself has written in the ranks."""
    texts = [(folder / f"said-{number}").read_text() for number in (0, 1)]
    return [line for text in texts for line in text.splitlines() if line.startswith(("lamina:", "[lamina"))]


def said(folder):
    """The last of what each rank has written."""
    return "\n".join((folder / f"said-{number}").read_text()[-2000:] for number in (0, 1))


def main(kinds):
    lines = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            lines += problems_of(kind, Path(folder))
    return training.told(lines)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main(sys.argv[1:]))
