# SPDX-License-Identifier: Apache-2.0
"""Small models, trained by plain torch on the CPU and by lamina, and compared."""

import statistics
import time
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

import lamina

SAMPLES = 8
WORDS = 96
STEPS = 3
LAYOUTS = {  # of two ranks
    "copies": {"ddp": True},
    "shards": {"ddp": True, "sharded_data_parallel_degree": 2},
    "slices": {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True},
    "a pipeline": {"partitions": 2, "microbatches": 4},
}


class GPT(nn.Module):
    PLAN: ClassVar = {"blocks.*.linear1": "colwise", "blocks.*.linear2": "rowwise"}  # of slices

    def __init__(self, width=64, depth=2, heads=4, context=32, dropout=0.0):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(context, width)
        layer = (width, heads, 4 * width, dropout, "gelu")
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(*layer, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, text, following):
        length = text.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=text.device).triu(1)
        hidden = self.words(text) + self.places.weight[:length]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), following.flatten())

    @staticmethod
    def batch(generator, dtype, samples=SAMPLES, context=32):
        text = torch.randint(WORDS, (samples, context + 1), generator=generator)
        return text[:, :-1], text[:, 1:]


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1, groups=2), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images, labels):
        return functional.cross_entropy(self.head(self.body(images).flatten(1)), labels)

    @staticmethod
    def batch(generator, dtype):
        images = torch.randn(SAMPLES, 3, 16, 16, generator=generator, dtype=torch.float64).to(dtype)
        return images, torch.randint(10, (SAMPLES,), generator=generator)


class MLP(nn.Module):
    PLAN: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, y):
        return (self.down(functional.gelu(self.up(x))) - y).square().mean()

    @staticmethod
    def batch(generator, dtype):
        x = torch.randn(SAMPLES, 32, generator=generator, dtype=torch.float64).to(dtype)
        return x, x.roll(1, dims=1)


def batches(model: type, steps: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return [model.batch(generator, dtype) for _ in range(steps)]


def made(model: type, dtype=torch.float32, **arguments):
    torch.manual_seed(11)
    return model(**arguments).to(dtype)


def adamw(parameters):
    # With the usual eps rounding in gradients near zero becomes steps as large as any.
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-4)


def plain(model, data, most=None):
    """The losses of plain torch, on the device of the model; `most` is the norm that gradients are clipped to."""
    optimizer, losses = adamw(model.parameters()), []
    for batch in data:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        if most is not None:
            nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@lamina.step
def train(model, *batch):
    loss = model(*batch)
    model.backward(loss)
    return loss


def here(batch):
    """The batch on the rank's device."""
    return [tensor.to(lamina.device()) for tensor in batch]


def own_part(batch):
    """Returns what this rank reads of a batch: a part where there are copies of the model, else all of it."""
    return [tensor.chunk(lamina.rdp_size())[lamina.rdp_rank()] for tensor in batch]


class Job:
    """A job with a model, wrapped by lamina, on the rank's device, and an optimizer of its own. Gradients are clipped
    to the norm `most`, if one is given."""

    def __init__(self, model, optimizer=adamw, most=None, **layout):
        lamina.init(**{"timeout_s": 60} | layout)
        self.most = most
        if "tensor_parallel_degree" in layout:
            lamina.set_tensor_parallelism(model, plan=model.PLAN)
        self.model = lamina.distribute(model)
        self.optimizer = lamina.DistributedOptimizer(optimizer(self.model.parameters()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        lamina.shutdown()

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = train(self.model, *here(own_part(batch)))
        if self.most is not None:
            self.model.clip_grad_norm_(self.most)
        self.optimizer.step()
        return loss.reduce_mean()

    def steps(self, data):
        """The losses, the means of all copies; none is read before the last step."""
        losses = [loss.item() for loss in [self.step(batch) for batch in data]]
        return [statistics.mean(each) for each in zip(*lamina.allgather(losses, lamina.RDP_GROUP), strict=True)]

    def whole_values(self):
        """The model's parameters and buffers, whole, on the host."""
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}


def differences(what, found, expected, tolerance):
    """Lines about tensors, or lists of losses, that are further apart than `tolerance` of the largest."""
    if isinstance(found, list):
        found, expected = {"losses": torch.tensor(found)}, {"losses": torch.tensor(expected)}
    largest = max(value.double().abs().max().item() for value in expected.values())
    for name, value in expected.items():
        apart = (found[name].detach().cpu().double() - value.detach().cpu().double()).abs().max().item()
        if not apart <= tolerance * max(value.double().abs().max().item(), 1e-3 * largest):
            yield f"{what}, {name}: {apart:.3g} apart"


def against_plain(what, model, dtype, tolerance, most=None, **layout):
    """Trains in a layout, and yields what differs from plain torch on the CPU, and what is not on the rank's device."""
    data, what = batches(model, STEPS, dtype), f"{what}, {model.__name__} in {dtype}"
    expected = made(model, dtype)
    losses = plain(expected, data, most)
    with Job(made(model, dtype), most=most, **layout) as job:
        found, values = job.steps(data), job.whole_values()
        held = {*job.model.local_parameters(), *job.model.local_buffers()}
        places, own = {tensor.device for tensor in held}, lamina.device()
    print(f"{what}: {', '.join(map(str, places))}, losses {found}", flush=True)
    if places != {own}:
        yield f"{what}: the model is on {places}, the rank on {own}"
    yield from differences(what, found, losses, tolerance)
    yield from differences(what, values, expected.state_dict(), tolerance)


def host_and_whole_ms(work, rounds):
    """Measures what the host takes for a round, and what host and device take together, of a device that was idle."""
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    for _ in range(rounds):
        work()
    host = time.perf_counter() - begin
    torch.accelerator.synchronize()
    return host * 1e3 / rounds, (time.perf_counter() - begin) * 1e3 / rounds


def told(problems):
    """Prints what is wrong; the code of the program."""
    problems = list(problems)
    for line in problems:
        print(f"WRONG: {line}", flush=True)
    return 1 if problems else 0
