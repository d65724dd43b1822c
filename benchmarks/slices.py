# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a GPT whose layers are cut over the ranks, beside torch's own tensor parallelism, in turns in
one run.

    lamina run -n 2 benchmarks/slices.py

A sample is one plain iteration of rank 0, all ranks beginning together: 8 blocks of width 512, 25 million parameters in
float32, 4 sequences of 128 words.
  lamina           lamina.distribute, with a plan
  torch, sequence  torch's parallelize_module with SequenceParallel over Gloo
  torch, whole     the same with whole activations, over Gloo
  torch, lamina    that over the backend "lamina"
  alone            the model itself
  part             what a rank computes of the first, as if the others' parts were there: no exchanges
`exposed` is the time that is not that of the part.
"""

import statistics
import time

import torch
import torch.distributed as dist
from measure import Report, arguments
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import lamina
from lamina._lamina import Alone

WIDTH, HEADS, BLOCKS, WORDS = 512, 8, 8, 512
PLAN = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        layers = (self.query, self.key, self.value)
        heads = [layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in layers]
        return self.out(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), words.flatten())


def model() -> nn.Module:
    torch.manual_seed(0)
    return Gpt()


def with_whole_activations(mesh: DeviceMesh) -> nn.Module:
    net = model()
    of_block = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    of_block |= {"attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in net.blocks:
        parallelize_module(block, mesh, of_block)
    return net


def with_sequences(mesh: DeviceMesh) -> nn.Module:
    net = model()
    parts = Shard(1)
    of_block = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    of_block |= {
        "before": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(Replicate(),)),
        "attention.out": RowwiseParallel(output_layouts=parts),
        "between": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=parts),
        "down": RowwiseParallel(output_layouts=parts),
    }
    for block in net.blocks:
        parallelize_module(block, mesh, of_block)
    around = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=parts),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=parts, output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh, around)


def of_lamina(words: torch.Tensor, count: int) -> tuple[list[float], list[float]]:
    """Samples of a job of lamina's own, which has one model, and of what a rank computes of it."""
    lamina.init(tensor_parallel_degree=dist.get_world_size(), ddp=True, prescaled_batch=True)
    net = model()
    lamina.set_tensor_parallelism(net, plan=PLAN)
    net = lamina.distribute(net)
    samples = measured(net, words, count)
    with Alone():
        part = measured(net.module, words, count)
    lamina.shutdown()
    return samples, part


def measured(net: nn.Module, words: torch.Tensor, count: int) -> list[float]:
    """Samples after two iterations that are not counted."""
    samples = []
    for _ in range(count + 2):
        for parameter in net.parameters():
            parameter.grad = None
        dist.barrier()
        begin = time.perf_counter()
        net(words).backward()
        samples.append(1e3 * (time.perf_counter() - begin))
    return samples[2:]


def add_rows(report: Report, case: str, samples: dict[str, list[float]]) -> None:
    for name, values in samples.items():
        ratios = [value / other for value, other in zip(values, samples["torch, sequence"], strict=True)]
        report.add(case, name, "ms", values, of_torchs_sequence=statistics.median(ratios))


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("lamina")
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    ours = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    nets = {
        "torch, sequence": with_sequences(gloo),
        "torch, whole": with_whole_activations(gloo),
        "torch, lamina": with_whole_activations(ours),
        "alone": model(),
    }
    report = Report(options.name or "slices", f"An iteration of a GPT cut over {dist.get_world_size()} ranks")
    words = torch.randint(0, WORDS, (4, 128), generator=torch.Generator().manual_seed(0))
    count = options.pick(2, 4, 6)
    samples: dict[str, list[float]] = {}
    for _ in range(options.pick(1, 5, 9)):
        for name, found in zip(("lamina", "part"), of_lamina(words, count), strict=True):
            samples.setdefault(name, []).append(statistics.median(found))
        for name, net in nets.items():
            samples.setdefault(name, []).append(statistics.median(measured(net, words, count)))
    add_rows(report, "4 x 128 words", samples)
    exposed = {
        name: [value - part for value, part in zip(values, samples["part"], strict=True)]
        for name, values in samples.items()
        if name not in ("part", "alone")
    }
    add_rows(report, "exposed", exposed)
    if dist.get_rank() == 0:
        report.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
