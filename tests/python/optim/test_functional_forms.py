# SPDX-License-Identifier: Apache-2.0
"""Functional forms of optimizers: the registry, and what is made of its entries."""

import shutil
import warnings

import pytest
import torch
from launch.launcher_harness import built
from python.optim.test_optim import TORCHS, agree, looks_during, parameters
from torch import Tensor

import lamina
from lamina import _lamina, optim
from lamina.optim.local_optimizer import CompiledOptimizer, EagerOptimizer, EngineOptimizer, local_optimizer
from lamina.optim.registry import functional_forms, needs_of

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _entries():
    """The registry is the process's: what a test registers is taken back."""
    forms = functional_forms()
    before = dict(forms)
    yield
    forms.clear()
    forms.update(before)


def qhm_update(
    params: list[Tensor],
    dp_list: list[Tensor],
    momentum_buffer_list: list[Tensor],
    lr: float,
    nu: float,
    weight_decay: float,
    weight_decay_type: str,
    momentum: float,
):
    for p, d_p, momentum_buffer in zip(params, dp_list, momentum_buffer_list):  # noqa: B905
        if weight_decay != 0:
            if weight_decay_type == "grad":
                d_p.add_(p, alpha=weight_decay)
            elif weight_decay_type == "direct":
                p.mul_(1.0 - lr * weight_decay)
            else:
                raise ValueError("Invalid weight decay type provided")
        momentum_buffer.mul_(momentum).add_(d_p, alpha=1.0 - momentum)
        p.data.add_(momentum_buffer, alpha=-lr * nu)
        p.data.add_(d_p, alpha=-lr * (1.0 - nu))


class FunctionalQHM:
    """A class as tutorials have it, that makes its momentum anew in each step."""

    def __init__(
        self,
        params: list[Tensor],
        lr: float,
        momentum: float,
        nu: float,
        weight_decay: float = 0.0,
        weight_decay_type: str = "grad",
    ):
        if lr < 0.0:
            raise ValueError("Invalid learning rate: {}".format(lr))  # noqa: UP032
        self.defaults = {"lr": lr, "momentum": momentum, "nu": nu, "weight_decay": weight_decay}
        self.weight_decay_type = weight_decay_type
        self.param_group = {"params": params}
        self.state = torch.jit.annotate(dict[torch.Tensor, dict[str, torch.Tensor]], {})

    def step(self, gradients: list[Tensor | None]):
        params = self.param_group["params"]
        params_with_grad = []
        grads = []
        momentum_buffer_list: list[Tensor] = []
        if len(params) != len(gradients):
            raise ValueError("the gradients passed in does not equal to the size of the parameters!")
        for param, gradient in zip(self.param_group["params"], gradients):  # noqa: B905
            if gradient is not None:
                params_with_grad.append(param)
                grads.append(gradient)
                if param not in self.state:
                    self.state[param] = {}
                state = self.state[param]
                state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                momentum_buffer_list.append(state["momentum_buffer"])
        with torch.no_grad():
            qhm_update(
                params_with_grad,
                grads,
                momentum_buffer_list,
                self.defaults["lr"],
                self.defaults["nu"],
                self.defaults["weight_decay"],
                self.weight_decay_type,
                self.defaults["momentum"],
            )


class NotForJit(FunctionalQHM):
    """torch.jit knows no classes that inherit."""

    def step(self, gradients):
        super().step([gradient for gradient in gradients])


class OwnQHM(torch.optim.Optimizer):
    """A user's class, of which a remote owner needs the name alone."""

    def __init__(self, params, lr, momentum, nu):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nu": nu})


def test_a_users_class_runs_as_it_is_written():
    optim.DistributedOptimizer.functional_optim_map[OwnQHM] = FunctionalQHM
    own = parameters(torch.float32, shapes=[(3, 4), (5,)])
    start = [each.detach().clone() for each in own]
    made = local_optimizer(OwnQHM, own, 0.1, momentum=0.9, nu=0.7)
    for _ in range(2):
        made.step([torch.ones(3, 4), None])
    moved = 2 * 0.1 * (0.7 * 0.1 + 0.3)  # a momentum that lived would be larger in the second step
    torch.testing.assert_close(own[0].detach(), start[0] - moved)
    assert torch.equal(own[1].detach(), start[1])
    assert isinstance(made, CompiledOptimizer) and made.module is not None
    torch.testing.assert_close(made.state[own[0]]["momentum_buffer"], torch.full((3, 4), 0.1))
    with pytest.raises(ValueError, match=r"Params length: 2\. Gradients length: 1"):
        made.step([None])
    with pytest.raises(Exception, match=r"Invalid learning rate: -1\.0"):
        local_optimizer(OwnQHM, own, -1.0, momentum=0.9, nu=0.7)


def test_a_compiled_form_releases_the_gil():
    optim.register_functional_optimizer(OwnQHM, FunctionalQHM)
    (own,) = parameters(torch.float32, shapes=[(1 << 24,)])
    made = local_optimizer(OwnQHM, [own], 1e-3, momentum=0.9, nu=0.7)
    gradient = torch.ones_like(own)
    assert looks_during(lambda: made.step([gradient]))


def test_what_torch_jit_cannot_compile_runs_and_says_so_once():
    optim.register_functional_optimizer(OwnQHM, NotForJit)
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = [local_optimizer(OwnQHM, each, 0.1, momentum=0.9, nu=0.7) for each in (ours, ours)]
    said = [str(each.message) for each in said if "GIL" in str(each.message)]
    assert len(said) == 1 and "OwnQHM has the functional form NotForJit" in said[0]
    assert made[0].module is None
    gradients = [torch.ones_like(each) for each in ours]
    made[0].step([gradient.clone() for gradient in gradients])
    FunctionalQHM(theirs, 0.1, 0.9, 0.7).step(gradients)
    agree(ours, theirs, 0)
    assert "momentum_buffer" in made[0].state[ours[0]]


def test_the_map_and_the_function_are_one_registry_in_which_the_user_wins():
    mapping = optim.DistributedOptimizer.functional_optim_map
    own = parameters(shapes=[(2,)])
    assert isinstance(local_optimizer(torch.optim.SGD, own, lr=0.1), EngineOptimizer)
    optim.register_functional_optimizer(torch.optim.SGD, FunctionalQHM)
    assert mapping[torch.optim.SGD] is FunctionalQHM
    assert isinstance(local_optimizer(torch.optim.SGD, own, 0.1, 0.9, 0.7), CompiledOptimizer)
    mapping[optim.QHM] = FunctionalQHM
    assert isinstance(local_optimizer(optim.QHM, own, 0.1, 0.9, 0.7), CompiledOptimizer)
    for key, value in ((FunctionalQHM, FunctionalQHM), (torch.optim.SGD, "SGD")):
        with pytest.raises(lamina.UsageError, match="functional_optim_map"):
            mapping[key] = value
    for wrong in ({}, {"needs": "norms"}, {"form": FunctionalQHM, "needs": "all"}):
        with pytest.raises(lamina.UsageError, match="needs="):
            optim.register_functional_optimizer(torch.optim.SGD, **wrong)


def test_needs_are_those_of_the_engines_forms():
    assert {needs_of(getattr(torch.optim, name)) for name, _ in TORCHS} == {"elements"}
    assert needs_of(optim.LAMB) == needs_of(optim.NovoGrad) == "norms"
    assert needs_of(torch.optim.Adafactor) == needs_of(torch.optim.Muon) == "whole"
    assert needs_of(torch.optim.SparseAdam) is None


@pytest.mark.parametrize(
    ("name", "keys"), [*TORCHS, ("LAMB", {}), ("NovoGrad", {}), ("QHM", {"momentum": 0.9, "nu": 1})]
)
def test_given_gradients_do_what_own_ones_do(name, keys):
    ours, theirs = parameters(), parameters()
    keys = {"lr": 0.01, **keys}
    made = local_optimizer(getattr(torch.optim, name, getattr(optim, name)), ours, **keys)
    other = getattr(optim, name)(theirs, **keys)
    for number in range(5):
        for place, each in enumerate(theirs):
            each.grad = None if place == number else torch.full_like(each, 0.1 * number + place)
        other.step()
        made.step([each.grad for each in theirs])
    assert all(each.grad is None for each in ours)
    agree(ours, theirs, 0)
    assert made.state[ours[0]].keys() == other.state[theirs[0]].keys()
    with pytest.raises(ValueError, match=r"Params length: 4\. Gradients length: 5"):
        made.step([None] * 5)


@pytest.mark.parametrize("keys", [{"capturable": False, "foreach": True}, {"differentiable": True}])
def test_what_the_engine_does_not_update_is_torchs_business(keys):
    ours, theirs = parameters(), parameters()
    made, other = local_optimizer(torch.optim.AdamW, ours, **keys), torch.optim.AdamW(theirs)
    for each in theirs:
        each.grad = torch.ones_like(each)
    other.step()
    if "differentiable" in keys:  # of leaves torch differentiates nothing, and says so
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            made.step([each.grad for each in theirs])
    else:
        made.step([each.grad for each in theirs])
        agree(ours, theirs)
    twice = torch.ones(3, requires_grad=True)
    with pytest.raises(lamina.UsageError, match="LAMB updates parameters that are each listed once"):
        optim.LAMB([{"params": [twice, twice]}]).step()


def test_gradients_that_do_not_fit_are_refused():
    own = parameters(shapes=[(3, 2)])
    made = local_optimizer(torch.optim.AdamW, own)
    for gradient, words in (
        (torch.ones(2, 3), "a gradient of shape"),
        (torch.ones(3, 2).to_sparse(), "does not support sparse"),
        (torch.ones(3, 2, dtype=torch.int64), "of type Long"),
        (torch.ones(3, 2, device="meta"), "on meta for a parameter on cpu"),
    ):
        with pytest.raises(lamina.UsageError, match=words):
            made.step([gradient])
    agree(own, parameters(shapes=[(3, 2)]), 0)


def test_an_empty_list_is_torchs_error_unless_it_is_allowed():
    with pytest.raises(ValueError, match="empty parameter list"):
        local_optimizer(torch.optim.AdamW, [])
    local_optimizer(torch.optim.AdamW, [], _allow_empty_param_list=True).step([])


def test_a_class_without_a_form_runs_as_it_is():
    ours, theirs = parameters(), parameters()
    with pytest.warns(UserWarning, match=r"ASGD has no functional form; .*register_functional_optimizer.*the GIL"):
        made = local_optimizer(torch.optim.ASGD, ours, lr=0.1)
    other = torch.optim.ASGD(theirs, lr=0.1)
    ours[0].grad = kept = torch.zeros_like(ours[0])
    for each in theirs[:3]:
        each.grad = torch.ones_like(each)
    other.step()
    made.step([*(each.grad for each in theirs[:3]), None])
    agree(ours, theirs, 0)
    assert ours[0].grad is kept and isinstance(made, EagerOptimizer)
    with pytest.raises(lamina.UsageError, match="LBFGS computes the loss again"):
        local_optimizer(torch.optim.LBFGS, ours)


def test_a_shared_library_may_be_the_form():
    """A step of lr times the parameter's norm: see tests/optim/trust_plugin.cc."""

    class Trust(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

    optim.register_functional_optimizer(Trust, str(built("*/libtrust_plugin.so")))
    assert needs_of(Trust) == "norms"
    own = torch.full((10, 6), 3.0, requires_grad=True)
    made = local_optimizer(Trust, [own], lr=0.5)
    for number in range(2):
        made.step([torch.full((10, 6), 0.25 * (number + 1))])
    torch.testing.assert_close(own.detach(), torch.full((10, 6), 0.75))
    with pytest.raises(lamina.UsageError, match=r"no optimizer in /nowhere\.so"):
        optim.register_functional_optimizer(Trust, "/nowhere.so")


def test_a_shared_library_takes_no_other_ones_place(tmp_path):
    other = tmp_path / "other.so"
    trust = built("*/libtrust_plugin.so")
    shutil.copy(trust, other)
    names = [_lamina.load_functional(str(path)) for path in (trust, other, trust, other)]
    assert names == 2 * ["Trust", f"Trust of {other}"]


def test_a_shared_library_that_is_not_this_classs_form_is_an_error():
    class Paced(torch.optim.Optimizer):
        def __init__(self, params, pace):
            super().__init__(params, {"pace": pace})

    trust = built("*/libtrust_plugin.so")
    optim.register_functional_optimizer(Paced, trust)  # again, and for another class
    own = torch.ones(3, requires_grad=True)
    with pytest.raises(lamina.UsageError, match="Trust needs a value of lr, which groups of Paced have not"):
        local_optimizer(Paced, [own], pace=0.5).step([torch.ones(3)])
    assert own.eq(1).all()
    with pytest.raises(lamina.UsageError, match=r"not a class of torch\.optim\.Optimizer"):
        optim.register_functional_optimizer(torch.nn.Linear, needs="whole")
