# SPDX-License-Identifier: Apache-2.0
"""Forward, backward and update of a GPT whose parameters are sharded over the ranks, beside torch's FSDP2, in turns in
one run.

    lamina run -n 2 benchmarks/sharding.py

A sample is one plain iteration of rank 0, all ranks beginning together: forward, backward and, apart, AdamW's step. A
GPT of 25 million parameters in float32; the batch is large, or tiny, so that communication weighs.
  lamina, sharded  sharded_data_parallel_degree: all ranks
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
from types import SimpleNamespace

import torch
import torch.distributed as dist
from measure import Report, arguments
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import lamina

WIDTH, LAYERS, WORDS = 512, 8, 256
BATCHES = {"large": (4, 128), "tiny": (1, 16)}  # sequences, and their length


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
        "train_micro_batch_size_per_gpu": BATCHES["large"][0],
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
    net: Callable, optimizer: torch.optim.Optimizer | SimpleNamespace, words: torch.Tensor, count: int
) -> Samples:
    """Samples after two iterations that are not counted."""
    samples: Samples = {"forward and backward": [], "update": []}
    for _ in range(count + 2):
        dist.barrier()
        begin = time.perf_counter()
        net(words).backward()
        middle = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        optimizer.zero_grad()
        samples["forward and backward"].append(1e3 * (middle - begin))
        samples["update"].append(1e3 * (end - middle))
    return {what: values[2:] for what, values in samples.items()}


def of_lamina(words: torch.Tensor, count: int, degree: int) -> Samples:
    """Samples of a job of lamina's own, which has one model."""
    lamina.init(ddp=True, sharded_data_parallel_degree=degree, sdp_param_persistence_threshold=10_000)
    net = lamina.distribute(model())
    samples = measured(net, lamina.DistributedOptimizer(adamw(net)), words, count)
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
    for batch, shape in BATCHES.items():
        words = torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(rank))
        count = options.pick(2, 3, 5)
        ways: dict[str, Callable[[], Samples]] = {
            "lamina, sharded": lambda words=words, count=count: of_lamina(words, count, ranks),
            "lamina": lambda words=words, count=count: of_lamina(words, count, 1),
        }
        for name, pair in trained.items():
            ways[name] = lambda pair=pair, words=words, count=count: measured(*pair, words, count)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(options.pick(1, 3, 7)):
            for name, way in ways.items():
                rounds[name].append({what: statistics.median(values) for what, values in way().items()})
        add_rows(report, batch, rounds)
    if "DeepSpeed" not in trained:
        report.note("DeepSpeed is not installed, and left out")
    if rank == 0:
        report.finish()
    dist.destroy_process_group()


def add_rows(report: Report, batch: str, rounds: dict[str, list[dict[str, float]]]) -> None:
    both, peer = "forward and backward", "FSDP2, gloo"
    for what in (both, "update"):
        for name, values in rounds.items():
            own = [value[what] for value in values]
            ratios = [a / b[what] for a, b in zip(own, rounds[peer], strict=True)]
            report.add(f"{batch}: {what}", name, "ms", own, of_FSDP2=statistics.median(ratios))
    for name, values in rounds.items():
        if name == "alone":
            continue
        exposed = [value[both] - alone[both] for value, alone in zip(values, rounds["alone"], strict=True)]
        of_peer = [value[both] - alone[both] for value, alone in zip(rounds[peer], rounds["alone"], strict=True)]
        ratios = [a / b for a, b in zip(exposed, of_peer, strict=True)]
        report.add(f"{batch}: exposed", name, "ms", exposed, of_FSDP2=statistics.median(ratios))


if __name__ == "__main__":
    main()
