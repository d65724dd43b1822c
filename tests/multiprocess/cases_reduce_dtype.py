# SPDX-License-Identifier: Apache-2.0
"""Cases for four ranks whose gradients travel in a dtype that `reduce_dtype` says, beside torch's own ways of that."""

import copy
import itertools

import pytest
import torch
from multiprocess.cases_backend import world
from soak import paired
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lamina
from lamina.model import shards

SHARDED = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}
LAYOUTS = {
    "copies": {},
    "copies, shared states": {"shard_optimizer_state": True},
    "pp2": {"partitions": 2},
    "sharded 4": {"sharded_data_parallel_degree": 4, **SHARDED},
    "sharded 2, two copies": {"sharded_data_parallel_degree": 2, **SHARDED},
    "sharded 4, small ones whole": SHARDED | {"sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 20},
    "pp2 sharded 2": {"partitions": 2, "sharded_data_parallel_degree": 2, **SHARDED},
}
CARRIERS = ("auto", "nccl")  # memory in common, and Gloo
WAYS = tuple(itertools.product(CARRIERS, (torch.bfloat16, torch.float16)))
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
HALF = {torch.float32: {}, torch.float16: {"fp16": True}, torch.bfloat16: {"bf16": True}}
# Largest errors of one rounding.
ROUNDED = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
COPIES = 4


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def batch(number, dtype):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number)).to(dtype)


def loss_of(model, x):
    return model(x).float().square().mean()


def gradients_of(number, dtype):
    """The gradients of one copy."""
    plain = network(dtype)
    loss_of(plain, batch(number, dtype)).backward()
    return {name: parameter.grad.double() for name, parameter in plain.named_parameters()}


def mean(copies, dtype):
    """The mean of all copies' gradients, and that of their sizes, which errors go with."""
    each = [gradients_of(number, dtype) for number in range(copies)]
    means = {name: sum(one[name] for one in each) / copies for name in each[0]}
    return means, {name: sum(one[name].abs() for one in each) / copies for name in each[0]}


def trained(layout, dtype, **keys):
    """The whole gradients that this rank holds after a step."""
    lamina.init(ddp=True, microbatches=1, timeout_s=30, **LAYOUTS[layout], **HALF[dtype], **keys)
    model = lamina.DistributedModel(network())

    @lamina.step
    def step(x):
        model.backward(loss_of(model, x))

    step(batch(lamina.dp_rank(), dtype))
    gradients = {name: lamina.get_full_gradient(each) for name, each in model.local_named_parameters()}
    sharded = {name: shards.holder(each) is not each for name, each in model.local_named_parameters()}
    for there in lamina.allgather(gradients, lamina.WORLD):
        for name in there.keys() & gradients.keys():
            assert torch.equal(there[name], gradients[name]), "the same bits on all ranks"
    copies = lamina.dp_size()
    lamina.shutdown()
    return gradients, sharded, copies


def require_rounded(gradients, means, sizes, error):
    for name, gradient in gradients.items():
        most = error * sizes[name] + 1e-7  # of float32, and numbers that are denormal in float16
        assert ((gradient.double() - means[name]).abs() <= most).all(), (name, gradient, means[name])


def case_gradients_of_float32_travel_in_half():
    for layout, (carrier, dtype) in paired(LAYOUTS, WAYS):
        gradients, _, copies = trained(layout, torch.float32, reduce_dtype=NAMES[dtype], ddp_dist_backend=carrier)
        means, sizes = mean(copies, torch.float32)
        # Each copy's is rounded once, and the sum; with copies of shards the sum of each group, too.
        require_rounded(gradients, means, sizes, 3.01 * ROUNDED[dtype])
        with pytest.raises(AssertionError):
            require_rounded(gradients, means, sizes, 4 * ROUNDED[torch.float32])


def case_gradients_of_half_lose_nothing_on_their_way_in_float32():
    for layout, (carrier, dtype) in paired(LAYOUTS, WAYS):
        gradients, sharded, copies = trained(layout, dtype, reduce_dtype="fp32", ddp_dist_backend=carrier)
        means, sizes = mean(copies, dtype)
        for name, gradient in gradients.items():
            # Gradients of masters of shards stay float32; one beside its parameter is rounded once.
            assert gradient.dtype is (torch.float32 if sharded[name] else dtype)
            once = ROUNDED[gradient.dtype] * means[name].abs()
            assert ((gradient.double() - means[name]).abs() <= once + 1e-6 * sizes[name] + 2.0**-25).all(), name


def case_gradients_of_half_are_summed_in_float32():
    for layout, carrier in paired(("copies", "sharded 4"), CARRIERS):
        gradients, _, copies = trained(layout, torch.bfloat16, reduce_dtype="bf16", ddp_dist_backend=carrier)
        means, sizes = mean(copies, torch.bfloat16)
        require_rounded(gradients, means, sizes, 2.01 * ROUNDED[torch.bfloat16])


# Beside torch's.


def of_fsdp(param=None, reduce=None):
    net = network()
    with world("gloo"):
        mesh = init_device_mesh("cpu", (COPIES,))
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        for layer in net[::2]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)
        loss_of(net, batch(torch.distributed.get_rank(), torch.float32)).backward()
        return {name: whole(parameter.grad) for name, parameter in net.named_parameters()}


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def of_ddp(hook):
    net = network()
    with world("gloo"):
        model = DistributedDataParallel(net)
        model.register_comm_hook(None, hook)
        loss_of(model, batch(torch.distributed.get_rank(), torch.float32)).backward()
        return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


def error(gradients, means):
    return sum((gradients[name].double() - means[name]).abs().sum().item() for name in means)


def case_half_gradients_are_nearer_to_the_mean_than_those_of_torch():
    """Torch's, too, are rounded before they travel, and again after each of the additions."""
    means, sizes = mean(COPIES, torch.float32)
    for half, theirs, layout in (
        (torch.bfloat16, of_fsdp(reduce=torch.bfloat16), "sharded 4"),
        (torch.float16, of_ddp(fp16_compress_hook), "copies"),
    ):
        require_rounded(theirs, means, sizes, (COPIES + 2) * ROUNDED[half])
        for carrier in CARRIERS:
            ours, _, _ = trained(layout, torch.float32, reduce_dtype=NAMES[half], ddp_dist_backend=carrier)
            require_rounded(ours, theirs, sizes, (COPIES + 2 + 2) * ROUNDED[half])
            assert error(ours, means) <= error(theirs, means), (layout, carrier)


def case_masters_have_the_gradients_of_fsdp():
    """Forwards and backwards are the same in bfloat16, and so are sums of float32, but for their order."""
    theirs = of_fsdp(param=torch.bfloat16, reduce=torch.float32)
    for carrier in CARRIERS:
        ours, _, _ = trained("sharded 4", torch.bfloat16, reduce_dtype="fp32", ddp_dist_backend=carrier)
        for name, gradient in ours.items():
            assert gradient.dtype is theirs[name].dtype is torch.float32
            torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-6)


def case_training_in_half_with_float32_on_the_way_is_that_of_fsdp():
    half = torch.bfloat16
    net = network(half).float()  # masters begin with the values of their parameters
    with world("gloo"):
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        model = fully_shard(copy.deepcopy(net), mesh=init_device_mesh("cpu", (COPIES,)), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(5):
            loss_of(model, batch(COPIES * number + torch.distributed.get_rank(), torch.float32)).backward()
            optimizer.step()
            optimizer.zero_grad()
        theirs = [whole(parameter).detach() for parameter in model.parameters()]
    lamina.init(ddp=True, bf16=True, reduce_dtype="fp32", timeout_s=30, **LAYOUTS["sharded 4"])
    model = lamina.DistributedModel(net)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for number in range(5):
        loss_of(model, batch(COPIES * number + lamina.dp_rank(), half)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for number, master in optimizer.state_dict()["masters"].items():
        torch.testing.assert_close(master, theirs[number], rtol=1e-5, atol=1e-6)


# Hooks and buffers.


def case_a_hook_decides_how_gradients_travel():
    lamina.init(ddp=True, reduce_dtype="bf16", timeout_s=30)
    model = lamina.DistributedModel(network())
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().dtype)
        future = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 1 + 2.0**-20))
        return future

    model.register_comm_hook(None, hook)
    loss_of(model, batch(0, torch.float32)).backward()
    assert seen == [torch.float32]
    assert all((parameter.grad == 1 + 2.0**-20).all() for parameter in model.parameters())


def case_buffers_keep_the_dtype_that_they_are_given():
    for given, expected in ((None, "bf16"), ("own", "fp32"), ("fp32", "fp32"), ("fp16", "fp16")):
        lamina.init(ddp=True, bf16=True, buffer_dtype=given, timeout_s=30)
        net = network()
        net.register_buffer("mean", torch.full((3,), 1 / 3))
        net.register_buffer("count", torch.zeros(1, dtype=torch.long))
        model = lamina.DistributedModel(net)
        loss_of(model, batch(lamina.dp_rank(), torch.bfloat16)).backward()
        assert (NAMES[net.mean.dtype], net.count.dtype) == (expected, torch.long)
        assert all(parameter.dtype is torch.bfloat16 for parameter in net.parameters())
        if expected == "fp32":
            assert torch.equal(net.mean, torch.full((3,), 1 / 3))
        lamina.shutdown()
