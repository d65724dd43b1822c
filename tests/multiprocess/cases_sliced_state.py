# SPDX-License-Identifier: Apache-2.0
"""States of optimizers, precision and checkpoints of a model with layers that are cut over two ranks."""

import copy
import os

import pytest
import torch
from multiprocess.cases_checkpoints import folder, require_same
from multiprocess.cases_sliced import made, require_equal_states, sliced, words
from torch import nn

import lamina
from lamina.errors import UsageError

RANK = int(os.environ.get("RANK", 0))
SCALE = {"init_scale": 2.0**10, "scale_window": 2}


class Job:
    """A model and its optimizer, sliced with `tp` 2."""

    def __init__(self, make=None, seed=0, tp=2, scale=None, **keys):
        sliced_keys = {"tensor_parallel_degree": 2, "prescaled_batch": True} if tp == 2 else {}
        lamina.init(ddp=True, timeout_s=60, **sliced_keys, **keys)
        plain = made(seed).float() if keys.keys() & {"bf16", "fp16"} else made(seed)
        self.model = sliced(plain) if tp == 2 else lamina.distribute(plain)
        self.optimizer = lamina.DistributedOptimizer((make or adamw)(self.model.parameters()), **(scale or {}))
        self.steps = 0

    def train(self, steps):
        return [self.update() for _ in range(steps)]

    def update(self):
        if self.steps == 0:
            torch.manual_seed(0)
        loss = self.model(words(self.steps * lamina.rdp_size() + lamina.rdp_rank()))
        self.model.backward(loss)
        self.optimizer.clip_master_grads(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.detach()

    def states(self):
        """Copies of them."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))


class Plain:
    """A training of the same on one rank."""

    def __init__(self, make=None, seed=0):
        self.model = made(seed)
        self.optimizer = (make or adamw)(self.model.parameters())

    def train(self, steps, copies=1):
        torch.manual_seed(0)
        for step in range(steps):
            for number in range(copies):
                (self.model(words(step * copies + number)) / copies).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def require_equal_optimizers(state, plain):
    assert state["param_groups"] == plain["param_groups"]
    assert list(state["state"]) == list(plain["state"])
    for number, fields in plain["state"].items():
        require_equal_states(state["state"][number], fields)


def require_equal(job, plain):
    model, optimizer = job.states()
    require_equal_states(model, plain.model.state_dict())
    require_equal_optimizers(optimizer, plain.optimizer.state_dict())


def case_states_of_optimizers_are_the_plain_ones_and_are_loaded():
    job, plain, other = Job(), Plain(), Plain(seed=3)
    job.train(2)
    plain.train(2)
    require_equal(job, plain)
    assert (job.optimizer.state_dict(gather_to_rank0=True) == {}) == (RANK > 0)
    other.train(3)
    job.model.load_state_dict(other.model.state_dict())
    job.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    require_same(job.optimizer.state_dict(), other.optimizer.state_dict())
    job.steps = 0
    job.train(2)
    other.train(2)
    require_equal(job, other)


def case_states_that_came_before_the_wrap_are_sliced():
    plain, other = Plain(), Plain()
    plain.train(2)
    lamina.init(tensor_parallel_degree=2, ddp=True, prescaled_batch=True, timeout_s=60)
    other.train(2)
    model = sliced(other.model)
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(other.optimizer.state_dict())
    optimizer = lamina.DistributedOptimizer(optimizer)
    require_same(optimizer.state_dict(), plain.optimizer.state_dict())


def case_training_goes_on_from_a_checkpoint():
    with folder() as path:
        job = Job()
        job.train(2)
        lamina.save_checkpoint(path, "two")
        expected = job.train(2), job.states()
        lamina.shutdown()
        job = Job(seed=5)
        torch.manual_seed(99)
        lamina.resume_from_checkpoint(path)
        job.steps = 2
        require_same((job.train(2), job.states()), expected)


def case_checkpoints_go_into_other_degrees_and_back():
    with folder() as path:
        job = Job()
        job.train(2)
        expected = job.states()
        lamina.save_checkpoint(path, "a")
        lamina.save_checkpoint(path, "whole", partial=False)
        lamina.shutdown()
        job = Job(seed=5, tp=1)
        lamina.resume_from_checkpoint(path, "a")
        require_same(job.states(), expected)
        lamina.save_checkpoint(path, "b", asynchronous=True).wait()
        lamina.save_checkpoint(path, "old", form="smp")
        lamina.shutdown()
        job = Job(seed=6)
        lamina.resume_from_checkpoint(path, "b")
        require_same(job.states(), expected)
        job.train(1)
        lamina.resume_from_checkpoint(path, "whole", partial=False)
        require_same(job.states()[0], expected[0])
        job.train(1)
        lamina.resume_from_checkpoint(path, "old")
        require_same(job.states(), expected)


def case_norms_of_parameters_are_those_of_the_whole():
    for make in (
        lambda parameters: lamina.optim.LAMB(parameters, lr=1e-2),
        lambda parameters: lamina.optim.NovoGrad(parameters, lr=1e-2),
    ):
        job, plain = Job(make), Plain(make)
        job.train(3)
        plain.train(3)
        require_equal(job, plain)
        lamina.shutdown()


def case_optimizers_that_need_whole_parameters_are_refused_before_an_update():
    job = Job()
    before, _ = job.states()
    hidden = [each for each in job.model.module.blocks.parameters() if each.dim() == 2]
    own = [torch.optim.Adafactor(hidden), torch.optim.Muon(hidden), torch.optim.LBFGS(hidden)]
    with pytest.raises(UsageError, match="whose layers are sliced"):
        lamina.DistributedOptimizer(own[-1])
    for optimizer in (*own, lamina.optim.LAMB(hidden)):
        job.model(words(0)).backward()
        with pytest.raises(UsageError, match="whose layers are sliced"):
            optimizer.step(*[lambda: None] * isinstance(optimizer, torch.optim.LBFGS))
    require_same(job.model.state_dict(), before)


def case_what_is_whole_has_any_optimizer():
    job, plain = Job(), made()
    for make in (torch.optim.Adafactor, lambda parameters: lamina.optim.LAMB(parameters, max_grad_norm=1e-2)):
        for model in (job.model, plain):
            torch.manual_seed(0)
            optimizer = make((model.module if model is job.model else model).embedding.parameters())
            model.zero_grad()
            model(words(0)).backward()
            optimizer.step()
        require_equal_states(job.model.state_dict(), plain.state_dict())


def case_halves_have_masters_and_overflows_leave_the_step_out():
    scale = {"dynamic_loss_scale": True, "dynamic_loss_args": SCALE}
    for keys in ({"bf16": True}, {"fp16": True}):
        with folder() as path:
            job = Job(scale=scale, **keys)
            job.train(2)
            states = job.states()
            assert states[1]["masters"][3].shape == states[0][list(states[0])[3]].shape
            lamina.save_checkpoint(path, "two")
            job.train(1)
            expected = job.states()
            lamina.resume_from_checkpoint(path)
            require_same(job.states(), states)
            job.steps = 2
            job.train(1)
            require_same(job.states(), expected)
            job.model.load_state_dict(states[0])
            job.optimizer.load_state_dict(states[1])
            require_same(job.states(), states)
            job.model.backward(job.model(words(0)))
            if RANK == 1:
                job.model.module.blocks[0].up.weight.grad.fill_(float("inf"))
            job.optimizer.step()
            assert job.optimizer.overflow
            require_same(job.model.state_dict(), states[0])


def case_an_infinity_in_a_slice_has_all_ranks_leave_the_step_out():
    for wrap in (lambda optimizer: optimizer, lamina.DistributedOptimizer):
        for kind in (torch.amp.GradScaler, lamina.amp.GradScaler):
            job = Job()
            optimizer, scaler = wrap(torch.optim.SGD(job.model.parameters(), lr=0.1)), kind("cpu", init_scale=8.0)
            before, _ = job.states()
            scaler.scale(job.model(words(0))).backward()
            if RANK == 1:
                job.model.module.blocks[0].up.weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 4.0
            require_same(job.model.state_dict(), before)
            lamina.shutdown()
