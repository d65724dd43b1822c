# SPDX-License-Identifier: Apache-2.0
"""Cases with sharded parameters, or with states that copies divide (degree 1). Each is a model, a layout and keys,
trained by lamina over several replicas and by a plain loop over all their data, and compared by [Note: equal]."""

import os
import random
from dataclasses import dataclass, replace

import torch
from equivalence.cases import BATCH, STEPS, Trained, build, difference, on_host
from equivalence.models import MODELS, WIDTH

import lamina

THRESHOLDS = (0, 20, 10**9)  # none stays whole; small ones; all
BUCKETS = (1, 37, 10**9)


@dataclass(frozen=True)
class ShardedCase:
    model: str
    degree: int
    partitions: int
    schedule: str
    microbatches: int
    accumulate: int
    threshold: int
    bucket: int
    live: int
    optimizer: str
    backend: str
    kept: str = ""  # until the end of it values are, beside forwards: "backward", "update"
    prefetch: str = "pre"
    units: tuple[str, ...] | None = None
    dtype: str = "float64"

    @property
    def name(self) -> str:
        return (
            f"{self.model}-d{self.degree}-pp{self.partitions}-{self.schedule}-m{self.microbatches}-a{self.accumulate}-"
            f"t{self.threshold}-b{self.bucket}-l{self.live}-{self.optimizer}-{self.backend}"
            f"-k{self.kept}-{self.prefetch}-u{'all' if self.units is None else len(self.units)}"
        )


def cases(world: int, count: int) -> list[ShardedCase]:
    """A seeded sample of all."""
    draw = random.Random(1000 + world)
    found: dict[str, ShardedCase] = {}
    while len(found) < count:
        partitions = draw.choice((1, 1, 2)) if world > 2 else 1
        replicas = world // partitions
        model = draw.choice(list(MODELS))
        names = [name for name, _ in MODELS[model]().named_modules() if name]
        case = ShardedCase(
            model,
            draw.choice([degree for degree in (1, 2, 4, 8) if replicas % degree == 0]),
            partitions,
            draw.choice(("simple", "interleaved")),
            draw.choice((1, 2, 4)),
            draw.choice((1, 2, 3)),
            draw.choice(THRESHOLDS),
            draw.choice(BUCKETS),
            draw.choice((1, 10**9)),
            draw.choice(("sgd", "adamw", "lamb", "novograd", "adafactor")),
            draw.choice(("auto", "nccl")),
            draw.choice(("", "backward", "update")),
            draw.choice(("pre", "post", "none")),
            draw.choice((None, tuple(draw.sample(names, draw.randint(0, min(4, len(names))))))),
        )
        found[case.name] = case
    return list(found.values())


def cases_on_machines(world: int, count: int) -> list[ShardedCase]:
    """Cases with sharding groups that span machines: some cross as `auto` does, some over Gloo."""
    drawn = [replace(case, degree=world, partitions=1) for case in cases(world, count)]
    return [replace(case, backend=("auto", "nccl")[number % 2]) for number, case in enumerate(drawn)]


def make_optimizer(case: ShardedCase, parameters) -> torch.optim.Optimizer:
    parameters = list(parameters)
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "lr": 3e-3}]
    # Gradients that are zero but for rounding are not to be made large by what divides by them.
    if case.optimizer == "lamb":
        return lamina.optim.LAMB(groups, lr=1e-2, eps=1e-4, max_grad_norm=0.5)
    if case.optimizer == "novograd":
        return lamina.optim.NovoGrad(groups, lr=1e-2, eps=1e-4)
    if case.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=1e-2, eps=(1e-4, 1e-3))
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def data(replicas: int, accumulate: int) -> list[list[list[torch.Tensor]]]:
    """Returns what each replica reads in each pass of each step."""
    generator = torch.Generator().manual_seed(7)
    shape = (STEPS, accumulate, replicas, BATCH, WIDTH)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).unbind()


def plain(case: ShardedCase, replicas: int) -> Trained:
    model = build(case)
    optimizer = make_optimizer(case, model.parameters())
    losses, gradients = [], {}
    for passes in data(replicas, case.accumulate):
        optimizer.zero_grad()
        for of_replicas in passes:
            total = 0.0
            for x in of_replicas:
                for part in x.chunk(case.microbatches):
                    loss = model(part) / (replicas * case.microbatches)
                    loss.backward()
                    total += loss.item()
            losses.append(total)
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return Trained(losses, {}, gradients, dict(model.named_parameters()))


def distributed(case: ShardedCase) -> Trained:
    lamina.init(
        pipeline_parallel_degree=case.partitions,
        schedule=case.schedule,
        microbatches=case.microbatches,
        ddp=True,
        ddp_dist_backend=case.backend,
        sharded_data_parallel_degree=case.degree,
        shard_optimizer_state=case.degree == 1,
        sdp_param_persistence_threshold=case.threshold,
        sdp_reduce_bucket_size=case.bucket,
        sdp_max_live_parameters=case.live,
        sdp_reshard_after_forward=not case.kept,
        sdp_reshard_after_backward=case.kept != "update",
        sdp_backward_prefetch=case.prefetch,
        sdp_units=case.units,
        sdp_gradient_clipping=1e9,
        timeout_s=60,
    )
    model = lamina.DistributedModel(build(case), backward_passes_per_step=case.accumulate)
    optimizer = lamina.DistributedOptimizer(make_optimizer(case, model.parameters()))

    @lamina.step
    def train(x):
        loss = model(x)
        model.backward(loss)
        return loss

    losses, gradients = [], {}
    for passes in data(lamina.rdp_size(), case.accumulate):
        optimizer.zero_grad()
        for of_replicas in passes:
            own = train(of_replicas[lamina.rdp_rank()].to(lamina.device())).reduce_mean().cpu()
            losses.append(torch.stack(lamina.allgather(own, lamina.RDP_GROUP)).mean().item())
        local = list(model.local_named_parameters())
        gradients = {name: lamina.get_full_gradient(parameter) for name, parameter in local}
        optimizer.step()
    parameters = {name: lamina.get_full_parameter(parameter) for name, parameter in local}
    lamina.shutdown()
    return Trained(losses, {}, on_host(gradients), on_host(parameters))


def check(case: ShardedCase) -> list[str]:
    """The differences between the two ways of training, on this rank; an empty list is the promise kept."""
    ours = distributed(case)
    theirs = plain(case, int(os.environ["WORLD_SIZE"]) // case.partitions)
    wrong = [
        f"loss of pass {i}: {a} here, {b} plain"
        for i, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True))
        if not abs(a - b) <= 1e-9 * max(abs(b), 1e-3)
    ]
    with torch.no_grad():
        wrong += difference(ours.parameters, theirs.parameters, 1e-9, "parameter")
        wrong += difference(ours.gradients, theirs.gradients, 1e-9, "gradient of")
    return wrong
