# SPDX-License-Identifier: Apache-2.0
"""The Python side of test_both_faces_refuse.py: what each case is refused with, as a line `case<TAB>error`. Each begins
a job of its own. Functions of the same names make up the C++ side, tests/frontend/refusals.cc.

    lamina run -n 2 refusals.py
"""

import os

import torch
from torch import nn

import lamina


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower, self.upper = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.upper(self.lower(x).tanh())


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


def clipping_after_the_job():
    lamina.init(ddp=True)
    optimizer = sgd(lamina.DistributedModel(Net()))
    lamina.shutdown()
    optimizer.clip_master_grads(1)


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


CASES = (
    a_loss_that_was_not_scaled,
    gradients_of_no_backward,
    clipping_what_was_not_scaled,
    a_closure_over_shards,
    two_loss_scales,
    options_that_differ,
    lbfgs_over_partitions,
    masters_of_one_memory,
    clipping_after_the_job,
    a_save_without_a_model,
    a_save_before_the_cut,
    a_resumption_without_a_model,
    a_checkpoint_that_is_not_there,
    a_checkpoint_of_a_newer_lamina,
    optimizers_that_were_not_saved,
    an_optimizer_of_another_class,
    options_that_were_not_saved,
    groups_with_other_parameters,
)


def main():
    """The Python side, on each rank."""
    for case in CASES:
        text = "nothing"
        try:
            case()
        except lamina.errors.Error as error:
            text = str(error)
        if not lamina.is_initialized() or lamina.rank() == 0:
            print(f"{case.__name__}\t{text}", flush=True)
        lamina.shutdown()


if __name__ == "__main__":
    main()
