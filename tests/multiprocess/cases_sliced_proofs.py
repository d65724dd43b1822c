# SPDX-License-Identifier: Apache-2.0
"""Code between and around sliced layers computes what it does around whole ones, or is refused before an update."""

import contextlib
import copy
import io
import math
import os
from types import SimpleNamespace

import pytest
import torch
from multiprocess.cases_sliced import require_equal_states
from torch import nn
from torch.nn import functional

import lamina
from lamina.errors import UsageError

UP_DOWN = {"up": "colwise", "down": "rowwise"}
QKVO = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


def start(**options):
    lamina.shutdown()
    lamina.init(tensor_parallel_degree=2, ddp=True, timeout_s=60, **({"prescaled_batch": True} | options))


class MLP(nn.Module):
    def __init__(self, between=functional.gelu, **modules):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(16, 32), nn.Linear(32, 16), between
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.down(self.between(self.up(x)) if not isinstance(self.between, str) else self.other(self.up(x)))

    def other(self, h):
        return getattr(self, self.between)(h)


class Scaled(MLP):
    def __init__(self, *sizes):
        super().__init__("scaled")
        self.scale = nn.Parameter(torch.ones(sizes))

    def scaled(self, h):
        return h.relu() * self.scale


class Attention(nn.Module):
    """Heads that are told in one of several ways."""

    def __init__(self, heads="num_heads", scale=lambda q, count: q.shape[-1], bias=None, norm=None):
        super().__init__()
        self.config = SimpleNamespace(nhead=4)
        self.heads, self.scale, self.bias, self.norm = heads, scale, bias, norm
        if heads in ("num_heads", "nhead"):
            setattr(self, heads, 4)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def count(self):
        if self.heads == "config.nhead":
            return self.config.nhead
        return getattr(self, self.heads) if self.heads else -1

    def forward(self, x):
        shape = (*x.shape[:2], self.count(), -1 if self.heads else 4)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        q = q if self.norm is None else self.norm(q)
        scores = q @ k.mT / math.sqrt(self.scale(q, self.count()))
        scores = scores if self.bias is None else scores + self.bias(q.shape[1])[:, None, None] * torch.arange(6)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def numbers():
    return torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def updated(plain, plan, batch=None, heads=None, **options):
    """Trains a model with sliced layers and the plain one, and requires the same losses and values."""
    start(**options)
    batch = numbers() if batch is None else batch
    net = copy.deepcopy(plain)
    lamina.set_tensor_parallelism(net, plan=plan, heads=heads)
    model = lamina.distribute(net)
    pairs = [(each, torch.optim.Adam(each.parameters(), lr=0.01)) for each in (model, plain)]
    for seed in range(3):
        losses = []
        for each, optimizer in pairs:
            torch.manual_seed(seed)
            loss = each(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
    require_equal_states(model.state_dict(), plain.state_dict())
    return model


def refused(plain, plan, text, heads=None):
    start()
    lamina.set_tensor_parallelism(plain, plan=plan, heads=heads)
    model = lamina.distribute(plain)
    with pytest.raises(UsageError, match=text) as caught:
        model(numbers().requires_grad_()).sum().backward()
    assert "[tp-unproven]" in str(caught.value)
    for name in plan:
        assert name in str(caught.value)


def made(kind, *args, **kwargs):
    torch.manual_seed(0)
    return kind(*args, **kwargs).double()


def case_whole_parameters_between_slices_get_the_gradients_of_the_whole():
    for plain in (
        made(MLP, "act", act=nn.PReLU()),
        made(Scaled),
        made(Scaled, 1),
        made(MLP, "act", act=nn.Sequential(nn.Dropout(0.25), nn.PReLU(), nn.Tanh())),
    ):
        model = updated(plain, UP_DOWN)
        for parameter in model.parameters():
            if parameter.numel() == 1:  # the same on both ranks, to the bit
                values = lamina.allgather(parameter.detach(), lamina.WORLD)
                assert torch.equal(values[0], values[1])


class SharedActivation(nn.Module):
    """One activation between slices, and on what is whole."""

    def __init__(self):
        super().__init__()
        self.act = nn.PReLU()
        self.mlp = MLP("act", act=self.act)

    def forward(self, x):
        return self.mlp(self.act(self.mlp(self.act(x))))


def case_a_module_between_slices_and_outside_of_them_has_both_gradients():
    updated(made(SharedActivation), {"mlp.up": "colwise", "mlp.down": "rowwise"})


def case_batches_of_each_ranks_own_are_proven_in_their_turns():
    start(prescaled_batch=False)
    plain = made(MLP, "act", act=nn.PReLU())
    net = copy.deepcopy(plain)
    lamina.set_tensor_parallelism(net, plan=UP_DOWN)
    model = lamina.distribute(net)
    model(numbers()[[lamina.rank()]]).square().mean().backward()
    plain(numbers()).square().mean().backward()
    torch.testing.assert_close(model.module.act.weight.grad, plain.act.weight.grad)


def case_norms_are_partial_where_they_are_given_heads_and_not_by_their_width():
    updated(made(Attention, norm=nn.LayerNorm(4)), QKVO)
    updated(made(Attention, norm=nn.LayerNorm(4)), QKVO | {"norm": "replicated_with_grad_allreduce"})

    class Before(Attention):
        def __init__(self):
            super().__init__()
            self.narrow, self.before, self.wide = nn.Linear(16, 4), nn.LayerNorm(4), nn.Linear(4, 16)

        def forward(self, x):
            return super().forward(self.wide(self.before(self.narrow(x))))

    updated(made(Before), QKVO)


def case_operations_across_the_cut_are_refused_with_their_line():
    def halves(h):
        left, right = h.chunk(2, -1)
        return torch.cat([left * right.sigmoid(), right], -1)

    file = os.path.basename(__file__)
    for name, between in {
        "layer_norm": lambda h: functional.layer_norm(h, h.shape[-1:]),
        "softmax": lambda h: h.softmax(-1),
        "mean": lambda h: h - h.mean(-1, keepdim=True),
        "rsqrt|mul|mean": lambda h: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6),
        "group_norm": lambda h: functional.group_norm(h.transpose(1, 2), 1).transpose(1, 2),
        "cumsum": lambda h: h.cumsum(-1),
        "add": lambda h: h + h.flip(-1),
    }.items():
        refused(made(MLP, between), UP_DOWN, rf"({name}) in \S*{file}:\d+ on")
    refused(made(MLP, halves), UP_DOWN, "in .*tests/multiprocess/cases_sliced_proofs.py:")
    refused(made(MLP, lambda h: h + torch.ones(32)), UP_DOWN, rf"it ends in \S*{file}:\d+ in RuntimeError")
    refused(made(Scaled, 32), UP_DOWN, "with slices it ends")
    refused(made(MLP, "act", act=nn.BatchNorm1d(6)), UP_DOWN, "batch_norm in|the gradient|differs")
    # The styles that the message names.
    plan = {"up": "colwise_gather_output", "down": "rowwise_split_input"}
    updated(made(MLP, lambda h: h.softmax(-1)), plan)


def case_heads_of_other_names_are_said_or_refused():
    refused(made(Attention, "nhead"), QKVO, "heads=")
    refused(made(Attention, "config.nhead"), QKVO, "heads=")
    updated(made(Attention, "nhead"), QKVO, heads="nhead")
    updated(made(Attention, "config.nhead"), QKVO, heads="config.nhead")
    updated(made(Attention, None), QKVO, heads=4)
    updated(made(Attention, None), QKVO)  # no head is torn
    with pytest.raises(UsageError, match=r'heads="nheads".*no module around layers .* there are Attention'):
        updated(made(Attention, "nhead"), QKVO, heads="nheads")
    with pytest.raises(UsageError, match="takes the name of the attribute"):
        lamina.set_tensor_parallelism(nn.Linear(2, 2), heads="nhead")


def case_what_is_computed_from_numbers_of_heads_is_that_of_the_whole():
    refused(made(Attention, scale=lambda q, count: 16 // count), QKVO, "(div|truediv) in")
    slopes = lambda count: 2.0 ** (-8 / count * torch.arange(1, count + 1))  # noqa: E731
    refused(made(Attention, bias=slopes), QKVO, "cases_sliced_proofs.py:")


class Gained(nn.Linear):
    def forward(self, x):
        return super().forward(x * 2) * 0.5 + 1


class Bypassed(nn.Linear):
    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)


class Clamped(nn.Embedding):
    def forward(self, words):
        return super().forward(words.clamp(max=self.num_embeddings - 1))


def case_layers_with_a_forward_of_their_own_run_it():
    plain = made(MLP)
    plain.up, plain.down = made(Gained, 16, 32), made(Gained, 32, 16)
    updated(copy.deepcopy(plain), UP_DOWN)
    updated(plain, {"up": "colwise_gather_output", "down": "rowwise_split_input"})
    plain = made(MLP)
    plain.down = made(Bypassed, 32, 16)
    refused(copy.deepcopy(plain), UP_DOWN, "its result differs|the gradient")
    plain.up, plain.down = made(Bypassed, 16, 32), made(nn.Linear, 32, 16)
    refused(plain, UP_DOWN, "the gradient of its input 0")
    words = torch.randint(24, (2, 6), generator=torch.Generator().manual_seed(1))
    for style in ("embedding_rowwise", "embedding_colwise"):
        updated(made(lambda: nn.Sequential(Clamped(20, 16, padding_idx=11), nn.Linear(16, 4))), {"0": style}, words)


def case_registered_classes_call_their_hooks_around_sliced_layers():
    class Twice(nn.Linear):
        def forward(self, x, twice=False):
            return super().forward(2 * x if twice else x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Twice(4, 8)

        def forward(self, x):
            return self.layer(x, twice=True)

    start()
    calls = []
    lamina.tp_register_with_module(
        Twice,
        lamina.nn.DistributedLinear,
        forward_hook=lambda x, twice=False: ((2 * x if twice else x,), {}),
        return_hook=lambda output: calls.append(1) or output,
    )
    with lamina.tensor_parallelism():
        model = lamina.distribute(Net())
    x = torch.ones(2, 4)
    values = model.state_dict()
    expected = functional.linear(2 * x, values["layer.weight"], values["layer.bias"])
    torch.testing.assert_close(model(x), expected)
    assert calls


def case_fast_paths_of_torch_are_not_taken_around_slices():
    start()
    torch.manual_seed(0)  # for all ranks, whatever ran before
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    net = made(lambda: nn.TransformerEncoder(layer, 2)).eval()
    x = torch.randn(4, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[1, 4:] = True
    expected = net(x, src_key_padding_mask=padding).detach()
    lamina.set_tensor_parallelism(net, plan={"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"})
    model = lamina.distribute(net).eval()
    for has_gradients in (True, False):
        with torch.set_grad_enabled(has_gradients):
            torch.testing.assert_close(model(x, src_key_padding_mask=padding).detach(), expected)
    assert torch.backends.mha.get_fastpath_enabled()


def case_maps_of_attention_are_of_all_heads_or_refused():
    import transformers

    sizes = {"vocab_size": 64, "attn_implementation": "eager"}
    words = torch.arange(12).view(2, 6)
    start()
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_head=4, n_layer=2, n_positions=8, **sizes)
    net = transformers.GPT2Model(config).double().eval()
    expected = [each.detach() for each in net(words, output_attentions=True).attentions]
    lamina.set_tensor_parallelism(net)
    model = lamina.distribute(net).eval()
    for options in ({}, {"output_attentions": True}):
        found = model(words, **options)
    assert all(isinstance(each, torch.Tensor) for each in found.attentions)
    torch.testing.assert_close([each.detach() for each in found.attentions], expected)
    start()
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, **sizes
    )
    net = transformers.BertModel(config).double().eval()
    lamina.set_tensor_parallelism(net)
    model = lamina.distribute(net).eval()
    model(words)
    with pytest.raises(UsageError, match="its attentions 0, which it leaves to others, differs"):
        model(words, output_attentions=True)


def case_nothing_is_left_of_a_proof():
    class Counting(MLP):
        def __init__(self):
            super().__init__(lambda h: functional.dropout(h, 0.5, self.training))
            self.calls, self.seen = 0, []
            self.register_buffer("times", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.seen.append(len(self.seen))
            self.times += 1
            return super().forward(x)

    start()
    net = made(Counting)
    heard = []
    net.up.register_forward_hook(lambda *_: heard.append(1) or None)
    lamina.set_tensor_parallelism(net, plan=UP_DOWN)
    model = lamina.distribute(net)
    torch.manual_seed(5)
    model(torch.randn(2, 6, 16, dtype=torch.float64)).sum().backward()
    after = torch.get_rng_state()
    assert (net.calls, net.seen, net.times.item(), len(heard)) == (1, [0], 1, 1)
    torch.manual_seed(5)
    torch.randn(2, 6, 16, dtype=torch.float64)
    functional.dropout(torch.ones(2, 6, 32, dtype=torch.float64))
    assert torch.equal(after, torch.get_rng_state())


def case_what_two_modules_of_one_class_do_otherwise_is_proven_apart():
    class Blocks(nn.Sequential):
        def __init__(self, *blocks):
            super().__init__(*blocks)

    class Numbered(MLP):
        def __init__(self, number):
            super().__init__("by_number")
            self.number = number

        def by_number(self, h):
            return h.softmax(-1) if self.number else h.relu()

    plan = {"*.up": "colwise", "*.down": "rowwise"}
    for blocks in (
        lambda: Blocks(MLP(functional.gelu), MLP(lambda h: h.softmax(-1))),
        lambda: Blocks(Numbered(0), Numbered(1)),
    ):
        start()
        net = made(blocks)
        lamina.set_tensor_parallelism(net, plan=plan)
        with pytest.raises(UsageError, match=r"^1 \((MLP|Numbered)\) computes something else.* softmax in"):
            lamina.distribute(net)(numbers())


def case_widths_whose_parts_are_alike_on_one_rank_alone_are_proven_apart_on_all():
    class Narrow(MLP):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    class Heads(Attention):
        def __init__(self, heads):
            super().__init__()
            self.num_heads, width = heads, 4 * heads
            self.q, self.k, self.v = (nn.Linear(16, width) for _ in range(3))
            self.o = nn.Linear(width, 16)

    updated(made(lambda: nn.Sequential(Narrow(7), Narrow(6))), {"*.up": "colwise", "*.down": "rowwise"})
    plan = {f"*.{name}": style for name, style in QKVO.items()}
    updated(made(lambda: nn.Sequential(Heads(3), Heads(2))), plan)


def case_hooks_and_what_they_keep_are_proven():
    kept = []
    for hook in (
        lambda module, given, output: functional.layer_norm(output, output.shape[-1:]),
        lambda module, given, output: kept.append(output.abs().mean()),
    ):
        plain = made(MLP)
        plain.up.register_forward_hook(hook)
        refused(plain, UP_DOWN, "differs")
    assert not kept
    plain = made(MLP)
    plain.up.register_forward_hook(lambda module, given, output: output / 2)
    updated(plain, UP_DOWN)


def case_whole_parameters_that_are_read_in_other_ways_are_refused():
    class InAList(Scaled):
        def __init__(self):
            super().__init__()
            self.scales = [self.scale]

        def scaled(self, h):
            return h.relu() * self.scales[0]

    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            scale = self.scale = nn.Parameter(torch.ones(()))
            self.mlp = MLP(lambda h: h.relu() * scale)

        def forward(self, x):
            return self.mlp(x)

    class Kept(Scaled):
        def scaled(self, h):
            self.penalty = self.scale.square()
            return super().scaled(h)

    class Tiny(MLP):
        def __init__(self):
            super().__init__(lambda h: h.softmax(-1))
            self.scale = nn.Parameter(torch.full((16,), 1e-6))

        def forward(self, x):
            return x + self.scale * super().forward(x)

    refused(made(InAList), UP_DOWN, "scale is a part on each rank, and is not added")
    refused(made(Kept), UP_DOWN, "the gradient of scale differs")
    refused(made(Tiny), UP_DOWN, "softmax in")
    plan = {"mlp.up": "colwise", "mlp.down": "rowwise"}
    start()
    net = made(Outside)
    lamina.set_tensor_parallelism(net, plan=plan)
    with pytest.raises(UsageError, match=r"the gradient of a parameter .* of a module outside of it differs"):
        lamina.distribute(net)(numbers())


def case_a_key_leaves_proofs_out():
    start(prove_slices=False)
    net = made(MLP, lambda h: h.softmax(-1))
    lamina.set_tensor_parallelism(net, plan=UP_DOWN)
    lamina.distribute(net)(torch.ones(2, 6, 16, dtype=torch.float64))


def case_layers_that_a_step_calls_by_themselves_are_told_of_once():
    start()
    net = nn.Sequential(MLP()).double()
    lamina.set_tensor_parallelism(net, plan={"0.up": "colwise", "0.down": "rowwise"})
    model, said = lamina.distribute(net), io.StringIO()
    with contextlib.redirect_stderr(said):
        for inner in (model, copy.deepcopy(model.module)):
            model(numbers()).sum().backward()
            torch.utils.checkpoint.checkpoint(inner, numbers().requires_grad_(), use_reentrant=False).sum().backward()
        assert "outside of the forward" not in said.getvalue()
        for _ in range(2):
            block = model.module[0]
            block.down(functional.gelu(block.up(numbers()))).sum().backward()
    told = said.getvalue().count("0.up, which is sliced, was called outside of the forward of 0:")
    assert told == (os.environ["RANK"] == "0"), said.getvalue()
