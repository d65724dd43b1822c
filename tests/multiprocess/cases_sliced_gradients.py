# SPDX-License-Identifier: Apache-2.0
"""Gradients of slices, collectives of the script's own and torch.func: over two ranks."""

import contextlib

import pytest
import torch
from multiprocess.cases_sliced_weights import _OUTSIDE, _batch, _guarded, _sliced, _wholes
from torch import distributed, nn
from torch.optim.swa_utils import AveragedModel

import lamina
from lamina import dist
from lamina.errors import UsageError

_GRADIENT = r"up.weight is sliced, and this rank has \[8, 8\] of its gradient's \[16, 8\]; .*lamina.get_full_gradient"


def _backward(*models):
    for each in models:
        each(_batch()).pow(2).sum().backward()


def _gradients(model):
    return {name: lamina.get_full_gradient(each) for name, each in model.module.named_parameters()}


def case_what_takes_the_gradient_of_a_slice_for_the_whole_is_refused():
    plain, model = _sliced()
    lamina.get_world_process_group()
    _backward(plain, model)
    up = model.module.up.weight
    uses = (
        lambda: up.grad.norm(),
        lambda: torch.stack([each.grad.norm() for each in model.parameters()]).norm(),
        lambda: up.grad.pow(2).sum(),
        lambda: up.grad.data.abs().max(),
        lambda: up.grad.detach().mean(),
        lambda: torch.stack(torch._foreach_norm([each.grad for each in model.parameters()])),
        lambda: torch.linalg.vector_norm(up.grad),
        lambda: nn.utils.parameters_to_vector([up.grad]).norm(),
        lambda: up.grad[0],
        lambda: up.grad.chunk(2),
        lambda: up.grad.view(-1)[4],
        lambda: up.grad @ up.grad.T,
        lambda: torch.isfinite(up.grad).all(),
        lambda: up.grad.isnan().any(),
        lambda: distributed.all_reduce(up.grad),
    )
    for use in uses:
        with pytest.raises(UsageError, match=_GRADIENT):
            use()
    assert "its gradient's" in str(up.grad)
    for name, value in _gradients(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).grad)
    assert torch.equal(lamina.get_full_gradient(up), lamina.get_full_parameter(up.grad))


def case_gradients_that_libraries_measure_are_refused():
    plain, model = _sliced()
    _backward(plain, model)
    norms = "[each.grad.norm() for each in parameters]"
    elements = "[each.grad.mul_(0.5) for each in parameters if each.grad is not None]"
    for library in ("accelerate.utils.other", "transformers.trainer", "pytorch_lightning.utilities.grads", "lightning"):
        for net, tells in ((plain, False), (model.module, True)):
            known = {"__name__": library, "parameters": list(net.parameters())}
            exec(f"found = {elements}", known)
            with pytest.raises(UsageError, match=_GRADIENT) if tells else contextlib.nullcontext():
                exec(f"found = {norms}", known)
    for name, value in _gradients(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).grad)


def case_what_takes_elements_of_gradients_is_right():
    plain, model = _sliced()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for each in (plain, model)]
    for foreach in (True, False, None):
        _backward(plain, model)
        kept = {}
        for root in (plain, model):
            for name, each in root.named_parameters():
                each.grad.mul_(2).clamp_(-3, 3)
                assert "up.w" not in name or each.grad[..., 0].shape[0] == each.shape[0]
                each.grad = each.grad + 0.1 * each.detach()  # a penalty by hand
            kept[root] = [each.grad.clone() for each in root.parameters()]  # which stays
            torch._foreach_mul_([each.grad for each in root.parameters()], 0.5)
        norms = [nn.utils.get_total_norm([each.grad for each in root.parameters()]) for root in (plain, model)]
        torch.testing.assert_close(*norms)
        norms = [nn.utils.clip_grad_norm_(root.parameters(), 0.7, foreach=foreach) for root in (plain, model)]
        torch.testing.assert_close(*norms)
        torch.testing.assert_close(model.grad_norm(), nn.utils.get_total_norm([e.grad for e in plain.parameters()]))
        for root in (plain, model):
            nn.utils.clip_grad_value_(root.parameters(), 0.1)
        for root, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=foreach is None)
            assert len(kept[root]) == 4
    for name, value in _wholes(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name))
    assert not any(_guarded(value) for state in optimizers[1].state.values() for value in state.values())


def case_updates_read_gradients_that_a_script_has_read():
    for make in (
        lambda own: torch.optim.AdamW(own, lr=0.01, fused=True),
        lambda own: torch.optim.AdamW(own, lr=0.01, foreach=True),
        lambda own: torch.optim.Adagrad(own, lr=0.01),
        lambda own: torch.optim.RMSprop(own, lr=0.01, momentum=0.5),
        lambda own: lamina.optim.AdamW(own, lr=0.01),
        lambda own: lamina.optim.LAMB(own, lr=0.01),
    ):
        plain, model = _sliced()
        optimizers = [make(list(plain.parameters())), lamina.DistributedOptimizer(make(list(model.parameters())))]
        averages = [AveragedModel(plain), AveragedModel(model.module)]
        for _ in range(3):
            for root, optimizer, average in zip((plain, model), optimizers, averages, strict=True):
                _backward(root)
                assert all(each.grad is not None for each in root.parameters())
                _backward(root)  # into what the script has read
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                average.update_parameters(plain if root is plain else model.module)
        for name, value in _wholes(model).items():
            torch.testing.assert_close(value, plain.get_parameter(name))
        lamina.shutdown()


def case_a_scaler_reads_gradients_of_slices():
    plain, model = _sliced()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for root, optimizer in zip((plain, model), optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8)
        for step in range(3):
            scaler.scale(root(_batch()).pow(2).sum()).backward()
            assert next(root.parameters()).grad is not None
            if step == 1 and (root is plain or lamina.tp_rank() == 1):
                with torch.no_grad():
                    next(root.parameters()).grad.fill_(float("inf"))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 4
    for name, value in _wholes(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name))


def case_hooks_and_asked_gradients_of_slices_are_judged():
    plain, model = _sliced()
    up, told = model.module.up.weight, []

    def takes_whole(gradient):
        with pytest.raises(UsageError, match=_GRADIENT):
            gradient / gradient.norm()
        told.append(1)

    def takes_whole_after(parameter):
        with pytest.raises(UsageError, match=_GRADIENT):
            parameter.grad.norm()
        told.append(2)

    hooks = [up.register_hook(takes_whole), up.register_post_accumulate_grad_hook(takes_whole_after)]
    _backward(model)
    assert told == [1, 2]
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    for net in (plain, model.module):
        net.up.weight.register_hook(lambda gradient: gradient * 2)
        net.down.weight.register_hook(lambda gradient: gradient.clamp_(-1, 1))
    _backward(plain, model)
    for name, value in _gradients(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).grad)
    (gradient,) = torch.autograd.grad(model(_batch()).pow(2).sum(), [up])
    with pytest.raises(UsageError, match=_GRADIENT):
        gradient.norm()
    (whole,) = torch.autograd.grad(plain(_batch()).pow(2).sum(), [plain.up.weight])
    torch.testing.assert_close(lamina.get_full_parameter(gradient), whole)


def case_collectives_of_slices_are_refused():
    _, model = _sliced()
    lamina.get_world_process_group()
    up, norm = model.module.up.weight, nn.Parameter(torch.full((2,), float(lamina.rank())))
    for use in (
        lambda: distributed.all_reduce(up),
        lambda: distributed.all_reduce(up.data),
        lambda: distributed.broadcast(up.detach(), 0),
        lambda: distributed.all_gather([torch.empty(8, 8).double() for _ in range(2)], up.detach()),
        lambda: distributed.all_gather_into_tensor(torch.empty(16, 8).double(), up.detach()),
        lambda: distributed.all_reduce(up.detach().clone(), async_op=True),
        lambda: dist.all_reduce(up.detach()),
        lambda: dist.broadcast(up.data, 0),
    ):
        with pytest.raises(UsageError, match=r"up.weight is sliced, and this rank has \[8, 8\] of its \[16, 8\]"):
            use()
    with torch.no_grad():
        distributed.all_reduce(norm)
        distributed.broadcast(model.module.down.bias, 0)  # whole on each rank
    assert norm.tolist() == [1, 1]


def case_transforms_of_slices_are_refused():
    plain, model = _sliced()
    net, values = model.module, dict(model.module.named_parameters())
    called = torch.func.functional_call(net, values, (_batch(),))
    torch.testing.assert_close(called, plain(_batch()))

    def loss(given):
        return torch.func.functional_call(net, given, (_batch(),)).pow(2).sum()

    ones = {name: torch.ones_like(each) for name, each in values.items()}
    for use in (
        lambda: torch.func.grad(loss)(values),
        lambda: torch.func.vjp(loss, values),
        lambda: torch.func.jvp(loss, (values,), (ones,)),
        lambda: torch.func.vmap(net)(torch.ones(3, 4, _OUTSIDE).double()),
        lambda: torch.func.jacrev(net)(_batch()),
    ):
        with pytest.raises(
            UsageError, match=r"a sliced Linear was called inside a transform of torch.func|is sliced, and this rank"
        ):
            use()
    one, up = torch.ones((), dtype=torch.double), net.up.weight
    for use in (
        lambda: torch.func.grad(lambda a: (a * up).sum())(one),
        lambda: torch.func.grad(lambda a: (up + a).pow(2).sum())(one),
        lambda: torch.func.grad(lambda a: (a * up.detach()).sum())(one),
        lambda: torch.func.grad(lambda weight: weight.pow(2).sum())(up),
        lambda: torch.func.grad(torch.func.grad(lambda a: (a.pow(3) * up).sum()))(one),
        lambda: torch.func.hessian(lambda a: (a * a * up).sum())(one),
        lambda: torch.func.jvp(lambda weight: weight.sum(), (up,), (torch.ones_like(up),)),
        lambda: torch.vmap(lambda a: (a * up).sum())(torch.arange(3.0).double()),
        lambda: torch.vmap(lambda column: column.sum(), in_dims=1)(up),
        lambda: torch.vmap(lambda a: (a * up)[0])(torch.arange(3.0).double()),
    ):
        with torch.enable_grad(), pytest.raises(UsageError, match=r"up.weight is sliced, and this rank has"):
            use()
    doubled = torch.vmap(lambda row: row * 2, in_dims=1, out_dims=1)(up)
    torch.testing.assert_close(lamina.get_full_parameter(doubled), plain.up.weight.detach() * 2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(_batch(), _batch())
        with pytest.raises((UsageError, NotImplementedError, RuntimeError)):
            torch.autograd.forward_ad.unpack_dual(model(dual))
    _backward(plain, model)
    for name, value in _gradients(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).grad)
