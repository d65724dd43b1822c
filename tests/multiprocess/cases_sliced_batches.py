# SPDX-License-Identifier: Apache-2.0
"""Layers that are cut over two ranks, each of which has a batch of its own (`prescaled_batch` false)."""

import copy
import os

import pytest
import torch
from multiprocess.cases_sliced import PLAN, WORDS, Block, Own, Words, made, require_equal_states, sliced
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lamina
from lamina.errors import UsageError

RANK = int(os.environ.get("RANK", 0))
RANKS = int(os.environ.get("WORLD_SIZE", 1))


def start(**keys):
    lamina.init(tensor_parallel_degree=2, ddp=True, timeout_s=60, **keys)


def batch(seed, rank):
    """One of its own for each rank, of another shape."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randint(0, WORDS, (2 + rank, 5 - rank), generator=generator)


def loss_of(model, seed, rank):
    torch.manual_seed(10 * seed + rank)
    return model(batch(seed, rank))


def require_same_training(model, plain, steps=3, loss_of=loss_of):
    """Updates of both, with dropout: the plain model's are by all batches."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    for seed in range(steps):
        loss = loss_of(model, seed, RANK)
        loss.backward()
        losses = [loss_of(plain, seed, rank) for rank in range(RANKS)]
        (sum(losses) / RANKS).backward()
        torch.testing.assert_close(loss, losses[RANK], rtol=1e-10, atol=0)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (model, plain)]
        torch.testing.assert_close(*norms, rtol=1e-10, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    require_equal_states(model.state_dict(), plain.state_dict())


def regions(model):
    return [name for name, module in model.module.named_modules() if "_lamina_turns" in module.__dict__]


def case_updates_are_those_of_the_plain_model_with_all_batches():
    start()
    plain = made()
    model = sliced(plain)
    assert regions(model) == [f"blocks.{n}" for n in range(2)]
    scaled = {name for name, _ in model.scaled_batch_reducer_named_parameters()}
    default = {name for name, _ in model.default_reducer_named_parameters()}
    assert {"blocks.0.up.weight", "blocks.0.down.weight"} <= scaled and not scaled & default
    assert {"embedding.weight", "blocks.0.down.bias", "blocks.0.norm.weight"} <= default
    assert model.is_scaled_batch_parameter(model.module.blocks[0].down.weight)
    require_same_training(model, plain)


def case_step_functions_count_the_microbatches_of_all():
    start(microbatches=2, seed=7)
    plain = made()
    model = sliced(plain)
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @lamina.step
    def train(words):
        loss = model(words)
        model.backward(loss)
        return loss

    def all_batches():
        return [torch.randint(0, WORDS, (4, 5), generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]

    losses = [train(all_batches()[RANK]).outputs for _ in range(2)]
    optimizer.step()
    state = model.state_dict()
    lamina.shutdown()
    lamina.init(microbatches=2 * RANKS, seed=7)  # of one rank each, with all batches
    model = lamina.distribute(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = [train(torch.cat(all_batches())).outputs for _ in range(2)]
    optimizer.step()
    expected, plains = lamina.allgather((expected, plain.state_dict()), lamina.WORLD)[0]  # the first's
    for ours, everyones in zip(losses, expected, strict=True):
        torch.testing.assert_close(ours, everyones[2 * RANK : 2 * RANK + 2], rtol=1e-10, atol=0)
    require_equal_states(state, plains)


def case_batches_of_other_sizes_train_as_one_with_all():
    start(microbatches=3)
    plain = made().eval()
    model = sliced(plain)
    model.eval()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]

    @lamina.step
    def train(words):
        loss = model(words)
        model.backward(loss)
        return loss

    for seed, sizes in enumerate([[4, 3], [1, 5], [2, 1]]):
        generator = torch.Generator().manual_seed(seed)
        batches = torch.randint(0, WORDS, (sum(sizes), 5), generator=generator).split(sizes)
        loss = train(batches[RANK])
        assert sum(loss.samples) == sizes[RANK]
        torch.testing.assert_close(loss.reduce_mean(), plain(batches[RANK]).detach(), rtol=1e-10, atol=0)
        plain(torch.cat(batches)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    require_equal_states(model.state_dict(), plain.state_dict())


class Checkpointed(Words):
    """Activations are computed again, outside of regions and in them; a norm in a region is used outside of it, too."""

    reentrant = False

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())
        return loss + self.blocks[0].norm.weight.square().sum() * loss.detach() / 100


class InBlock(Block):
    """A block that computes its attention again."""

    reentrant = False

    def forward(self, x):
        x = x + checkpoint(self.attention, self.norm(x), use_reentrant=self.reentrant)
        return x + self.down(self.up(x).relu())


def case_activations_are_computed_again_in_regions_and_around_them():
    for reentrant in (False, True):
        start()
        torch.manual_seed(0)
        plain = Checkpointed().double()
        plain.reentrant = reentrant
        require_same_training(sliced(plain), plain, steps=2)
        lamina.shutdown()
        start()
        for block in plain.blocks:
            block.__class__, block.reentrant = InBlock, reentrant
        model = sliced(plain)
        assert regions(model) == ["blocks.0", "blocks.1"]
        require_same_training(model, plain, steps=2)
        lamina.shutdown()


def case_layers_that_are_sliced_of_themselves_take_batches_of_all():
    start()
    torch.manual_seed(0)
    plain = Own().double()
    model = lamina.distribute(copy.deepcopy(plain))
    assert regions(model) == ["embedding", "linear", "head"]
    require_same_training(model, plain)


def case_a_row_of_blocks_is_one_region():
    start()
    torch.manual_seed(0)
    plain = Words().double()
    plain.blocks = nn.Sequential(*plain.blocks)
    model = sliced(plain)
    assert regions(model) == ["blocks"]


def case_gradients_of_several_backwards_add_up():
    start()
    plain = made()
    model = copy.deepcopy(plain)
    lamina.set_tensor_parallelism(model, plan=PLAN)
    model = lamina.DistributedModel(model, backward_passes_per_step=2)
    for seed in range(2):
        loss_of(model, seed, RANK).backward()
        sum(loss_of(plain, seed, rank) for rank in range(RANKS)).div(RANKS).backward()
    norm = nn.utils.get_total_norm([each.grad for each in plain.parameters()])
    torch.testing.assert_close(model.grad_norm(), norm, rtol=1e-10, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, 5, RANK), loss_of(plain, 5, RANK), rtol=1e-10, atol=0)


class Kept:
    """Like a cache of attention's keys."""

    def __init__(self):
        self.seen = []


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x, kept, length):
        assert length == len(x)  # a number of the rank whose batch it is
        kept.seen.append(self.up(x))
        return self.down(torch.stack(kept.seen).sum(0))


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Remembers() for _ in range(2))

    def forward(self, x, kept=None):
        kept = kept or Kept()
        for part in self.parts:
            x = part(x, kept, len(x))
        return x


def case_objects_that_a_module_keeps_are_those_of_each_batch():
    start()
    torch.manual_seed(0)
    plain = Remembering().double()
    model = sliced(plain, {"parts.*.up": "colwise", "parts.*.down": "rowwise"})
    xs = [torch.randn(2 + rank, 4, dtype=torch.double) for rank in range(RANKS)]
    torch.testing.assert_close(model(xs[RANK]), plain(xs[RANK]))
    filled = Kept()
    filled.seen.append(torch.ones(2 + RANK, 3, dtype=torch.double))
    with pytest.raises(UsageError, match=r"a Kept that holds a tensor .* prescaled_batch: true"):
        model(xs[RANK], filled)


class Meter:
    def __init__(self):
        self.total, self.values = 0.0, []

    def update(self, value):
        self.total += value
        self.values.append(value)


class Noting(nn.Module):
    """Keeps something of each of its calls, in all ways."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.BatchNorm1d(4), nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("running", torch.zeros(4))
        self.register_buffer("largest", torch.zeros(4))
        self.loss, self.count, self.seen, self.by_name, self.meter = None, 0, [], {}, Meter()

    def forward(self, x):
        x = self.norm(x)
        y = self.down(self.up(x).relu())
        self.count += 1
        self.calls += 1
        with torch.no_grad():
            self.running.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.largest = torch.maximum(self.largest, y.amax(0))
        self.loss = y.square().mean()
        self.seen.append(y.mean())
        self.by_name[f"call {self.count}"] = len(x)
        self.meter.update(y.sum().item())
        return y * (1 + 0.1 * (self.count % 3))  # as its state says

    def noted(self):
        tensors = {name: value.clone() for name, value in self.named_buffers()}
        values = [self.loss, *self.seen, torch.tensor([self.meter.total, *self.meter.values])]
        return tensors, [each.detach().clone() for each in values], (self.count, dict(self.by_name))


def case_what_a_module_keeps_of_its_calls_is_of_its_own_batch_once():
    start()
    torch.manual_seed(0)
    plain = nn.Sequential(Noting(), nn.Tanh()).double()
    model = copy.deepcopy(plain)
    lamina.set_tensor_parallelism(model, plan={"0.up": "colwise", "0.down": "rowwise"})
    model = lamina.DistributedModel(model, broadcast_buffers=False)
    collected, plains = [], []
    model.module[0].up.register_forward_hook(lambda module, args, output: collected.append(args[0].sum().item()))
    plain[0].up.register_forward_hook(lambda module, args, output: plains.append(args[0].sum().item()))
    for step in range(5):
        ours, its = model.module[0], plain[0]
        x = torch.randn(3 + RANK, 4, dtype=torch.double, generator=torch.Generator().manual_seed(10 * step + RANK))
        for each in (model, plain):
            each.train(step != 3)
        outputs = [model(model(x)), plain(plain(x))]  # twice in a pass
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(ours.noted(), its.noted())
        torch.testing.assert_close(collected, plains)
        for each in (ours, its):  # a script takes what was noted, and sets some anew
            each.seen = [] if step == 1 else each.seen
            each.seen.clear() if step == 2 else None
            each.loss = None
        outputs[0].sum().backward()
        model.zero_grad()
    assert len(collected) == 10 and model.module[0].calls == 10


def case_slices_are_not_called_outside_of_their_region():
    start()
    model = sliced(made())
    with pytest.raises(UsageError, match=r"was called outside of blocks.1, in which"):
        model.module.blocks[1].up(torch.zeros(1, 16, dtype=torch.double))
    with pytest.raises(UsageError, match="take prescaled_batch: true"):
        model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(UsageError, match="take prescaled_batch: true"), model.join():
        pass


def case_an_error_in_one_ranks_turn_is_one_of_all_and_the_next_step_is_right():
    start()
    plain = made().eval()
    model = sliced(plain)
    model.eval()
    with pytest.raises((IndexError, lamina.RemoteError), match="index out of range"):
        model(torch.full((1, 2), WORDS) if RANK == 1 else batch(0, 0))
    loss_of(model, 1, RANK).backward()
    sum(loss_of(plain, 1, rank) for rank in range(RANKS)).div(RANKS).backward()
    norm = nn.utils.get_total_norm([each.grad for each in plain.parameters()])
    torch.testing.assert_close(model.grad_norm(), norm, rtol=1e-10, atol=0)


def case_a_transformer_of_the_originals_is_one_region():
    for optimize in ("speed", "memory"):
        start(optimize=optimize)
        torch.manual_seed(0)
        plain = lamina.nn.DistributedTransformerLMHead(
            2, 3, 4, 12, 17, WORDS, 6, 0.2, 0.1, "relu", 1e-6, 0, 6, False, True, 0.1, True, True, False
        ).double()
        model = lamina.distribute(copy.deepcopy(plain))
        assert regions(model) == [""]

        def loss_of(model, seed, rank):
            torch.manual_seed(10 * seed + rank)
            words = batch(seed, rank)
            return model((words, None, None, None, words))[0]

        require_same_training(model, plain, steps=2, loss_of=loss_of)
        lamina.shutdown()
