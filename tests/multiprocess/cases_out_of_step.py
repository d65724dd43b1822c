# SPDX-License-Identifier: Apache-2.0
"""Two ranks of a pipeline that do not make the same calls. Each case begins without a job; every rank runs it."""

import copy
import os
import time

import pytest
import torch
from torch import nn

import lamina

RANK = int(os.environ.get("RANK", 0))
BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
WITHIN_S = 2.0
HERE = "cases_out_of_step.py:"
MUTUAL = "[step-mutual-wait]"


class Training:
    """A model over both ranks, and the plain one; what they do."""

    def __init__(self):
        lamina.init(partitions=2, microbatches=2, timeout_s=60, auto_partition=False, default_partition=0)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.plain = copy.deepcopy(self.net)
        lamina.set_partition(self.net[1], 1)
        self.model = lamina.DistributedModel(self.net)
        make = torch.optim.SGD
        self.optimizer = lamina.DistributedOptimizer(make(self.model.parameters(), lr=0.1, momentum=0.9))
        self.plain_optimizer = make(self.plain.parameters(), lr=0.1, momentum=0.9)

        @lamina.step
        def train(x):
            loss = self.model(x).square().mean()
            self.model.backward(loss)
            return {"trained": loss}

        @lamina.step
        def evaluate(x):
            return {"evaluated": self.model(x)}

        @lamina.step
        def local(x):
            return {"local": x.sum()}

        self.train, self.evaluate, self.local = train, evaluate, local

    def expect_exact(self):
        for _ in range(2):
            self.optimizer.zero_grad()
            loss = self.train(BATCH)["trained"].reduce_mean()
            self.optimizer.step()
            self.plain_optimizer.zero_grad()
            expected = self.plain(BATCH).square().mean()
            expected.backward()
            self.plain_optimizer.step()
            torch.testing.assert_close(loss, expected.detach())
        for name, value in self.model.state_dict().items():
            torch.testing.assert_close(value, self.plain.state_dict()[name])


def expect_desync(call, *words):
    began = time.monotonic()
    with pytest.raises(lamina.DesyncError) as caught:
        call()
    assert time.monotonic() - began < WITHIN_S
    for word in words:
        assert word in str(caught.value), str(caught.value)


def case_one_rank_alone_evaluates():
    training = Training()
    training.expect_exact()
    mine = training.evaluate if RANK == 0 else training.train
    expect_desync(lambda: mine(BATCH), "rank 0 has entered the step function ", ".evaluate at ", ".train at ", HERE)
    training.optimizer.zero_grad()
    training.expect_exact()


def case_one_rank_alone_runs_a_step_that_needs_no_other():
    training = Training()
    training.expect_exact()
    if RANK == 0:
        assert list(training.local(BATCH)) == ["local"]
        lamina.send("over", 1, lamina.WORLD_RANK)
    else:
        lamina.recv_from(0, lamina.WORLD_RANK)
    expect_desync(lambda: training.train(BATCH), ".local at ", ".train at ", HERE)
    if RANK == 1:  # which has refused the step that rank 0 had left
        expect_desync(lambda: training.train(BATCH), ".local at ", ".train at ")
    training.optimizer.zero_grad()
    training.expect_exact()


def case_the_model_is_called_without_gradients_as_in_a_plain_script():
    training = Training()
    with torch.no_grad():  # before the first step
        torch.testing.assert_close(training.model(BATCH), training.plain(BATCH))
    training.expect_exact()
    seen = []
    training.model.register_post_step_hook(lambda model, optimizer: seen.append(model))
    for context in (torch.no_grad, torch.inference_mode):
        before = torch.get_rng_state()
        with context():
            output = training.model(BATCH[:5])  # of any number of rows
            expected = training.plain(BATCH[:5])
        torch.testing.assert_close(output, expected)
        assert type(output) is torch.Tensor and not output.requires_grad and not seen
        assert torch.equal(torch.get_rng_state(), before)
    training.expect_exact()
    assert seen


def case_a_call_with_gradients_says_how_to_evaluate():
    training = Training()
    with pytest.raises(lamina.UsageError, match=r"under torch\.no_grad\(\): docs/evaluation\.md"):
        training.model(BATCH)


def case_one_rank_alone_calls_the_model():
    training = Training()
    training.expect_exact()
    with torch.no_grad():
        mine = training.model if RANK == 0 else training.train
        expect_desync(lambda: mine(BATCH), "a call of the model outside of step functions at ", ".train at ", HERE)
    training.optimizer.zero_grad()
    training.expect_exact()


def case_a_call_with_another_batch_is_refused():
    training = Training()
    with torch.no_grad():
        if RANK == 0:
            training.model(BATCH)
        else:
            with pytest.raises(lamina.UsageError, match=r"another batch than on the rank that leads.*other-batch"):
                training.model(BATCH + 1)
    training.expect_exact()


def case_calls_outside_of_steps_leave_the_random_numbers_of_steps():
    def trained(evaluates, **config):
        lamina.init(partitions=2, microbatches=2, **config)
        torch.manual_seed(0)
        model = lamina.DistributedModel(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)))
        step = lamina.step(lambda x: model(x))
        drawn = [step(BATCH).concat()]
        if evaluates:
            with torch.no_grad():
                noisy = [model(BATCH), model(BATCH)]  # in training mode, as one draws samples
                assert not torch.equal(*noisy)
                model.eval()
                assert torch.equal(model(BATCH), model(BATCH))
                model.train()
        drawn.append(step(BATCH).concat())
        lamina.shutdown()
        return drawn

    for config in ({}, {"seed": 3}):
        for one, other in zip(trained(True, **config), trained(False, **config), strict=True):
            assert torch.equal(one, other), config


ALONE = {
    "model.state_dict()": lambda t: t.model.state_dict(),
    "model.clip_grad_norm_()": lambda t: t.model.clip_grad_norm_(1.0),
    "torch.nn.utils.clip_grad_norm_()": lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), 1.0),
    "optimizer.state_dict()": lambda t: t.optimizer.state_dict(),
    "model.load_state_dict()": lambda t: t.model.load_state_dict(t.plain.state_dict()),
    "optimizer.load_state_dict()": lambda t: t.optimizer.load_state_dict(t.plain_optimizer.state_dict()),
    "lamina.barrier()": lambda t: lamina.barrier(),
    "lamina.allgather()": lambda t: lamina.allgather(RANK, lamina.PP_GROUP),
    "lamina.recv_from()": lambda t: lamina.recv_from(1 - RANK, lamina.WORLD_RANK),
}


def case_one_rank_alone_makes_a_call_of_all_ranks():
    training = Training()
    training.expect_exact()
    for turn, (name, alone) in enumerate(ALONE.items()):
        who = turn % 2
        mine = (lambda: alone(training)) if who == RANK else (lambda: training.train(BATCH))  # noqa: B023
        expect_desync(mine, f"rank {who} waits in {name} at ", f"rank {1 - who} waits in step ", ".train at ", MUTUAL)
    training.optimizer.zero_grad()
    training.expect_exact()


def case_ranks_make_different_calls_of_all_ranks():
    training = Training()
    training.expect_exact()
    calls = [training.model.state_dict, training.optimizer.state_dict]
    expect_desync(calls[RANK], "model.state_dict() at ", "optimizer.state_dict() at ", HERE)
    calls = [training.model.state_dict, lamina.barrier]
    expect_desync(calls[RANK], "model.state_dict() at ", "lamina.barrier() at ", HERE)
    calls = [training.model.state_dict, training.model.cpu]
    expect_desync(calls[RANK], "model.state_dict() at ", "model.cpu() at ", HERE)
    training.expect_exact()


def case_one_rank_alone_enters_the_step_in_which_the_model_is_cut():
    for alone in (0, 1):
        training = Training()
        mine = (lambda: training.train(BATCH)) if alone == RANK else lamina.barrier  # noqa: B023
        expect_desync(mine, "lamina.barrier() at ", HERE)
        training.expect_exact()
        lamina.shutdown()


class Copies:
    """A model that both ranks train, in a plain loop."""

    def __init__(self, **keys):
        lamina.init(ddp=True, timeout_s=60, **keys)
        torch.manual_seed(0)
        self.model = lamina.DistributedModel(nn.Linear(6, 4))
        self.optimizer = lamina.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def backward(self):
        self.model(BATCH).sum().backward()

    def step(self):
        self.optimizer.step()


SHARDS = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
PLAIN_ALONE = (  # of each layout, what one rank does while the other has a backward or another call
    ({}, lambda copies: lamina.barrier(), Copies.backward, "lamina.barrier()", "backward()", MUTUAL),
    (SHARDS, Copies.step, Copies.backward, "optimizer.step()", "backward()", MUTUAL),
    (SHARDS, Copies.step, lambda copies: lamina.barrier(), "optimizer.step()", "lamina.barrier()", MUTUAL),
    (
        SHARDS,
        Copies.step,
        lambda copies: copies.optimizer.state_dict(),
        "optimizer.step()",
        "optimizer.state_dict()",
        "[step-calls-differ]",
    ),
    ({"shard_optimizer_state": True}, Copies.step, Copies.backward, "optimizer.step()", "backward()", MUTUAL),
)


def case_one_copy_leaves_out_a_call_in_a_plain_loop():
    for keys, one, other, *names, code in PLAIN_ALONE:
        copies = Copies(**keys)
        copies.backward()
        copies.step()
        copies.backward()
        expect_desync(lambda: (one, other)[RANK](copies), f" {names[0]} at ", f" {names[1]} at ", HERE, code)  # noqa: B023
        lamina.shutdown()
