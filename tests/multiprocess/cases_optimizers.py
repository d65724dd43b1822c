# SPDX-License-Identifier: Apache-2.0
"""Cases for two copies: what a script does to parameters between steps, where something stands in for them in the
optimizer's groups."""

import contextlib
import copy
import itertools
import pickle

import pytest
import torch
from multiprocess.steps import said_on_stderr
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lamina

SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}
HALVES = ({}, {"shard_optimizer_state": True}, SHARDED)
WHOLE_BATCH = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(3))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.last = nn.Linear(4, 3)
        self.repeated = nn.Parameter(torch.ones(1).expand(4), requires_grad=False)

    def forward(self, x):
        return self.last(self.conv(x).mean((2, 3)).tanh() * self.repeated)


def started(module, make, **keys):
    lamina.init(**({"ddp": True, "timeout_s": 30} | keys))
    model = lamina.DistributedModel(module)
    return model, lamina.DistributedOptimizer(make(model.parameters()))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return lamina.optim.AdamW(parameters, lr=0.01)


def lamb(parameters):
    return lamina.optim.LAMB(parameters, lr=0.01)


def adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=0.01)


def share():
    return WHOLE_BATCH.chunk(2)[lamina.rank()]


def in_another_order(model):
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.transpose(0, 1).contiguous().transpose(0, 1)


def in_one_piece(model, last_first=False):
    """All in one memory; the second time, in it at other places."""
    own = [parameter for parameter in model.parameters() if parameter.numel() > 0]
    values = [parameter.detach().clone() for parameter in own]
    memory = getattr(model, "memory", None)
    model.memory = memory = torch.cat([value.reshape(-1) for value in values]) if memory is None else memory
    begin = 0
    for parameter, value in list(zip(own, values, strict=True))[:: -1 if last_first else 1]:
        parameter.data = memory[begin : begin + parameter.numel()].view(parameter.shape)
        parameter.data.copy_(value)
        begin += parameter.numel()


MOVES = {
    "channels last": [lambda model: model.to(memory_format=torch.channels_last)],
    "another order": [in_another_order, lambda model: None],
    "one piece": [in_one_piece, lambda model: in_one_piece(model, last_first=True)],
    "there and back": [
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.to(memory_format=torch.contiguous_format),
    ],
}


def values_after(moves, make, **keys):
    """Values after a few steps, with a move before each but the first."""
    model, optimizer = started(Small(), make, **keys)
    for move in [lambda model: None, *moves, lambda model: None]:
        move(model)
        optimizer.zero_grad()
        model.backward(model(share()).square().mean())
        optimizer.step()
    state = copy.deepcopy(model.state_dict())
    states = copy.deepcopy(optimizer.state_dict()["state"])
    everyone = lamina.allgather(state, lamina.WORLD)
    assert all(torch.equal(everyone[0][name], everyone[1][name]) for name in state)
    lamina.shutdown()
    return state, states


def case_parameters_may_lie_in_any_memory():
    makes = itertools.cycle((sgd, adamw, lamb, adafactor, sgd))
    for half, (name, moves), make in zip([{}] * 4 + [{"bf16": True}] * 4, [*MOVES.items()] * 2, makes, strict=False):
        expected, _ = values_after([lambda model: None] * len(moves), make, shard_optimizer_state=True, **half)
        values, states = values_after(moves, make, shard_optimizer_state=True, **half)
        for each, value in expected.items():
            torch.testing.assert_close(values[each], value, atol=1e-2 if half else 1e-5, rtol=0, msg=f"{name} {each}")
        assert len(states) == len(values) - 1  # the frozen one has none


def case_looking_a_state_up_changes_nothing():
    layouts = ({"ddp": False, "partitions": 2, "microbatches": 1}, SHARDED, {"shard_optimizer_state": True})
    for keys, make in itertools.product(layouts, (sgd, adamw, adafactor)):
        model, optimizer = started(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), make, **keys)
        parameters = list(model.parameters())
        step = lamina.step(lambda x, model=model: model.backward(model(x).sum()))
        for number in range(3):
            step(torch.ones(2, 4))
            assert [optimizer.state[parameter] for parameter in parameters] or number
            optimizer.step()
            for parameter in parameters:
                found = optimizer.state[parameter]
                assert (parameter in optimizer.state) == bool(found)
                assert optimizer.state.get(parameter, {}) is found or not found
            state = optimizer.state_dict()
            assert sorted(state["state"]) == [0, 1, 2, 3]
            if number == 1:
                optimizer.load_state_dict(copy.deepcopy(state))
        if make is adamw and "partitions" not in keys:
            own = optimizer.state[parameters[0]]["exp_avg"]  # this rank's part
            assert own.numel() == parameters[0].numel() // 2
            optimizer.state[parameters[0]] = {"step": torch.tensor(1.0), "exp_avg": torch.arange(16.0).view(4, 4)}
            assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], torch.arange(16.0).view(4, 4))
            del optimizer.state[parameters[0]]
            assert parameters[0] not in optimizer.state
        lamina.shutdown()


def fills(parameter):
    parameter.fill_(3.0)


def clips_what_nobody_counts(parameter):
    parameter.data.clamp_(-0.05, 0.05)


def initialises(parameter):
    nn.init.constant_(parameter, 0.3)


def gives_other_memory(parameter):
    parameter.data = torch.full_like(parameter, 0.7)


WRITES = (fills, clips_what_nobody_counts, initialises, gives_other_memory)


def stands_still(make):
    return lambda parameters: make(parameters, lr=0.0)


def case_what_is_written_to_half_parameters_stays():
    makes = map(stands_still, (torch.optim.SGD, lamina.optim.AdamW, lamina.optim.LAMB, torch.optim.Adafactor))
    pipeline = {"ddp": False, "partitions": 2, "microbatches": 1}
    for keys, make in zip(itertools.cycle((*HALVES, pipeline)), [*makes] * 2, strict=False):
        model, optimizer = started(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), make, bf16=True, **keys)
        train = lamina.step(lambda x, model=model: model.backward(model(x).sum()))
        for write in WRITES:
            train(torch.ones(2, 4))
            optimizer.step()
            for parameter in model.local_parameters():
                with lamina.gathered_parameters(parameter, write_back=True), torch.no_grad():
                    write(parameter)
            expected = copy.deepcopy(model.state_dict())
            assert write is not fills or all(value.eq(3).all() for value in expected.values())
            masters = optimizer.state_dict()["masters"]
            for master, value in zip(masters.values(), expected.values(), strict=True):
                assert torch.equal(master.to(value.dtype).reshape(value.shape), value)
            train(torch.ones(2, 4))
            optimizer.step()
            for name, value in model.state_dict().items():
                assert torch.equal(value, expected[name]), (keys, make, write, name)
        lamina.shutdown()


def case_masters_keep_what_half_precision_cannot_hold():
    """Small updates add up, whatever is saved in between; what is written to a master counts, too."""
    for keys in HALVES:
        model, optimizer = started(
            nn.Linear(4, 4, bias=False), lambda p: torch.optim.SGD(p, lr=1e-3), bf16=True, **keys
        )
        before = lamina.get_full_parameter(model.module.weight).float()
        for _ in range(8):
            model.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
            optimizer.state_dict()
        (master,) = optimizer.state_dict()["masters"].values()
        assert torch.allclose(master, before - 8e-3, atol=1e-6)
        (place,) = optimizer.param_groups[0]["params"]
        with torch.no_grad():
            place.fill_(2.0)
        model.backward(model(torch.zeros(1, 4)).sum())
        optimizer.step()
        assert lamina.get_full_parameter(model.module.weight).eq(2).all()
        lamina.shutdown()


def values_everywhere(tensor):
    everyone = lamina.allgather(tensor.detach(), lamina.WORLD)
    assert all(torch.equal(other, everyone[0]) for other in everyone)
    return everyone[0]


def case_parameters_beside_the_model_train_with_it():
    """A loss with weights, whose ranks begin with different ones; the optimizer is made before the cut, or after it."""
    batches = torch.arange(24.0).view(2, 4, 3).double() / 24
    layouts = ({}, {"shard_optimizer_state": True}, SHARDED, {"ddp": False, "partitions": 2, "microbatches": 2})
    for keys, early in itertools.product(layouts, (True, False)):
        lamina.init(**({"ddp": True, "timeout_s": 30} | keys))
        torch.manual_seed(0)
        net, criterion = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double(), nn.Linear(3, 1).double()
        plain = copy.deepcopy(nn.ModuleList([net, criterion]))
        if lamina.rank() == 1:
            nn.init.zeros_(criterion.weight)
        model = lamina.DistributedModel(net)
        step = lamina.step(lambda x, model=model, own=criterion: model.backward(own(model(x)).square().mean()))
        evaluate = lamina.step(lambda x, model=model: model(x).detach())
        if not early:
            evaluate(batches[0])
        ours = lamina.DistributedOptimizer(sgd([*model.parameters(), *criterion.parameters()]))
        theirs = sgd(plain.parameters())
        for batch in batches:
            step(batch.chunk(2)[lamina.dp_rank()] if lamina.dp_size() > 1 else batch)
            plain[1](plain[0](batch)).square().mean().backward()
            clipped = [nn.utils.clip_grad_norm_([*own], 0.2) for own in (parameters_of(ours), plain.parameters())]
            torch.testing.assert_close(*clipped)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for own, other in zip(criterion.parameters(), plain[1].parameters(), strict=True):
            torch.testing.assert_close(values_everywhere(own), other.detach())
        state = ours.state_dict()
        assert sorted(state["state"]) == [*range(6)]
        theirs.load_state_dict(state)
        ours.load_state_dict(copy.deepcopy(state))
        lamina.shutdown()


def parameters_of(optimizer):
    return [place for group in optimizer.param_groups for place in group["params"]]


def case_parameters_beside_the_model_are_the_same_on_all_ranks():
    model, _ = started(nn.Linear(2, 2), sgd)
    model(torch.ones(1, 2))
    own = nn.Parameter(torch.ones(2 + lamina.rank()))
    with pytest.raises(lamina.UsageError, match=r"rank 0 has \[Float \[2\]\], rank 1 \[Float \[3\]\]"):
        lamina.DistributedOptimizer(sgd([own]))


def change(key, value):
    def of(optimizer):
        optimizer.param_groups[0][key] = value

    return of


def case_options_that_differ_are_an_error_of_all_before_the_update():
    layouts = ({}, {"shard_optimizer_state": True}, SHARDED, {"ddp": False, "partitions": 2, "microbatches": 1})
    changes = [
        (change("lr", 0.2), "lr of group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
        (change("lr", torch.tensor(0.5)), "lr of group 0 is 0.1 on rank 0 and 0.5 on rank 1"),
        (change("nesterov", True), "nesterov of group 0 is False on rank 0 and True on rank 1"),
    ]
    for keys, (differ, words) in zip(layouts, itertools.cycle(changes), strict=False):
        model, optimizer = started(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), sgd, **keys)
        step = lamina.step(lambda x, model=model: model.backward(model(x).sum()))
        step(torch.ones(2, 2))
        optimizer.step()
        before = copy.deepcopy(model.state_dict())
        options = dict(optimizer.param_groups[0])
        if lamina.rank() == 1:
            differ(optimizer)
        with pytest.raises(lamina.UsageError, match=words):
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        optimizer.param_groups[0].update(options)
        optimizer.step()
        if keys == {}:
            with pytest.raises(lamina.UsageError, match=r"lr of group 0 is 0\.1 on rank 0 and 0\.2 on rank 1"):
                optimizer.clip_master_grads(1.0)
                optimizer.param_groups[0]["lr"] = 0.1 * (1 + lamina.rank())
                optimizer.step()
        lamina.shutdown()
    model, _ = started(nn.Linear(2, 2), sgd)
    optimizer = lamina.DistributedOptimizer((sgd, adamw)[lamina.rank()](model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(lamina.UsageError, match="the class is SGD on rank 0 and AdamW on rank 1"):
        optimizer.step()


def loads(model):
    optimizer = lamina.DistributedOptimizer(sgd(model.parameters()))
    if lamina.rank() == 1:
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def in_another_order_on_each(model):
    return lamina.DistributedOptimizer(sgd(list(model.parameters())[:: 1 - 2 * lamina.rank()]))


def without_another_on_each(model):
    return lamina.DistributedOptimizer(sgd(list(model.parameters())[lamina.rank() :][:3]))


PARTED = (
    (loads, "states that were loaded into it is 0 on rank 0 and 1 on rank 1"),
    (in_another_order_on_each, r"parameter 0 of group 0 is 0\.weight on rank 0 and 1\.bias on rank 1"),
    (without_another_on_each, r"parameter 0 of group 0 is 0\.weight on rank 0 and 0\.bias on rank 1"),
)


def case_optimizers_of_other_parameters_or_states_are_an_error_before_the_update():
    for keys, (make, words) in itertools.product(({}, {"shard_optimizer_state": True}), PARTED):
        if make is loads and keys:
            continue  # a call of all ranks
        lamina.init(ddp=True, timeout_s=30, **keys)
        model = lamina.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(lamina.UsageError, match=words):
            make(model).step()
        lamina.shutdown()


def case_arguments_of_the_model_that_differ_are_an_error_of_all():
    for keys in ({}, SHARDED):
        lamina.init(ddp=True, timeout_s=30, **keys)
        with pytest.raises(lamina.UsageError, match=r"backward_passes_per_step is '?1'? on rank 0 and '?2'? on rank 1"):
            lamina.DistributedModel(nn.Linear(2, 2), backward_passes_per_step=1 + lamina.rank())
        lamina.shutdown()


def case_groups_that_a_script_gives_the_parameters_again_are_this_ranks_part():
    batches = torch.arange(24.0).view(3, 2, 4) / 24
    for keys in ({}, {"shard_optimizer_state": True}, SHARDED):
        plain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
        model, optimizer = started(copy.deepcopy(plain), torch.optim.Adam, **keys)
        plain.load_state_dict(model.state_dict())
        theirs = torch.optim.Adam(plain.parameters())
        for batch in batches:
            model.backward(model(batch.chunk(2)[lamina.rank()]).square().mean())
            plain(batch).square().mean().backward()
            optimizer.param_groups[0]["params"][:] = model.parameters()
            for each in (optimizer, theirs):
                each.step()
                each.zero_grad()
        torch.testing.assert_close(model(batch), plain(batch))
        lamina.shutdown()


def thirds(parameters):
    own = list(parameters)
    return torch.optim.Adam([{"params": own[at : at + 2], "lr": 0.01 * (at + 1)} for at in (0, 2, 4)])


def without_its_first(optimizer):
    taken = optimizer.param_groups[1]["params"][:1]
    optimizer.param_groups[1]["params"] = optimizer.param_groups[1]["params"][1:]
    for each in taken:
        optimizer.state.pop(each, None)


def without_a_group(optimizer):
    for each in optimizer.param_groups.pop(0)["params"]:
        optimizer.state.pop(each, None)


def with_joined_groups(optimizer):
    groups = optimizer.param_groups
    groups[0]["params"] += groups[2]["params"]
    groups[2]["params"].clear()


CHANGES = (without_its_first, without_a_group, with_joined_groups, lambda optimizer: optimizer.param_groups.reverse())


def case_groups_that_a_script_changes_are_so_in_the_state():
    """As on one device: the same values, and a state dict with the same groups, which loads."""
    pipeline = {"ddp": False, "partitions": 2, "microbatches": 1}
    batches = torch.arange(24.0).view(3, 2, 4).double() / 24
    for keys, change in zip(
        itertools.cycle((pipeline, SHARDED, {"shard_optimizer_state": True})), CHANGES * 2, strict=False
    ):
        if keys is pipeline and change is without_its_first:
            continue  # the rank that has the first of its part would take another one out
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)).double()
        net = copy.deepcopy(plain)
        model, optimizer = started(net, thirds, **keys)
        plain.load_state_dict(model.state_dict())
        theirs = thirds(plain.parameters())
        step = lamina.step(lambda x, model=model: model.backward(model(x).square().mean()))
        for number, batch in enumerate(batches):
            step(batch.chunk(2)[lamina.rank()] if "partitions" not in keys else batch)
            plain(batch).square().mean().backward()
            if number == 1:
                change(optimizer)
                change(theirs)
            for each, whole in ((optimizer, model), (theirs, plain)):
                each.step()
                whole.zero_grad()
            state, expected = optimizer.state_dict(), theirs.state_dict()
            assert [group["params"] for group in state["param_groups"]] == [
                group["params"] for group in expected["param_groups"]
            ]
            assert state["state"].keys() == expected["state"].keys()
            for place, held in expected["state"].items():
                torch.testing.assert_close(state["state"][place], held)
            optimizer.load_state_dict(copy.deepcopy(state))
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name])
        lamina.shutdown()


def decays(optimizer):
    with torch.no_grad():
        for place in parameters_of(optimizer):
            place.mul_(0.9)


def case_what_is_written_to_parts_other_ranks_have_before_the_model_is_used():
    batches = torch.arange(24.0).view(3, 2, 4).double() / 24
    for keys in ({"shard_optimizer_state": True},):
        plain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        model, optimizer = started(copy.deepcopy(plain), adamw, **keys)
        plain.load_state_dict(model.state_dict())
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for batch in batches:
            model.backward(model(batch.chunk(2)[lamina.rank()]).square().mean())
            plain(batch).square().mean().backward()
            for each in (optimizer, theirs):
                each.step()
                each.zero_grad()
                decays(each)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name])
        lamina.shutdown()


class Nested(torch.optim.Optimizer):
    """Has tensors deeper in its states, and an entry of its own in its state dict."""

    steps = 0

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for place in parameters_of(self):
            if place.grad is not None:
                sums = self.state[place].setdefault("sums", {"all": [torch.zeros_like(place)]})["all"][0]
                place.sub_(sums.add_(place.grad), alpha=0.1)

    def state_dict(self):
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.steps = state_dict["steps"]


def case_states_are_whole_however_deep_and_entries_of_a_class_are_loaded():
    lamina.optim.register_functional_optimizer(Nested, needs="elements")
    pipeline = {"ddp": False, "partitions": 2, "microbatches": 1}
    for keys in (pipeline, {"shard_optimizer_state": True}, SHARDED):
        model, optimizer = started(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), Nested, **keys)
        step = lamina.step(lambda x, model=model: model.backward(model(x).sum()))
        for number in range(2):
            step(torch.ones(2, 4))
            optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
            shapes = [state["state"][place]["sums"]["all"][0].shape for place in range(4)]
            assert shapes == [
                parameter.shape for parameter in nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)).parameters()
            ]
            assert state["steps"] == number + 1
            optimizer.steps = 0
            optimizer.load_state_dict(state)
            assert optimizer.steps == number + 1
        lamina.shutdown()


def case_an_optimizer_with_parts_is_not_copied_nor_stepped_by_its_class():
    for keys in ({"ddp": False, "partitions": 2, "microbatches": 1}, {"shard_optimizer_state": True}, SHARDED):
        model, optimizer = started(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), adamw, **keys)
        lamina.step(lambda x, model=model: model.backward(model(x).sum()))(torch.ones(2, 4))
        before = copy.deepcopy(model.state_dict())
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(lamina.UsageError, match=r"\[optimizer-copied\]"):
                copied(optimizer)
        if "partitions" not in keys:
            with pytest.raises(lamina.UsageError, match=r"\[optimizer-step-apart\]"):
                type(optimizer).step(optimizer)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        lamina.shutdown()


def case_hooks_of_a_step_change_the_gradients_of_what_stands_in_the_groups():
    """In place, and by others in their places, as for parameters."""

    def halves(optimizer, *_):
        for place in parameters_of(optimizer):
            if place.grad is not None:
                place.grad = place.grad.mul_(0.5) * 0.5

    batch = torch.arange(8.0).view(2, 4).double()
    for keys, make in itertools.product(({"shard_optimizer_state": True}, SHARDED), (sgd, adamw)):
        plain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        model, optimizer = started(copy.deepcopy(plain), make, **keys)
        plain.load_state_dict(model.state_dict())
        theirs = make(plain.parameters())
        for each in (optimizer, theirs):
            each.register_step_pre_hook(halves)
        for _ in range(2):
            model.backward(model(batch.chunk(2)[lamina.rank()]).square().mean())
            plain(batch).square().mean().backward()
            for each in (optimizer, theirs):
                each.step()
                each.zero_grad()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name])
        lamina.shutdown()


def case_an_optimizer_that_one_rank_cannot_have_is_an_error_of_all_in_each_step():
    lamina.init(partitions=2, microbatches=1, bf16=True, timeout_s=30)
    there = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    there[1].weight.data = there[0].weight.data
    net = nn.Sequential(nn.Linear(4, 4), there)
    for partition, module in enumerate(net):
        lamina.set_partition(module, partition)
    model = lamina.DistributedModel(net)
    lamina.DistributedOptimizer(sgd(model.parameters()))
    step = lamina.step(lambda x: model.backward(model(x).sum()))
    for words in (r"lie in one memory.*\[optimizer-shared-memory\]", r"\[(model-half-cut|step-calls-differ)\]"):
        with pytest.raises(lamina.UsageError, match=words):
            step(torch.ones(2, 4))


def case_states_may_be_sparse_over_partitions():
    net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    model, optimizer = started(net, sgd, ddp=False, partitions=2, microbatches=1)
    step = lamina.step(lambda x: model.backward(model(x).sum()))
    for _ in range(2):
        step(torch.tensor([1, 3]))
        optimizer.step()
        optimizer.zero_grad()
        state = copy.deepcopy(optimizer.state_dict())
        sums = state["state"][0]["momentum_buffer"]
        assert sums.is_sparse and sums.to_dense()[[1, 3]].ne(0).any()
        optimizer.load_state_dict(state)
    lamina.shutdown()
    with pytest.raises(lamina.UsageError, match=r"\[optimizer-sparse\]"):
        started(nn.Embedding(5, 4, sparse=True), torch.optim.SparseAdam)


def scale(gradient):
    return gradient.mul_(0.5) if gradient is not None else None


def halve(place):
    if place.grad is not None:
        place.grad = place.grad * 0.5


BY_HAND = (
    lambda place: scale(place.grad),
    halve,
    lambda place: place.grad is not None and place.grad.clamp_(-1e-3, 1e-3) is None,
    lambda place: setattr(place, "grad", None),
)


def values_with(change, of, **keys):
    """Values after steps whose gradients were changed by hand: those of parameters, or of what stands in the groups."""
    torch.manual_seed(1)
    model, optimizer = started(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), sgd, **keys)
    x = torch.arange(8.0).view(2, 4)[lamina.rank() :][:1]
    for _ in range(3):
        model.backward(model(x).float().square().sum())
        for each in of(model, optimizer):
            change(each)
        optimizer.step()
        if change is not BY_HAND[-1]:
            optimizer.zero_grad()
    values = copy.deepcopy(model.state_dict())
    lamina.shutdown()
    return values


def case_gradients_of_what_stands_in_the_groups_are_parts_of_the_parameters():
    layouts = ({"shard_optimizer_state": True}, {"bf16": True}, {"bf16": True, **SHARDED})
    for keys, change in itertools.product(layouts, BY_HAND):
        expected = values_with(change, lambda model, _: model.parameters(), **keys)
        values = values_with(change, lambda _, optimizer: parameters_of(optimizer), **keys)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-2 if "bf16" in keys else 1e-6, atol=1e-6)


def case_an_optimizer_of_a_job_without_a_model_makes_no_step():
    lamina.init(ddp=True, timeout_s=30)
    optimizer = lamina.DistributedOptimizer(sgd(nn.Linear(2, 2).parameters()))
    with pytest.raises(lamina.UsageError, match=r"no DistributedModel.*optimizer-no-model"):
        optimizer.step()


class BreaksOff(torch.optim.Optimizer):
    breaks = False

    def step(self, closure=None):
        if BreaksOff.breaks:
            BreaksOff.breaks = False
            raise ValueError("broken off")


def case_an_update_that_one_rank_breaks_off_is_an_error_of_all_before_the_next():
    words = "the number of updates that an error broke off is 0 on rank 0 and 1 on rank 1"
    for keys in ({}, {"ddp": False, "partitions": 2, "microbatches": 1}):
        make = lambda parameters: BreaksOff(parameters, {})  # noqa: E731
        model, optimizer = started(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), make, **keys)
        plain = make(model.parameters()) if not keys else optimizer
        step = lamina.step(lambda x, model=model: model.backward(model(x).sum()))
        for each in (optimizer, plain):
            step(torch.ones(2, 2))
            state = copy.deepcopy(optimizer.state_dict())
            BreaksOff.breaks = lamina.rank() == 1
            with contextlib.suppress(ValueError):
                each.step()
            step(torch.ones(2, 2))
            with pytest.raises(lamina.UsageError, match=words):
                each.step()
            if each is optimizer:
                optimizer.load_state_dict(state)
                optimizer.step()
        lamina.shutdown()


def case_copies_that_train_apart_have_options_of_their_own():
    model, optimizer = started(nn.Linear(2, 2), sgd, ddp=False)
    optimizer.param_groups[0]["lr"] = 0.1 * lamina.rank()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def case_torchs_grad_scaler_finds_gradients_that_others_stand_for():
    model, optimizer = started(nn.Linear(2, 2), sgd, shard_optimizer_state=True)
    plain = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, spoilt in enumerate((True, False)):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if number == 0:
            plain.load_state_dict(model.state_dict())
        if spoilt:
            model.module.weight.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    plain(torch.ones(1, 2)).sum().backward()
    sgd(plain.parameters()).step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    assert scaler.get_scale() == 2.0


def case_torchs_averages_have_the_values_of_shards():
    net, plain = Small(), Small()
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in (net, plain)]
    model, optimizer = started(net, sgd, **SHARDED)
    theirs = sgd(plain.parameters())
    for _ in range(3):
        model.backward(model(share()).square().mean())
        plain(WHOLE_BATCH).square().mean().backward()
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
        averages[0].update_parameters(model)
        averages[1].update_parameters(plain)
    for own, other in zip(averages[0].module.parameters(), averages[1].module.parameters(), strict=True):
        torch.testing.assert_close(own, other)


def case_clipping_by_default_is_told_once():
    for keys, times in (({}, 1), ({"sdp_gradient_clipping": 1.0}, 0), ({"sdp_gradient_clipping": None}, 0)):
        model, optimizer = started(
            nn.Linear(2, 2), sgd, sharded_data_parallel_degree=2, sdp_param_persistence_threshold=0, **keys
        )

        with said_on_stderr() as said:
            for _ in range(2):
                model.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
        assert said[0].count("were clipped to 1, the default of sdp_gradient_clipping") == times * (lamina.rank() == 0)
        lamina.shutdown()


def case_a_step_that_overflows_is_told_as_that_and_not_as_clipped():
    lamina.init(ddp=True, sharded_data_parallel_degree=2, fp16=True, timeout_s=30, sdp_param_persistence_threshold=0)
    model = lamina.DistributedModel(nn.Linear(2, 2))
    optimizer = lamina.DistributedOptimizer(sgd(model.parameters()), dynamic_loss_scale=True)
    with said_on_stderr() as said:
        for _ in range(3):  # with the scale that a dynamic one begins with
            model.backward(model(torch.ones(1, 2)).float().sum())
            optimizer.step()
            optimizer.zero_grad()
    assert "clipped" not in said[0] and "nan" not in said[0]
    assert said[0].count("a step is left out, for its gradients overflowed") == (lamina.rank() == 0)


def case_a_plain_optimizer_of_the_model_is_alike_on_all_copies():
    lamina.init(ddp=True, timeout_s=30)
    model, own = lamina.DistributedModel(nn.Linear(2, 2)), nn.Linear(2, 2)
    optimizer, other = sgd(model.parameters()), sgd(own.parameters())
    other.param_groups[0]["lr"] = 0.1 * lamina.rank()
    for _ in range(2):
        (model(torch.ones(1, 2)) + own(torch.ones(1, 2))).sum().backward()
        optimizer.step()
        other.step()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + lamina.rank())
    before = model.module.weight.detach().clone()
    with pytest.raises(lamina.UsageError, match=r"lr of group 0 is 0\.1 on rank 0 and 0\.2 on rank 1"):
        optimizer.step()
    assert torch.equal(model.module.weight, before)
