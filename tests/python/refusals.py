# SPDX-License-Identifier: Apache-2.0
"""The Python side of test_both_faces_refuse.py: what each case is refused with, as a line `case<TAB>error`. Each begins
a job of its own. Functions of the same names make up the C++ side, tests/frontend/refusals.cc.

    lamina run -n 2 refusals.py
"""

import os

import listed_cases
import torch
from torch import nn

import lamina


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower, self.upper = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.upper(self.lower(x).tanh())


class Doubled(torch.autograd.Function):
    """Doubles gradients on their way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Spoiled(nn.Linear):
    """Has a fault on the second rank."""

    def __init__(self, spoil):
        super().__init__(6, 2)
        self.spoil = spoil

    def forward(self, x):
        y = super().forward(x)
        return self.spoil(self, y) if lamina.rank() == 1 else y


def of_a_weight(layer, y):
    layer.weight.register_hook(lambda gradient: 1.5 * gradient)
    return y


def batch():
    return torch.linspace(0, 1, 20).view(5, 4)


def sgd(model, lr=0.1, **keys):
    return lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), **keys)


def a_loss_that_was_not_scaled():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    optimizer = sgd(model, static_loss_scale=128)
    model(batch()).square().mean().backward()
    optimizer.step()


def gradients_of_no_backward():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    optimizer = sgd(model, static_loss_scale=128)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def clipping_what_was_not_scaled():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    optimizer = sgd(model, static_loss_scale=128)
    model(batch()).square().mean().backward()
    optimizer.clip_master_grads(1)


def a_closure_over_shards():
    lamina.init(ddp=True, sharded_data_parallel_degree=2)
    model = lamina.DistributedModel(Net())

    def closure():
        raise lamina.UsageError("the closure was called")

    sgd(model).step(closure)


def two_loss_scales():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    sgd(model, static_loss_scale=128)
    sgd(model, static_loss_scale=2)


def options_that_differ():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    optimizer = sgd(model, lr=0.1 if lamina.rank() == 0 else 0.25)
    model(batch()).square().mean().backward()
    optimizer.step()


def lbfgs_over_partitions():
    lamina.init(pipeline_parallel_degree=2)
    model = lamina.DistributedModel(Net())
    lamina.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))


def masters_of_one_memory():
    lamina.init(bf16=True, ddp=True)
    net = Net().bfloat16()
    net.upper.weight.data = net.lower.weight.detach().view(-1)[:12].view(2, 6)
    sgd(lamina.DistributedModel(net))


def options_of_models_that_differ():
    lamina.init(ddp=True)
    lamina.DistributedModel(Net(), backward_passes_per_step=1 + lamina.rank())


def a_count_that_is_none():
    lamina.init(ddp=True)
    lamina.DistributedModel(Net(), backward_passes_per_step=0)


def a_size_that_is_none():
    lamina.init(ddp=True)
    lamina.DistributedModel(Net(), bucket_cap_mb=-1)


def a_norm_that_is_none():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    optimizer = sgd(model)
    model(batch()).square().mean().backward()
    optimizer.clip_master_grads(-1)


def parameters_in_another_order():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    parameters = list(model.parameters())[:: 1 - 2 * lamina.rank()]
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    model(batch()).square().mean().backward()
    optimizer.step()


def gradients_without_tensors():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    output = model(batch())
    model.backward([output, output], [output])


def a_backward_after_the_job():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    output = model(batch()).sum()
    lamina.shutdown()
    model.backward(output)


def a_join_without_ddp():
    lamina.init()
    with lamina.DistributedModel(Net()).join():
        pass


def parts_before_the_cut():
    lamina.init(pipeline_parallel_degree=2)
    list(lamina.DistributedModel(Net()).local_parameters())


def a_partition_below_none():
    lamina.init(pipeline_parallel_degree=2)
    lamina.set_partition(Net(), -1)


def a_call_outside_of_a_step():
    lamina.init(pipeline_parallel_degree=2)
    net = Net()
    for part, partition in ((net, 0), (net.lower, 0), (net.upper, 1)):
        lamina.set_partition(part, partition)
    model = lamina.DistributedModel(net)
    lamina.step(lambda x: model.backward(model(x).square().mean()))(batch()[:4])
    if lamina.rank() == 0:
        net.upper(torch.ones(2, 6))


def clipping_after_the_job():
    lamina.init(ddp=True)
    optimizer = sgd(lamina.DistributedModel(Net()))
    lamina.shutdown()
    optimizer.clip_master_grads(1)


def a_state_with_other_groups():
    lamina.init(ddp=True, shard_optimizer_state=True)
    optimizer, state = sgd(lamina.DistributedModel(Net())), torch.optim.SGD(Net().lower.parameters(), lr=0.1)
    state.add_param_group({"params": Net().upper.parameters()})
    optimizer.load_state_dict(state.state_dict())


def a_state_with_other_members():
    lamina.init(ddp=True, shard_optimizer_state=True)
    optimizer = sgd(lamina.DistributedModel(Net()))
    optimizer.load_state_dict(torch.optim.SGD(Net().lower.parameters(), lr=0.1).state_dict())


def a_parameter_in_two_groups():
    lamina.init(ddp=True, shard_optimizer_state=True)
    model = lamina.DistributedModel(Net())
    sgd(model).add_param_group({"params": list(model.parameters())[:1]})


def folder():
    return os.environ["REFUSALS_FOLDER"]


def adamw(parameters):
    return lamina.DistributedOptimizer(torch.optim.AdamW(parameters, lr=0.1))


def save_and_begin_anew():
    """A checkpoint of a model with AdamW in the folder, and then another job."""
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    optimizer = adamw(model.parameters())
    model(batch()).square().mean().backward()
    optimizer.step()
    lamina.save_checkpoint(folder(), "a")
    lamina.shutdown()
    lamina.init(ddp=True)
    return lamina.DistributedModel(Net())


def a_save_without_a_model():
    lamina.init(ddp=True)
    lamina.save_checkpoint(folder(), "b")


def a_save_before_the_cut():
    lamina.init(pipeline_parallel_degree=2)
    lamina.DistributedModel(Net())
    lamina.save_checkpoint(folder(), "b")


def a_resumption_without_a_model():
    lamina.init(ddp=True)
    lamina.resume_from_checkpoint(folder())


def a_checkpoint_that_is_not_there():
    lamina.init(ddp=True)
    lamina.DistributedModel(Net())
    lamina.resume_from_checkpoint(folder() + "/elsewhere")


def a_checkpoint_of_a_newer_lamina():
    lamina.init(ddp=True)
    lamina.DistributedModel(Net())
    lamina.resume_from_checkpoint(folder() + "/newer")


def optimizers_that_were_not_saved():
    save_and_begin_anew()
    lamina.resume_from_checkpoint(folder(), "a")


def an_optimizer_of_another_class():
    sgd(save_and_begin_anew())
    lamina.resume_from_checkpoint(folder(), "a")


def options_that_were_not_saved():
    sgd(save_and_begin_anew())
    lamina.resume_from_checkpoint(folder(), "a", strict=False)


def groups_with_other_parameters():
    adamw(list(save_and_begin_anew().parameters())[:1])
    lamina.resume_from_checkpoint(folder(), "a")


def a_change_without_a_model():
    lamina.init(ddp=True)
    lamina.change(partitions=2)


def a_change_to_more_ranks():
    lamina.init(ddp=True)
    lamina.DistributedModel(Net())
    lamina.change(partitions=3)


def a_change_of_another_key():
    lamina.init(ddp=True)
    lamina.DistributedModel(Net())
    lamina.change(bf16=True)


def a_change_by_both_names():
    lamina.init(ddp=True)
    lamina.DistributedModel(Net())
    lamina.change(partitions=2, pipeline_parallel_degree=2)


def changes_that_differ():
    lamina.init(ddp=True)
    lamina.DistributedModel(Net())
    lamina.change(**({"schedule": "simple"} if lamina.rank() else {"partitions": 2}))


def a_change_with_gradients():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    model(batch()).square().mean().backward()
    lamina.change(partitions=2)


def a_change_with_another_parameter():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    parameters = [*model.parameters(), nn.Parameter(torch.zeros(2))]
    lamina.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    lamina.change(partitions=2)


def a_change_of_lbfgs():
    lamina.init(ddp=True)
    model = lamina.DistributedModel(Net())
    lamina.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    lamina.change(partitions=2)


def a_change_with_a_state_that_waits():
    lamina.init(pipeline_parallel_degree=2, microbatches=2, ddp=True)
    optimizer = sgd(lamina.DistributedModel(Net()))
    optimizer.load_state_dict(torch.optim.SGD(Net().parameters(), lr=0.1).state_dict())
    lamina.change(partitions=1)


def train_with(spoil):
    lamina.init(partitions=2, microbatches=1, auto_partition=False, default_partition=0, verify_steps=1)
    torch.manual_seed(0)
    net = Net()
    net.upper = Spoiled(spoil)
    lamina.set_partition(net.upper, 1)
    model = lamina.DistributedModel(net)

    @lamina.step
    def train(x):
        model.backward(model(x).square().mean())

    train(batch())


def a_step_with_another_output():
    train_with(lambda layer, y: 1.5 * y)


def a_step_with_another_gradient():
    train_with(lambda layer, y: Doubled.apply(y))


def a_step_with_another_gradient_of_a_weight():
    train_with(of_a_weight)


CASES = (
    a_loss_that_was_not_scaled,
    gradients_of_no_backward,
    clipping_what_was_not_scaled,
    a_closure_over_shards,
    two_loss_scales,
    options_that_differ,
    lbfgs_over_partitions,
    masters_of_one_memory,
    options_of_models_that_differ,
    a_count_that_is_none,
    a_size_that_is_none,
    a_norm_that_is_none,
    parameters_in_another_order,
    gradients_without_tensors,
    a_backward_after_the_job,
    a_join_without_ddp,
    parts_before_the_cut,
    a_partition_below_none,
    a_call_outside_of_a_step,
    clipping_after_the_job,
    a_state_with_other_groups,
    a_state_with_other_members,
    a_parameter_in_two_groups,
    a_save_without_a_model,
    a_save_before_the_cut,
    a_resumption_without_a_model,
    a_checkpoint_that_is_not_there,
    a_checkpoint_of_a_newer_lamina,
    optimizers_that_were_not_saved,
    an_optimizer_of_another_class,
    options_that_were_not_saved,
    groups_with_other_parameters,
    a_change_without_a_model,
    a_change_to_more_ranks,
    a_change_of_another_key,
    a_change_by_both_names,
    changes_that_differ,
    a_change_with_gradients,
    a_change_with_another_parameter,
    a_change_of_lbfgs,
    a_change_with_a_state_that_waits,
    a_step_with_another_output,
    a_step_with_another_gradient,
    a_step_with_another_gradient_of_a_weight,
)


if __name__ == "__main__":
    listed_cases.run(CASES)
