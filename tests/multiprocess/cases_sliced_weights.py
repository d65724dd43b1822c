# SPDX-License-Identifier: Apache-2.0
"""Slices outside of their layers: never taken for whole weights, over two ranks."""

import copy
import io
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lamina
from lamina.errors import DesyncError, UsageError

_INSIDE, _OUTSIDE = 16, 8
_SLICED = r"up.weight is sliced, and this rank has \[8, 8\] of its \[16, 8\]; .*lamina.get_full_parameter\(parameter\)"


class _Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(_OUTSIDE, _INSIDE), nn.Linear(_INSIDE, _OUTSIDE)

    def forward(self, x):
        return self.down(self.up(x).relu())


def _sliced():
    """A plain model, and the same one over two ranks."""
    lamina.init(tensor_parallel_degree=2, ddp=True, prescaled_batch=True, timeout_s=60)
    torch.manual_seed(0)
    plain = _Halves().double()
    net = copy.deepcopy(plain)
    lamina.set_tensor_parallelism(net, plan={"up": "colwise", "down": "rowwise"})
    return plain, lamina.distribute(net)


def _batch():
    return torch.randn(4, _OUTSIDE, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def _wholes(model):
    return {name: lamina.get_full_parameter(each) for name, each in model.module.named_parameters()}


def case_what_takes_a_slice_for_the_weight_is_refused():
    _, model = _sliced()
    up = model.module.up
    uses = (
        lambda: sum(each.norm() for each in model.parameters()),
        lambda: up.weight.pow(2).sum(),
        lambda: up.weight.detach().abs().mean(),
        lambda: up.weight.data.max().item(),
        lambda: torch.linalg.matrix_norm(up.weight, 2),
        lambda: up.weight @ up.weight.T,
        lambda: functional.linear(torch.ones(2, _OUTSIDE).double(), up.weight),
        lambda: torch.equal(up.weight, up.weight.clone()),
        lambda: torch.nn.utils.parameters_to_vector([up.weight]).norm(),
        lambda: torch.stack(torch._foreach_norm([up.weight])),
        lambda: copy.deepcopy(up).weight.sum(),
        lambda: (up.weight - torch.zeros(_INSIDE, _OUTSIDE).double()).pow(2).sum(),  # a whole that was kept
        lambda: up.weight.copy_(torch.zeros(_INSIDE, _OUTSIDE)),
    )
    for use in uses:
        with torch.no_grad(), pytest.raises(UsageError, match=_SLICED):
            use()
    with up.register_forward_hook(lambda module, *_: module.weight.sum()), pytest.raises(UsageError, match=_SLICED):
        model(_batch())
    assert "up.weight is sliced, and this rank has [8, 8] of its [16, 8]" in str(up.weight)
    model(_batch()).sum().backward()  # after all of that


def case_places_along_the_cut_are_refused():
    plain, model = _sliced()
    up, down = model.module.up.weight, model.module.down.weight  # of which rows, and columns, are elsewhere
    mask, first = torch.ones(_INSIDE // 2, _OUTSIDE, dtype=torch.bool), torch.tensor([0])
    uses = (
        lambda: up[0].fill_(0),
        lambda: up[:3].fill_(0),
        lambda: up[2, 1],
        lambda: up.__setitem__(0, 1.0),
        lambda: up.__setitem__((slice(0, 2), 0), 1.0),
        lambda: up.data[0].zero_(),
        lambda: up.chunk(2),
        lambda: up.split(4),
        lambda: up.tensor_split(2),
        lambda: up.unbind(),
        lambda: list(up),
        lambda: up.narrow(0, 0, 2),
        lambda: up.select(0, -1),
        lambda: up.diagonal(),
        lambda: up.fill_diagonal_(0),
        lambda: up[mask],
        lambda: up.__setitem__(mask, 0.0),
        lambda: up[first],
        lambda: up.index_select(0, first),
        lambda: up.index_fill_(0, first, 0),
        lambda: up.index_put_((first,), torch.zeros(1, _OUTSIDE).double()),
        lambda: up.gather(0, first.expand(1, _OUTSIDE)),
        lambda: up.view(2, 4, _OUTSIDE)[0],
        lambda: up.view(-1)[3],
        lambda: up.view(-1)[:3],
        lambda: up.T.flatten()[::16],
        lambda: up[: _INSIDE // 2, 0],  # all that is here, which torch takes no range of
        lambda: up[None, ..., : _INSIDE - 1, :2],
        lambda: up.view(2, 4, _OUTSIDE)[:2, :, 0],
        lambda: up.__setitem__((slice(0, _INSIDE // 2), 0), 1.0),
        lambda: up.__setitem__(slice(0, _INSIDE // 2), 1.0),
        lambda: up.T[:, 0],
        lambda: (up * 2)[0],
        lambda: up + up.T,
        lambda: up.roll(1, 0),
        lambda: up.triu(),
    )
    for use in uses:
        with torch.no_grad(), pytest.raises(UsageError, match=_SLICED):
            use()
    biases = (lambda bias: bias[:3], lambda bias: bias[-2:], lambda bias: bias[: _INSIDE // 2].zero_())
    for use in biases:
        with torch.no_grad(), pytest.raises(UsageError, match=r"up\.bias is sliced, and this rank has"):
            use(model.module.up.bias)
    for use in (lambda: down[:, 0].zero_(), lambda: down.chunk(2, 1), lambda: down.T[0], lambda: up + down):
        with torch.no_grad(), pytest.raises(UsageError, match="is sliced, and this rank has"):
            use()
    for name, value in _wholes(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name


def case_places_along_other_dimensions_are_right():
    plain, model = _sliced()
    for net in (plain, model.module):
        up, down = net.up.weight, net.down.weight
        with torch.no_grad():
            up[:, 0] = 1.0
            up[..., -1].fill_(2)
            up[:, 2:4].mul_(3)
            up.T[1].zero_()
            up.data[:, 5] = up[:, 6]
            up.chunk(2, 1)[1].add_(1)
            up.select(1, 3).copy_(up.unbind(1)[2])
            up[:].clamp_(max=5)
            up[:_INSIDE, 7] = up[0:, 6]
            up[:, :_OUTSIDE, None].mul_(2)
            net.up.bias[:] += 1
            down[0].fill_(0)
            down[1, :] = 4
            for row in down:
                row.div_(2)
            net.up.bias[...] = 1
    for name, value in _wholes(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name
    assert "is sliced" in str(model.module.up.weight[:, 0]) and len(model.module.up.weight) == _INSIDE // 2
    assert "is sliced" in repr(copy.deepcopy(model.module.up).weight == 0)


def case_places_of_joined_weights_are_those_of_parts():
    plain, model = _sliced()
    for net in (plain, model.module):
        parameters = list(net.parameters())
        vector = nn.utils.parameters_to_vector(parameters) * 2
        parts = vector.split([each.numel() for each in parameters])
        with torch.no_grad():
            for each, part in zip(parameters, parts, strict=True):
                each.copy_(part.view_as(each))
            flat = torch._utils._flatten_dense_tensors(parameters)
            for each, part in zip(parameters, torch._utils._unflatten_dense_tensors(flat, parameters), strict=True):
                each.add_(part)
            twice = torch.stack([net.up.weight, net.up.weight + 1])
            net.up.weight.copy_(twice[1])
            net.up.weight[:, 0] = torch.cat([net.up.weight, twice[0]], 1)[:, 9]
    for name, value in _wholes(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name))
    torch.testing.assert_close(parts[3], 2 * parameters[3].detach() / 4)  # the last bias is whole, and no slice
    up, down = model.module.up.weight, model.module.down.weight
    for use in (
        lambda: vector[3],
        lambda: vector[:3],
        lambda: vector[-3:],
        lambda: vector.chunk(3),
        lambda: torch.cat([up, down.T])[0],
        lambda: torch.cat([up, up])[:2],
        lambda: torch.stack([up, up])[:, 0],
        lambda: torch.stack([model.module.up.bias] * 2)[0, 1],
    ):
        with pytest.raises(UsageError, match=r"is sliced, and this rank has"):
            use()


def case_values_that_are_read_without_an_operation_are_refused():
    _, model = _sliced()
    up = model.module.up
    model(_batch()).sum().backward()
    for use in (
        lambda: up.weight.detach().numpy(),
        lambda: np.asarray(up.weight.detach()),
        lambda: np.array(up.weight.grad),
        lambda: up.weight.tolist(),
        lambda: up.bias.data.tolist(),
        lambda: up.weight.grad.tolist(),
        lambda: pickle.dumps(up.weight),
        lambda: pickle.dumps(up.weight.data),
        lambda: torch.save({"up": up.weight.detach()}, io.BytesIO()),
        lambda: torch.save(up.state_dict(), io.BytesIO()),
        lambda: safetensors.torch.save(up.state_dict()),
        lambda: torch.from_dlpack(up.weight.detach()),
        lambda: up.bias[:].tolist(),
    ):
        with pytest.raises(UsageError, match=r"up.(weight|bias) is sliced, and this rank has"):
            use()
    for state in (model.state_dict(), model.local_state_dict()):
        saved = io.BytesIO()
        torch.save(state, saved)
        saved.seek(0)
        loaded = torch.load(saved)
        assert safetensors.torch.save({"up": state["up.weight"]})
        assert all(torch.equal(loaded[name], value) for name, value in state.items() if name != "_smp_is_partial")
        assert state["up.weight"].numpy().shape == (len(state["up.bias"]), _OUTSIDE)
    assert up.weight.new_tensor([1.0, 2.0]).sum() == up.weight.new([3.0]).item()
    assert up.weight.detach().new_tensor([1]).dtype == torch.double
    lamina.shutdown()
    assert "numpy" not in vars(torch.Tensor) and "__getitem__" not in vars(torch.Tensor)


def case_initial_values_are_those_of_whole_layers_or_refused():
    plain, model = _sliced()
    up, down = model.module.up, model.module.down
    for init in (nn.init.xavier_uniform_, nn.init.normal_, nn.init.orthogonal_, nn.init.kaiming_normal_):
        with pytest.raises(UsageError, match=r"is sliced.*write_back=True"):
            init(up.weight)
    with pytest.raises(UsageError, match=r"is sliced.*before the model is wrapped"):
        up.reset_parameters()
    torch.manual_seed(2)
    with lamina.gathered_parameters([down.weight, up.weight], write_back=True):
        nn.init.xavier_uniform_(down.weight)
        nn.init.orthogonal_(up.weight)
    torch.manual_seed(2)
    nn.init.xavier_uniform_(plain.down.weight)
    nn.init.orthogonal_(plain.up.weight)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    nn.init.ones_(up.weight)
    assert lamina.get_full_parameter(up.weight).sum() == _INSIDE * _OUTSIDE


def case_whole_values_are_read_and_written():
    plain, model = _sliced()
    named, up = dict(model.module.named_parameters()), model.module.up
    for name, value in _wholes(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name
    with lamina.gathered_parameters(model.parameters()), torch.no_grad():
        assert all(torch.equal(each, plain.get_parameter(name)) for name, each in named.items())
        norm = sum(each.norm() for each in model.parameters())
    assert torch.equal(norm, sum(each.norm() for each in plain.parameters()))
    for each in (model, plain):
        each(_batch()).pow(2).sum().backward()
    for name, each in named.items():
        torch.testing.assert_close(lamina.get_full_gradient(each), plain.get_parameter(name).grad)
    before = _wholes(model)
    changed = pytest.raises(UsageError, match=r"up.weight was changed.*write_back=True")
    with torch.no_grad(), changed, lamina.gathered_parameters(up.weight):
        up.weight.zero_()
    apart = pytest.raises(DesyncError, match=r"different values to up.weight")
    with torch.no_grad(), apart, lamina.gathered_parameters(up.weight, write_back=True):
        up.weight.fill_(lamina.tp_rank())
    assert all(torch.equal(value, before[name]) for name, value in _wholes(model).items())
    with torch.no_grad(), lamina.gathered_parameters(up.weight, modifier_rank=1):
        up.weight.fill_(lamina.tp_rank() + 2)
    assert torch.equal(lamina.get_full_parameter(up.weight), torch.full((_INSIDE, _OUTSIDE), 3.0).double())
    with pytest.raises(UsageError, match=_SLICED):
        up.weight.sum()


def case_changes_of_elements_are_right():
    plain, model = _sliced()
    torch.optim.SGD(model.parameters(), lr=0.1)
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for each in (plain, model.module)]
    kept = [[parameter.detach().clone() for parameter in each.parameters()] for each in (plain, model.module)]
    for root, average, old in zip((plain, model), averages, kept, strict=True):
        optimizer = torch.optim.SGD(root.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            root(_batch()).pow(2).sum().backward()
            optimizer.step()
            average.update_parameters(plain if root is plain else model.module)
        with torch.no_grad():
            for parameter, before in zip(root.parameters(), old, strict=True):
                parameter.data.clamp_(-0.2, 0.2)
                parameter.lerp_(before, 0.25)
            vector = torch.nn.utils.parameters_to_vector(root.parameters())
            torch.nn.utils.vector_to_parameters(vector * 2, root.parameters())
    for name, value in _wholes(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name))
    assert not any(_guarded(value) for state in optimizer.state.values() for value in state.values())
    ours = {name: lamina.get_full_parameter(each) for name, each in averages[1].module.named_parameters()}
    for name, value in averages[0].module.named_parameters():
        torch.testing.assert_close(ours[name], value.detach())


def _guarded(value):
    return isinstance(value, torch.Tensor) and "is sliced" in str(value)


def case_weights_that_are_computed_are_not_cut():
    lamina.init(tensor_parallel_degree=2, ddp=True, prescaled_batch=True, timeout_s=60)

    class LowRank(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(_INSIDE, 2)), nn.Parameter(torch.ones(2, _OUTSIDE))

        def forward(self, weight):
            return weight + self.a @ self.b

    def low_rank(layer):
        nn.utils.parametrize.register_parametrization(layer, "weight", LowRank())
        return layer

    def pruned_bias(layer):
        return prune.l1_unstructured(layer, "bias", 2)

    forms = (
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 5),
        pruned_bias,
        low_rank,
    )
    for form in forms:
        net = _Halves()
        net.up = form(net.up)
        lamina.set_tensor_parallelism(net, plan={"up": "colwise", "down": "rowwise"})
        with pytest.raises(UsageError, match=r"up is to be sliced, and computes its (weight|bias) from"):
            lamina.distribute(net)


def case_a_sliced_weight_that_is_computed_later_is_refused():
    for form in (
        lambda layer: prune.custom_from_mask(layer, "weight", torch.ones(8, _OUTSIDE)),
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh()),
    ):
        _, model = _sliced()
        with pytest.raises(
            UsageError, match=r"the weight of a sliced .* is no parameter of it any more|is sliced, and"
        ):
            form(model.module.up)
            model(_batch())
        lamina.shutdown()


def case_words_that_no_rank_has_are_an_error_on_all():
    lamina.init(tensor_parallel_degree=2, ddp=True, prescaled_batch=True, timeout_s=60)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(21, _OUTSIDE, padding_idx=-2), nn.Linear(_OUTSIDE, 4))
    plain = copy.deepcopy(net)
    lamina.set_tensor_parallelism(net, plan={"0": "embedding_rowwise"})
    model = lamina.distribute(net)
    for words in ([21], [-1], [0, 25, 3], [3, -3]):
        with pytest.raises(IndexError, match="index out of range in self"):
            model(torch.tensor(words))
    words = torch.tensor([0, 10, 11, 19, 20])
    assert torch.equal(model(words), plain(words))
    for each in (model, plain):
        each(words).sum().backward()
    torch.testing.assert_close(lamina.get_full_gradient(net[0].weight), plain[0].weight.grad)


def case_a_compiled_model_computes_with_its_slices():
    plain, model = _sliced()
    compiled = torch.compile(model, backend="aot_eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(2):
        for root, optimizer in zip((plain, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            root(_batch()).pow(2).sum().backward()
            optimizer.step()
    for name, value in _wholes(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name))
    with pytest.raises(UsageError, match=_SLICED):
        model.module.up.weight.sum()
