# SPDX-License-Identifier: Apache-2.0
"""Shards whose values are gathered by collectives, in two copies of a pipeline of two partitions: four ranks, two
teams."""

import sys

import torch
from multiprocess.cases_sliced import RANK, require_equal_states
from multiprocess.cases_sliced_pipeline import PLACES, Backward, Words, train, words
from multiprocess.cases_sliced_state import adamw, require_equal_optimizers
from torch import nn

import lamina

CLIP = 0.5


class Job:
    """A model over gathers of Gloo, and the plain one, which reads the batches of both copies."""

    def __init__(self, make=adamw, **keys):
        options = {"partitions": 2, "microbatches": 4, "ddp": True, "ddp_dist_backend": "nccl", "timeout_s": 60}
        shards = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20}
        lamina.init(**options | shards | {"sdp_gradient_clipping": CLIP} | keys)
        torch.manual_seed(0)
        self.plain = Words().double().eval()
        torch.manual_seed(RANK)
        model = Words().double().eval()
        if RANK == 0:
            model.load_state_dict(self.plain.state_dict())
        for name, partition in PLACES.items():
            lamina.set_partition(model.get_submodule(name), partition)
        self.model = lamina.DistributedModel(model)
        self.optimizers = [lamina.DistributedOptimizer(make(self.model.parameters())), make(self.plain.parameters())]
        self.model.eval()
        self.steps = 0

    def train(self, steps, length=lambda step, copy_number: 7):
        """Trains both; the losses and norms are equal."""
        for _ in range(steps):
            batches = [words(2 * self.steps + number, length(self.steps, number)) for number in range(2)]
            loss = train(self.model, batches[lamina.dp_rank()]).reduce_mean()
            expected = [torch.stack([self.plain(part) for part in batch.chunk(4)]).mean() for batch in batches]
            (sum(expected) / 2).backward()
            norm = nn.utils.clip_grad_norm_(self.plain.parameters(), CLIP)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(loss, expected[lamina.dp_rank()].detach(), rtol=1e-10, atol=0)
            assert abs(self.optimizers[0]._global_grad_norm - norm.item()) <= 1e-10 * norm.item()
            self.steps += 1

    def require_equal(self):
        require_equal_states(self.model.state_dict(), self.plain.state_dict())
        require_equal_optimizers(self.optimizers[0].state_dict(), self.optimizers[1].state_dict())


def case_updates_are_those_of_the_plain_model_in_all_schedules():
    for schedule in ("interleaved", "simple", "zero_bubble"):
        job = Job(pipeline=schedule)
        job.train(10, length=lambda step, copy_number: 5 + (step + copy_number) % 3)
        job.require_equal()
        lamina.shutdown()


def case_copies_with_batches_of_other_sizes_train_as_one_with_all():
    job = Job()
    for step, sizes in enumerate([[8, 5], [1, 6], [3, 2]]):
        batches = [words(2 * step + number)[:size] for number, size in enumerate(sizes)]
        train(job.model, batches[lamina.dp_rank()])
        job.plain(torch.cat(batches)).backward()
        norm = nn.utils.clip_grad_norm_(job.plain.parameters(), CLIP)
        for optimizer in job.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert abs(job.optimizers[0]._global_grad_norm - norm.item()) <= 1e-10 * norm.item()
    job.require_equal()


def case_values_and_gradients_travel_in_any_portions():
    for keys in ({"sdp_reduce_bucket_size": 100}, {"sdp_max_live_parameters": 500}, {"deterministic_server": True}):
        job = Job(**keys)
        job.train(3)
        job.require_equal()
        lamina.shutdown()


def failure_of(job, rank, block, what, step=train):
    """The error of a step in which one rank runs other code in one block."""
    sys.faults.where, sys.faults.what = (rank, block), what
    try:
        step(job.model, words(lamina.dp_rank()))
    except Exception as error:
        return error
    finally:
        sys.faults.where = (None, None)
        job.model.zero_grad()
    raise AssertionError(f"the step went on, though rank {rank} ran other code in block {block}")


def fail(block, x):
    raise ValueError("of a forward")


def case_a_rank_that_fails_ends_the_step_for_all_and_the_next_one_is_right():
    job = Job()
    job.train(2)
    for rank, block in enumerate(lamina.allgather(lamina.pp_rank(), lamina.WORLD)):
        for what, text in ((fail, "of a forward"), (lambda _, x: Backward.apply(x), "of a backward")):
            error = failure_of(job, rank, block, what)
            assert text in str(error), repr(error)
        job.train(1)
    job.require_equal()


def case_an_evaluation_that_fails_on_one_rank_fails_on_all_and_the_next_step_is_right():
    @lamina.step
    def evaluate(model, batch):
        return model(batch)

    job = Job()
    for rank, block in enumerate(lamina.allgather(lamina.pp_rank(), lamina.WORLD)):
        job.train(1)
        with torch.no_grad():
            error = failure_of(job, rank, block, fail, evaluate)
            assert "of a forward" in str(error), repr(error)
            evaluate(job.model, words(0))
    job.train(1)
    job.require_equal()
