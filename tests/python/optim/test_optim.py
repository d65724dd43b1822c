# SPDX-License-Identifier: Apache-2.0
"""Optimizers with the engine's update, beside torch's and formulas written out."""

import contextlib
import copy
import functools
import math
import pickle
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import lamina
from lamina import optim, optimizers

pytestmark = pytest.mark.unit

TORCHS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "betas": (0.8, 0.9)}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.3, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 1e-2}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("Adamax", {"weight_decay": 0.1}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1}),
]
SHAPES = [(5, 7), (), (0, 3), (1001,)]


def parameters(dtype=torch.float64, shapes=SHAPES):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def steps(ours, theirs, optimizers, count, seed=1):
    """Some steps of both with the same gradients; now and then a parameter has none."""
    draw = torch.Generator().manual_seed(seed)
    for number in range(count):
        for place, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            grad = torch.randn(own.shape, generator=draw, dtype=torch.float64)
            for tensor in (own, other):
                tensor.grad = None if (number + place) % 7 == 6 else grad.to(tensor.dtype, copy=True)
        for optimizer in optimizers:
            optimizer.step()


def agree(ours, theirs, tolerance=1e-12):
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "keys"), TORCHS, ids=[f"{name}{number}" for number, (name, _) in enumerate(TORCHS)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_fifty_steps_are_those_of_torch(name, keys, dtype, tolerance):
    ours, theirs = parameters(dtype), parameters(dtype)
    both = getattr(optim, name)(ours, **keys), getattr(torch.optim, name)(theirs, **keys)
    steps(ours, theirs, both, 50)
    agree(ours, theirs, tolerance)


@pytest.mark.parametrize(("name", "keys"), TORCHS, ids=[f"{name}{number}" for number, (name, _) in enumerate(TORCHS)])
def test_state_dicts_go_both_ways(name, keys):
    ours, theirs = parameters(), parameters()
    both = getattr(optim, name)(ours, **keys), getattr(torch.optim, name)(theirs, **keys)
    steps(ours, theirs, both, 5)
    mine, torchs = (copy.deepcopy(each.state_dict()) for each in both)
    assert list(mine["param_groups"][0]) == list(torchs["param_groups"][0])
    assert {number: set(state) for number, state in mine["state"].items()} == {
        number: set(state) for number, state in torchs["state"].items()
    }
    fresh = getattr(optim, name)(ours, lr=123.0), getattr(torch.optim, name)(theirs, lr=123.0)
    fresh[0].load_state_dict(torchs)
    fresh[1].load_state_dict(mine)
    steps(ours, theirs, fresh, 5, seed=2)
    agree(ours, theirs, 1e-11)


def test_groups_and_schedulers_set_what_a_step_uses():
    ours, theirs = parameters(), parameters()

    def made(kind, given):
        groups = [{"params": given[:2]}, {"params": given[2:], "lr": 0.5, "weight_decay": 0.0}]
        optimizer = kind(groups, lr=0.1)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.5], total_steps=20)

    pairs = [made(optim.AdamW, ours), made(torch.optim.AdamW, theirs)]
    for number in range(10):
        steps(ours, theirs, [optimizer for optimizer, _ in pairs], 1, seed=number)
        for _, scheduler in pairs:
            scheduler.step()
    agree(ours, theirs)
    late = torch.ones(3, dtype=torch.float64, requires_grad=True)
    late.grad = torch.ones_like(late)
    pairs[0][0].add_param_group({"params": [late]})
    pairs[0][0].step()
    assert late[0] != 1


def test_momentum_that_begins_late_begins_with_an_undamped_gradient():
    ours, theirs = parameters(), parameters()
    both = [kind(each, lr=0.1, dampening=0.5) for kind, each in ((optim.SGD, ours), (torch.optim.SGD, theirs))]
    for number, momentum in enumerate((0.0, 0.9, 0.0, 0.5)):
        for optimizer in both:
            optimizer.param_groups[0]["momentum"] = momentum
        steps(ours, theirs, both, 2, seed=number)
    agree(ours, theirs)


def test_hooks_are_called_once_where_the_update_is_torchs():
    own = torch.ones(3, requires_grad=True)
    torch.optim.SGD([own])  # gives the class's step its hooks
    for keys in ({}, {"differentiable": True}):
        updated = own.clone() if keys else own
        updated.grad = torch.ones(3)
        optimizer, heard = optim.SGD([updated], **keys), []
        optimizer.register_step_pre_hook(lambda *_, heard=heard: heard.append("before"))
        optimizer.register_step_post_hook(lambda *_, heard=heard: heard.append("after"))
        optimizer.step()
        assert heard == ["before", "after"]


def test_hooks_of_a_step_that_a_subclass_has_are_called_once():
    class Own(optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    own, heard = torch.ones(3, requires_grad=True), []
    optimizer = Own([own])
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    own.grad = torch.ones(3)
    optimizer.step()
    assert heard == ["before", "after"]


def test_hooks_of_a_step_that_wraps_ours_are_called():
    class Own(optim.SGD):
        @functools.wraps(optim.SGD.step)
        def step(self, closure=None):
            return super().step(closure)

    own, heard = torch.ones(3, requires_grad=True), []
    optimizer = Own([own])
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    optimizer.step()
    assert heard == ["after"]


@pytest.mark.parametrize("module", [torch.optim, optim])
def test_hooks_get_the_arguments_of_the_step_and_may_give_others(module):
    def made(hook):
        optimizer = module.SGD([torch.ones(3, requires_grad=True)])
        optimizer.register_step_pre_hook(hook)
        return optimizer

    heard = []
    optimizer = made(lambda _, args, keys: heard.append((len(args), sorted(keys))))
    optimizer.step()
    optimizer.step(lambda: 1.0)
    optimizer.step(closure=lambda: 1.0)
    assert heard == [(1, []), (2, []), (1, ["closure"])]
    assert made(lambda each, *_: ((each,), {})).step(lambda: 1.0) is None
    assert made(lambda _, args, keys: (args, {**keys, "closure": lambda: 5.0})).step() == 5.0


@pytest.mark.parametrize("module", [torch.optim, optim])
def test_hooks_that_a_closure_registers_are_called(module):
    optimizer, heard = module.SGD([torch.ones(3, requires_grad=True)]), []

    def closure():
        optimizer.register_step_post_hook(lambda *_: heard.append("after"))
        return 1.0

    assert optimizer.step(closure) == 1.0 and heard == ["after"]


def test_an_observer_of_all_functions_sees_a_step(tmp_path):
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
    optimizer = optim.SGD([torch.ones(3, requires_grad=True)])
    observer.start()
    optimizer.step()
    observer.stop()
    observer.unregister_callback()
    assert "Optimizer.step#SGD.step" in (tmp_path / "trace.json").read_text()


def test_an_error_in_one_group_leaves_all_groups_as_they_are():
    first, second = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = optim.AdamW([{"params": [first]}, {"params": [second]}], lr=0.1)
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    before = first.detach().clone()
    second.grad = None
    second.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert first.equal(before) and optimizer.state[first]["step"] == 1


def test_a_parameter_cannot_be_swapped_while_another_thread_updates_it():
    own, other = torch.ones(8_000_000, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer, started = optim.AdamW([own]), threading.Event()

    def step():
        started.set()
        optimizer.step()

    for _ in range(50):
        own.grad = torch.ones_like(own)
        started.clear()
        thread = threading.Thread(target=step)
        thread.start()
        started.wait()
        time.sleep(0.003)
        own.grad = None
        try:
            torch.utils.swap_tensors(own, other)
        except RuntimeError as error:
            assert "use_count" in str(error)
            break
        finally:
            thread.join()
        torch.utils.swap_tensors(own, other)  # too early, or too late
    else:
        pytest.fail("no swap met an update")


def test_hooks_of_all_optimizers_are_called_and_may_give_the_closure():
    own, heard = torch.ones(3, requires_grad=True), []
    optimizer = optim.SGD([own])
    handles = [
        register_optimizer_step_pre_hook(lambda each, *_: ((each, lambda: 5.0), {})),
        register_optimizer_step_post_hook(lambda *_: heard.append("after")),
    ]
    try:
        assert optimizer.step() == 5.0 and heard == ["after"]
    finally:
        for handle in handles:
            handle.remove()
    assert optimizer.step() is None


@pytest.mark.parametrize("subclass", [False, True])
def test_a_profiler_sees_a_step_by_its_name(subclass):
    kind = type("Own", (optim.SGD,), {}) if subclass else optim.SGD
    own = torch.ones(3, requires_grad=True)
    optimizer = kind([own])
    own.grad = torch.ones(3)
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert sum(event.name == f"Optimizer.step#{kind.__name__}.step" for event in profile.events()) == 1
    assert own.eq(1 - 1e-3).all()


def test_hooks_closures_copies_and_pickles():
    ours = parameters()
    optimizer = optim.Adam(ours)
    heard = []
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = sum(each.square().sum() for each in ours)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first > optimizer.step(closure) and heard == ["after", "after"]
    again = copy.deepcopy(optimizer)
    assert again.state_dict()["state"][0]["step"] == 2
    assert pickle.loads(pickle.dumps(optimizer)).state_dict()["state"][0]["step"] == 2


def test_what_a_program_puts_into_the_state_counts():
    ours, theirs = parameters(), parameters()
    both = optim.SGD(ours, lr=0.1, momentum=0.9), torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    steps(ours, theirs, both, 3)
    for optimizer, given in zip(both, (ours, theirs), strict=True):
        optimizer.state[given[0]]["momentum_buffer"] = torch.ones_like(given[0])
        del optimizer.state[given[3]]["momentum_buffer"]
    steps(ours, theirs, both, 3, seed=2)
    for optimizer in both:
        optimizer.state.clear()
    steps(ours, theirs, both, 3, seed=3)
    agree(ours, theirs)


def _replace_the_data(parameter):
    parameter.data = parameter.data * 2


def _swap(parameter):
    grad, parameter.grad = parameter.grad, None
    other = nn.Parameter(parameter.detach() + 1) if isinstance(parameter, nn.Parameter) else parameter.detach() + 1
    torch.utils.swap_tensors(parameter, other.requires_grad_())
    parameter.grad = grad


# Things that a program may do between two steps: to an optimizer, a parameter, and the state that this one has.
MEANWHILE = {
    "nothing": lambda optimizer, parameter, state: None,
    "a state in place": lambda optimizer, parameter, state: state["exp_avg"].mul_(2),
    "a state's data": lambda optimizer, parameter, state: setattr(state["exp_avg"], "data", state["exp_avg"].data + 1),
    "another state": lambda optimizer, parameter, state: state.update(exp_avg=state["exp_avg"] * 3),
    "steps in place": lambda optimizer, parameter, state: state["step"].add_(3),
    "other steps": lambda optimizer, parameter, state: state.update(step=torch.tensor(2.0)),
    "no state": lambda optimizer, parameter, state: optimizer.state.pop(parameter),
    "the parameter in place": lambda optimizer, parameter, state: parameter.data.add_(1),
    "the parameter's data": lambda optimizer, parameter, state: _replace_the_data(parameter),
    "the parameter swapped": lambda optimizer, parameter, state: _swap(parameter),
    "a state dict": lambda optimizer, parameter, state: optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    ),
    "a group": lambda optimizer, parameter, state: optimizer.param_groups[0].update(lr=0.05),
    "the order": lambda optimizer, parameter, state: optimizer.param_groups[0]["params"].reverse(),
}


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_program_does_between_steps_counts(seed):
    ours, theirs = parameters(), parameters()
    both = optim.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    steps(ours, theirs, both, 2)
    draw = random.Random(seed)
    for number in range(60):
        place, name = draw.randrange(len(ours)), draw.choice(list(MEANWHILE))
        for optimizer, given in zip(both, (ours, theirs), strict=True):
            if given[place] in optimizer.state:
                MEANWHILE[name](optimizer, given[place], optimizer.state[given[place]])
        steps(ours, theirs, both, draw.randrange(1, 3), seed=number)
        agree(ours, theirs, 1e-10)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LAMB", "NovoGrad"])
def test_halves_lie_near_their_floats(name):
    halves = parameters(torch.bfloat16)
    floats = [half.detach().float().requires_grad_() for half in halves]
    both = getattr(optim, name)(halves, lr=1e-2), getattr(optim, name)(floats, lr=1e-2)
    steps(halves, floats, both, 5)
    for half, full in zip(halves, floats, strict=True):
        torch.testing.assert_close(half.float(), full, rtol=0.05, atol=0.05)


def test_torchs_grad_scaler_leaves_the_division_to_it():
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    for given, kind, keys in ((ours, optim.AdamW, {"fused": True}), (theirs, torch.optim.AdamW, {})):
        optimizer = kind(given, **keys)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(sum(each.square().sum() for each in given)).backward()
            if number == 2:
                given[0].grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    agree(ours, theirs, 1e-5)


def of_formula(name, start, gradients, keys):
    """One parameter after some steps, by apex's or the papers' formulas."""
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    norm = 0.0
    b1, b2 = 0.9, 0.999
    for t, grad in enumerate(gradients, 1):
        c1, c2 = 1 - b1**t, 1 - b2**t
        if name == "LAMB":
            g = grad / max(1.0, grad.norm().item())
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            update = (m / c1) / ((v / c2).sqrt() + 1e-6) + 0.01 * p
            p = p - keys["lr"] * p.norm() / update.norm() * update
        elif name == "NovoGrad":
            own = grad.norm().item()
            norm = own if t == 1 else math.sqrt(b2 * norm**2 + (1 - b2) * own**2)
            m = b1 * m + (1 - b1) * grad
            p = p - keys["lr"] * (m / c1 / (norm / math.sqrt(c2) + 1e-8) + keys["weight_decay"] * p)
        else:
            g = grad + keys["weight_decay"] * p if keys["weight_decay_type"] == "grad" else grad
            p = p if keys["weight_decay_type"] == "grad" else p * (1 - keys["lr"] * keys["weight_decay"])
            m = keys["momentum"] * m + (1 - keys["momentum"]) * g
            p = p - keys["lr"] * (keys["nu"] * m + (1 - keys["nu"]) * g)
    return p


QHM = {"lr": 0.1, "momentum": 0.9, "nu": 0.7, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("LAMB", {"lr": 0.01}),
        ("NovoGrad", {"lr": 0.01, "weight_decay": 0.1}),
        ("QHM", QHM | {"weight_decay_type": "grad"}),
        ("QHM", QHM | {"weight_decay_type": "direct"}),
    ],
)
def test_those_that_torch_has_not_are_their_formulas(name, keys):
    (own,) = parameters(shapes=[(6, 5)])
    start = own.detach().clone()
    optimizer = getattr(optim, name)([own], **keys)
    gradients = [torch.randn(6, 5, dtype=torch.float64) for _ in range(50)]
    for grad in gradients:
        own.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(own.detach(), of_formula(name, start, gradients, keys), rtol=1e-9, atol=1e-9)


def test_lamb_divides_by_the_norm_of_all_groups():
    one, two = parameters(shapes=[(4,), (9,)])
    whole, apart = copy.deepcopy([one, two]), copy.deepcopy([one, two])
    together, grouped = optim.LAMB(whole, lr=0.1), optim.LAMB([{"params": [each]} for each in apart], lr=0.1)
    steps(whole, apart, (together, grouped), 5)
    agree(whole, apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["LAMB", "NovoGrad", "NAdam"])
def test_numbers_survive_a_round_trip_to_the_bit(name, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    first, other = (getattr(optim, name)(given, lr=0.01) for given in (ours, theirs))
    steps(ours, theirs, (first, other), 5)
    first.zero_grad()
    assert all(own.grad is None for own in ours)
    fresh = getattr(optim, name)(ours, lr=0.01)
    fresh.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(ours, theirs, (fresh, other), 5, seed=2)
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))


def test_apexs_names_have_its_arguments():
    ours, theirs = parameters(), parameters()
    both = optimizers.FusedAdam(ours, lr=0.01, weight_decay=0.1), torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    steps(ours, theirs, both, 5)
    agree(ours, theirs)
    assert optimizers.FusedLamb is optimizers.FusedLAMB is optim.LAMB
    assert optimizers.FusedNovoGrad is optim.NovoGrad
    plain = optimizers.FusedAdam(ours, bias_correction=False, adam_w_mode=False, set_grad_none=False)
    before = ours[0].detach().clone()
    ours[0].grad = torch.full_like(before, 2.0)
    plain.step()
    expected = 1e-3 * 0.1 * 2 / (math.sqrt(0.001 * 4) + 1e-8)
    torch.testing.assert_close(before - ours[0].detach(), torch.full_like(before, expected))
    plain.zero_grad()
    assert ours[0].grad.count_nonzero() == 0
    for kind in (optimizers.FusedAdam, optimizers.FusedLamb, optimizers.FusedNovoGrad):
        with pytest.raises(RuntimeError, match="AMSGrad"):
            kind(ours, amsgrad=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.AdamW(p, lr=-1.0), "Invalid learning rate: -1.0"),
        (lambda p: optim.SGD(p, lr=0.1, momentum=-2), "Invalid momentum value: -2"),
        (lambda p: optim.QHM(p, -0.5, 0.9, 0.7), "Invalid learning rate: -0.5"),
        (lambda p: optim.QHM(p, 0.1, -0.9, 0.7), "Invalid momentum value: -0.9"),
        (lambda p: optim.QHM(p, 0.1, 0.9, 0.7, weight_decay=-1), "Invalid weight_decay value: -1"),
        (lambda p: optim.QHM(p, 0.1, 0.9, 0.7, weight_decay_type="l2"), "Invalid weight_decay_type value: l2"),
        (lambda p: optim.LAMB(p, betas=(1.5, 0.9)), "Invalid beta parameter at index 0: 1.5"),
        (lambda p: optim.NovoGrad(p, norm_type=1), "NovoGrad supports"),
        (lambda p: optim.LAMB([]), "empty parameter list"),
    ],
)
def test_bad_values_are_torchs_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make(parameters())


def test_the_two_distributed_optimizers_name_each_other():
    with pytest.raises(
        lamina.UsageError, match=r"takes an optimizer, as SGD\(model.parameters\(\)\).*lamina.optim.Dist"
    ):
        lamina.DistributedOptimizer(torch.optim.SGD, parameters())
    with pytest.raises(lamina.UsageError, match=r"takes a class and remote.*lamina.DistributedOptimizer\(optimizer\)"):
        optim.DistributedOptimizer(torch.optim.SGD(parameters()), [])


def test_sparse_gradients_are_refused():
    weight = nn.Parameter(torch.ones(4, 2))
    optimizer = optim.Adam([weight])
    nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert weight.eq(1).all()


def test_differentiable_updates_are_torchs():
    scale = torch.full((3,), 2.0, requires_grad=True)
    own = torch.ones(3, requires_grad=True).clone()
    own.grad = scale * 3
    optim.SGD([own], lr=0.1, differentiable=True).step()
    own.sum().backward()
    torch.testing.assert_close(scale.grad, torch.full((3,), -0.3))


def looks_during(step):
    """True where another thread of Python's looks at the clock in the middle of an update. On a busy machine it may
    come too late, so there are several updates."""
    looks, stop = [], threading.Event()

    def look():
        while not stop.wait(0.001):
            looks.append(time.perf_counter())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(30):
            begin = time.perf_counter()
            step()
            quarter = (time.perf_counter() - begin) / 4
            if any(begin + quarter < at < begin + 3 * quarter for at in list(looks)):
                return True
    finally:
        stop.set()
        thread.join()
    return False


def test_other_threads_run_while_it_updates():
    """One parameter of 64 MiB."""
    (own,) = parameters(torch.float32, shapes=[(1 << 24,)])
    own.grad = torch.ones_like(own)
    assert looks_during(optim.AdamW([own]).step)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_is_of_the_same_kind(copied):
    own = parameters(shapes=[(3, 4)])
    optimizer = optimizers.FusedAdam(own, adam_w_mode=False, weight_decay=0.5, set_grad_none=False)
    own[0].grad = torch.ones_like(own[0])
    optimizer.step()
    other = copied(optimizer)
    (its,) = other.param_groups[0]["params"]
    its.grad = torch.ones_like(its)
    for each in (optimizer, other):
        each.step()
        each.zero_grad()
    assert torch.equal(its, own[0]) and torch.equal(its.grad, torch.zeros_like(its))


@pytest.mark.parametrize("name", ["AdamW", "LAMB"])
def test_threads_that_share_an_optimizer_take_turns(name):
    ours, theirs = (parameters(torch.float32, shapes=[(100,)] * 20) for _ in range(2))
    shared, alone = (getattr(optim, name)(each) for each in (ours, theirs))
    for each in (*ours, *theirs):
        each.grad = torch.ones_like(each)
    threads = [threading.Thread(target=lambda: [shared.step() for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(200):
        alone.step()
    assert all(shared.state[each]["step"] == 200 for each in ours)
    agree(ours, theirs, 0)


def test_a_signal_handler_may_take_a_step_while_one_is_begun():
    class Interrupting(float):
        def __float__(self):
            signal.raise_signal(signal.SIGUSR1)
            return 0.5

    def take_a_step(*_):
        optimizer.param_groups[0]["lr"] = 0.25
        assert not optimizer.state[own]  # which makes an entry
        optimizer.step()

    own = torch.nn.Parameter(torch.zeros(3))
    own.grad = torch.ones(3)
    optimizer = optim.AdamW([own], weight_decay=0)
    optimizer.param_groups[0]["lr"] = Interrupting(0.5)
    before = signal.signal(signal.SIGUSR1, take_a_step)
    try:
        optimizer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert torch.allclose(own, torch.full((3,), -0.75)) and optimizer.state[own]["step"] == 2


class Hashed(torch.nn.Parameter):
    """A parameter that calls a function in the middle of its first step, which puts its state into a dict."""

    def __hash__(self):
        call, self.call = getattr(self, "call", None), None
        if call is not None:
            call()
        return id(self)


def _interrupted(call):
    """An optimizer's parameters, the second of which calls that in its first step."""
    own = [Hashed(torch.zeros(3)) for _ in range(3)]
    for each in own:
        each.grad = torch.ones(3)
    optimizer = optim.AdamW(own, lr=0.5, weight_decay=0)
    optimizer._known_groups()
    own[1].call = lambda: call(optimizer)
    return own, optimizer


def _interrupt(_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda optimizer: optimizer.step(), lamina.UsageError, r"within its own step.*let it set a flag"),
        (_interrupt, KeyboardInterrupt, None),
    ],
)
def test_what_interrupts_an_update_loses_no_state(call, error, says):
    own, optimizer = _interrupted(call)
    with pytest.raises(error, match=says):
        optimizer.step()
    for steps in (1, 2):
        for each in own:
            assert torch.allclose(each, torch.full((3,), -0.5 * steps)) and optimizer.state[each]["step"] == steps
        optimizer.step()


def test_a_finaliser_that_takes_a_step_within_its_own_is_refused():
    class Stepping:
        def __del__(self):
            with contextlib.suppress(lamina.UsageError):
                optimizer.step()

    def drop(_):
        nonlocal kept
        kept = None

    kept = Stepping()
    own, optimizer = _interrupted(drop)
    optimizer.step()
    assert kept is None
    assert [optimizer.state[each]["step"].item() for each in own] == [1, 1, 1]
    assert all(torch.allclose(each, torch.full((3,), -0.5)) for each in own)


# In a process of its own: a fork lets go of what torch keeps for other threads, such as groups that other tests have
# made, which would wait for threads that the child lacks.
FORKED_STEP = """
import multiprocessing, sys, threading, torch
from lamina import optim

own = torch.nn.Parameter(torch.zeros(3))
own.grad = torch.ones(3)
optimizer = optim.SGD([own], lr=0.5)
child = multiprocessing.get_context("fork").Process(target=optimizer.step)
with optimizer.turn():
    forking = threading.Thread(target=child.start)
    forking.start()
    forking.join()
    child.join(60)
if child.exitcode is None:
    child.kill()
sys.exit(child.exitcode != 0)
"""


def test_a_forked_process_takes_a_step_while_a_thread_of_its_parent_does():
    subprocess.run([sys.executable, "-c", FORKED_STEP], check=True, timeout=180)


def test_flags_are_what_python_takes_for_true():
    ours, theirs = (parameters(torch.float64, shapes=[(7,)]) for _ in range(2))
    for kind, each in ((optim.SGD, ours), (torch.optim.SGD, theirs)):
        optimizer = kind(each, lr=0.1, momentum=0.9, nesterov=2)
        for _ in range(3):
            each[0].grad = each[0].detach().clone()
            optimizer.step()
    agree(ours, theirs, 1e-12)


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
def test_a_parameter_listed_twice_is_torchs_business():
    ((ours,), (theirs,)) = (parameters(shapes=[(5,)]) for _ in range(2))
    for kind, each in ((optim.AdamW, ours), (torch.optim.AdamW, theirs)):
        optimizer = kind([each, each])
        for _ in range(3):
            each.grad = each.detach().clone()
            optimizer.step()
        assert optimizer.state[each]["step"] == 6
    agree([ours], [theirs], 0)
    ours.grad = torch.ones_like(ours)
    with pytest.raises(lamina.UsageError, match="LAMB updates parameters that are each listed once"):
        optim.LAMB([ours, ours]).step()


@pytest.mark.parametrize("name", ["AdamW", "LAMB"])
def test_elements_that_are_one_in_memory_are_refused_before_anything_changes(name):
    plain = torch.ones(3, requires_grad=True)
    expanded = torch.ones(1, 6).expand(4, 6).requires_grad_()
    optimizer = getattr(optim, name)([plain, expanded])
    for each in (plain, expanded):
        each.grad = torch.ones(each.shape)
    with pytest.raises(RuntimeError, match="more than one element of a parameter"):
        optimizer.step()
    assert plain.eq(1).all() and not optimizer.state


def test_a_parameter_whose_memory_was_given_back_is_refused_before_anything_changes():
    plain, emptied = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = optim.SGD([plain, emptied], lr=1.0, momentum=0.9)
    for each in (plain, emptied):
        each.grad = torch.ones(3)
    optimizer.step()
    emptied.untyped_storage().resize_(0)
    with pytest.raises(lamina.UsageError, match=r"a parameter of shape \[3\] has no memory"):
        optimizer.step()
    assert plain.eq(0).all()


def test_a_gradient_in_another_layout_is_refused_by_its_name():
    parameter = nn.Parameter(torch.ones(3, 4).to_mkldnn())
    optimizer = lamina.optim.AdamW([parameter])
    parameter.grad = torch.ones(3, 4).to_mkldnn()
    with pytest.raises(lamina.UsageError, match="oneDNN's layout"):
        optimizer.step()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "LAMB", "NovoGrad"])
def test_a_gradient_of_zeros_that_has_no_memory_is_zeros(name):
    ours, theirs = (parameters(torch.float32, [(5,)]) for _ in range(2))
    ours[0].sgn().sum().backward()
    assert ours[0].grad._is_zerotensor()
    theirs[0].grad = torch.zeros(5)
    for each in (ours, theirs):
        getattr(optim, name)(each, lr=0.1, weight_decay=0.1).step()
    agree(ours, theirs, 0)


class Doubled(torch.Tensor):
    """Its elements are twice those of another tensor: a class with a dispatch of its own, as DTensor."""

    @staticmethod
    def __new__(cls, half):
        made = torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)
        made.half_of_it = half
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda own: own.half_of_it * 2, (args, kwargs or {}))
        out = function(*args, **kwargs)
        if function._schema.is_mutable:
            raise NotImplementedError(f"{function} writes to a Doubled")
        return out


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
def test_a_tensor_subclass_with_a_dispatch_of_its_own_is_torchs_business(kind):
    parameter = Doubled(torch.ones(3)).requires_grad_()
    parameter.grad = Doubled(torch.ones(3))
    with pytest.raises(NotImplementedError, match="writes to a Doubled"):  # what it is asked to do, it does or not
        kind([parameter], foreach=False).step()


def test_one_that_torch_has_not_refuses_a_tensor_subclass_with_a_dispatch_of_its_own():
    parameter = Doubled(torch.ones(3)).requires_grad_()
    parameter.grad = Doubled(torch.ones(3))
    with pytest.raises(lamina.UsageError, match=r"LAMB updates parameters .* __torch_dispatch__"):
        optim.LAMB([parameter]).step()


def test_an_entry_that_a_program_replaces_counts():
    own = torch.ones(3, requires_grad=True)
    optimizer = optim.SGD([own], lr=1.0, momentum=1.0)
    own.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[own] = {"momentum_buffer": torch.full((3,), 10.0)}
    optimizer.step()
    assert optimizer.state[own]["momentum_buffer"].eq(11).all() and own.eq(-11).all()
    counting = optim.AdamW([own])
    counting.step()
    counting.state[own]["step"] = 5  # as very old checkpoints have it
    counting.step()
    assert counting.state[own]["step"] == 6


@pytest.mark.parametrize("swaps", [False, True])
def test_modules_may_be_converted_between_steps(swaps):
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        layer = nn.Linear(3, 2)
        optimizer = optim.AdamW(layer.parameters(), lr=0.1)
        for dtype in (torch.float32, torch.float64):
            layer.to(dtype)
            optimizer.zero_grad()
            layer(torch.ones(1, 3, dtype=dtype)).sum().backward()
            before = layer.weight.detach().clone()
            optimizer.step()
            torch.testing.assert_close(layer.weight.detach(), before * (1 - 1e-3) - 0.1, rtol=1e-5, atol=1e-5)
            assert optimizer.state[layer.weight]["exp_avg"].dtype == dtype
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_what_is_no_number_moves_rprop_as_torchs():
    ours, theirs = (torch.ones(4, requires_grad=True) for _ in range(2))
    both = optim.Rprop([ours]), torch.optim.Rprop([theirs])
    for gradient in ([math.nan, math.inf, -math.inf, 1.0], [1.0, -1.0, math.nan, -1.0], [2.0, 2.0, 2.0, 2.0]):
        for each, optimizer in zip((ours, theirs), both, strict=True):
            each.grad = torch.tensor(gradient)
            optimizer.step()
    agree([ours], [theirs], 1e-6)


def test_a_scheduler_may_leave_the_bounds_of_an_argument():
    ours, theirs = parameters(), parameters()
    both = optim.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1.0 - 0.5 * step) for each in both]
    for number in range(4):
        steps(ours, theirs, both, 1, seed=number)
        for each in schedulers:
            each.step()
    assert both[0].param_groups[0]["lr"] < 0
    agree(ours, theirs)


def test_a_layer_norm_computes_in_the_type_that_all_fit_into():
    plain, x = nn.LayerNorm(8), 1000 + torch.randn(3, 8)
    halves = lamina.nn.FusedLayerNorm(8).bfloat16()
    torch.testing.assert_close(halves(x), plain(x))  # in bfloat16 all elements of x are alike
    double = x.double() + 1e-9 * torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(lamina.nn.FusedLayerNorm(8)(double), plain.double()(double), rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        halves(torch.ones(3, 8, dtype=torch.int64))
    compiled = torch.jit.script(lamina.nn.FusedLayerNorm(8))
    assert torch.equal(compiled(x), nn.LayerNorm(8)(x))


def test_a_layer_norm_takes_halves_with_parameters_in_float32():
    layer, plain = lamina.nn.FusedLayerNorm(8), nn.LayerNorm(8)
    x = torch.randn(3, 8)
    assert torch.equal(layer(x), plain(x)) and list(layer.state_dict()) == list(plain.state_dict())
    for dtype in (torch.bfloat16, torch.float16):
        out = layer(x.to(dtype))
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), plain(x.to(dtype).float()), rtol=0.01, atol=0.01)
    assert lamina.nn.FusedLayerNorm((8,), elementwise_affine=False).weight is None


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_nadams_product_is_kept_as_torchs(default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        ours, theirs = parameters(), parameters()
        both = optim.NAdam(ours, momentum_decay=0.1), torch.optim.NAdam(theirs, momentum_decay=0.1)
        steps(ours, theirs, both, 50)
        agree(ours, theirs)
        mine, torchs = (each.state[given[0]]["mu_product"] for each, given in zip(both, (ours, theirs), strict=True))
        assert mine.dtype == torchs.dtype and mine == torchs
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("name", "keys"), TORCHS, ids=[f"{name}{number}" for number, (name, _) in enumerate(TORCHS)])
def test_parameters_of_another_device_are_updated_there(name, keys):
    own = torch.empty(4, 3, device="meta", requires_grad=True)  # where looking at an element is an error
    optimizer = getattr(optim, name)([own], **keys)
    for _ in range(2):
        own.grad = torch.empty_like(own)
        assert optimizer.is_fused()
        optimizer.step()
    state = optimizer.state[own]
    assert all(value.device.type == ("meta" if value.dim() else "cpu") for value in state.values())
    assert state.get("step", 2) == 2
