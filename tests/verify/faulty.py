# SPDX-License-Identifier: Apache-2.0
"""A training script with a fault, named by its first argument, that only the layout has: see faults.py.

lamina verify -n 2 tests/verify/faulty.py FAULT
"""

import itertools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import lamina
from lamina.model import shards

sys.path.insert(0, str(Path(__file__).parents[1]))

from verify.faults import AT, FAULTS, LAYOUTS, MEAN, OUTPUT, WEIGHT
from verify.faulty_model import CLASSES, SIZE, Model, State

ROWS, STEPS = 8, 3


class Spoiler:
    """Does what is wrong between backward, update and the next step."""

    def __init__(self, model, optimizer, state):
        self.model, self.optimizer, self.state = model, optimizer, state
        self.kept = None

    def named(self, name):
        """The parameter or buffer, where this rank has it: as a list."""
        every = itertools.chain(self.model.local_named_parameters(), self.model.local_named_buffers())
        return [each for its, each in every if its == name]

    @torch.no_grad()
    def before_update(self):
        state = self.state
        own = [each for _, each in self.model.local_named_parameters() if each.grad is not None]
        for weight in self.named(WEIGHT):
            match state.fault if state.is_here else "":
                case "skipped_parameter":
                    weight.grad = None
                case "doubled_gradient_of_weight":
                    weight.grad.mul_(2)
                case "kept_gradient":
                    if self.kept is not None:
                        weight.grad.add_(self.kept)
                    self.kept = weight.grad.clone()
                case "exchanged_gradients":
                    for other in self.named(f"layers.{AT + 1}.linear.weight"):
                        weight.grad, other.grad = other.grad.clone(), weight.grad.clone()
                case "missed_reduction":
                    if lamina.rank() == 1:
                        weight.grad.mul_(0.5)
                case "shard_without_gradient":
                    if lamina.rank() == 1:
                        shards.holder(weight).grad.zero_()
        match state.fault if state.is_here else "":
            case "wrong_clip":
                for each in own:
                    each.grad.mul_(0.5)
            case "sum_for_mean":
                for each in own:
                    each.grad.mul_(2)

    @torch.no_grad()
    def after_update(self):
        state = self.state
        if not state.is_here:
            return
        for weight in self.named(WEIGHT):
            match state.fault:
                case "written_parameter":
                    weight.mul_(1.01)
                case "parted_copy" | "wrong_shard":
                    if lamina.rank() == 1:
                        shards.holder(weight).mul_(1.01)
                case "momentum_reset" | "state_of_a_copy":
                    if state.fault == "momentum_reset" or lamina.rank() == 1:
                        self.optimizer.state[weight]["momentum_buffer"].zero_()
        for weight in self.named(f"layers.{AT}.norm.weight"):
            match state.fault:
                case "written_norm":
                    weight.add_(0.01)
                case "weight_decay":  # of a group that has none
                    weight.mul_(0.999)
        if state.fault == "rate" and lamina.rank() == 1:
            for _, each in self.model.local_named_parameters():
                each.sub_(each.grad, alpha=0.01)
        for mean in self.named(MEAN):
            if state.fault == "stale_buffer":
                mean.zero_()


def run(fault, layout, **keys):
    lamina.init(**LAYOUTS[layout], **keys, timeout_s=60)
    try:
        train(fault)
    finally:
        lamina.shutdown()


def train(fault):
    state = State(fault)
    torch.manual_seed(0)
    module = Model([state])
    for layer in module.layers[AT:]:
        lamina.set_partition(layer, lamina.pp_size() - 1)
    model = lamina.DistributedModel(module)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    spoiler = Spoiler(model, optimizer, state)

    @lamina.step
    def step(model, x, target):
        loss = F.cross_entropy(model(x), target)
        model.backward(loss)
        return loss

    torch.manual_seed(0 if fault == "same_rows" and state.is_here else lamina.dp_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(model, torch.randn(ROWS, SIZE), torch.randint(CLASSES, (ROWS,)))
        spoiler.before_update()
        optimizer.step()
        spoiler.after_update()


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "none"
    run(name, sys.argv[2] if len(sys.argv) > 2 else FAULTS.get(name, OUTPUT).layout)
