# SPDX-License-Identifier: Apache-2.0
"""Forward, backward and update of a GPT whose parameters are sharded over the ranks, beside torch's FSDP2, in turns in
one run.

    lamina run -n 2 benchmarks/sharding.py

A sample is one plain iteration of rank 0, all ranks beginning together: forward, backward and, apart, AdamW's step. A
GPT of 25 million parameters in float32; the batch is large, or tiny, so that communication weighs. Nothing is clipped,
or, in a case of its own, everything is: torch's by clip_grad_norm_, which belongs to the update.
  lamina, sharded  sharded_data_parallel_degree: all ranks
  lamina.optim     the same with lamina.optim's AdamW in the place of torch's
  lamina           data parallelism: all of the model on each rank
  FSDP2, gloo      torch's fully_shard around each block and the model, over Gloo
  FSDP2, lamina    the same over the backend "lamina"
  DeepSpeed        its ZeRO-3 over Gloo, where it is installed (DS_ACCELERATOR=cpu, DS_BUILD_OPS=0)
  alone            the model itself, with all of its parameters: what of it is computing
`exposed` is the time of forward and backward that is not the model's own; `of_FSDP2` are ratios to that over Gloo.
"""

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from measure import Report, arguments
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import lamina

WIDTH, LAYERS, WORDS = 512, 8, 256
LARGE, TINY = (4, 128), (1, 16)  # sequences, and their length
CASES = {"large": (LARGE, None), "tiny": (TINY, None), "tiny, clipped": (TINY, 1e-3)}  # to which norm, if any


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, length, width)
        q, k, v = (each.unflatten(-1, (8, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(words)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def model() -> GPT:
    torch.manual_seed(0)
    return GPT()


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)


def own_adamw(net: nn.Module) -> torch.optim.Optimizer:
    return lamina.optim.AdamW(net.parameters(), lr=1e-4)


def sharded_by_torch(group: dist.ProcessGroup) -> nn.Module:
    net, mesh = model(), DeviceMesh.from_group(group, "cpu")
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def sharded_by_deepspeed() -> tuple[Callable[[torch.Tensor], SimpleNamespace], SimpleNamespace]:
    """A model and its optimizer, which are called as torch's."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    net = model()
    config = {
        "train_micro_batch_size_per_gpu": LARGE[0],
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=adamw(net), config=config)

    def call(words: torch.Tensor) -> SimpleNamespace:
        loss = engine(words)
        return SimpleNamespace(backward=lambda: engine.backward(loss))

    return call, SimpleNamespace(step=engine.step, zero_grad=lambda: None)


Samples = dict[str, list[float]]  # of "forward and backward", and of "update"


def measured(
    net: Callable,
    optimizer: torch.optim.Optimizer | SimpleNamespace,
    words: torch.Tensor,
    count: int,
    clip: float | None,
) -> Samples:
    """Samples after two iterations that are not counted. `clip`: to this norm, by torch's function."""
    samples: Samples = {"forward and backward": [], "update": []}
    for _ in range(count + 2):
        dist.barrier()
        begin = time.perf_counter()
        net(words).backward()
        middle = time.perf_counter()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        end = time.perf_counter()
        optimizer.zero_grad()
        samples["forward and backward"].append(1e3 * (middle - begin))
        samples["update"].append(1e3 * (end - middle))
    return {what: values[2:] for what, values in samples.items()}


def of_lamina(
    words: torch.Tensor, count: int, degree: int, clip: float | None, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> Samples:
    """Samples of a job of lamina's own, which has one model; shards are clipped by the job itself."""
    lamina.init(
        ddp=True,
        sharded_data_parallel_degree=degree,
        sdp_param_persistence_threshold=10_000,
        sdp_gradient_clipping=clip,
    )
    net = lamina.distribute(model())
    optimizer = lamina.DistributedOptimizer(make(net))
    samples = measured(net, optimizer, words, count, clip if degree == 1 else None)
    lamina.shutdown()
    return samples


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nets = {
        "FSDP2, gloo": sharded_by_torch(dist.group.WORLD),
        "FSDP2, lamina": sharded_by_torch(dist.new_group(backend="lamina")),
        "alone": model(),
    }
    trained = {name: (net, adamw(net)) for name, net in nets.items()}
    if importlib.util.find_spec("deepspeed"):
        trained["DeepSpeed"] = sharded_by_deepspeed()
    report = Report(options.name or "sharding", f"An iteration of a GPT of 25 million parameters over {ranks} ranks")
    for case, (shape, clip) in CASES.items():
        words = torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(rank))
        count = options.pick(2, 3, 5)
        ways: dict[str, Callable[[], Samples]] = {
            "lamina, sharded": partial(of_lamina, words, count, ranks, clip, adamw),
            "lamina.optim": partial(of_lamina, words, count, ranks, clip, own_adamw),
            "lamina": partial(of_lamina, words, count, 1, clip, adamw),
        }
        for name, pair in trained.items():
            if name != "DeepSpeed" or clip is None:  # which is told at its start
                ways[name] = partial(measured, *pair, words, count, clip)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(options.pick(1, 3, 7)):
            for name, way in ways.items():
                rounds[name].append({what: statistics.median(values) for what, values in way().items()})
        add_rows(report, case, rounds)
    if "DeepSpeed" not in trained:
        report.note("DeepSpeed is not installed, and left out")
    if rank == 0:
        report.finish()
    dist.destroy_process_group()


def add_rows(report: Report, case: str, rounds: dict[str, list[dict[str, float]]]) -> None:
    both, peer = "forward and backward", "FSDP2, gloo"
    for what in (both, "update"):
        for name, values in rounds.items():
            own = [value[what] for value in values]
            ratios = [a / b[what] for a, b in zip(own, rounds[peer], strict=True)]
            report.add(f"{case}: {what}", name, "ms", own, of_FSDP2=statistics.median(ratios))
    for name, values in rounds.items():
        if name == "alone":
            continue
        exposed = [value[both] - alone[both] for value, alone in zip(values, rounds["alone"], strict=True)]
        of_peer = [value[both] - alone[both] for value, alone in zip(rounds[peer], rounds["alone"], strict=True)]
        ratios = [a / b for a, b in zip(exposed, of_peer, strict=True)]
        report.add(f"{case}: exposed", name, "ms", exposed, of_FSDP2=statistics.median(ratios))


if __name__ == "__main__":
    main()
