# SPDX-License-Identifier: Apache-2.0
"""Layers that are cut over two ranks, with one partition: what the plain model computes, and what is refused."""

import copy
import os
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lamina
from lamina.errors import RemoteError, UsageError
from lamina.tensor_parallel import marks

RANK = int(os.environ.get("RANK", 0))
HEADS, WIDTH, WORDS = 4, 16, 21


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = HEADS, WIDTH // HEADS, 0.25
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-2, -1) / self.head_dim**0.5
        dropped = functional.dropout(scores.softmax(-1), self.dropout, self.training)
        return functional.dropout(self.out((dropped @ value).transpose(1, 2).flatten(2)), 0.25, self.training)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(self.up(x).relu())


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


PLAN = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


def start(microbatches=1):
    lamina.init(tensor_parallel_degree=2, ddp=True, prescaled_batch=True, microbatches=microbatches, timeout_s=60)


def made(seed=0):
    torch.manual_seed(seed)
    return Words().double()


def sliced(plain, plan=PLAN):
    model = copy.deepcopy(plain)
    lamina.set_tensor_parallelism(model, plan=plan)
    return lamina.distribute(model)


def words(seed):
    return torch.randint(0, WORDS, (4, 7), generator=torch.Generator().manual_seed(seed))


def update(model, optimizer, seed):
    torch.manual_seed(seed)
    loss = model(words(seed))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


def require_equal_states(state, plain):
    assert list(state) == list(plain)
    for name, value in plain.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: name + text)


def case_updates_are_those_of_the_plain_model_with_dropout():
    start()
    plain = made()
    model = sliced(made(seed=RANK) if RANK else plain)  # the values are rank 0's
    assert model.module.blocks[0].attention.query.weight.shape == (WIDTH // 2, WIDTH)
    assert model.module.blocks[0].attention.num_heads == HEADS // 2
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    for seed in range(5):
        ours, plains = (update(each, by, seed) for each, by in zip((model, plain), optimizers, strict=True))
        torch.testing.assert_close(ours, plains, rtol=1e-10, atol=0)
    require_equal_states(model.state_dict(), plain.state_dict())
    whole = lamina.allgather(model.module.embedding.weight.detach(), lamina.WORLD)
    assert torch.equal(whole[0], whole[1])  # to the bit


def case_gpt2_is_sliced_by_what_is_known_of_its_classes():
    from transformers import GPT2Config, GPT2LMHeadModel

    start()
    for implementation in ("sdpa", "eager"):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=WORDS, n_positions=8, n_embd=16, n_head=4, n_layer=2, attn_implementation=implementation
        )
        plain = GPT2LMHeadModel(config).double()
        with lamina.tensor_parallelism():
            model = GPT2LMHeadModel(config).double()
        model.load_state_dict(plain.state_dict())
        model = lamina.distribute(model)
        assert model.module.transformer.h[0].attn.c_attn.weight.shape == (16, 24)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
        for seed in range(3):
            losses = []
            for each, by in zip((model, plain), optimizers, strict=True):
                torch.manual_seed(seed)
                loss = each(input_ids=words(seed), labels=words(seed)).loss
                loss.backward()
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                by.step()
                by.zero_grad()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=1e-6, atol=0)  # transformers' loss is one of floats
        require_equal_states(model.state_dict(), plain.state_dict())
        with torch.no_grad():
            found, expected = (
                each.generate(words(9)[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
                for each in (model.module.eval(), plain.eval())
            )
        assert torch.equal(found, expected)
        lamina.shutdown()
        start()


def case_step_functions_and_distributed_optimizers_do_the_same():
    start(microbatches=2)
    plain = made()
    model = sliced(plain).eval()
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    plains = torch.optim.AdamW(plain.eval().parameters(), lr=1e-2)

    @lamina.step
    def train(batch):
        loss = model(batch)
        model.backward(loss)
        return loss

    for seed in range(3):
        loss = train(words(seed)).reduce_mean()
        assert torch.allclose(model.grad_norm(), nn.utils.get_total_norm([each.grad for each in model.parameters()]))
        optimizer.clip_master_grads(0.1)
        optimizer.step()
        optimizer.zero_grad()
        expected = [plain(part) for part in words(seed).chunk(2)]
        (sum(expected) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        plains.step()
        plains.zero_grad()
        torch.testing.assert_close(loss, torch.stack(expected).mean().detach(), rtol=1e-10, atol=0)
    require_equal_states(model.state_dict(), plain.state_dict())


def case_whole_states_are_loaded_and_what_does_not_fit_changes_nothing():
    start()
    model, other = sliced(made()), made(seed=5).state_dict()
    before = model.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(other | {"blocks.1.up.weight": torch.zeros(3 * WIDTH // 2, WIDTH)})
    require_equal_states(model.state_dict(), before)
    model.load_state_dict(other)
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
    assert (model.state_dict(gather_to_rank0=True) == {}) == (RANK > 0)
    names = {name for name, _ in model.scaled_batch_reducer_named_parameters()}
    assert "blocks.0.up.weight" in names and "blocks.0.down.bias" not in names


def case_plans_that_do_not_fit_change_nothing():
    start()
    plain = made()
    for plan, text in [
        ({"blocks.*.attention.qwery": "colwise"}, 'matches no module, the nearest is "blocks.*.attention.query"'),
        ({"blocks.*.up": "colwis"}, 'the style "colwis" for "blocks.*.up", the nearest is "colwise"'),
        ({"blocks.0.norm": "colwise"}, "blocks.0.norm is a LayerNorm, and a plan slices"),
        ({"head": "colwise"}, "embedding.weight and head.weight are one parameter"),
    ]:
        model = copy.deepcopy(plain)
        lamina.set_tensor_parallelism(model, plan=plan)
        with pytest.raises(UsageError, match=re.escape(text)):
            lamina.distribute(model)
        require_equal_states(model.state_dict(), plain.state_dict())
    model = copy.deepcopy(plain)
    model.blocks[1].attention.num_heads = 3
    lamina.set_tensor_parallelism(model, plan=PLAN)
    with pytest.raises(UsageError, match="query has 16 features, which are no whole number of them for"):
        lamina.distribute(model)
    with pytest.raises(UsageError, match="takes a dictionary of names and styles"):
        lamina.set_tensor_parallelism(model, plan=["up"])


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = lamina.nn.DistributedEmbedding(WORDS, 6, initializer_range=0.5)
        self.norm = lamina.nn.DistributedLayerNorm(6)
        self.linear = lamina.nn.DistributedLinear(6, 6)
        self.head = lamina.nn.DistributedLinear(6, WORDS, bias=False)

    def forward(self, words):
        x = self.embedding(words)
        x = self.linear(self.norm(x)).relu() + x
        return functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def case_layers_that_are_sliced_of_themselves_compute_the_same():
    start()
    torch.manual_seed(0)
    plain = Own().double()
    model = lamina.distribute(copy.deepcopy(plain))
    assert model.module.linear.weight.shape == (6, 3) and model.module.embedding.weight.shape == (WORDS, 3)
    assert {type(module).__name__ for module in model.distributed_modules()} == {
        "DistributedEmbedding",
        "DistributedLinear",
    }
    assert model.is_distributed_parameter(model.module.head.weight)
    assert not model.is_distributed_parameter(model.module.norm.weight)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for seed in range(2):
        ours, plains = (update(each, by, seed) for each, by in zip((model, plain), optimizers, strict=True))
        torch.testing.assert_close(ours, plains, rtol=1e-10, atol=0)
    require_equal_states(model.state_dict(), plain.state_dict())


def case_marks_are_of_the_innermost():
    start()
    with lamina.tensor_parallelism():
        first = nn.Linear(2, 2)
        with lamina.tensor_parallelism(False), lamina.partition(0):
            second = nn.Linear(2, 2)
    assert marks.is_marked(first) and not marks.is_marked(second) and not marks.is_marked(nn.Linear(2, 2))


def case_an_error_of_one_rank_is_one_of_all_and_the_next_step_is_right():
    start()
    plain = made().eval()
    model = sliced(plain)
    model.eval()

    @lamina.step
    def train(batch, fails):
        if fails == "before" and RANK == 1:
            raise ValueError("bad data")
        loss = model(batch)
        if fails == "between" and RANK == 0:
            raise ValueError("bad data")
        model.backward(loss)
        if fails == "after" and RANK == 1:
            raise ValueError("bad data")
        return loss

    for seed, fails in enumerate(["before", "between", "after"]):
        with pytest.raises((ValueError, RemoteError), match="bad data"):
            train(words(seed), fails)
        model.zero_grad()
        loss = train(words(seed), "").reduce_mean()
        torch.testing.assert_close(loss, plain(words(seed)).detach(), rtol=1e-10, atol=0)
        plain.zero_grad()
        plain(words(seed)).backward()
        norm = nn.utils.get_total_norm([each.grad for each in plain.parameters()])
        torch.testing.assert_close(model.grad_norm(), norm, rtol=1e-10, atol=0)


def case_other_data_on_a_rank_is_an_error_with_both():
    start()
    model = sliced(made())
    with pytest.raises(
        lamina.DesyncError, match=r"ranks 0 and 1 of a TP_GROUP have called the model with other values"
    ):
        model(words(RANK))
    model(words(0))
    with pytest.raises((lamina.DesyncError, RemoteError), match=r"ranks 0 and 1 .* called the model with other values"):
        model(torch.zeros(2 + RANK, 3, dtype=torch.long))
    model.eval()
    assert torch.isfinite(model(words(0)))


class Parted(nn.Module):
    """Layers that are cut, then dropout: no shape, and no order of what ranks begin, tells of its mode."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(dropout)

    def forward(self, x, scale=1.0, more=None):
        return self.dropout(self.down(self.up(x).relu())) * scale


def parted(dropout=0.0):
    torch.manual_seed(7)
    model = Parted(dropout)
    lamina.set_tensor_parallelism(model, plan={"up": "colwise", "down": "rowwise"})
    return lamina.distribute(model)


def case_what_a_later_call_is_given_apart_is_told_before_an_update():
    """Each of these on rank 1 alone, after steps that were alike."""
    x, other = torch.ones(3, 4), torch.full((3, 4), 1.0 + RANK)
    ways = {
        "other values": lambda model: model(other),
        "called the model with other values": lambda model: model(x, more={"boxes": other}),
        "a module that trains on one": lambda model: model.train(RANK == 0)(x),
        "freeze the same on both": lambda model: model.requires_grad_(RANK == 0)(x),
        "under another autocast": lambda model: under(torch.autocast("cpu", enabled=RANK == 0), model, x),
        "without on the other": lambda model: under(torch.set_grad_enabled(RANK == 0), model, x),
    }
    for words, call in ways.items():
        start()
        model = parted(dropout=0.5)
        for _ in range(2):
            model(x).sum().backward()
        with pytest.raises((lamina.DesyncError, RemoteError), match=words):
            call(model)
        model.train().requires_grad_()
        assert torch.isfinite(model(x).sum())  # all go on together
        lamina.shutdown()


def under(context, model, x):
    with context:
        return model(x)


def case_a_seed_and_what_the_model_gave_back_may_differ():
    start()
    model = parted()
    torch.manual_seed(RANK)
    for _ in range(3):
        checkpoint(model, torch.ones(3, 4), use_reentrant=False).sum().backward()
    fast = torch.compile(model, backend="eager")
    fast(torch.ones(3, 4)).sum().backward()
    with pytest.raises((lamina.DesyncError, RemoteError), match="other values"):
        fast(torch.ones(3, 4) + RANK)
    with torch.no_grad():
        model(torch.ones(3, 4), more=[torch.full((2,), 1.0 * RANK)])  # keys of its own heads that it gave back


def case_the_model_is_whole_on_the_cpu_for_a_while():
    start()
    plain = made()
    model = sliced(plain)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    for seed in range(3):
        ours, plains = (update(each, by, seed) for each, by in zip((model, plain), optimizers, strict=True))
        torch.testing.assert_close(ours, plains, rtol=1e-10, atol=0)
        assert model.cpu() is model
        assert type(model.module.blocks[0].up) is nn.Linear and model.module.blocks[0].attention.num_heads == HEADS
        require_equal_states(model.state_dict(), plain.state_dict())
        with torch.no_grad():
            torch.manual_seed(seed)
            lost = model.module(words(seed + RANK))  # of its own: no rank is waited for
            torch.manual_seed(seed)
            torch.testing.assert_close(lost, plain(words(seed + RANK)), rtol=1e-10, atol=0)
    require_equal_states(model.state_dict(), plain.state_dict())


class Twice(nn.Module):
    """Has one block in two places."""

    def __init__(self):
        super().__init__()
        block = Block()
        self.embedding, self.first, self.last = nn.Embedding(WORDS, WIDTH), nn.ModuleDict({"block": block}), block

    def forward(self, words):
        return self.last(self.first["block"](self.embedding(words))).square().mean()


def case_a_module_that_is_in_two_places_is_sliced_once():
    start()
    torch.manual_seed(0)
    plain = Twice().double()
    model = sliced(plain, {name.replace("blocks.*", "first.block"): style for name, style in PLAN.items()})
    assert model.module.last.up.weight.shape == (3 * WIDTH // 2, WIDTH)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    for seed in range(3):
        ours, plains = (update(each, by, seed) for each, by in zip((model, plain), optimizers, strict=True))
        torch.testing.assert_close(ours, plains, rtol=1e-10, atol=0)
    require_equal_states(model.state_dict(), plain.state_dict())
