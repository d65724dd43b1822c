# SPDX-License-Identifier: Apache-2.0
"""Layers that are cut over two ranks, in a pipeline of two partitions: four ranks, two teams."""

import copy
import re
import sys
import time
from typing import ClassVar

import pytest
import torch
from equivalence.random_sides import place_by_hand, world_of_one
from multiprocess.cases_sliced import HEADS, PLAN, RANK, WIDTH, WORDS, Block, require_equal_states
from multiprocess.cases_sliced_batches import Noting
from torch import nn
from torch.nn import functional

import lamina
from lamina.errors import ConfigError, DesyncError, RemoteError, UsageError


class Faults:
    """Code that one rank alone runs in one block, between its own work."""

    def __init__(self):
        self.where, self.what = (None, None), lambda block, x: x

    def run(self, block, x):
        return self.what(block, x) if (RANK, block.number) == self.where else x


sys.faults = Faults()  # modules of others do not hand on what they see of it


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("of a backward")


class Numbered(Block):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        return sys.faults.run(self, super().forward(x))


class Words(nn.Module):
    """As many blocks as two partitions share, a call within a call, and a head with the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Numbered(number) for number in range(4))
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), Numbered(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.inner(x)).flatten(0, 1), words.flatten())


PLACES = {"blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 0, "inner": 1, "inner.1": 0}
ALL = PLAN | {name.replace("blocks.*", "inner.1"): style for name, style in PLAN.items()}


def start(**options):
    keys = {"tensor_parallel_degree": 2, "partitions": 2, "ddp": True, "prescaled_batch": True, "timeout_s": 60}
    lamina.init(**keys | options)


def job(make=Words, **options):
    """A job with a plain model and its sliced copy."""
    start(microbatches=4, **options)
    torch.manual_seed(0)
    plain = make().double()
    torch.manual_seed(RANK)
    model = make().double()
    if RANK == 0:
        model.load_state_dict(plain.state_dict())
    for name, partition in PLACES.items():
        lamina.set_partition(model.get_submodule(name), partition)
    lamina.set_tensor_parallelism(model, plan=ALL)
    return plain, lamina.DistributedModel(model)


def words(seed, length=7):
    return torch.randint(0, WORDS, (8, length), generator=torch.Generator().manual_seed(seed))


@lamina.step
def train(model, batch):
    loss = model(batch)
    model.backward(loss)
    return loss


def require_plain_updates(plain, model, steps):
    plain.eval(), model.eval()
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    plains = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for seed in range(steps):
        loss = train(model, words(seed)).reduce_mean()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected = [plain(part) for part in words(seed).chunk(4)]
        (sum(expected) / 4).backward()
        plains_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        plains.step()
        plains.zero_grad()
        found, wanted = torch.stack([loss, norm]), torch.stack([torch.stack(expected).mean().detach(), plains_norm])
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
    return optimizer, plains


def require_equal_copies(model):
    """Compares what both members of a team have whole, to the bit."""
    kept = {name: value for name, value in model.local_named_parameters() if not model.is_distributed_parameter(value)}
    mine, other = (
        {name: value.detach() for name, value in each.items()} for each in lamina.allgather(kept, lamina.TP_GROUP)
    )
    assert mine and list(mine) == list(other)
    for name, value in mine.items():
        assert torch.equal(value, other[name]), name


class Two(lamina.nn.DistributedModule):
    """Two modules with slices of their own, which partitions may have apart."""

    slicing_plan: ClassVar = {
        f"{part}.{layer}": style for part in "ab" for layer, style in (("0", "colwise"), ("2", "rowwise"))
    }

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))

    def forward(self, x):
        return self.b(self.a(x))


def require_gpt2_with_own_batches(optimize):
    from transformers import GPT2Config, GPT2LMHeadModel

    from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2

    start(microbatches=2, prescaled_batch=False, optimize=optimize)
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=12, n_layer=3, n_head=3, **no_dropout))
    model = copy.deepcopy(plain.double())
    lamina.set_tensor_parallelism(model, replace=True)
    model = lamina.distribute(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]

    @lamina.step
    def update(batch):
        loss = model(input_ids=batch, labels=batch).loss
        model.backward(loss)
        return loss

    for seed in range(2):
        loss = update(words(seed).chunk(2)[lamina.dp_rank() % 2]).reduce_mean()
        losses = [plain(input_ids=part, labels=part).loss for part in words(seed).chunk(4)]
        (sum(losses) / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        own = torch.stack(losses).detach().double().view(2, 2).mean(1)[lamina.dp_rank() % 2]
        torch.testing.assert_close(loss, own, rtol=1e-10, atol=0)  # computed in float32 by both
    state = translate_state_dict_to_hf_gpt2(model.state_dict())
    require_equal_states({name: state.pop(name) for name in plain.state_dict()}, plain.state_dict())
    assert not state


def case_gpt2_of_transformers_with_own_batches_for_memory():
    require_gpt2_with_own_batches("memory")


def case_gpt2_of_transformers_with_own_batches_for_speed():
    require_gpt2_with_own_batches("speed")


def case_a_distributed_module_with_a_batch_of_each_ranks_own_is_cut_between_its_parts():
    start(microbatches=2, prescaled_batch=False)
    torch.manual_seed(0)
    plain = Two().double()
    model = copy.deepcopy(plain)
    lamina.set_partition(model.a, 0), lamina.set_partition(model.b, 1)
    model = lamina.distribute(model)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plains = torch.optim.SGD(plain.parameters(), lr=0.1)

    @lamina.step
    def train(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for seed in range(2):
        x = torch.randn(8, 4, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad(), plains.zero_grad()
        loss = train(x.chunk(lamina.dp_size())[lamina.dp_rank()]).reduce_mean()
        torch.testing.assert_close(loss, plain(x.chunk(lamina.dp_size())[lamina.dp_rank()]).square().mean().detach())
        plain(x).square().mean().backward()
        optimizer.step(), plains.step()
    require_equal_states(model.state_dict(), plain.state_dict())


def case_updates_are_those_of_the_plain_model_in_all_schedules():
    for schedule in ("interleaved", "simple", "zero_bubble"):
        plain, model = job(pipeline=schedule)
        optimizer, plains = require_plain_updates(plain, model, steps=12)
        require_equal_copies(model)
        require_equal_states(model.state_dict(), plain.state_dict())
        state = optimizer.state_dict()
        names = [name for name, _ in plain.named_parameters()]
        for name, of_plain in zip(names, plains.state_dict()["state"].values(), strict=True):
            index = names.index(name)
            torch.testing.assert_close(state["state"][index]["exp_avg"], of_plain["exp_avg"], rtol=1e-8, atol=1e-12)
        lamina.shutdown()


def failure_of(model, rank, block, what):
    """The error of a step in which one rank runs other code in one block; the next step is right again."""
    sys.faults.where, sys.faults.what = (rank, block), what
    try:
        train(model, words(0))
    except Exception as error:
        return error
    finally:
        sys.faults.where = (None, None)
        model.zero_grad()
    raise AssertionError(f"the step went on, though rank {rank} ran other code in block {block}")


def case_members_that_part_or_fail_end_the_step_for_all_and_the_next_one_is_right():
    plain, model = job()
    require_plain_updates(plain, model, steps=2)

    def again(block, x):
        return x + block.down(block.up(x))

    for rank, block in ((0, 0), (1, 3), (2, 1), (3, 2), (1, 4)):
        error = failure_of(model, rank, block, again)
        assert isinstance(error, DesyncError), repr(error)
        first = rank - rank % 2
        assert re.search(f"rank {first} and rank {first + 1}, whose collectives have one order", str(error))
        assert re.search(r"(all-reduce of a Double tensor of shape \[2, 7, 16\]|forward of) ", str(error)), str(error)
        assert "(microbatch " in str(error), str(error)

    def fail(block, x):
        raise ValueError("of a forward")

    for rank, block, what, text in ((3, 1, fail, "of a forward"), (2, 2, lambda _, x: Backward.apply(x), "of a back")):
        error = failure_of(model, rank, block, what)
        assert text in str(error), repr(error)
    require_plain_updates(plain, model, steps=2)
    require_equal_copies(model)
    lamina.shutdown()


def state_after(steps, prescaled, **options):
    _, model = job(prescaled_batch=prescaled, deterministic_server=True, **options)
    torch.manual_seed(0)
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(steps):
        train(model, words(2 * step + (0 if prescaled else lamina.tp_rank())))
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    lamina.shutdown()
    return state


def case_steps_are_compared_with_the_plain_model():
    for prescaled in (True, False):
        expected, found = state_after(3, prescaled), state_after(3, prescaled, verify_steps=2)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        _, model = job(prescaled_batch=prescaled, verify_steps=2)
        torch.manual_seed(0)
        train(model, words(0))
        rank = 3 if prescaled else 2  # the first pipeline has a batch of its own then, and is told of first
        error = str(failure_of(model, rank, 1, lambda block, x: 1.01 * x))
        assert "[step-differs]" in error and f"step 1, microbatch 0: output of blocks.1 on rank {rank} differs" in error
        lamina.shutdown()


def case_a_stack_whose_activations_lie_in_parts_of_positions():
    start(microbatches=2, optimize="memory")
    torch.manual_seed(0)
    plain = lamina.nn.DistributedTransformerLMHead(3, 3, 4, 12, 10, WORDS, 8, causal_mask_size=8, num_token_types=2)
    model = copy.deepcopy(plain.double().eval())
    lamina.set_partition(model.transformer.seq_layers[1], 1)
    model = lamina.distribute(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]

    @lamina.step
    def update(batch):
        loss = model((batch, None, batch % 2, None, batch))[0]
        model.backward(loss)
        return loss

    for seed in range(2):
        loss = update(words(seed)).reduce_mean()
        expected = torch.stack([plain((part, None, part % 2, None, part))[0] for part in words(seed).chunk(2)]).mean()
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=0)
    require_equal_states(model.state_dict(), plain.state_dict())


class Read(Words):
    """Reads a value of what it is given, so that it can be traced in a run alone."""

    def forward(self, words):
        assert words.min().item() >= 0
        return super().forward(words)


def case_a_model_that_has_to_run_to_be_traced_is_traced_by_one_rank():
    plain, model = job(Read)
    require_plain_updates(plain, model, steps=2)
    report = model.partition_report()
    assert "blocks.0.attention.query" in report["slices"] and "blocks.0.norm" not in report["slices"]
    assert report["exchange_us"]["blocks.0.down"] > 0
    lamina.shutdown()


def case_each_rank_of_a_team_has_a_batch_of_its_own_of_any_length():
    for keys in ({}, {"schedule": "zero_bubble"}):
        require_updates_by_own_batches(frozen=(), **keys)


def case_teams_with_batches_of_their_own_split_backwards_beside_frozen_parameters():
    for frozen in (["blocks.0.norm.weight", "blocks.1.up.weight"], ["embedding.weight"]):
        require_updates_by_own_batches(frozen, schedule="zero_bubble")


def require_updates_by_own_batches(frozen, **keys):
    plain, model = job(prescaled_batch=False, **keys)
    for name in frozen:
        for each in (plain, model):
            each.get_parameter(name).requires_grad_(False)
    plain.eval(), model.eval()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    optimizers[0] = lamina.DistributedOptimizer(optimizers[0])
    for step in range(6):
        batches = [words(2 * step, 5 + step % 2), words(2 * step + 1, 7 - step // 3)]
        loss = train(model, batches[lamina.dp_rank()]).reduce_mean()
        expected = [torch.stack([plain(part) for part in batch.chunk(4)]).mean() for batch in batches]
        (sum(expected) / 2).backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (model, plain)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(loss, expected[lamina.dp_rank()].detach(), rtol=1e-10, atol=0)
        torch.testing.assert_close(*norms, rtol=1e-10, atol=0)
    require_equal_copies(model)
    require_equal_states(model.state_dict(), plain.state_dict())
    lamina.shutdown()


def case_what_modules_keep_of_a_batch_of_each_ranks_own_is_as_with_whole_layers():
    for microbatches in (1, 2):
        start(microbatches=microbatches, prescaled_batch=False)
        torch.manual_seed(0)
        plain = nn.Sequential(Noting(), Noting(), nn.Tanh()).double()
        model = copy.deepcopy(plain)
        for number in range(2):
            lamina.set_partition(model[number], number)
        lamina.set_tensor_parallelism(model, plan={"*.up": "colwise", "*.down": "rowwise"})
        model = lamina.DistributedModel(model, broadcast_buffers=False)
        ours, its = model.module[lamina.pp_rank()], plain[lamina.pp_rank()]
        collected, plains = [], []
        ours.up.register_forward_hook(lambda _, args, output, seen=collected: seen.append(args[0].sum().item()))
        its.up.register_forward_hook(lambda _, args, output, seen=plains: seen.append(args[0].sum().item()))

        @lamina.step
        def update(x, model=model):
            loss = model(x).square().mean()
            if model.training:
                model.backward(loss)
            return loss

        for step in range(5):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + lamina.dp_rank())).double()
            for each in (model, plain):
                each.train(step not in (2, 4))
            with torch.set_grad_enabled(model.training):
                loss = update(x).reduce_mean()
                expected = torch.stack([plain(part).square().mean() for part in x.chunk(microbatches)]).mean()
            torch.testing.assert_close(loss, expected.detach())
            torch.testing.assert_close(ours.noted(), its.noted())
            torch.testing.assert_close(collected, plains)
            model.zero_grad()
        lamina.shutdown()


class Core(nn.Module):
    """Attention alone: dropout of heads, in a module that has none of the sliced layers."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, query, key, value):
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        return self.dropout(scores.softmax(-1)) @ value + functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.2 if self.training else 0.0
        )


class Torn(nn.Module):
    """Heads and inner features, twice as many as there are others, in one module, with dropout of both. One module of
    dropout is for what lies in parts, and for what is whole."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim, self.core = HEADS, WIDTH // HEADS, Core()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.inner = nn.Linear(WIDTH, 2 * WIDTH), nn.Sequential(nn.GELU(), nn.Dropout(0.1))
        self.down, self.dropout = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.25)
        self.mixed = nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.2), nn.Tanh(), nn.Linear(12, WIDTH))

    def forward(self, x):
        heads = [
            each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.query, self.key, self.value)
        ]
        x = x + self.dropout(self.out(self.core(*heads).transpose(1, 2).flatten(2)))
        inner = self.up(self.dropout(x))
        x = x + self.dropout(self.down(self.dropout(self.inner(inner))))
        return self.mixed(x)


TORN = dict.fromkeys(("*.query", "*.key", "*.value", "*.up", "*.mixed.0"), "colwise")
TORN |= dict.fromkeys(("*.out", "*.down", "*.mixed.3"), "rowwise")


def torn_losses(placed, checkpointed, **keys):
    """Losses and state of a model of torn modules, placed where a seed says."""
    lamina.init(microbatches=4, seed=placed, timeout_s=60, **keys)
    torch.manual_seed(0)
    model = nn.Sequential(Torn(), Torn()).double()
    place_by_hand(model, placed)
    for module in model.modules():
        if checkpointed and not isinstance(module, (nn.Linear, Torn)):
            lamina.set_activation_checkpointing(module)
    lamina.set_tensor_parallelism(model, plan=TORN)
    model = lamina.DistributedModel(model)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @lamina.step
    def update(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for _ in range(3):
        losses.append(update(torch.linspace(-1, 1, 8 * 5 * WIDTH).double().reshape(8, 5, WIDTH)).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    lamina.shutdown()
    return torch.stack(losses), state


def case_modules_with_sliced_heads_are_torn_over_partitions_with_dropout():
    keys = {"tensor_parallel_degree": 2, "partitions": 2, "ddp": True, "prescaled_batch": True}
    for seed in range(6):
        found, state = torn_losses(seed, seed % 2 == 1, auto_partition=False, default_partition=0, **keys)
        with world_of_one():
            expected, plain = torn_losses(seed, seed % 2 == 1)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
        require_equal_states(state, plain)


class Gained(nn.Module):
    """A gain of full width between layers that are cut, and another one where a hidden value decides."""

    def __init__(self, reads):
        super().__init__()
        self.up, self.down, self.reads = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), reads
        self.gain = nn.Parameter(torch.ones(2 * WIDTH))

    def forward(self, x):
        hidden = self.up(x).tanh()
        if self.reads:
            assert hidden.sum().item() < 1e9
        return self.down(hidden * self.gain)


def refused(net, text, kinds=(UsageError, ConfigError), **options):
    start(microbatches=2, **options)
    lamina.set_tensor_parallelism(net, plan={"*.up": "colwise", "*.down": "rowwise"})
    model = lamina.distribute(net)

    @lamina.step
    def step(x):
        model.backward(model(x).square().mean())

    with pytest.raises(kinds, match=text) as caught:
        step(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)))
    lamina.shutdown()
    return str(caught.value)


def case_modules_that_do_not_fit_slices_are_refused_as_by_a_proof_where_the_model_is_traced():
    for reads in (False, True):
        net = nn.Sequential(Gained(False), Gained(reads))
        said = refused(
            net, r"0 \(Gained\) computes something else .* in .*cases_sliced_pipeline.py:\d+ in RuntimeError"
        )
        assert "[tp-unproven]" in said and 'up "colwise", down "rowwise"' in said
    torn = nn.Sequential(Gained(False), Gained(False))
    lamina.set_partition(torn[1].up, 1)
    said = refused(torn, "in RuntimeError", (UsageError, RemoteError), auto_partition=False, default_partition=0)
    assert "[tp-unproven]" in said


class Failing(Gained):
    def forward(self, x):
        raise KeyError(f"of its own: {list(self.up(x).shape)}")


def case_errors_of_its_own_around_slices_stay_what_they_are():
    said = refused(nn.Sequential(nn.Identity(), Failing(False)), "of its own", (KeyError, ConfigError))
    assert "tp-unproven" not in said


def quartet():
    """A sliced model of which each partition has two of four parts."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(4)))
    lamina.set_tensor_parallelism(net, plan={"*.0": "colwise", "*.2": "rowwise"})
    return lamina.distribute(net)


def case_a_rank_alone_in_another_call_is_told_to_all():
    """The others are in a step, of which they wait for it: one for the rank beside it, in its turn."""
    calls = {
        "a save": lambda model: lamina.save_checkpoint("never-saved", "a"),
        "a state dict": lambda model: model.state_dict(),
        "a barrier": lambda model: lamina.barrier(),
        "a clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    }
    for what, call in calls.items():
        start(microbatches=2)
        model = quartet()
        train = step_of(model)
        train(torch.ones(4, 4))
        began = time.monotonic()
        if RANK == 1:
            with pytest.raises(lamina.DesyncError, match="step-mutual-wait"):
                call(model)
        with pytest.raises((lamina.DesyncError, RemoteError), match="step-mutual-wait"):
            train(torch.ones(4, 4))  # which the others have left
        assert time.monotonic() - began < 10, what  # of 60 s, on any machine
        model.zero_grad()
        train(torch.ones(4, 4))
        lamina.shutdown()


def step_of(model):
    @lamina.step
    def train(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return train


def case_what_a_later_step_is_given_apart_is_told_to_all():
    """Another batch, or evaluation, on one rank of a team alone. The model is called with what it has returned, too."""
    ways = {
        "other values": lambda model, x: x + lamina.tp_rank(),
        "trains on one": lambda model, x: model.train(lamina.tp_rank() == 0) and x,
    }
    for words, apart in ways.items():
        start(microbatches=2)
        model = quartet()

        @lamina.step
        def train(model, x):
            with torch.no_grad():
                again = model(x)
            model.backward(model(again).square().mean())

        for seed in range(2):
            train(model, torch.full((4, 4), 1.0 + seed))
        with pytest.raises((lamina.DesyncError, RemoteError), match=words):
            train(model, apart(model, torch.ones(4, 4)))
        model.train().zero_grad()
        train(model, torch.ones(4, 4))
        lamina.shutdown()
