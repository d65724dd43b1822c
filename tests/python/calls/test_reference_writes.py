# SPDX-License-Identifier: Apache-2.0
"""A reference that is written, viewed or given as `out=` is from then on an ordinary tensor, with its history.

Each case runs once with a reference and once with a plain tensor of the same value.
"""

import pytest
import torch
import torch.nn.functional as F
from python.calls.references import pending, plain, same

from lamina._lamina import is_pending

VALUE = torch.arange(1.0, 7.0).view(2, 3)


def set_item(h):
    h[:, 1] = 0


def set_masked(h):
    h[h > 3] = 0


def set_data(h):
    h.data = torch.ones(2, 3)


def augmented(h):
    h += 1
    h *= 2


def set_real(h):
    h.real = torch.ones(2, 3)


WRITES = {
    "add_": lambda h: h.add_(1),
    "+=": augmented,
    "h[:, 1] = 0": set_item,
    "h[mask] = 0": set_masked,
    "view": lambda h: h.view(-1).mul_(5),
    "transposed view": lambda h: h.t().add_(torch.ones(3, 2)),
    "element": lambda h: h[0, 0].fill_(9),
    "exp_": lambda h: h.exp_(),
    "relu_": lambda h: h.relu_(),
    "dropout": lambda h: F.dropout(h, 0.0, True, inplace=True),
    "copy_": lambda h: h.copy_(torch.ones(2, 3)),
    "zero_": lambda h: h.zero_(),
    "masked_fill_": lambda h: h.masked_fill_(h > 3, 0),
    "index_put_": lambda h: h.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "index_add_": lambda h: h.index_add_(0, torch.tensor([1]), torch.ones(1, 3)),
    "scatter_": lambda h: h.scatter_(0, torch.tensor([[1, 0, 1]]), 4.0),
    "unsqueeze_": lambda h: h.unsqueeze_(0),
    "detach().mul_": lambda h: h.detach().mul_(3),
    "data.mul_": lambda h: h.data.mul_(3),
    "numpy": lambda h: h.detach().numpy().fill(9),
    "data =": set_data,
    "real =": set_real,
    "init": lambda h: torch.nn.init.constant_(h.detach(), 0.3),
}

WRITES_WITHOUT_GRAD = {
    "out": lambda h: torch.add(torch.ones(2, 3), torch.ones(2, 3), out=h),
    "out of several": lambda h: torch.max(torch.ones(1, 2, 3), dim=0, out=(h, torch.zeros(2, 3, dtype=torch.long))),
    "out of a sum with itself": lambda h: torch.add(h, h, out=h),
    "resize_": lambda h: h.resize_(3, 2),
    "set_": lambda h: h.set_(torch.ones(4)),
    "normal_": lambda h: h.normal_(generator=torch.Generator().manual_seed(1)),
    "foreach": lambda h: torch._foreach_add_([h, torch.ones(2)], 1.0),
}


def after(write, h):
    """Traces that a write leaves: the value, its version, its history, what it gave."""
    error = None
    try:
        write(h)
    except (RuntimeError, TypeError) as raised:
        error = str(raised).splitlines()[0]
    return (error, plain(h), h.shape, h._version, h.is_leaf, h.requires_grad, h._is_view())


@pytest.mark.parametrize("name", WRITES | WRITES_WITHOUT_GRAD)
def test_writing_does_what_it_does_to_a_plain_tensor(name):
    write = (WRITES | WRITES_WITHOUT_GRAD)[name]
    reference = pending(VALUE)
    assert same(after(write, reference), after(write, plain(VALUE)))
    with torch.no_grad():
        reference.sum()
    assert not is_pending(reference)


class Double(torch.autograd.Function):
    """Gives its result as `form` makes it: a reference or a plain tensor, with history."""

    @staticmethod
    def forward(ctx, x, form):
        return form(x * 2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


@pytest.mark.parametrize("name", WRITES)
def test_gradients_flow_through_a_write(name):
    results = []
    for form in (pending, plain):
        x = VALUE.clone().requires_grad_()
        h = Double.apply(x, form)
        assert is_pending(h) == (form is pending)
        result = after(WRITES[name], h)
        (h * torch.arange(6.0).view(h.shape)).sum().backward()
        results.append((result, x.grad))
    assert same(results[0], results[1])


@pytest.mark.parametrize("name", ["add_", "h[:, 1] = 0", "view", "relu_"])
def test_a_leaf_that_requires_grad_is_not_written(name):
    results = [after(WRITES[name], h.requires_grad_()) for h in (pending(VALUE), plain(VALUE))]
    assert results[0][0] is not None and same(results[0], results[1])


def test_views_of_an_alias_are_views_of_the_reference():
    reference = pending(VALUE)
    alias = reference.detach()
    row = alias[0]
    row.zero_()
    assert is_pending(reference)
    reference[1].fill_(8)
    assert alias.tolist() == reference.tolist() == [[0.0] * 3, [8.0] * 3]
    assert reference._version == alias._version == 2


def test_a_version_error_names_a_reference_as_it_names_a_tensor():
    messages = []
    for h in (pending(VALUE), plain(VALUE)):
        product = h.requires_grad_() * 1
        square = product * product
        product.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            square.sum().backward()
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_a_parameter_made_of_a_reference_is_trained():
    parameter = torch.nn.Parameter(pending(VALUE))
    assert is_pending(parameter) and type(parameter) is torch.nn.Parameter
    (parameter * 2).sum().backward()
    torch.optim.SGD([parameter], lr=0.5).step()
    assert torch.equal(parameter, VALUE - 1)


def test_a_reference_may_be_a_gradient():
    parameter = torch.nn.Parameter(VALUE.clone())
    parameter.grad = pending(torch.ones(2, 3))
    assert is_pending(parameter.grad)
    torch.optim.AdamW([parameter], lr=0.5, weight_decay=0.0, eps=0.0).step()
    assert torch.allclose(parameter, VALUE - 0.5)
