# SPDX-License-Identifier: Apache-2.0
"""References given to what people use with PyTorch: checkpoints, scripts, transforms, compilers, modes, hooks."""

import copy
import warnings
from typing import ClassVar

import pytest
import torch
import torch.nn as nn
from python.calls.references import pending, pending_reference, plain, same
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lamina._lamina import is_pending

VALUE = torch.arange(6.0).view(2, 3)


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def both(use):
    """Returns what `use` gives for a reference, and for a plain tensor."""
    return use(pending(VALUE)), use(plain(VALUE))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_function_takes_one(use_reentrant):
    def use(h):
        module = linear()
        output = checkpoint(module, h.requires_grad_(), use_reentrant=use_reentrant)
        output.pow(2).sum().backward()
        return output.detach(), h.grad, module.weight.grad

    assert same(*both(use))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_function_gives_one(use_reentrant):
    def use(form):
        x = VALUE.clone().requires_grad_()
        output = checkpoint(lambda h: (h * 2).view_as(h) + form(VALUE), x, use_reentrant=use_reentrant)
        output.pow(2).sum().backward()
        return output.detach(), x.grad

    assert same(use(pending), use(plain))


def test_a_checkpoint_hands_an_unread_one_through():
    h = pending(VALUE)
    assert checkpoint(lambda h: h, h, use_reentrant=False) is h and is_pending(h)


def test_scripted_functions_take_lists_tuples_and_dicts_of_them():
    @torch.jit.script
    def use(a: dict[str, torch.Tensor], b: list[torch.Tensor], c: tuple[torch.Tensor, int]):
        return a["k"].size(0) + b[0].stride(0), a["k"] + b[0] * c[0]

    for _ in range(4):  # the profiling runs and the optimised one
        gave = use({"k": pending(VALUE)}, [pending(VALUE)], (pending(VALUE), 1))
        assert same(gave, use({"k": VALUE}, [VALUE], (VALUE, 1)))


def test_a_scripted_module_takes_one():
    scripted = torch.jit.script(nn.Sequential(linear(), nn.ReLU()))
    for _ in range(4):
        assert same(*both(scripted))


def test_tracing_with_one_traces_the_operations():
    traced = torch.jit.trace(lambda h: h * 2 + 1, (pending(VALUE),))
    assert torch.equal(traced(torch.ones(2, 3)), torch.full((2, 3), 3.0))


TRANSFORMS = {
    "vmap": lambda h: torch.func.vmap(lambda a: a * 2)(h),
    "vmap around one": lambda h: torch.func.vmap(lambda a: a * h)(torch.ones(4)),
    "vmap of what is detached": lambda h: torch.func.vmap(lambda a: a.detach() + a)(h),
    "grad": lambda h: torch.func.grad(lambda a: (a * a).sum())(h),
    "grad around one": lambda h: torch.func.grad(lambda a: (a * h).sum())(torch.ones(2, 3)),
    "jvp": lambda h: torch.func.jvp(lambda a: a * a, (h,), (torch.ones(2, 3),)),
    "jacrev": lambda h: torch.func.jacrev(lambda a: (a * a).sum(1))(h),
    "functionalize": lambda h: torch.func.functionalize(lambda a: a.clone().add_(1))(h),
    "functional_call": lambda h: torch.func.functional_call(
        linear(), {"weight": h.expand(2, 3), "bias": h[:, 0]}, (torch.ones(2, 3),)
    ),
    "hessian": lambda h: torch.autograd.functional.hessian(lambda a: (a**3).sum(), h),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_takes_one(name):
    assert same(*both(TRANSFORMS[name]))


def test_functional_call_trains_a_parameter_that_is_one():
    def use(h):
        output = torch.func.functional_call(linear(), {"weight": h.requires_grad_(), "bias": None}, (torch.ones(2, 3),))
        output.sum().backward()
        return output.detach(), h.grad

    assert same(*both(use))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_takes_one(backend):
    torch._dynamo.reset()

    def use(h):
        module = linear()
        output = torch.compile(module, backend=backend)(h)
        output.sum().backward()
        return output.detach(), module.weight.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same(*both(use))


def test_export_takes_one():
    exported = torch.export.export(linear(), (pending(VALUE),))
    assert same(*both(exported.module()))


def test_a_module_that_keeps_one_is_copied():
    modules = nn.ModuleList([linear()])
    modules[0].hidden = pending(VALUE)
    copied = copy.deepcopy(modules)
    assert copied[0].hidden is not modules[0].hidden
    assert torch.equal(copied[0].hidden, VALUE)
    copied[0].hidden.zero_()
    assert torch.equal(modules[0].hidden, VALUE)


def test_saved_tensor_hooks_are_given_it():
    def use(h):
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.clone()) or t, lambda t: t):
            output = h.requires_grad_() * h
        output.sum().backward()
        return packed, h.grad

    assert same(*both(use))


def test_saved_tensors_may_rest_elsewhere():
    def use(h):
        with torch.autograd.graph.save_on_cpu():
            output = h.requires_grad_() ** 3
        output.sum().backward()
        return h.grad

    assert same(*both(use))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_a_custom_function_saves_one():
    def use(h):
        Square.apply(h.requires_grad_()).sum().backward()
        return h.grad

    assert same(*both(use))


def test_a_custom_function_saves_an_unread_one():
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, kept):
            ctx.save_for_backward(kept)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0], None

    def use(h):
        x = torch.ones(2, 3, requires_grad=True)
        Keep.apply(x, h).sum().backward()
        return x.grad

    assert same(*both(use))


def test_dispatch_modes_see_the_operations_and_not_the_making_of_the_value():
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.operations = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert not any(is_pending(arg) for arg in args if isinstance(arg, torch.Tensor))
            self.operations.append(str(function))
            return function(*args, **(kwargs or {}))

    def use(h):
        with Seen() as seen:
            output = h.detach() + 1
            h.data_ptr()
        return output, seen.operations

    assert same(*both(use))


def test_function_modes_and_subclasses_take_one():
    class Nothing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Named(torch.Tensor):
        pass

    def use(h):
        with Nothing():
            output = h + 1
        return output, torch.ones(2, 3).as_subclass(Named) + h, h.as_subclass(Named) * 2

    assert same(*both(use))


def test_a_default_device_changes_nothing():
    def use(h):
        with torch.device("meta"):
            return h + 1

    assert same(*both(use))


def test_autocast_casts_it():
    def use(h):
        module = linear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = module(h.requires_grad_())
            again = module(h)
        (output + again).float().sum().backward()
        return output.detach(), h.grad, module.weight.grad

    assert same(*both(use))


def test_hooks_of_modules_are_given_it():
    def use(h):
        module, seen = linear(), []
        module.register_forward_pre_hook(lambda module, inputs: seen.append(is_pending(inputs[0])))
        module.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].sum().item()))
        module(h.requires_grad_()).sum().backward()
        return seen[1:], h.grad

    assert same(*both(use))


def test_the_profiler_records_shapes_of_one():
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profile:
        linear()(pending(VALUE)).sum().backward()
    assert any(event.name == "aten::linear" for event in profile.events())


class Remote(torch.autograd.Function):
    """Twice its input; the gradient of it is a reference. Notes which gradients reach it unread."""

    unread: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Remote.unread.append(is_pending(gradient))
        return pending_reference(gradient, lambda: gradient * 2, gradient=True)


def test_gradients_pass_through_a_diamond_unread():
    Remote.unread.clear()
    x = VALUE.clone().requires_grad_()
    a = Remote.apply(x)
    b, c = Remote.apply(a), Remote.apply(a)
    (b * VALUE + c).sum().backward()
    assert Remote.unread == [False, False, True]
    assert torch.equal(x.grad, (VALUE + 1) * 4)


def test_gradients_of_two_backwards_add_up():
    x = VALUE.clone().requires_grad_()
    loss = (Remote.apply(Remote.apply(x)) * VALUE).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, VALUE * 8)


def test_anomaly_detection_reads_every_gradient():
    Remote.unread.clear()
    x = VALUE.clone().requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        Remote.apply(Remote.apply(x)).sum().backward()
    assert not any(Remote.unread)
    assert torch.equal(x.grad, torch.full((2, 3), 4.0))


def test_a_gradient_that_cannot_come_is_raised_by_backward():
    class Broken(Remote):
        @staticmethod
        def backward(ctx, gradient):
            def take():
                raise ZeroDivisionError("on rank 1")

            return pending_reference(gradient, take, gradient=True)

    x = VALUE.clone().requires_grad_()
    with pytest.raises(ZeroDivisionError, match="on rank 1"):
        Broken.apply(x * 1).sum().backward()
