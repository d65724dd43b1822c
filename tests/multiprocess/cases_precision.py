# SPDX-License-Identifier: Apache-2.0
"""Cases for four ranks: loss scales, masters of half-precision models, states of optimizers that copies divide."""

import copy
import functools
import itertools
import math

import pytest
import torch
from multiprocess.cases_checkpoints import folder, require_same
from multiprocess.cases_sliced_state import Job, Plain, require_equal
from soak import paired, some
from torch import nn

import lamina
from lamina.job import current
from lamina.model import shards

ROWS = 8  # of the whole batch
BATCH = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(7))
SHARDED = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}
LAYOUTS = {
    "pp4": {"partitions": 4},
    "pp2 dp2": {"partitions": 2, "ddp": True},
    "dp4": {"ddp": True},
    "dp4 shared states": {"ddp": True, "shard_optimizer_state": True},
    "pp2 dp2 shared states": {"partitions": 2, "ddp": True, "shard_optimizer_state": True},
    "sharded 4": {"ddp": True, "sharded_data_parallel_degree": 4, **SHARDED},
    "sharded 2, two copies": {"ddp": True, "sharded_data_parallel_degree": 2, **SHARDED},
    "sharded 4, small ones whole": {
        **SHARDED,
        "ddp": True,
        "sharded_data_parallel_degree": 4,
        "sdp_param_persistence_threshold": 10,
    },
    "pp2 sharded 2": {"partitions": 2, "ddp": True, "sharded_data_parallel_degree": 2, **SHARDED},
}


def start(layout, **keys):
    lamina.init(**({"microbatches": 1, "timeout_s": 30} | LAYOUTS[layout] | keys))


def network(bias=True):
    torch.manual_seed(0)
    linear = functools.partial(nn.Linear, bias=bias)
    return nn.Sequential(linear(6, 9), nn.Tanh(), linear(9, 5), nn.Tanh(), linear(5, 7), nn.Tanh(), linear(7, 1))


def network_of(make):
    """One that an optimizer trains: Muon takes matrices alone."""
    return network(bias=make is not muon)


def share():
    """This copy's rows of the batch."""
    rows = ROWS // lamina.dp_size()
    return BATCH[lamina.dp_rank() * rows :][:rows]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return lamina.optim.AdamW(parameters, lr=1e-2)


def adam_of_torch(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def lamb(parameters):
    return lamina.optim.LAMB(parameters, lr=1e-2)


@lamina.step
def train(model, x):
    loss = model(x).float().square().mean()
    model.backward(loss)
    return loss


def reference(make, dtype, steps, clip=math.inf):
    """The parameters of a plain loop over the whole batch, with masters, after each step."""
    model = network_of(make).to(dtype)
    parameters = list(model.parameters())
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = make(masters)
    for _ in range(steps):
        model(BATCH.to(dtype)).float().square().mean().backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.data.copy_(master)
        yield dict(model.named_parameters())


def masters(optimizer):
    """The whole masters, by number."""
    return optimizer.state_dict()["masters"]


# Half precision rounds a gradient of the whole batch once, that of copies once each and their mean again.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def trains_like_the_plain_loop(layout, dtype, make, clip=None, **scale):
    keys = {torch.float16: {"fp16": True}, torch.bfloat16: {"bf16": True}}.get(dtype, {})
    start(layout, **keys)
    model = lamina.DistributedModel(network_of(make))
    optimizer = lamina.DistributedOptimizer(make(model.parameters()), **scale)
    for expected in reference(make, dtype, 4, clip or math.inf):
        train(model, share())
        if clip:
            assert optimizer.clip_master_grads(clip) > clip
        optimizer.step()
        assert not optimizer.overflow
        optimizer.zero_grad()
        for name, parameter in model.local_named_parameters():
            assert parameter.dtype == dtype and parameter.grad is None
            ours = lamina.get_full_parameter(parameter)
            torch.testing.assert_close(ours, expected[name].detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    lamina.shutdown()


def case_half_models_train_like_the_plain_loop_with_masters():
    halves = ((torch.bfloat16, {}), (torch.float16, {"static_loss_scale": 128.0}))
    for layout, (dtype, scale) in paired(LAYOUTS, halves):
        trains_like_the_plain_loop(layout, dtype, sgd, **scale)


def case_states_that_copies_divide_change_nothing():
    for layout, make in paired(("dp4 shared states", "pp2 dp2 shared states"), (sgd, adamw, adam_of_torch)):
        trains_like_the_plain_loop(layout, torch.float32, make)


def case_a_closure_may_be_what_cuts_the_model():
    for layout, make in paired(("pp4", "pp2 dp2", "pp2 dp2 shared states"), (sgd, adamw)):
        start(layout, bf16=True)
        model = lamina.DistributedModel(network_of(make))
        optimizer = lamina.DistributedOptimizer(make(model.parameters()))
        for expected in reference(make, torch.bfloat16, 2):
            assert optimizer.step(lambda model=model: train(model, share()).reduce_mean()) > 0
            optimizer.zero_grad()
            for name, parameter in model.local_named_parameters():
                # A step that is left out leaves a parameter where it was, further away than this.
                torch.testing.assert_close(parameter.detach(), expected[name].detach(), rtol=1e-2, atol=4e-3)
        lamina.shutdown()


def case_a_scale_without_half_precision_changes_nothing():
    for layout in some(LAYOUTS, 4, seed=1):
        trains_like_the_plain_loop(layout, torch.float32, adamw, static_loss_scale=1024.0)


def case_master_gradients_are_clipped():
    for layout in some(LAYOUTS, 4, seed=2):
        trains_like_the_plain_loop(layout, torch.float32, sgd, clip=0.05, static_loss_scale=64.0)


def case_pipelines_of_half_models_are_exact():
    """With one microbatch a pipeline computes what one process does: bit by bit."""
    for make in (sgd, adamw, adam_of_torch, lamb):
        start("pp4", bf16=True)
        model = lamina.DistributedModel(network())
        optimizer = lamina.DistributedOptimizer(make(model.parameters()))
        for expected in reference(make, torch.bfloat16, 4):
            train(model, BATCH)
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in model.local_named_parameters():
                if make is not lamb:  # whose global norm is a float64 here
                    assert torch.equal(parameter, expected[name]), (make, name)
                torch.testing.assert_close(parameter, expected[name], rtol=1e-2, atol=1e-3)
        lamina.shutdown()


def plant(model, where):
    """Puts an infinity into one gradient of this rank."""
    parameter = next(iter(model.local_parameters()), None)
    if parameter is not None and lamina.rank() == where:
        holder = shards.holder(parameter)
        holder.grad.reshape(-1)[0] = math.inf


def case_an_infinity_on_any_rank_has_all_leave_the_step_out():
    for layout in some(LAYOUTS, 4, seed=3):
        start(layout, fp16=True)
        model = lamina.DistributedModel(network())
        optimizer = lamina.DistributedOptimizer(
            adamw(model.parameters()),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 256.0, "scale_window": 3},
        )
        train(model, share())
        optimizer.step()
        optimizer.zero_grad()
        for where in range(4):
            before = masters(optimizer)
            train(model, share())
            plant(model, where)
            optimizer.step()
            optimizer.zero_grad()
            assert lamina.allgather(optimizer.overflow, lamina.WORLD) == [True] * 4, (layout, where)
            assert optimizer.state_dict()["loss_scale"]["scale"] == 256.0 / 2 ** (where + 1)
            after = masters(optimizer)
            assert all(torch.equal(before[number], after[number]) for number in before)
        for _ in range(3):
            assert optimizer.state_dict()["loss_scale"]["scale"] == 16.0
            train(model, share())
            optimizer.step()
            assert not optimizer.overflow
            optimizer.zero_grad()
        assert optimizer.state_dict()["loss_scale"]["scale"] == 32.0
        lamina.shutdown()


def case_a_loss_that_overflows_on_one_rank_is_left_out_by_all():
    start("dp4", fp16=True)
    model = lamina.DistributedModel(network())
    optimizer = lamina.DistributedOptimizer(sgd(model.parameters()), dynamic_loss_scale=True)
    left_out = 0
    for _ in range(40):
        train(model, share())
        optimizer.step()
        optimizer.zero_grad()
        left_out += optimizer.overflow
    scale = optimizer.state_dict()["loss_scale"]["scale"]
    assert left_out >= 14 and scale == 2.0 ** (32 - left_out)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def case_training_goes_on_from_a_state_as_if_it_had_not_stopped():
    scaled = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 512.0, "scale_window": 3}}
    for layout in some(LAYOUTS, 3):

        def steps(model, optimizer, count):
            for _ in range(count):
                train(model, share())
                optimizer.step()
                optimizer.zero_grad()

        def state(model, optimizer):
            return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

        start(layout, fp16=True)
        model = lamina.DistributedModel(network())
        optimizer = lamina.DistributedOptimizer(adamw(model.parameters()), **scaled)
        steps(model, optimizer, 4)
        values, states = state(model, optimizer)
        local = copy.deepcopy(optimizer.local_state_dict())
        steps(model, optimizer, 4)
        expected, expected_states = state(model, optimizer)
        lamina.shutdown()

        for saved, optimizer_first in paired((states, local), (False, True), seed=layout):
            start(layout, fp16=True)
            torch.manual_seed(9)
            model = lamina.DistributedModel(network())
            optimizer = lamina.DistributedOptimizer(adamw(model.parameters()), **scaled)
            if optimizer_first:
                optimizer.load_state_dict(copy.deepcopy(saved))
            model.load_state_dict(values)
            if not optimizer_first:
                optimizer.load_state_dict(copy.deepcopy(saved))
            steps(model, optimizer, 4)
            found, found_states = state(model, optimizer)
            apart = [name for name in expected if not torch.equal(found[name], expected[name])]
            assert not apart, (layout, saved is local, optimizer_first, apart)
            assert found_states["loss_scale"] == expected_states["loss_scale"]
            for number, master in expected_states["masters"].items():
                assert torch.equal(found_states["masters"][number], master), layout
            lamina.shutdown()


def case_what_scripts_read_of_the_optimizer():
    require_readable(sdp_param_persistence_threshold=0)


def case_what_scripts_read_of_parameters_that_stay_whole():
    """Parameters below sdp_param_persistence_threshold have shards as others have, which are parts of their memory."""
    require_readable(sdp_param_persistence_threshold=10)
    require_readable(sdp_param_persistence_threshold=10**6)


def require_readable(**keys):
    start("sharded 4", fp16=True, **keys)
    model = lamina.DistributedModel(network())
    sizes = [parameter.ds_tensor.ds_numel for parameter in model.parameters()]
    optimizer = lamina.DistributedOptimizer(adamw(model.parameters()))
    flat = optimizer.fp32_partitioned_groups_flat[0]
    assert flat.dtype == torch.float32 and flat.numel() == sum(sizes)
    for parameter, named in zip(optimizer.fp16_groups[0], model.module.named_parameters(), strict=True):
        assert parameter is named[1] and parameter.dtype == torch.float16
    for parameter, part in zip(optimizer.fp16_groups[0], flat.split(sizes), strict=True):
        assert torch.equal(part.half(), parameter.ds_tensor)
    assert optimizer.optimizer is optimizer and not optimizer.overflow
    assert torch.distributed.get_world_size(optimizer.ds_param_shard_group) == 4
    train(model, share())
    optimizer.step()
    assert optimizer._global_grad_norm > 0
    if all(shards.holder(parameter) is not parameter for parameter in model.parameters()):
        assert torch.equal(flat, optimizer.fp32_partitioned_groups_flat[0])  # the masters' own memory
    flat = optimizer.fp32_partitioned_groups_flat[0]
    assert torch.equal(flat.half(), torch.cat([parameter.ds_tensor for parameter in model.parameters()]))
    for parameter, size in zip(model.parameters(), sizes, strict=True):
        assert size == parameter.ds_tensor.numel() == math.ceil(parameter.ds_numel / 4)
        if shards.holder(parameter) is parameter:
            padded = nn.functional.pad(parameter.detach().flatten(), (0, 4 * size - parameter.numel()))
            assert torch.equal(parameter.ds_tensor, padded.split(size)[lamina.rank()])
    lamina.shutdown()


def case_a_loss_that_was_not_scaled_is_an_error():
    start("dp4")
    model = lamina.DistributedModel(network())
    optimizer = lamina.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=8.0)
    model(share()).square().mean().backward()
    with pytest.raises(lamina.UsageError, match=r"call model.backward\(loss\)"):
        optimizer.step()
    with pytest.raises(lamina.UsageError, match="one loss scale"):
        lamina.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=4.0)


def case_a_grad_scaler_is_alike_on_all_ranks():
    for layout in some(LAYOUTS, 4, seed=4):
        start(layout)
        model = lamina.DistributedModel(network())
        optimizer = lamina.DistributedOptimizer(sgd(model.parameters()))
        scaler = lamina.amp.GradScaler(init_scale=64.0, growth_interval=2)

        @lamina.step
        def scaled(model, scaler, x):
            model.backward(scaler.scale(model(x).square().mean()))

        expected = reference(sgd, torch.float32, 4)
        scales = []
        for where in (None, 0, None, 3, None, None):
            scaled(model, scaler, share())
            if where is not None:
                plant(model, where)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            if where is None:
                values = next(expected)
                for name, parameter in model.local_named_parameters():
                    ours = lamina.get_full_parameter(parameter)
                    torch.testing.assert_close(ours, values[name].detach(), rtol=1e-6, atol=1e-6)
        assert scales == [64.0, 32.0, 32.0, 16.0, 16.0, 32.0], (layout, scales)
        lamina.shutdown()


def case_torchs_own_grad_scaler_names_ours():
    start("pp4")
    model = lamina.DistributedModel(network())
    optimizer = lamina.DistributedOptimizer(sgd(model.parameters()))
    train(model, share())
    for use in (lambda scaler: scaler.step(optimizer), lambda scaler: scaler.update()):
        with pytest.raises(lamina.UsageError, match=r"take lamina\.amp\.GradScaler"):
            use(torch.amp.GradScaler("cpu"))


def case_norms_of_torchs_are_those_without_the_scale():
    for layout in some(LAYOUTS, 4, seed=5):
        norms = []
        for scale in (1.0, 256.0):
            start(layout)
            model = lamina.DistributedModel(network())
            optimizer = lamina.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=scale)
            train(model, share())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            norms.append(sum(value.double().square().sum().item() for value in model.state_dict().values()))
            lamina.shutdown()
        assert norms[:2] == pytest.approx(norms[2:], rel=1e-5), layout


def novograd(parameters):
    return lamina.optim.NovoGrad(parameters, lr=1e-2, weight_decay=0.1)


def adafactor(parameters):
    parameters = list(parameters)
    return torch.optim.Adafactor([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-2}], lr=1e-2)


def muon(parameters):
    return torch.optim.Muon(parameters, lr=1e-2)


DIVIDED = [layout for layout in LAYOUTS if "shared" in layout or "sharded" in layout]


def case_what_needs_all_of_a_parameter_has_it_in_every_layout():
    kinds = ((torch.float32, {}), (torch.bfloat16, {}), (torch.float16, {"static_loss_scale": 128.0, "clip": 0.05}))
    for (layout, make), (dtype, keys) in paired(paired(DIVIDED, (adafactor, muon)), kinds):
        trains_like_the_plain_loop(layout, dtype, make, **keys)


def case_what_measures_parameters_measures_all_of_them_in_every_layout():
    every = some(itertools.product(DIVIDED, (lamb, novograd)), 4)
    for (layout, make), dtype in paired(every, (torch.float32, torch.bfloat16)):
        trains_like_the_plain_loop(layout, dtype, make)


def case_the_same_gradients_give_the_bits_of_one_device_in_every_layout():
    """Gradients are written over, so that only the update may differ from that of one device."""
    dtypes = ((torch.float32, {}), (torch.bfloat16, {"bf16": True}))
    for make, (dtype, keys) in paired((adamw, lamb, novograd, adafactor, muon), dtypes):
        for layout in some(DIVIDED, 2, seed=make.__name__):
            start(layout, **keys)
            model = lamina.DistributedModel(network_of(make))
            optimizer = lamina.DistributedOptimizer(make(model.parameters()))
            plain = network_of(make).to(dtype)
            masters = [parameter.detach().float().requires_grad_() for parameter in plain.parameters()]
            theirs = make(masters)
            draw = torch.Generator().manual_seed(0)
            for _ in range(3):
                train(model, share())
                for (name, parameter), master in zip(plain.named_parameters(), masters, strict=True):
                    gradient = torch.randn(parameter.shape, generator=draw).to(dtype)
                    give(model, name, gradient, LAYOUTS[layout].get("sharded_data_parallel_degree", 1))
                    master.grad = gradient.float()
                optimizer.step()
                theirs.step()
                optimizer.zero_grad()
            for (name, _), master in zip(plain.named_parameters(), masters, strict=True):
                if (own := dict(model.local_named_parameters()).get(name)) is not None:
                    assert torch.equal(lamina.get_full_parameter(own), master.to(dtype)), (layout, make, name)
            lamina.shutdown()


def give(model, name, gradient, count):
    """Has a parameter, or this rank's shard of it, that gradient."""
    parameter = dict(model.local_named_parameters()).get(name)
    if parameter is None:
        return
    if shards.holder(parameter) is parameter:
        parameter.grad = gradient.clone()
        return
    size = parameter.ds_tensor.numel()
    padded = nn.functional.pad(gradient.flatten(), (0, count * size - gradient.numel()))
    parameter.ds_tensor.grad = padded.split(size)[lamina.dp_rank() % count].clone()


def case_states_of_parts_go_on_in_any_layout():
    """Another layout, and torch's own optimizer, go on with what one has saved."""
    for make, keys in some(itertools.product((adafactor, lamb, muon), ({}, {"bf16": True})), 2, seed=1):
        saved = None
        for layout in ("dp4 shared states", "sharded 4", "pp2 dp2 shared states", "pp2 sharded 2", "dp4"):
            start(layout, **keys)
            model = lamina.DistributedModel(network_of(make))
            optimizer = lamina.DistributedOptimizer(make(model.parameters()))
            train(model, share())
            if saved is not None:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                found = optimizer.state_dict()
                assert_same(found["state"], saved[1]["state"])
                assert_same(found.get("masters", {}), saved[1].get("masters", {}))
            optimizer.step()
            optimizer.zero_grad()
            train(model, share())
            optimizer.step()
            values = copy.deepcopy(model.state_dict())
            saved = values, copy.deepcopy(optimizer.state_dict())
            for gather in (True, False):
                local = copy.deepcopy(optimizer.local_state_dict(gather_if_shard=gather))
                train(model, share())
                optimizer.step()
                model.load_state_dict(values)
                optimizer.load_state_dict(local)
                again = optimizer.state_dict()
                assert_same(again["state"], saved[1]["state"])
                assert_same(again.get("masters", {}), saved[1].get("masters", {}))
            lamina.shutdown()
            plain = network_of(make)
            theirs = make(plain.parameters())
            theirs.load_state_dict({key: saved[1][key] for key in ("state", "param_groups")})
            assert len(theirs.state) == len(saved[1]["state"])


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


class Odd(nn.Module):
    """Parameters that are hard to divide."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4))
        self.imaginary = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.precise = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        rest = self.imaginary.abs().square().sum() + self.precise.sum() + self.empty.sum() + self.one.sum()
        return (self.linear(x) @ self.transposed.t()).float() * self.scalar + rest * self.frozen.sum()


def case_odd_parameters_are_divided_or_left_whole():
    """Loading a state that was just saved changes nothing, and copies stay alike."""
    every = paired(
        (("dp4 shared states", {}), ("dp4 shared states", {"bf16": True}), ("dp4", {"bf16": True}), ("sharded 4", {})),
        (adamw, sgd, adam_of_torch, lamb),
    )
    for (layout, keys), make in every:
        found = []
        for saves in (False, True):
            start(layout, **keys)
            model = lamina.DistributedModel(Odd())
            optimizer = lamina.DistributedOptimizer(make(model.parameters()))
            for _ in range(3):
                train(model, share())
                optimizer.step()
                optimizer.zero_grad()
                if saves:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            found.append(copy.deepcopy(model.state_dict()))
            everyone = lamina.allgather(found[-1], lamina.WORLD)
            for name, value in found[-1].items():
                assert all(torch.equal(other[name], value) for other in everyone), (make, name)
            lamina.shutdown()
        assert_same(*found)


class Signed(nn.Module):
    """The gradient of `gate` is zeros without memory, as sgn() gives them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.gate = nn.Parameter(torch.randn(6))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.first(x) * self.gate.sgn())


def case_gradients_of_zeros_that_have_no_memory_are_zeros():
    for layout, keys, make in some(itertools.product(LAYOUTS, ({}, {"bf16": True}), (sgd, adamw, lamb)), 6):
        start(layout, **keys)
        model = lamina.DistributedModel(Signed())
        optimizer = lamina.DistributedOptimizer(make(model.parameters()), static_loss_scale=8.0)
        gate = model.module.gate
        before = Signed().gate.detach().to(torch.bfloat16 if keys else torch.float32)
        for _ in range(2):
            train(model, share())
            optimizer.step()
            optimizer.zero_grad()
        if make is sgd and any(own is gate for _, own in model.local_named_parameters()):
            assert torch.equal(lamina.get_full_parameter(gate), before), layout
        lamina.shutdown()


def case_parts_of_another_layout_are_refused():
    states = {}
    for layout in ("sharded 4", "dp4 shared states", "dp4"):
        start(layout)
        model = lamina.DistributedModel(network())
        optimizer = lamina.DistributedOptimizer(adamw(model.parameters()))
        train(model, share())
        optimizer.step()
        for state in states.values():
            with pytest.raises(lamina.UsageError, match=r"part \d of 4 of each parameter's.*gather_if_shard=True"):
                optimizer.load_state_dict(state)
        states[layout] = copy.deepcopy(optimizer.local_state_dict(gather_if_shard=False))
        states = {name: state for name, state in states.items() if "_lamina_parts" in state}
        for bad in ({}, None, {"state": {}}):
            with pytest.raises(lamina.UsageError, match="takes a state dict of an optimizer"):
                optimizer.load_state_dict(bad)
        lamina.shutdown()
    assert list(states) == ["sharded 4", "dp4 shared states"]


def case_groups_can_be_read_before_the_model_is_cut():
    for layout, keys in (("pp2 dp2", {"fp16": True}), ("pp2 sharded 2", {}), ("dp4 shared states", {"fp16": True})):
        start(layout, **keys)
        model = lamina.DistributedModel(network())
        optimizer = lamina.DistributedOptimizer(adamw(model.parameters()))
        flat = optimizer.fp32_partitioned_groups_flat[0]
        assert flat.dtype == torch.float32 and flat.dim() == 1
        if "sharded" in layout:
            assert torch.distributed.get_world_size(optimizer.ds_param_shard_group) == 2
        assert all(a is b for a, b in zip(optimizer.fp16_groups[0], model.parameters(), strict=True))
        train(model, share())
        optimizer.step()
        places = optimizer.param_groups[0]["params"]
        assert optimizer.fp32_partitioned_groups_flat[0].numel() == sum(place.numel() for place in places)
        lamina.shutdown()


def case_a_whole_parameter_has_one_owner_among_the_copies():
    start("dp4 shared states", bf16=True)
    model = lamina.DistributedModel(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8))))
    optimizer = lamina.DistributedOptimizer(torch.optim.Adafactor(model.parameters()))
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    before = list(optimizer.param_groups[0]["params"])
    assert [part.numel() for part in before] == [16] * 8, "masters are divided by elements"
    optimizer.step()
    assert len(optimizer.state) == 2, "of eight, spread evenly over four"
    assert all(a is b for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))


def case_an_optimizer_of_which_nothing_is_known_is_refused_where_copies_divide():
    class Own(torch.optim.SGD):
        pass

    start("dp4 shared states")
    model = lamina.DistributedModel(network())
    for kind, words in ((Own, "Own with shard_optimizer_state.*not known"), (torch.optim.LBFGS, "all parameters")):
        with pytest.raises(lamina.UsageError, match=words):
            lamina.DistributedOptimizer(kind(model.parameters(), lr=0.1))
    lamina.DistributedOptimizer(adamw(model.parameters()))


def case_gradients_that_a_backward_has_scaled_may_be_taken_twice():
    start("dp4")
    model = lamina.DistributedModel(network())
    optimizer = lamina.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=8.0)
    train(model, share())
    norms = [optimizer.clip_master_grads(0.1) for _ in range(2)]
    assert norms[0] == norms[1] > 0.1
    optimizer.step()
    optimizer.step()
    for forget in (optimizer.zero_grad, functools.partial(optimizer.zero_grad, set_to_none=False)):
        forget()
        model(share()).square().mean().backward()
        with pytest.raises(lamina.UsageError, match=r"call model.backward\(loss\)"):
            optimizer.step()


def case_gradients_that_are_not_zeroed_have_the_scale_in_every_step():
    for layout, make in paired(("pp4", "dp4", "sharded 4"), (sgd, adamw, adam_of_torch)):
        found = []
        for scale in (1.0, 64.0):
            start(layout)
            model = lamina.DistributedModel(network_of(make))
            optimizer = lamina.DistributedOptimizer(make(model.parameters()), static_loss_scale=scale)
            for _ in range(3):
                train(model, share())
                optimizer.step()
                optimizer.step()
            found.append(copy.deepcopy(model.state_dict()))
            lamina.shutdown()
        assert_same(*found)


def case_values_of_gradients_are_clipped_without_the_scale():
    for layout in some(LAYOUTS, 4, seed=6):
        found = []
        for scale in (1.0, 64.0):
            start(layout)
            model = lamina.DistributedModel(network())
            optimizer = lamina.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=scale)
            train(model, share())
            other = nn.Parameter(torch.zeros(1))
            other.grad = torch.ones(1)
            torch.nn.utils.clip_grad_value_(other, 0.01)
            assert other.grad == 0.01, "it is not the model's"
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            found.append(copy.deepcopy(model.state_dict()))
            lamina.shutdown()
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


def case_values_of_half_gradients_are_clipped_whatever_the_scale():
    """Clipping to more than half precision has changes nothing, and an infinity stays one."""
    for layout in some(LAYOUTS, 4, seed=7):
        start(layout, fp16=True)
        model = lamina.DistributedModel(network())
        optimizer = lamina.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=1024.0)
        for where in range(5):  # on no rank in the end
            train(model, share())
            before = [shards.holder(parameter).grad.clone() for parameter in model.local_parameters()]
            torch.nn.utils.clip_grad_value_(model.parameters(), 1000.0)
            for parameter, gradient in zip(model.local_parameters(), before, strict=True):
                assert torch.equal(shards.holder(parameter).grad, gradient)
            plant(model, where)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.overflow == (where < 4), (layout, where)
        lamina.shutdown()


def case_norms_of_half_gradients_may_be_larger_than_half_precision_goes():
    elements = sum(parameter.numel() for parameter in network().parameters())
    for layout in some(LAYOUTS, 4, seed=8):
        start(layout, fp16=True)
        model = lamina.DistributedModel(network())
        optimizer = lamina.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=1024.0)
        train(model, share())
        for parameter in model.local_parameters():
            gradient = shards.holder(parameter).grad
            if gradient.numel():
                gradient.view(-1)[_elements_here(parameter) :] = 0
                gradient.view(-1)[: _elements_here(parameter)] = 2.0**15
        for norm_type in (2.0, 1.0, math.inf):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type)
            expected = 32.0 * elements ** (1 / norm_type)
            assert norm.item() == pytest.approx(expected, rel=1e-5), (layout, norm_type)
        optimizer.step()
        assert not optimizer.overflow
        lamina.shutdown()


def _elements_here(parameter):
    """How many elements of a parameter this rank holds; others fill its shard up."""
    shard = shards.holder(parameter)
    if shard is parameter:
        return parameter.numel()
    rank = lamina.rdp_rank() % current.session().config.sharded_data_parallel_degree
    return max(0, min(shard.numel(), math.prod(parameter.shape) - rank * shard.numel()))


def case_what_stands_for_parameters_in_groups_is_clipped_as_they_are():
    """Scripts clip what the optimizer has in its groups: masters, shards, and parts that copies divide."""
    clips = (
        lambda given: torch.nn.utils.clip_grad_norm_(given, 0.05).item(),
        lambda given: torch.nn.utils.clip_grad_value_(given, 0.01),
    )
    for (layout, keys), clip in paired(some(itertools.product(LAYOUTS, ({}, {"bf16": True})), 4), clips):
        found = []
        for from_groups in (False, True):
            start(layout, **keys)
            model = lamina.DistributedModel(network())
            optimizer = lamina.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=16.0)
            train(model, share())
            norm = clip(optimizer.param_groups[0]["params"] if from_groups else model.local_parameters())
            assert norm is None or norm > 0.05
            optimizer.step()
            found.append((copy.deepcopy(model.state_dict()), norm))
            lamina.shutdown()
        assert_same(*(values for values, _ in found))
        assert found[0][1] == found[1][1]


def case_parameters_may_be_given_other_memory():
    for layout in ("dp4 shared states", "pp2 dp2 shared states", "dp4"):
        found = []
        for moves in (False, True):
            start(layout)
            model = lamina.DistributedModel(network())
            optimizer = lamina.DistributedOptimizer(adamw(model.parameters()))
            for _ in range(3):
                train(model, share())
                optimizer.step()
                optimizer.zero_grad()
                for parameter in model.local_parameters() if moves else ():
                    parameter.data = parameter.data.clone()
            found.append(copy.deepcopy(model.state_dict()))
            lamina.shutdown()
        assert_same(*found)


def case_an_optimizer_has_one_job_and_one_loss_scale():
    start("dp4")
    model = lamina.DistributedModel(network())
    optimizer = sgd(model.parameters())
    for _ in range(2):
        assert lamina.DistributedOptimizer(optimizer, static_loss_scale=8.0) is optimizer
    for other in ({"static_loss_scale": 4.0}, {"dynamic_loss_scale": True}):
        with pytest.raises(lamina.UsageError, match="one loss scale"):
            lamina.DistributedOptimizer(optimizer, **other)
    for huge in ({"static_loss_scale": 10**400}, {"dynamic_loss_args": {"scale_window": 10**30}}):
        with pytest.raises(lamina.UsageError, match="too large"):
            lamina.DistributedOptimizer(optimizer, **huge)
    lamina.shutdown()
    start("dp4")
    with pytest.raises(lamina.UsageError, match="make a new one"):
        lamina.DistributedOptimizer(optimizer)


def case_what_comes_between_clipping_and_the_step_is_clipped_and_may_overflow():
    @lamina.step
    def evaluate(model, x):
        return model(x).detach()

    for layout in some(LAYOUTS, 4, seed=9):
        found = []
        for clips_early in (False, True):
            start(layout)
            model = lamina.DistributedModel(network())
            optimizer = lamina.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=8.0)
            train(model, share())
            if clips_early:
                optimizer.clip_master_grads(0.05)
            train(model, share())
            if not clips_early:
                optimizer.clip_master_grads(0.05)
            evaluate(model, share())
            optimizer.step()
            optimizer.zero_grad()
            found.append(copy.deepcopy(model.state_dict()))
            train(model, share())
            optimizer.clip_master_grads(0.05)
            train(model, share() * (math.inf if lamina.rank() == 0 else 1))
            optimizer.step()
            assert lamina.allgather(optimizer.overflow, lamina.WORLD) == [True] * 4, layout
            lamina.shutdown()
        assert_same(*found)


def case_a_state_with_a_scale_or_masters_that_do_not_fit_changes_nothing():
    for layout in ("pp2 dp2", "dp4 shared states", "pp2 sharded 2"):
        start(layout, fp16=True)
        model = lamina.DistributedModel(network())
        optimizer = lamina.DistributedOptimizer(
            adamw(model.parameters()), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 64.0}
        )
        train(model, share())
        optimizer.step()
        states = copy.deepcopy((optimizer.state_dict(), optimizer.local_state_dict()))
        train(model, share())
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict())
        for state in states:
            numbers = list(state["masters"])
            for change, words in (
                ({"loss_scale": {"scale": 2.0}}, "its loss_scale is {'scale': 2.0}, which is none"),
                ({"loss_scale": {**state["loss_scale"], "scale": math.nan}}, "which is none"),
                ({"masters": dict.fromkeys(numbers, torch.zeros(2))}, "has 2 elements in the state, and the parameter"),
            ):
                with pytest.raises(lamina.UsageError, match=words):
                    optimizer.load_state_dict({**state, **change})
                assert_same(optimizer.state_dict(), before)
        lamina.shutdown()


def case_copies_divide_the_states_of_slices():
    for make in (None, lambda parameters: lamina.optim.LAMB(parameters, lr=1e-2)):
        job, plain = Job(make, shard_optimizer_state=True), Plain(make)
        job.model.eval()
        plain.model.eval()
        own = job.model.module.blocks[0].up.weight.numel()
        job.train(3)
        plain.train(3, copies=2)
        assert own // 2 in [state["exp_avg"].numel() for state in job.optimizer.state.values()]
        require_equal(job, plain)
        job.optimizer.load_state_dict(plain.optimizer.state_dict())
        require_same(job.optimizer.state_dict(), plain.optimizer.state_dict())
        lamina.shutdown()


def case_divided_masters_of_slices_go_into_checkpoints_and_back():
    with folder() as path:
        job = Job(shard_optimizer_state=True, bf16=True)
        job.train(2)
        expected = job.states()
        lamina.save_checkpoint(path, "a")
        lamina.shutdown()
        job = Job(seed=5, tp=1, bf16=True)
        lamina.resume_from_checkpoint(path, "a")
        require_same(job.states(), expected)
        lamina.save_checkpoint(path, "b")
        lamina.shutdown()
        job = Job(seed=6, shard_optimizer_state=True, bf16=True)
        lamina.resume_from_checkpoint(path, "b")
        require_same(job.states(), expected)
