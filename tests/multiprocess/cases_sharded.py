# SPDX-License-Identifier: Apache-2.0
"""Cases for four ranks whose parameters are sharded."""

import collections
import contextlib
import copy
import itertools
import math
import pathlib
import re
import tempfile
import warnings

import pytest
import torch
from multiprocess.replicas import agrees, close, share, train_on_sizes, whole
from multiprocess.steps import train_step
from torch import nn
from torch.nn.utils import clip_grad_norm_

import lamina
from lamina.model import shards

KEPT_PAST_FORWARD = {"sdp_reshard_after_forward": False}
KEPT = KEPT_PAST_FORWARD | {"sdp_reshard_after_backward": False}


def start(degree=2, **keys):
    options = {"ddp": True, "microbatches": 1, "timeout_s": 30, "sharded_data_parallel_degree": degree}
    lamina.init(options | {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9} | keys)


def seeded(*layers, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(layer() for layer in layers)).double()


def network(seed=0):
    return seeded(
        lambda: nn.Linear(6, 5), nn.Tanh, lambda: nn.Linear(5, 3), nn.Tanh, lambda: nn.Linear(3, 1), seed=seed
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model):
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


def both_backwards(plain, model):
    plain(whole()).square().mean().backward()
    model(share()).square().mean().backward()


def case_copies_with_batches_of_other_sizes_train_like_one_process_with_all():
    for backend in ("auto", "nccl"):  # values in common memory, and gathered
        start(microbatches=2, ddp_dist_backend=backend)
        train_on_sizes(network(), [[8, 8, 8, 8], [5, 7, 2, 3], [1, 6, 2, 1]], lamina.get_full_parameter)
        lamina.shutdown()


def update(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def same_values(model, plain):
    for name, parameter in model.local_named_parameters():
        close(lamina.get_full_parameter(parameter), plain.get_parameter(name))


def train(module, make, steps=3, clip=None, accumulate=1):
    """Some steps, compared with the plain loop over the whole batch."""
    plain = copy.deepcopy(module)
    model = lamina.DistributedModel(module, backward_passes_per_step=accumulate)
    theirs, ours = make(plain), lamina.DistributedOptimizer(make(model))
    step = train_step(model)
    for _ in range(steps):
        for _ in range(accumulate):
            expected = plain(whole()).square().mean()
            expected.backward()
            losses = lamina.allgather(step(share()).reduce_mean(), lamina.DP_GROUP)
            close(sum(losses) / len(losses), expected)
        for name, parameter in model.local_named_parameters():
            close(lamina.get_full_gradient(parameter), plain.get_parameter(name).grad)
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        ours.step()
        if clip:
            assert abs(ours._global_grad_norm - norm.item()) < 1e-9
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    same_values(model, plain)
    return model, plain


def case_it_trains_like_one_process_with_the_whole_batch():
    for degree, make in itertools.product((2, 4), (sgd, adamw)):
        start(degree)
        train(network(), make)
        lamina.shutdown()


def case_each_optimizer_that_updates_elements_by_themselves_works():
    torchs = (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Rprop, torch.optim.ASGD)
    for kind in (*torchs, lamina.optim.AdamW, lamina.optim.RMSprop):
        start(2)
        train(network(), lambda model, kind=kind: kind(model.parameters(), lr=1e-2))
        lamina.shutdown()


def lamb(model):
    """Two groups, and gradients that are clipped."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0, "lr": 3e-3}]
    return lamina.optim.LAMB(groups, lr=1e-2, max_grad_norm=0.05)


def novograd(norm_type):
    return lambda model: lamina.optim.NovoGrad(model.parameters(), lr=1e-2, weight_decay=0.1, norm_type=norm_type)


def case_optimizers_that_measure_parameters_measure_all_of_them():
    for degree, make in itertools.product((2, 4), (lamb, novograd(2), novograd(0))):
        start(degree)
        train(network(), make)
        lamina.shutdown()
    start(4, sdp_param_persistence_threshold=6)  # some are whole
    train(network(), lamb)
    lamina.shutdown()
    start(2, ddp_dist_backend="nccl")
    train(network(), lamb)
    lamina.shutdown()
    start(2, pipeline_parallel_degree=2, microbatches=4)
    train(network(), lamb)


def case_a_measured_update_has_the_bits_of_one_device():
    """In float32: squares are added up in float64, in an order that the rounding of what comes of them hides."""
    for make in (lamb, novograd(2), novograd(0), lambda m: lamina.optim.LAMB(m.parameters(), eps=0.0)):
        start(4)
        plain = network().float()
        model = lamina.DistributedModel(copy.deepcopy(plain))
        theirs, ours = make(plain), lamina.DistributedOptimizer(make(model))
        model(share().float()).sum().backward()
        draw = torch.Generator().manual_seed(0)
        for _ in range(5):
            for name, parameter in model.named_parameters():
                gradient = plain.get_parameter(name).grad = torch.randn(parameter.ds_shape, generator=draw)
                size = parameter.ds_tensor.numel()
                padded = nn.functional.pad(gradient.flatten(), (0, 4 * size - gradient.numel()))
                parameter.ds_tensor.grad = padded.split(size)[lamina.dp_rank()].clone()
            theirs.step()
            ours.step()
        for name, parameter in model.named_parameters():
            assert torch.equal(lamina.get_full_parameter(parameter), plain.get_parameter(name)), name
        lamina.shutdown()


def case_measuring_all_parameters_takes_one_collective():
    start(2, ddp_dist_backend="nccl")
    model = lamina.DistributedModel(network())
    optimizers = [
        lamina.DistributedOptimizer(kind(model.parameters()))
        for kind in (lamina.optim.AdamW, lamina.optim.NovoGrad, lamina.optim.LAMB)
    ]
    model(share()).square().mean().backward()
    counts = [collectives_of(lambda _, each=each: each.step()) for each in optimizers]
    gathers = [sum(count[name] for name in count if "allgather" in name) for count in counts]
    assert [count - gathers[0] for count in gathers] == [0, 1, 1], counts


def adafactor(model):
    parameters = list(model.parameters())
    return torch.optim.Adafactor([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-2}], lr=1e-2)


def matrices(seed=0):
    shapes = ((6, 5), (5, 7), (7, 3))
    return seeded(*(lambda s=s: nn.Linear(*s, bias=False) for s in shapes), seed=seed)


def muon(model):
    return torch.optim.Muon(model.parameters(), lr=1e-2)


class Centred(torch.optim.SGD):
    """One of a user's, that looks at all of a parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("mean", torch.zeros(())).copy_(parameter.mean())
                    parameter.sub_(group["lr"] * (parameter.grad - parameter.grad.mean()))


def case_optimizers_that_need_all_of_a_parameter_have_it():
    lamina.optim.register_functional_optimizer(Centred, needs="whole")
    cases = [(network, adafactor), (matrices, muon), (network, lambda m: Centred(m.parameters(), lr=0.1))]
    for degree, (make, optimizer) in itertools.product((2, 4), cases):
        start(degree, sdp_gradient_clipping=0.05)
        train(make(), optimizer, clip=0.05)
        lamina.shutdown()
    for keys in (
        {"sdp_param_persistence_threshold": 6},
        {"ddp_dist_backend": "nccl"},
        {"pipeline_parallel_degree": 2, "microbatches": 4},
    ):
        start(2, **keys)
        train(network(), adafactor)
        lamina.shutdown()


def case_each_whole_parameter_has_one_owner_in_a_group():
    start(4)
    model = lamina.DistributedModel(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8))))
    optimizer = lamina.DistributedOptimizer(torch.optim.Adafactor(model.parameters()))
    model(torch.ones(2, 8)).sum().backward()
    before = [list(group["params"]) for group in optimizer.param_groups]
    optimizer.step()
    assert len(optimizer.state) == 2, "of eight, spread evenly over four"
    assert all(a is b for a, b in zip(before[0], optimizer.param_groups[0]["params"], strict=True))
    assert all(parameter.ds_tensor is shard for parameter, shard in zip(model.parameters(), before[0], strict=True))


def whole_state(optimizer):
    return optimizer.state_dict()


def local_state(optimizer):
    return optimizer.local_state_dict()


def state_of_this_rank(optimizer):
    return optimizer.local_state_dict(gather_if_shard=False)


def case_states_of_whole_parameters_go_on_from_any_form():
    for saved, pipeline in itertools.product((whole_state, local_state, state_of_this_rank), (1, 2)):
        start(2, pipeline_parallel_degree=pipeline, microbatches=2)
        plain = network()
        model = lamina.DistributedModel(copy.deepcopy(plain))
        theirs, ours = adafactor(plain), lamina.DistributedOptimizer(adafactor(model))
        step = train_step(model)

        def both(ours, step=step, plain=plain, theirs=theirs):
            plain(whole()).square().mean().backward()
            step(share())
            update(theirs, ours)

        both(ours)
        both(ours)
        state = copy.deepcopy(saved(ours))
        if saved is whole_state:
            expected = theirs.state_dict()
            assert state["param_groups"] == expected["param_groups"]
            assert state["state"].keys() == expected["state"].keys()
            for number, values in expected["state"].items():
                assert values.keys() == state["state"][number].keys()
                for name, value in values.items():
                    close(state["state"][number][name], value)
        elif saved is state_of_this_rank:
            everyone = lamina.allgather(list(state["state"]), lamina.WORLD)
            copies = collections.Counter(itertools.chain.from_iterable(everyone))
            assert set(copies.values()) == {2 // pipeline}, "once in each sharding group"
        for group in ours.param_groups:
            for parameter in group["params"]:
                ours.state.pop(parameter, None)
        ours.load_state_dict(state)
        both(ours)
        same_values(model, plain)
        lamina.shutdown()


def case_whole_parameters_may_come_later():
    start(2)
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    sides = []
    for each, x in ((plain, whole()), (model, share())):
        optimizer = torch.optim.Adafactor(list(each.parameters())[:2])
        sides.append((each, lamina.DistributedOptimizer(optimizer) if each is model else optimizer, x))
    for number in range(4):
        for each, optimizer, x in sides:
            if number == 2:
                optimizer.add_param_group({"params": list(each.parameters())[2:], "lr": 0.1})
            each(x).square().mean().backward()
            optimizer.step()
            each.zero_grad()
    same_values(model, plain)


def case_a_step_that_failed_leaves_shards_in_the_groups():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("no step")

    lamina.optim.register_functional_optimizer(Fails, needs="whole")
    start(2)
    model = lamina.DistributedModel(network())
    optimizer = lamina.DistributedOptimizer(Fails(model.parameters(), lr=0.1))
    shards = list(optimizer.param_groups[0]["params"])
    model(share()).sum().backward()
    with pytest.raises(KeyError):
        optimizer.step()
    optimizer.zero_grad()
    assert all(a is b for a, b in zip(shards, optimizer.param_groups[0]["params"], strict=True))
    assert all(shard.grad is None for shard in shards)


def case_an_optimizer_of_which_nothing_is_known_is_refused():
    start(2)
    model = lamina.DistributedModel(network())

    class Own(torch.optim.SGD):
        pass

    with pytest.raises(lamina.UsageError, match=r"Own with sharded.*register_functional_optimizer\(Own, needs="):
        lamina.DistributedOptimizer(Own(model.parameters(), lr=0.1))
    with pytest.raises(lamina.UsageError, match="SparseAdam with ddp: it takes sparse gradients alone"):
        lamina.DistributedOptimizer(torch.optim.SparseAdam(model.parameters(), lr=0.1))
    with pytest.raises(lamina.UsageError, match=r"LBFGS with sharded.*measures all parameters"):
        lamina.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    lamina.optim.register_functional_optimizer(Own, needs="elements")
    lamina.shutdown()
    start(2)
    train(network(), lambda model: Own(model.parameters(), lr=0.1, momentum=0.9))


def case_gradients_accumulate_over_passes():
    start(2)
    train(network(), adamw, accumulate=3)


def case_gradients_are_clipped_to_their_global_norm():
    start(2, sdp_gradient_clipping=0.05)
    train(network(), sgd, clip=0.05)


def case_gradients_stay_clipped_after_the_step():
    """As torch's clip_grad_norm_ leaves them."""
    start(2, sdp_gradient_clipping=0.05)
    plain, model = network(), lamina.DistributedModel(network())
    optimizer = lamina.DistributedOptimizer(sgd(model))
    plain(whole()).square().mean().backward()
    train_step(model)(share())
    clip_grad_norm_(plain.parameters(), 0.05)
    optimizer.step()
    for name, parameter in model.local_named_parameters():
        close(lamina.get_full_gradient(parameter), plain.get_parameter(name).grad)


def case_the_norm_is_there_where_nothing_is_clipped():
    start(2, sdp_gradient_clipping=None)
    plain, model = network(), lamina.DistributedModel(network())
    optimizer = lamina.DistributedOptimizer(sgd(model))
    plain(whole()).square().mean().backward()
    train_step(model)(share())
    optimizer.step()
    assert optimizer._global_grad_norm == pytest.approx(clip_grad_norm_(plain.parameters(), math.inf).item())


def case_small_parameters_stay_whole():
    start(4, sdp_param_persistence_threshold=6, sdp_gradient_clipping=0.05)
    model, _ = train(network(), adamw, clip=0.05)
    assert whole_here(model) == {"0.bias", "2.bias", "4.bias", "4.weight"}


def whole_here(model):
    return {name for name, parameter in model.named_parameters() if shards.holder(parameter) is parameter}


def case_parameters_stay_whole_by_their_names_and_their_modules():
    for backend in ("auto", "nccl"):
        start(4, ddp_dist_backend=backend, sdp_persistent_parameters=["0.weight", "4"], sdp_gradient_clipping=0.05)
        model, _ = train(network(), adamw, clip=0.05)
        assert whole_here(model) == {"0.weight", "4.bias", "4.weight"}
        lamina.shutdown()
    start(2, pipeline_parallel_degree=2, microbatches=4, sdp_persistent_parameters=["0"])
    train(network(), adamw)
    lamina.shutdown()
    start(2, bf16=True, sdp_persistent_parameters=["2"], sdp_gradient_clipping=None)
    model = lamina.DistributedModel(network())
    assert whole_here(model) == {"2.bias", "2.weight"}


def case_tied_parameters_stay_whole_by_the_first_of_their_names():
    start(2, sdp_persistent_parameters=["0.weight"])
    tied = seeded(lambda: nn.Linear(6, 6), nn.Tanh, lambda: nn.Linear(6, 6), lambda: nn.Linear(6, 1))
    tied[2].weight = tied[0].weight
    model, _ = train(tied, sgd)
    assert whole_here(model) == {"0.weight"}


def case_names_of_nothing_stay_no_parameters():
    for name in ("5", "0.weigh", "", "0."):
        start(2, sdp_persistent_parameters=["0", name])
        with pytest.raises(lamina.ConfigError, match=f'sdp_persistent_parameters: the model has no parameter "{name}"'):
            lamina.DistributedModel(network())
        lamina.shutdown()


def case_microbatches_sum_up():
    start(2, microbatches=4)
    train(network(), sgd)


def case_a_plain_loop_trains_alike():
    start(2)
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))
    for _ in range(3):
        both_backwards(plain, model)
        update(theirs, ours)
    same_values(model, plain)


def case_a_parameter_keeps_its_object_and_its_value_is_away():
    start(4)
    module = network()
    parameters = dict(module.named_parameters())
    expected = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    model = lamina.DistributedModel(module)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and parameter.shape == parameter.ds_shape == expected[name].shape
        assert parameter.ds_tensor.ds_numel == -(-parameter.numel() // 4)
        with pytest.raises(lamina.UsageError, match=f"{name} is sharded.*get_full_parameter"):
            parameter + 1
        assert torch.equal(lamina.get_full_parameter(parameter), expected[name])
        with lamina.gathered_parameters(parameter):
            assert torch.equal(parameter, expected[name])
        with pytest.raises(lamina.UsageError, match="is away"):
            parameter.sum()


def case_states_are_those_of_the_plain_model():
    start(2)
    model, plain = train(network(), adamw)
    assert all(torch.allclose(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    other = network(seed=5)
    model.load_state_dict(other.state_dict())
    same_values(model, other)


def case_states_of_optimizers_are_those_of_the_plain_one():
    for make in (adamw, lamb, novograd(2)):
        start(2)
        compare_states(make)
        lamina.shutdown()


def compare_states(make):
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    theirs, ours = make(plain), lamina.DistributedOptimizer(make(model))
    for _ in range(2):
        for own, optimizer, x in ((plain, theirs, whole()), (model, ours, share())):
            own(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected["param_groups"] == found["param_groups"]
    for number, state in expected["state"].items():
        for name, value in state.items():
            close(found["state"][number][name], value)
    ours.load_state_dict(copy.deepcopy(expected))  # torch keeps the counts of steps that it is given
    for own, optimizer, x in ((plain, theirs, whole()), (model, ours, share())):
        own(x).square().mean().backward()
        optimizer.step()
    same_values(model, plain)


class Tied(nn.Module):
    """A weight that is read twice, by two modules, and one that another module reads."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(7, 6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.frozen(self.attention(x, x, x)[0])
        return nn.functional.linear(x, self.embedding.weight)


def tokens(copy_number):
    return torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(copy_number))


def case_parameters_of_other_modules_come_when_they_are_read():
    start(4)
    torch.manual_seed(0)
    plain = Tied().double()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))
    for _ in range(3):
        plain(torch.cat([tokens(number) for number in range(4)])).square().mean().backward()
        model(tokens(lamina.dp_rank())).square().mean().backward()
        assert lamina.get_full_gradient(model.module.unused.weight) is None
        update(theirs, ours)
    same_values(model, plain)
    with torch.no_grad():
        close(model(tokens(9)), plain(tokens(9)))


def case_an_optimizer_that_is_not_lamina_s_is_refused():
    start(2)
    model = lamina.DistributedModel(network())
    optimizer = sgd(model)
    model(share()).sum().backward()
    with pytest.raises(lamina.UsageError, match="DistributedOptimizer"):
        optimizer.step()


def case_replicas_take_different_ways():
    start(4)
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))
    for step in range(3):
        loss = 0
        for number in range(4):
            x = whole()[8 * number : 8 * number + 8]
            out = plain(x) if number != step else plain[:2](x)
            loss = loss + out.square().mean() / 4
        loss.backward()
        x = share()
        if lamina.dp_rank() != step:
            model(x).square().mean().backward()
        else:
            model.module[:2](x).square().mean().backward()
        update(theirs, ours)
    same_values(model, plain)


def case_a_failed_step_leaves_the_next_exact():
    start(2)
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))

    @lamina.step
    def step(x, fails):
        model.backward(model(x).square().mean())
        if fails:
            raise KeyError("bad batch")

    for number in range(4):
        if number % 2:
            with pytest.raises(KeyError):
                step(share(), lamina.rank() == number)
            ours.zero_grad()
            continue
        step(share(), False)
        plain(whole()).square().mean().backward()
        update(theirs, ours)
    same_values(model, plain)


class Fuse(nn.Module):
    """Hands on what it gets, and fails where it is told to."""

    blows = ""

    def forward(self, x):
        if self.blows == "forward":
            raise KeyError("a bad batch")
        if self.blows == "backward":
            x.register_hook(self.blow)
        return x

    def blow(self, gradient):
        raise KeyError("a bad gradient")


def fused(*modules):
    """The modules with a fuse among them."""
    return nn.Sequential(*modules[:3], Fuse(), *modules[3:])


def fail_somewhere(step, fuse, where, fails):
    """A pass that fails on this rank, or on another: an error of the same kind on all."""
    fuse.blows = where if fails else ""
    with pytest.raises(KeyError, match="bad"):
        step(share(), fails and where == "between")
    fuse.blows = ""


def case_over_gloo_a_failed_step_leaves_the_next_exact():
    """Wherever it fails, on whichever rank; also twice before a step that succeeds."""
    for degree in (2, 4):
        start(degree, ddp_dist_backend="nccl")
        plain = fused(*network())
        model = lamina.DistributedModel(copy.deepcopy(plain))
        theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))
        fuse = model.module[3]

        @lamina.step
        def step(x, fails, model=model):
            loss = model(x).square().mean()
            if fails:
                raise KeyError("bad luck")
            model.backward(loss)

        ways = ("forward", "between", "backward")
        for number, where in enumerate((*ways, *ways, *ways)):
            rank = number % lamina.size()
            if number != 3:  # before, between and after steps that succeed
                fail_somewhere(step, fuse, where, lamina.rank() == rank)
            if number % 2:
                fail_somewhere(step, fuse, ways[number % 3 - 1], lamina.rank() != rank)
            ours.zero_grad()
            step(share(), False)
            plain(whole()).square().mean().backward()
            update(theirs, ours)
            same_values(model, plain)
        lamina.shutdown()


def case_over_gloo_a_failed_backward_of_a_plain_loop_leaves_the_next_exact():
    start(4, ddp_dist_backend="nccl")
    plain = fused(*network())
    model = lamina.DistributedModel(copy.deepcopy(plain))
    theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))
    for number in range(4):
        model.module[3].blows = "backward" if lamina.rank() == number else ""
        with pytest.raises(KeyError, match="bad"):
            model.backward(model(share()).square().mean())
        ours.zero_grad()
        model.module[3].blows = ""
        for each, x in ((plain, whole()), (model, share())):
            each(x).square().mean().backward()
        update(theirs, ours)
        same_values(model, plain)


def case_all_ranks_begin_with_the_values_of_rank_0():
    start(2)
    model = lamina.DistributedModel(network(seed=lamina.rank()))
    same_values(model, network())
    assert all(agrees(lamina.get_full_parameter(parameter)) for parameter in model.parameters())


def case_delayed_parameters_are_sharded_at_once():
    start(4)
    torch.manual_seed(3)
    with lamina.delay_param_initialization():
        module = nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 200))
    model = lamina.DistributedModel(module)
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 200))
    for name, parameter in model.named_parameters():
        assert torch.equal(lamina.get_full_parameter(parameter), plain.get_parameter(name))


def case_what_is_left_over_and_what_no_sync_held_back_is_in_the_update():
    for keys in ({}, {"ddp_dist_backend": "nccl"}):
        start(2, **keys)
        plain = network()
        model = lamina.DistributedModel(copy.deepcopy(plain), backward_passes_per_step=2)
        theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))
        for passes in ((1, 0), (2, 1), (1, 2), (0, 2)):  # that are averaged, and held back before
            with model.no_sync():
                for _ in range(passes[1]):
                    model(share()).square().mean().backward()
            for _ in range(passes[0]):
                model(share()).square().mean().backward()
            for _ in range(sum(passes)):
                plain(whole()).square().mean().backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        same_values(model, plain)
        lamina.shutdown()


def case_members_may_hold_back_different_numbers_of_backwards():
    start(2)
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    counts = [1 + rank % 3 for rank in range(4)]
    with model.no_sync():
        for _ in range(counts[lamina.rank()]):
            model(share()).square().mean().backward()
    model(share()).square().mean().backward()
    for count, rows in zip(counts, whole().chunk(4), strict=True):
        for _ in range(count + 1):
            (plain(rows).square().mean() / 4).backward()
    for name, parameter in model.local_named_parameters():
        close(lamina.get_full_gradient(parameter), plain.get_parameter(name).grad)


def case_a_member_that_leaves_out_a_backward_is_told_of_at_the_next_exchange():
    start(2)
    model = lamina.DistributedModel(network())
    optimizer = lamina.DistributedOptimizer(sgd(model))
    model(share()).sum().backward()
    optimizer.step()
    with pytest.raises(lamina.DesyncError, match=r"different iterations.*replica-iterations"):
        if lamina.rank() == 2:
            model(share())
        model(share()).sum().backward()


def collectives_of(step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(share())
    return collections.Counter(event.name for event in profiler.events() if event.name.startswith("c10d::"))


def case_collectives_are_those_of_the_closed_form():
    """Over Gloo nothing stays between a module's calls. Of U units a forward makes U gathers, and so does its backward,
    which reduces and scatters as many buckets as their P parameters fill. With the second and last pass of a step the P
    shards are summed over their copies, after two words on the ranks that have them."""
    units, parameters = 3, 6
    for bucket_elements, buckets in ((1, parameters), (10**9, 1)):
        start(2, ddp_dist_backend="nccl", sdp_max_live_parameters=1, sdp_reduce_bucket_size=bucket_elements)
        model = lamina.DistributedModel(network(), backward_passes_per_step=2)
        step = train_step(model)
        first, last = collectives_of(step), collectives_of(step)
        for found in (first, last):
            assert found["c10d::_allgather_base_"] == 2 * units
            assert found["c10d::alltoall_base_"] == buckets  # summed by who gets them
        assert (first["c10d::allreduce_"], last["c10d::allreduce_"]) == (0, parameters + 2)
        lamina.shutdown()
    for keys, gathers in ((KEPT_PAST_FORWARD, (units, units)), (KEPT, (units, 0))):
        start(2, ddp_dist_backend="nccl", **keys)
        step = train_step(lamina.DistributedModel(network(), backward_passes_per_step=2))
        assert tuple(collectives_of(step)["c10d::_allgather_base_"] for _ in range(2)) == gathers
        lamina.shutdown()


def case_after_shutdown_shards_are_of_no_use():
    start(2)
    model, _ = train(network(), adamw)
    optimizer = lamina.DistributedOptimizer(adamw(model))
    lamina.shutdown()
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(lamina.UsageError, match=r"shut down|lamina\.init"):
            use()
    with pytest.raises(RuntimeError, match=r"lamina.shutdown\(\)"):
        model.module[0].weight.sum()


def why_not_sharded(gibibytes):
    start(2)
    with lamina.delay_param_initialization():
        module = nn.ParameterList(nn.Parameter(torch.empty(1 << 18, 1024)) for _ in range(round(gibibytes)))
    with pytest.raises(lamina.ConfigError, match="parameters and gradients take") as error:
        lamina.DistributedModel(module)
    lamina.shutdown()
    return str(error.value)


def case_what_does_not_fit_names_the_smallest_degree_that_does():
    """A rank needs as many bytes as all values with degree 2, and half of them with degree 4."""
    words = why_not_sharded(2048)
    assert "with degree 4, of all replicas, it would be 1.0 TiB" in words
    here = float(re.search(r"which has ([\d.]+) GiB here", words).group(1))
    assert "the smallest degree that fits is 4" in why_not_sharded(1.4 * here)


def case_two_partitions_of_two_replicas():
    start(2, pipeline_parallel_degree=2, microbatches=4)
    model, _ = train(network(), adamw)
    step = train_step(model)
    step(share())
    model.zero_grad()
    assert all(parameter.ds_tensor.grad is None for parameter in model.local_parameters())


def case_over_gloo_it_trains_alike():
    for keys in ({}, {"sdp_reduce_bucket_size": 1}, {"sdp_reduce_bucket_size": 17, "sdp_max_live_parameters": 20}):
        start(2, ddp_dist_backend="nccl", **keys)
        train(network(), adamw)
        lamina.shutdown()
    start(4, ddp_dist_backend="nccl", sdp_gradient_clipping=0.05)
    train(network(), sgd, accumulate=2, clip=0.05)


def case_over_gloo_a_pipeline_trains_alike():
    for schedule in ("interleaved", "simple", "zero_bubble"):
        start(2, pipeline_parallel_degree=2, microbatches=4, pipeline=schedule, ddp_dist_backend="nccl")
        train(network(), adamw)
        lamina.shutdown()


def case_buckets_of_any_size_give_the_same():
    for elements in (1, 7, 31):
        start(2, sdp_reduce_bucket_size=elements)
        train(network(), adamw, accumulate=2)
        lamina.shutdown()


def case_no_more_values_are_here_than_are_needed():
    start(2, sdp_max_live_parameters=1)
    model, _ = train(network(), sgd)
    sharding = model._life.model.sharding
    assert sharding.live == 0
    assert sharding.most_live == max(sum(p.numel() for p in layer.parameters()) for layer in model.module)


def case_over_gloo_values_take_what_is_said_and_train_alike():
    """Closed forms: the largest unit; all after forwards, and none after backwards; all until updates."""
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in network()]
    for keys, most, between in (
        ({"sdp_max_live_parameters": 1}, max(sizes), 0),
        (KEPT_PAST_FORWARD, sum(sizes), 0),
        (KEPT, sum(sizes), sum(sizes)),
    ):
        start(2, ddp_dist_backend="nccl", **keys)
        model, _ = train(network(), adamw, accumulate=2)
        sharding = model._life.model.sharding
        assert (sharding.live, sharding.most_live) == (0, most)
        train_step(model)(share())
        assert sharding.live == between
        with torch.no_grad():
            model(share())
        assert sharding.live <= max(between, keys.get("sdp_max_live_parameters", 0))
        lamina.shutdown()


def case_values_that_are_kept_are_never_old_ones():
    """Changes of shards, and failures, let go of them."""
    for keys in (KEPT_PAST_FORWARD, KEPT, KEPT | {"sdp_max_live_parameters": 20}):
        start(2, ddp_dist_backend="nccl", **keys)
        model, plain = train(network(), sgd)
        step = train_step(model)

        def same(model=model, plain=plain, step=step):
            losses = lamina.allgather(step(share()).reduce_mean(), lamina.DP_GROUP)
            close(sum(losses) / len(losses), plain(whole()).square().mean())
            model.zero_grad()
            same_values(model, plain)

        def halved(plain=plain):
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.mul_(0.5)

        step(share())
        parameters = list(model.local_parameters())
        with lamina.gathered_parameters(parameters, write_back=True), torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.5)
        halved()
        same()
        step(share())
        halved()
        model.load_state_dict(plain.state_dict())
        same()
        with pytest.raises(ValueError, match="in the step"):
            failing_step(model)(share())
        assert model._life.model.sharding.live == 0
        same()
        lamina.shutdown()


def failing_step(model):
    """One that fails on rank 0 after its forward."""

    @lamina.step
    def fails(x):
        loss = model(x).square().mean()
        if lamina.rank() == 0:
            raise ValueError("in the step")
        model.backward(loss)

    return fails


def case_units_are_those_that_are_listed():
    for backend in ("auto", "nccl"):
        start(2, ddp_dist_backend=backend, sdp_units=["0", "4"], sdp_max_live_parameters=1)
        model, _ = train(network(), sgd)
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.module]
        assert model._life.model.sharding.most_live == sizes[2] + max(sizes[0], sizes[4]), "of the model, and of one"
        lamina.shutdown()
    start(2, pipeline_parallel_degree=2, microbatches=4, sdp_units=["0"])
    train(network(), adamw)
    lamina.shutdown()
    start(2, sdp_units=["0", "5"])
    with pytest.raises(lamina.ConfigError, match='sdp_units: the model has no module "5"; the nearest is "'):
        lamina.DistributedModel(network())


def case_norms_are_those_of_the_whole_model():
    start(2, sdp_param_persistence_threshold=6)
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    ours = lamina.DistributedOptimizer(sgd(model))
    both_backwards(plain, model)
    gradients = [parameter.grad for parameter in model.parameters()]
    for kind in (2.0, 1.0, 3.0, float("inf"), 0, -float("inf"), -1.5):
        close(model.grad_norm(kind), model_norm(plain, kind))
        close(torch.nn.utils.get_total_norm(gradients, kind), model_norm(plain, kind))
    twice = [clip_grad_norm_([*each.parameters()] * 2, 1e9) for each in (model, plain)]
    close(*twice)
    assert clip_grad_norm_([], 1.0, -1).item() == 0
    model.module[0].weight.ds_tensor.grad[0] *= float("nan")
    assert model.grad_norm(float("inf")).isnan() and model.grad_norm(-float("inf")).isnan()
    model.zero_grad()
    model(share()).square().mean().backward()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (model, plain)]
    close(*norms)
    for name, parameter in model.named_parameters():
        close(lamina.get_full_gradient(parameter), plain.get_parameter(name).grad)
    ours.step()


@contextlib.contextmanager
def shared_folder():
    with tempfile.TemporaryDirectory() as mine:
        yield pathlib.Path(lamina.allgather(mine, lamina.WORLD)[0])
        lamina.barrier()


def case_parameters_may_come_to_an_optimizer_later():
    start(2)
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    pairs = []
    for each in (plain, model):
        parameters = list(each.parameters())
        optimizer = torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9)
        optimizer = lamina.DistributedOptimizer(optimizer) if each is model else optimizer
        optimizer.add_param_group({"params": parameters[2:], "lr": 0.01})
        pairs.append((each, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)))
    for _ in range(3):
        for (each, optimizer, schedule), x in zip(pairs, (whole(), share()), strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    same_values(model, plain)


def model_norm(model, kind):
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()], kind)


def case_a_conversion_that_changes_nothing_is_none():
    start(2)
    model = lamina.DistributedModel(network())
    model.to("cpu").double()
    with pytest.raises(lamina.UsageError, match="convert the module before"):
        model.half()
    same_values(model, network())
    assert [name for name, _ in model.default_reducer_named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not list(model.scaled_batch_reducer_named_parameters())


def case_partial_states_are_shards():
    start(2, sdp_param_persistence_threshold=4)
    model, plain = train(network(), sgd)
    state = copy.deepcopy(model.local_state_dict())
    assert state["0.weight"].shape == (15,) and state["4.bias"].shape == (1,)
    with shared_folder() as folder:
        lamina.save(state, folder / "model.pt")
        model.load_state_dict(network(seed=9).state_dict())
        model.load_state_dict(lamina.load(folder / "model.pt"))
    same_values(model, plain)
    lamina.shutdown()
    start(4, sdp_param_persistence_threshold=4)
    other = lamina.DistributedModel(network())
    with pytest.raises(lamina.UsageError, match=r"saved with shard \d of 2"):
        other.load_state_dict(state)


def case_checkpoints_compute_again_with_whole_values():
    for offload in (False, True):
        start(2, offload_activations=offload)
        plain = network()
        model = lamina.DistributedModel(copy.deepcopy(plain))
        lamina.set_activation_checkpointing(model.module, strategy="group_2")
        theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                both_backwards(plain, model)
                update(theirs, ours)
        same_values(model, plain)
        assert sum("stay there" in str(each.message) for each in said) == offload
        lamina.shutdown()


def case_what_needs_copies_of_their_own_is_refused():
    start(2)
    model = lamina.DistributedModel(network())
    optimizer = lamina.DistributedOptimizer(sgd(model))
    with pytest.raises(lamina.UsageError, match=r"join\(\) with sharded"), model.join():
        pass
    with pytest.raises(lamina.UsageError, match=r"register_comm_hook\(\) with sharded"):
        model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(lamina.UsageError, match="closure"):
        optimizer.step(lambda: model(share()).sum())


def case_evaluation_in_between_changes_nothing():
    start(4)
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))
    for _ in range(3):
        with torch.inference_mode():
            close(model(share()).clone(), plain(share()))
        if lamina.rank() == 1:
            with torch.no_grad():
                close(model(share()), plain(share()))
        both_backwards(plain, model)
        update(theirs, ours)
    same_values(model, plain)


def case_half_precision_sums_do_not_overflow():
    start(4)
    model = lamina.DistributedModel(nn.Linear(4, 1, bias=False).half())
    (model.module(torch.full((1, 4), 30000.0).half()).float() * 1.0).sum().backward()
    assert lamina.get_full_gradient(model.module.weight).tolist() == [[30000.0] * 4]


def case_modules_forget_the_gradients_of_their_shards():
    torchs = nn.Module.zero_grad, torch.amp.GradScaler._unscale_grads_
    start(2)
    model = lamina.DistributedModel(network())
    model(share()).sum().backward()
    model.module[0].zero_grad()
    assert lamina.get_full_gradient(model.module[0].weight) is None
    assert lamina.get_full_gradient(model.module[2].weight) is not None
    lamina.shutdown()
    assert (nn.Module.zero_grad, torch.amp.GradScaler._unscale_grads_) == torchs, "they are torch's again"


def case_an_infinity_in_one_shard_has_all_ranks_leave_the_step_out():
    start(4)
    model = lamina.DistributedModel(network().float())
    optimizer = lamina.DistributedOptimizer(sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = {name: lamina.get_full_parameter(p) for name, p in model.named_parameters()}
    for spoilt in (True, False):
        scaler.scale(model(share().float()).square().mean()).backward()
        if spoilt and lamina.rank() == 2:
            model.module[0].weight.ds_tensor.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [not torch.equal(lamina.get_full_parameter(p), before[n]) for n, p in model.named_parameters()]
        assert any(changed) != spoilt
        assert scaler.get_scale() == 2.0


def case_a_gradient_of_a_gradient_finds_the_values():
    start(2)
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    for own, x in ((plain, whole()), (model, share())):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(own(x).sum(), x, create_graph=True)
        gradient.square().sum(1).mean().backward()
    for name, parameter in model.named_parameters():
        ours, theirs = lamina.get_full_gradient(parameter), plain.get_parameter(name).grad
        assert (ours is None) == (theirs is None)
        if ours is not None:
            close(ours, theirs)


def case_a_gradient_asked_for_beside_a_pass_does_not_keep_values():
    for backend in ("auto", "nccl"):
        start(4, ddp_dist_backend=backend)
        plain = network()
        model = lamina.DistributedModel(copy.deepcopy(plain))
        theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))
        for _ in range(3):
            both_backwards(plain, model)
            x = share().requires_grad_()
            torch.autograd.grad(model(x).sum(), x, create_graph=True)  # what a program writes into its log
            update(theirs, ours)
        same_values(model, plain)
        lamina.shutdown()


def case_contexts_end_as_they_began_whatever_happens_inside():
    for backend in ("auto", "nccl"):
        start(4, ddp_dist_backend=backend)
        plain = network()
        model = lamina.DistributedModel(copy.deepcopy(plain))
        ours = lamina.DistributedOptimizer(sgd(model))
        parameters = list(model.parameters())
        for _ in range(2):  # the order is known then, and some values stay for their backward
            model(share()).square().mean().backward()
            ours.zero_grad()
        model(share())
        with pytest.raises(KeyError), lamina.gathered_parameters(parameters, write_back=True):
            raise KeyError("inside")
        with pytest.raises(lamina.UsageError, match="written to"), lamina.gathered_parameters(parameters):
            parameters[0].detach().mul_(1)
            parameters[1].detach().mul_(1)
        model(share()).square().mean().backward()
        with pytest.raises(lamina.UsageError, match="is to change while"), lamina.gathered_parameters(parameters[0]):
            ours.step()
        same_values(model, plain)
        with lamina.gathered_parameters([parameters[0], parameters[0]], write_back=True):
            parameters[0].detach().fill_(2)
        assert (lamina.get_full_parameter(parameters[0]) == 2).all()
        lamina.shutdown()


def case_gradients_are_clipped_by_their_values():
    start(2)
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain))
    (100 * plain(whole()).square().mean()).backward()
    (100 * model(share()).square().mean()).backward()
    for module in (plain, model):
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), 1.0, torch.tensor(2.0))
        torch.nn.utils.clip_grad_value_(module.parameters(), 0.01)
    assert max(parameter.grad.abs().max() for parameter in plain.parameters()) == 0.01
    for name, parameter in model.local_named_parameters():
        close(lamina.get_full_gradient(parameter), plain.get_parameter(name).grad)


def case_gradients_by_hand_are_those_of_the_shards():
    start(2)
    plain = network()
    model = lamina.DistributedModel(copy.deepcopy(plain), backward_passes_per_step=2)
    theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))

    def scaled(parameter):
        parameter.grad = 0.5 * parameter.grad

    by_hand = (
        lambda parameter: parameter.grad.mul_(0.5),
        lambda parameter: parameter.grad.zero_(),
        lambda parameter: setattr(parameter, "grad", None),
        scaled,
        lambda parameter: setattr(parameter, "grad", torch.ones(parameter.shape).double()),
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for change in by_hand:
            for each in (model, plain):
                for parameter in each.parameters():
                    parameter.grad = None
            model(share()).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad = None  # also of what was summed, in a pass that ends no reduction
            both_backwards(plain, model)
            for each in (model, plain):
                for parameter in each.parameters():
                    change(parameter)
            shapes = [(parameter.grad, parameter.ds_tensor) for parameter in model.parameters()]
            assert all(gradient is None or gradient.shape == shard.shape for gradient, shard in shapes)
            theirs.step()
            ours.step()
    assert sum("is sharded" in str(each.message) for each in told) == 1


def one_memory(dtype=torch.float64):
    """Parameters and a buffer over the memory of the first one: transposed, a part of it, and all."""
    net = seeded(*3 * [lambda: nn.Linear(6, 6, bias=False)]).to(dtype)
    net[1].weight = nn.Parameter(net[0].weight.data.t())
    net[2].weight = nn.Parameter(net[0].weight.data[1:])
    net.register_buffer("table", net[0].weight.data)
    return net


def case_tensors_in_one_memory_stay_there():
    for keys in ({"degree": 4}, {"degree": 2, "partitions": 2}, {"degree": 1, "shard_optimizer_state": True}):
        start(**keys)
        plain, model = one_memory(), lamina.DistributedModel(one_memory())
        theirs, ours = sgd(plain), lamina.DistributedOptimizer(sgd(model))
        step = train_step(model)
        for _ in range(3):
            for optimizer in (theirs, ours):
                optimizer.zero_grad()
            plain(whole()).square().mean().backward()
            step(share())
            for optimizer in (theirs, ours):
                optimizer.step()
        for name, value in model.state_dict().items():
            close(value, plain.state_dict()[name])
        lamina.shutdown()


def case_masters_of_parameters_in_one_memory_are_refused():
    start(2, bf16=True)
    model = lamina.DistributedModel(one_memory(torch.bfloat16))
    with pytest.raises(lamina.UsageError, match=r"0.weight.* lie in one memory"):
        lamina.DistributedOptimizer(sgd(model))


def case_a_sharded_parameter_prints_where_its_value_is():
    start(2)
    model = lamina.DistributedModel(network())
    text = str(next(iter(model.parameters())))
    assert "size=(5, 6)" in text and "its value is away" in text
    assert "0." in str(lamina.get_full_parameter(next(model.parameters())))
