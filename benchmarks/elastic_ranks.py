# SPDX-License-Identifier: Apache-2.0
"""The ranks that elastic.py starts: a GPT of 8 million parameters, of which a rank kills itself.

    python benchmarks/elastic_ranks.py WAY FOLDER STEPS FATAL...

    copies      lamina.Run over copies of the model
    restarts    copies, and a checkpoint of lamina in FOLDER every EVERY steps
    torch       torch's DistributedDataParallel, and one of torch.distributed.checkpoint

In each of the steps FATAL the last rank that there is dies, once. Each rank writes to FOLDER when it has ended a step,
and when it dies.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

EVERY, ROWS, LENGTH = 10, 12, 32
SIZES = {"vocabulary": 256, "width": 256, "layers": 10, "heads": 4, "context": LENGTH}


class Told:
    """Lines that a rank writes, each a word, the step and the time."""

    def __init__(self, folder: Path, fatal: list[int]):
        self._folder, self._fatal = folder, fatal
        self._file = (folder / f"told.{os.getpid()}").open("a", buffering=1)

    def begins(self, step: int, rank: int, ranks: int) -> None:
        """The step has its gradients soon: the last rank dies in it, where it is one of those."""
        mark = self._folder / f"died-{step}"
        if step not in self._fatal or rank != ranks - 1 or mark.exists():
            return
        mark.touch()
        self._write("dies", step)
        os.kill(os.getpid(), signal.SIGKILL)

    def ended(self, step: int) -> None:
        self._write("ended", step)

    def _write(self, word: str, step: int) -> None:
        self._file.write(f"{word} {step} {time.time()}\n")


def made() -> tuple[GPT, torch.Generator]:
    torch.manual_seed(0)
    return GPT(**SIZES), torch.Generator()


def batch(step: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(256, (ROWS, LENGTH + 1), generator=generator.manual_seed(step))


def with_lamina(way: str, folder: Path, steps: int, told: Told) -> None:
    import lamina

    lamina.init(ddp=True, microbatches=ROWS // int(os.environ["WORLD_SIZE"]))
    plain, generator = made()
    model = lamina.distribute(plain)
    optimizer = torch.optim.AdamW(model.parameters())
    lamina.DistributedOptimizer(optimizer)

    @lamina.step
    def train_step(x, y):
        loss = model(x, y)
        model.backward(loss)
        return loss

    def step(number: int) -> None:
        own = batch(number, generator).chunk(lamina.dp_size())[lamina.dp_rank()]
        optimizer.zero_grad()
        train_step(own[:, :-1], own[:, 1:])
        told.begins(number, lamina.rank(), lamina.size())
        optimizer.step()
        told.ended(number)

    if way == "copies":
        run = lamina.Run(model, optimizer)

        @run.elastic
        def train(updates):
            for number in range(updates, steps):
                step(number)

    else:
        saved = lamina.resume_from_checkpoint(folder / "saved", missing_ok=True)
        for number in range(saved["step"] if saved else 0, steps):
            step(number)
            if number % EVERY == EVERY - 1:
                content = {"step": number + 1}
                lamina.save_checkpoint(folder / "saved", "last", user_content=content, num_kept_partial_checkpoints=1)
    lamina.shutdown()


def with_torch(folder: Path, steps: int, told: Told) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))  # torchrun's, over all starts
    store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)  # which else finds addresses of before
    plain, generator = made()
    model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters())
    first, saved = 0, folder / "dcp"
    newest = max((int(each.name) for each in saved.glob("*") if (each / ".metadata").exists()), default=None)
    if newest is not None:
        states, options = get_state_dict(model, optimizer)
        given = {"model": states, "optimizer": options}
        dcp.load(given, checkpoint_id=saved / str(newest))
        set_state_dict(model, optimizer, model_state_dict=given["model"], optim_state_dict=given["optimizer"])
        first = newest
    for number in range(first, steps):
        own = batch(number, generator).chunk(ranks)[rank]
        optimizer.zero_grad()
        for part in own.chunk(ROWS // ranks):
            model(part[:, :-1], part[:, 1:]).backward()
        told.begins(number, rank, ranks)
        optimizer.step()
        told.ended(number)
        if number % EVERY == EVERY - 1:
            states, options = get_state_dict(model, optimizer)
            dcp.save({"model": states, "optimizer": options}, checkpoint_id=saved / str(number + 1))
    dist.destroy_process_group()


def main() -> None:
    way, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    told = Told(folder, list(map(int, sys.argv[4:])))
    if way == "torch":
        with_torch(folder, steps, told)
    else:
        with_lamina(way, folder, steps, told)


if __name__ == "__main__":
    main()
