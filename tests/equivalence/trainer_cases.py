# SPDX-License-Identifier: Apache-2.0
"""Random trainings by the Trainer: any number of ranks trains like one, which a loop by hand trains here, too."""

import random
from dataclasses import dataclass, field

import torch
from equivalence.random_sides import world_of_one
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lamina
from lamina.trainer import ComposerModel, Evaluator, Time, Trainer

# Rows of [Note: layouts of the Trainer], by arguments of it.
ROWS = {
    "": {},
    "FULL_SHARD": {"fsdp_config": {"backward_prefetch": "NONE", "min_params": 20}},
    "SHARD_GRAD_OP": {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}},
    "stage 2": {"deepspeed_config": {"zero_optimization": {"stage": 2}}},
    "stage 3": {"deepspeed_config": {"zero_optimization": {"stage": 3}}},
}


@dataclass
class TrainerCase:
    """A case. `batch` is that of all copies; samplers are "exact", the same in rows ("rows"), torch's ("torch"), or
    torch's with drop_last ("torch dropping"), which counts as without."""

    number: int
    world: int
    layouts: tuple[str, ...] = ("copies", "sharded", "partitions", "slices", "slices_of_one_batch")
    name: str = field(init=False)

    def __post_init__(self):
        draw = random.Random(self.number)
        self.per_rank = draw.randint(1, 5)
        self.layout = draw.choice(self.layouts) if self.world % 2 == 0 else "copies"
        self.copies = self.world // 2 if self.layout in ("partitions", "slices_of_one_batch") else self.world
        self.batch = self.per_rank * self.copies
        self.samples = draw.randint(self.world, 40)
        self.microbatch = draw.choice([{}, {"grad_accum": draw.randint(2, 4)}, {"size": draw.randint(1, 5)}])
        self.sampler = draw.choice(["exact", "torch", "torch dropping"])
        self.drop_last = draw.random() < 0.3 and self.samples >= self.batch
        self.shuffle = draw.random() < 0.7
        self.loss = draw.choice(["mean", "several", "total", "named"])
        batches = self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)
        self.duration = draw.choice(["1ep", "2ep", f"{draw.randint(1, 2 * batches)}ba", f"{2 * self.samples - 1}sp"])
        self.optimizer = draw.choice(["sgd", "adamw"])
        self.evaluated = draw.choice([None, draw.randint(1, 9)])
        self.dropout = 0.3 if draw.random() < 0.4 else 0.0
        self.row = draw.choice(list(ROWS)) if self.layout == "sharded" else ""
        self.backend = draw.choice(["auto", "nccl"]) if self.layout == "sharded" else "auto"
        if self.dropout:  # then microbatches are to be the same
            size = draw.choice([size for size in range(1, 6) if self.per_rank % size == 0])
            self.sampler, self.microbatch = "rows", {"size": size}
        self.name = "-".join(
            [
                f"{self.number}",
                self.layout + self.row.replace(" ", "_") + (self.backend == "nccl") * "_gathered",
                f"{self.samples}of{self.batch}",
                self.sampler.replace(" ", "_"),
                self.duration,
            ]
            + [f"{key}{value}" for key, value in self.microbatch.items()]
            + ["drop_last"] * self.drop_last
            + ["dropout"] * bool(self.dropout)
        )


def cases(world: int, count: int) -> list[TrainerCase]:
    """The first ones for so many ranks."""
    return [TrainerCase(1000 * world + number, world) for number in range(count)]


class Model(ComposerModel):
    def __init__(self, loss: str, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(3)
        self.kind = loss
        self.module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()

    def forward(self, batch):
        return self.module(batch[0])

    def loss(self, outputs, batch):
        entropy = functional.cross_entropy(outputs, batch[1], reduction="none")
        size = outputs.square().mean()
        return {
            "mean": lambda: entropy,
            "several": lambda: (entropy.mean(), size),
            "total": lambda: {"total": entropy.mean() + 0.5 * size, "size": size},
            "named": lambda: {"entropy": entropy.mean(), "size": size},
        }[self.kind]()


def total(loss):
    """The loss that is trained."""
    if isinstance(loss, tuple):
        return sum(loss)
    return loss["total"] if "total" in loss else sum(loss.values())


def data_of(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


def optimizer_of(case: TrainerCase, model: nn.Module) -> torch.optim.Optimizer:
    parameters = model.parameters()
    return torch.optim.SGD(parameters, 0.1, 0.9) if case.optimizer == "sgd" else torch.optim.AdamW(parameters, 0.01)


def by_hand(case: TrainerCase) -> dict[str, object]:
    """One process, with batches as large as all ranks' together."""
    model, dataset = Model(case.loss), data_of(case.samples, 1)
    optimizer = optimizer_of(case, model)
    sampler = DistributedSampler(dataset, 1, 0, case.shuffle)
    loader = DataLoader(dataset, case.batch, sampler=sampler, drop_last=case.drop_last)
    epochs, batches, seen, losses = 0, 0, 0, []
    limit = Time.from_timestring(case.duration)
    while {"ep": epochs, "ba": batches, "sp": seen}[limit.unit.value] < limit.value:
        sampler.set_epoch(epochs)
        for batch in loader:
            optimizer.zero_grad()
            loss = model.loss(model(batch), batch)
            loss = loss.mean() if isinstance(loss, torch.Tensor) else total(loss)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            batches, seen = batches + 1, seen + len(batch[0])
            if {"ba": batches, "sp": seen}.get(limit.unit.value, 0) >= limit.value:
                break
        epochs += 1
    with torch.no_grad():
        every = data_of(case.evaluated or 1, 2).tensors
        loss = model.loss(model(every), every)
        evaluated = loss.mean() if isinstance(loss, torch.Tensor) else total(loss)
    return {"state": model.state_dict(), "batches": batches, "samples": seen, "losses": losses, "eval": evaluated}


LAYOUTS = {
    "copies": {},
    "sharded": {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
    "partitions": {"partitions": 2},
    "slices": {"tensor_parallel_degree": 2},
    "slices_of_one_batch": {"tensor_parallel_degree": 2, "prescaled_batch": True},
}


def keys_of(case: TrainerCase) -> dict[str, object]:
    return LAYOUTS[case.layout] | ({"ddp_dist_backend": "nccl"} if case.backend == "nccl" else {})


def by_trainer(case: TrainerCase, alone: bool = False, **arguments: object) -> dict[str, object]:
    """This rank of several, by a Trainer with these arguments, too."""
    model, dataset = Model(case.loss, case.dropout), data_of(case.samples, 1)
    if "slices" in case.layout and not alone:
        lamina.set_tensor_parallelism(model.module, plan={"0": "colwise", "3": "rowwise"})
    drops = case.sampler == "torch dropping"
    per_copy = case.batch if alone else case.per_rank
    rows = {"batch_size": per_copy} if case.sampler == "rows" else {}
    exact = case.sampler in ("exact", "rows")
    sampler = lamina.dist.get_sampler(dataset, shuffle=case.shuffle, drop_last=drops, exact=exact, **rows)
    loader = DataLoader(dataset, per_copy, sampler=sampler, drop_last=case.drop_last)
    losses = Losses()
    microbatch = dict(case.microbatch)
    size = microbatch.pop("size", None)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        max_duration=case.duration,
        optimizers=optimizer_of(case, model),
        callbacks=losses,
        device_train_microbatch_size=size,
        **{"lamina_config": {"timeout_s": 60} | ({} if alone else keys_of(case)), "seed": 7} | arguments,
        **({} if alone else ROWS[case.row]),
        **evaluation(case),
        **microbatch,
    )
    trainer.fit()
    time = trainer.state.timestamp
    found = {"batches": time.batch.value, "samples": time.sample.value, "losses": losses.seen}
    trainer.close()
    found["state"] = model.state_dict()
    return found | {"eval": trainer.state.eval_metric_values.get("loss")}


def evaluation(case: TrainerCase) -> dict[str, object]:
    """The Trainer's arguments for it: at the end, and once before."""
    if case.evaluated is None:
        return {}
    dataset = data_of(case.evaluated, 2)
    loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset, shuffle=False, **place()))
    return {"eval_dataloader": Evaluator(label="other", dataloader=loader), "eval_interval": "2ba"}


def place() -> dict[str, int]:
    return {"num_replicas": lamina.dist.get_world_size(), "rank": lamina.dist.get_global_rank()}


class Losses(lamina.trainer.Callback):
    def __init__(self):
        self.seen = []

    def batch_end(self, state, logger):
        self.seen.append(state.total_loss_dict["loss/train/total"])


def check(case: TrainerCase, **arguments: object) -> list[str]:
    """Lists all that differs on this rank."""
    if case.dropout:
        with world_of_one():
            expected = by_trainer(case, alone=True)
    else:
        expected = by_hand(case)
    found = by_trainer(case, **arguments)
    wrong = [
        f"{name}: {found[name]}, and not {expected[name]}"
        for name in ("batches", "samples")
        if found[name] != expected[name]
    ]
    pairs = {"losses": (torch.tensor(found["losses"]), torch.tensor(expected["losses"]))}
    pairs |= {name: (found["state"][name], value) for name, value in expected["state"].items()}
    if case.evaluated:
        pairs["eval"] = torch.tensor(found["eval"]), torch.as_tensor(expected["eval"], dtype=torch.float32)
    for name, (one, other) in pairs.items():
        # Sums over ranks and microbatches are in another order.
        rtol = 1e-6 if one.dtype == torch.float32 else 1e-9
        if one.shape != other.shape or not torch.allclose(one, other, rtol=rtol):
            wrong.append(f"{name}: {one.flatten()[:4].tolist()}, and not {other.flatten()[:4].tolist()}")
    return wrong
