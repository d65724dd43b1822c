# SPDX-License-Identifier: Apache-2.0
"""Cases of what is done to parameters and modules of other ranks besides calling them, for two ranks that are one
pipeline."""

import copy
import pathlib
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import lamina

SEEDED = torch.Generator().manual_seed(2)
REAL, NOISE = torch.randn(8, 6, generator=SEEDED), torch.randn(8, 3, generator=SEEDED)


class Gan(nn.Module):
    """A generator on rank 0 and a discriminator on rank 1."""

    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 6))
        self.d = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0), nn.GELU(), nn.Linear(5, 1))

    def forward(self, z):
        return self.d(self.g(z))


def started(make=Gan, microbatches=2, **keys):
    """A model, the same plain, and the one that is distributed."""
    keys = {"auto_partition": False, "default_partition": 0, "timeout_s": 30} | keys
    lamina.init(partitions=2, microbatches=microbatches, **keys)
    torch.manual_seed(0)
    net = make()
    plain = copy.deepcopy(net)
    lamina.set_partition(net.d, 1)
    return net, plain, lamina.distribute(net)


def gathered(model, what):
    """Returns what `what(parameter)` is of each parameter, as its owner has it, by name."""
    mine = {name: what(parameter) for name, parameter in model.local_named_parameters()}
    return {name: value for part in lamina.allgather(mine, lamina.PP_GROUP) for name, value in part.items()}


def compare(body, calls=3, make=Gan, microbatches=2, **keys):
    """`body(net, backward, x, z)` leaves the gradients and flags that it leaves in the plain loop over the
    microbatches, call after call, whichever rank owns a parameter."""
    net, plain, model = started(make, microbatches, **keys)
    step = lamina.step(lambda x, z: body(net, model.backward, x, z))
    for _ in range(calls):
        for x, z in zip(REAL.chunk(microbatches), NOISE.chunk(microbatches), strict=True):
            body(plain, lambda loss: (loss / microbatches).backward(), x, z)
        step(REAL, NOISE)
        gradients = gathered(model, lambda parameter: parameter.grad)
        for name, parameter in plain.named_parameters():
            found, expected = gradients[name], parameter.grad
            assert (found is None) == (expected is None), name
            assert expected is None or torch.allclose(found, expected, atol=1e-6), name
        flags = {name: parameter.requires_grad for name, parameter in plain.named_parameters()}
        assert flags == {name: parameter.requires_grad for name, parameter in net.named_parameters()}
    return net, plain, model


def generator_loss(net, z):
    return F.softplus(-net(z)).mean()


def discriminator_loss(net, x, z):
    return F.softplus(-net.d(x)).mean() + F.softplus(net.d(net.g(z).detach())).mean()


def case_a_body_freezes_and_thaws_a_part_on_another_rank():
    def body(net, backward, x, z):
        net.d.requires_grad_(False)
        backward(generator_loss(net, z))
        net.d.requires_grad_(True)
        backward(discriminator_loss(net, x, z))

    compare(body, microbatches=4)


def case_what_a_body_leaves_frozen_is_so_for_the_next_microbatch_and_after_the_step():
    def body(net, backward, x, z):
        for parameter in net.d.parameters():
            parameter.requires_grad_(False)
        backward(generator_loss(net, z))

    net, _, model = compare(body, microbatches=4)
    step = lamina.step(lambda x, z: model.backward(discriminator_loss(net, x, z) + generator_loss(net, z)))
    step(REAL, NOISE)
    assert all(gradient is None for name, gradient in gathered(model, lambda p: p.grad).items() if name[0] == "d")


def case_a_body_that_freezes_less_with_every_call_is_as_in_the_plain_loop():
    def body(net, backward, x, z):
        net.thawed = getattr(net, "thawed", 0) + 1
        for index, parameter in enumerate(net.parameters()):
            parameter.requires_grad = index % 3 < net.thawed
        backward(generator_loss(net, z))

    compare(body, microbatches=1)


def case_every_schedule_bears_that_the_first_body_runs_alone():
    def body(net, backward, x, z):
        net.d.requires_grad_(False)
        backward(generator_loss(net, z))
        net.d.requires_grad_(True)

    compare(body, microbatches=4, schedule="simple")


def case_one_layer_is_frozen_between_calls():
    def body(net, backward, x, z):
        for index in (0, 3, 0):
            net.d[index].weight.requires_grad = not net.d[index].weight.requires_grad
            net.g[0].requires_grad_(index == 3)
            backward(discriminator_loss(net, x, z) + generator_loss(net, z))
        net.d[3].weight.requires_grad = True
        net.g[0].requires_grad_(True)

    compare(body, microbatches=4, calls=4)


def case_what_is_frozen_after_its_forward_gets_no_gradient():
    def body(net, backward, x, z):
        net.requires_grad_(True)
        loss = generator_loss(net, z)
        net.d[0].requires_grad_(False)
        backward(loss)
        net.requires_grad_(True)

    compare(body)


def case_checkpoints_compute_again_with_the_flags_of_the_moment():
    def body(net, backward, x, z):
        net.d.requires_grad_(False)
        backward(F.softplus(-checkpoint(net, net.g(z)[:, 3:], use_reentrant=True)).mean())
        net.d.requires_grad_(True)
        backward(F.softplus(-checkpoint(net, net.g(z)[:, :3], use_reentrant=True)).mean())

    compare(body)


def case_whether_a_result_requires_grad_follows_the_flags():
    net, _, _ = started()

    @lamina.step
    def step(x):
        found = [net.d.requires_grad_(on)(x).requires_grad for on in (True, False, True, False)]
        net.d.requires_grad_(True)
        return tuple(found)

    for _ in range(2):
        assert step(REAL) == ([True] * 2, [False] * 2, [True] * 2, [False] * 2)


def case_frozen_between_steps_on_every_rank():
    net, _, model = started()
    step = lamina.step(lambda x, z: model.backward(discriminator_loss(net, x, z)))
    step(REAL, NOISE)
    model.zero_grad()
    for part in (net.d[0], net.g[2]):
        part.requires_grad_(False)
    step(REAL, NOISE)
    found = gathered(model, lambda parameter: parameter.grad is not None)
    assert found == {name: name[:3] == "d.3" for name in found}


def case_parameters_replaced_between_steps_on_every_rank():
    net, _, _ = started()
    step = lamina.step(lambda x: net.d(x))
    before = step(REAL).concat()
    net.d[0].weight = nn.Parameter(torch.zeros(5, 6))
    assert not torch.equal(step(REAL).concat(), before)
    frozen = lamina.step(lambda x: net.d.requires_grad_(False)(x))
    frozen(REAL)
    assert not net.d[0].weight.requires_grad


def case_flags_that_are_left_too_late_are_an_error():
    net, _, model = started(microbatches=4)

    def body(x):
        model.backward(net.d(x).sum())
        net.d[3].weight.requires_grad = not net.d[3].weight.requires_grad

    with pytest.raises(lamina.UsageError, match=r"the step body left d\.3\.weight .*put it back"):
        lamina.step(body)(REAL)
    assert net.d[3].weight.requires_grad
    lamina.step(lambda x: model.backward(net.d(x).sum()))(REAL)
    assert all(gathered(model, lambda p: p.grad is not None)["d.3.weight"] for _ in range(2))


class Freezes(nn.Linear):
    def forward(self, x):
        self.bias.requires_grad_(False)
        return super().forward(x)


class WithFreezing(Gan):
    def __init__(self):
        super().__init__()
        self.d = Freezes(6, 1)


def case_a_module_that_freezes_its_parameters_for_its_caller_is_an_error():
    net, _, _ = started(WithFreezing)
    with pytest.raises(lamina.UsageError, match=r"d changed requires_grad of d\.bias on rank 1"):
        lamina.step(lambda x: net.d(x))(REAL)


def replaced(net, x):
    held = net.d[0]._parameters
    before = held["weight"]
    held["weight"] = nn.Parameter(torch.zeros(5, 6))
    try:
        return net.d(x)
    finally:
        held["weight"] = before


IGNORED = {
    r"lives in partition 1 .*model\.backward": lambda net, x: torch.autograd.grad(
        net.d(x).sum(), list(net.parameters())
    ),
    r"inputs=.*d\.0\.weight lives in": lambda net, x: net.d(x).sum().backward(inputs=[net.d[0].weight]),
    r"^d\.0\.weight was replaced in a step": replaced,
    r"^functional_call\(\) of a part of the model": lambda net, x: torch.func.functional_call(
        net.d, {"0.weight": torch.zeros(5, 6)}, (x,)
    ),
    r"d\.0\.register_forward_hook\(\) in a step": lambda net, x: net.d[0].register_forward_hook(print),
    r"d\.extra was set to a new Tensor": lambda net, x: net.d.register_buffer("extra", x),
    r"d\.more was set to a new Linear": lambda net, x: net.d.add_module("more", nn.Linear(6, 6)),
    r"^d\.0\.weight, a parameter or buffer of partition 1, is set on partition 0": lambda net, x: setattr(
        net.d[0], "weight", nn.Parameter(torch.ones(5, 6))
    ),
    r"to\(\), half\(\) and the like of a module in a step": lambda net, x: net.half(),
    r"^zero_grad\(\) of a module in a step": lambda net, x: net.d.zero_grad(),
    r"^load_state_dict\(\) of a module in a step": lambda net, x: net.d.load_state_dict({}),
    r"gradient of a parameter .* was set": lambda net, x: setattr(net.d[0].weight, "grad", None),
    r"data of a parameter .* was set": lambda net, x: setattr(net.d[0].weight, "data", torch.ones(5, 6)),
    r"register_hook\(\) of a parameter in a step": lambda net, x: net.d[0].weight.register_hook(print),
    r"d\.0\.weight lives in .*between steps": lambda net, x: nn.init.zeros_(net.d[0].weight),
    r"d\.0\.weight lives in .*a save, is done between steps": lambda net, x: sum(p.sum() for p in net.parameters()),
}


def case_what_another_rank_would_ignore_is_an_error():
    net, _, _ = started()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    lamina.step(lambda x: net.d(x))(REAL)
    IGNORED["^optimizer.step\\(\\) inside a step function"] = lambda net, x: optimizer.step()
    IGNORED["^optimizer.zero_grad\\(\\) inside a step function"] = lambda net, x: optimizer.zero_grad()
    for words, ignored in IGNORED.items():
        with pytest.raises(lamina.UsageError, match=words):
            lamina.step(lambda x, ignored=ignored: ignored(net, x) and None)(REAL)
    lamina.step(lambda x: net.d(x))(REAL)


def case_norms_and_gradients_are_the_whole_models():
    net, plain, model = started()
    (discriminator_loss(plain, REAL, NOISE) + generator_loss(plain, NOISE)).backward()
    step = lamina.step(lambda x, z: model.backward(discriminator_loss(net, x, z) + generator_loss(net, z)))
    step(REAL, NOISE)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for order in (2.0, float("inf")):
            expected = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()], order)
            assert torch.allclose(model.grad_norm(order), expected)
        model.clip_grad_norm_(1e9)
        optimizer.step()
        copy.deepcopy(nn.Parameter(torch.ones(2)))
    with pytest.warns(UserWarning, match=r"model\.grad_norm\(\)") as told:
        for _ in range(3):
            _ = [parameter.grad for parameter in net.parameters()]
    assert len(told) == 1 and told[0].filename == __file__
    mine = next(model.local_parameters())
    assert type(mine) is nn.Parameter and pickle.loads(pickle.dumps(mine)).equal(mine)
    mine.grad = None
    assert mine.grad is None and all(type(parameter) is nn.Parameter for parameter in net.parameters())
    parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Identity())
    with pytest.raises(lamina.UsageError, match="was set"):
        next(p for p in net.parameters() if p is not mine and p.grad is None).grad = torch.ones(1)


def case_an_optimizer_that_is_not_wrapped_says_so_once():
    net, _, model = started()
    optimizer = torch.optim.Adam(model.parameters())
    step = lamina.step(lambda x, z: model.backward(generator_loss(net, z)))
    with pytest.warns(UserWarning, match=r"Adam was not given to lamina\.DistributedOptimizer") as told:
        for _ in range(2):
            step(REAL, NOISE)
            optimizer.step()
    assert len(told) == 1
    lamina.DistributedOptimizer(optimizer)
    assert len(optimizer.state_dict()["state"]) == 8


def case_averages_of_the_weights():
    net, plain, model = started()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    lamina.DistributedOptimizer(optimizers[1])
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.7)) for each in (plain, net)]
    step = lamina.step(lambda x, z: model.backward(discriminator_loss(net, x, z)))
    for _ in range(3):
        discriminator_loss(plain, REAL, NOISE).backward()
        step(REAL, NOISE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        averages[0].update_parameters(plain)
        averages[1].update_parameters(model)
    expected = dict(averages[0].module.named_parameters())
    found = dict(averages[1].module.named_parameters())
    for name, _ in model.local_named_parameters():
        assert torch.allclose(found[name], expected[name], atol=1e-6), name
    there = next(name for name in found if name not in dict(model.local_named_parameters()))
    with pytest.raises(lamina.UsageError, match=f"the average of {there} lives in partition"):
        found[there].sum()


def byol(pair):
    """A model with a target network whose last layer is on the other rank than the online network's."""

    class Byol(pair):
        def __init__(self):
            super().__init__(lambda: nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 2)))

        @property
        def d(self):
            return self.target[2]

        def forward(self, x):
            return self.online(x) - self.target(x)

    return Byol


def page():
    """The names that the Python blocks of docs/porting.md define."""
    text = (pathlib.Path(__file__).parents[2] / "docs/porting.md").read_text()
    names = {"torch": torch, "nn": nn, "lamina": lamina}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
    return names


def case_the_page_on_averages_and_target_networks():
    names = page()
    net, plain, model = started(byol(names["Pair"]))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    lamina.DistributedOptimizer(optimizers[1])
    step = lamina.step(lambda x: model.backward(net(x).square().mean()))
    evaluate = lamina.step(lambda x: net(x))
    evaluate(REAL)
    average, expected = names["averages"](model), {name: p.detach().clone() for name, p in plain.named_parameters()}
    for decay in (0.0, 0.7):
        plain(REAL).square().mean().backward()
        step(REAL)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        names["update"](average, model, 0.9)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                expected[name].lerp_(parameter, 0.1)
            for target, online in zip(plain.target.parameters(), plain.online.parameters(), strict=True):
                target.lerp_(online, 1 - decay)
        names["follow"](model, decay)
        assert torch.allclose(evaluate(REAL).concat(), plain(REAL), atol=1e-6)
    names["swap"](average, model)
    averaged = copy.deepcopy(plain)
    averaged.load_state_dict(expected)
    assert torch.allclose(evaluate(REAL).concat(), averaged(REAL), atol=1e-6)
    names["swap"](average, model)
    whole = names["whole"](average)
    assert all(torch.allclose(whole[name], value, atol=1e-6) for name, value in expected.items())


def case_views_of_parameters_of_other_ranks_say_where_the_value_is():
    net, _, model = started()
    state = {name: value.t() for name, value in net.state_dict().items()}
    lamina.step(lambda z: model(z))(NOISE)
    for name, parameter in model.named_parameters():
        if model._life.model.owns(name):
            assert torch.equal(state[name], parameter.t())
        else:
            with pytest.raises(RuntimeError, match=f"{name} lives in partition [01] on rank [01]"):
                state[name].sum()
    lamina.shutdown()


class SavesItself(nn.Linear):
    """A layer that saves and loads its values in a way of its own."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "kernel"] = self.weight.detach().t()
        destination[prefix + "bias"] = self.bias.detach()

    def _load_from_state_dict(self, state_dict, prefix, *_):
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "kernel"].t())
            self.bias.copy_(state_dict[prefix + "bias"])


class OfLayers(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.g, self.d = layer(3, 5), layer(5, 1)

    def forward(self, z):
        return self.d(torch.tanh(self.g(z)))


def same_state(state, other):
    assert list(state) == list(other)
    assert all(torch.equal(value, other[name]) for name, value in state.items())


def case_layers_save_and_load_in_a_way_of_their_own():
    _, plain, model = started(lambda: OfLayers(SavesItself))
    lamina.step(lambda z: model(z))(NOISE)
    same_state(model.state_dict(), plain.state_dict())
    other = OfLayers(SavesItself)
    model.load_state_dict(other.state_dict())
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter, dict(other.named_parameters())[name])
    same_state(model.state_dict(), other.state_dict())
    assert list(model.local_state_dict())[:2] == [["g.kernel", "g.bias"], ["d.kernel", "d.bias"]][lamina.rank()]


def case_hooks_of_state_dicts_see_the_whole_model():
    _, plain, model = started(lambda: OfLayers(nn.Linear))

    def add_sum(module, state, prefix, _):
        state[prefix + "sum"] = sum(state[name].sum() for name in (prefix + "g.weight", prefix + "d.weight"))
        state[prefix + "g.renamed"] = state.pop(prefix + "g.bias")

    for each in (plain, model.get_module()):
        each.register_state_dict_post_hook(add_sum)
    lamina.step(lambda z: model(z))(NOISE)
    same_state(model.state_dict(), plain.state_dict())


def case_an_error_of_a_way_of_saving_comes_on_all_ranks():
    _, _, model = started(lambda: OfLayers(nn.Linear))
    lamina.step(lambda z: model(z))(NOISE)
    if lamina.rank() == 1:
        model.get_module().d.register_state_dict_pre_hook(lambda *_: [].pop())
    with pytest.raises((IndexError, lamina.UsageError), match="pop from empty list"):
        model.state_dict()
    assert lamina.allgather(0, lamina.WORLD) == [0, 0]


class Graph(nn.Linear):
    """A layer with a sparse buffer, a quantised one, and one whose elements lie on one another."""

    def __init__(self, size, outputs):
        super().__init__(size, outputs)
        self.register_buffer("adjacency", torch.rand(outputs, outputs).to_sparse())
        self.register_buffer("scale", torch.ones(1).expand(outputs))
        self.register_buffer("packed", torch.quantize_per_tensor(torch.rand(outputs), 0.1, 0, torch.qint8))

    def forward(self, x):
        return super().forward(x) @ self.adjacency.to_dense() * self.scale + self.packed.dequantize()


def case_sparse_and_quantised_buffers_stay_on_all_ranks():
    _, plain, model = started(lambda: OfLayers(Graph))
    loss = lamina.step(lambda z: model(z).square().mean())(NOISE).reduce_mean()
    expected = torch.stack([plain(z).square().mean() for z in NOISE.chunk(2)]).mean()
    torch.testing.assert_close(loss, expected.detach())
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        dense = [each.dequantize() if each.is_quantized else each.to_dense() for each in (state[name], value)]
        assert torch.equal(*dense)
    model.load_state_dict(plain.state_dict())
    with pytest.raises(lamina.UsageError, match=r"g\.adjacency is sparse,"):
        lamina.save_checkpoint("nowhere", tag="x", model=model)
