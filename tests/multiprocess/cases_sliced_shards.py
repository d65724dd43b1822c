# SPDX-License-Identifier: Apache-2.0
"""Shards of layers that are cut over two ranks, in two copies of a pipeline of two partitions: eight ranks."""

import copy

import torch
from multiprocess.cases_checkpoints import folder, require_same
from multiprocess.cases_sliced import require_equal_states
from multiprocess.cases_sliced_partial_states import adafactor, muon
from multiprocess.cases_sliced_pipeline import ALL, PLACES, Words, train, words
from multiprocess.cases_sliced_state import adamw, require_equal_optimizers
from torch import nn

import lamina

CLIP = 0.5
SHARDS = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20, "sdp_gradient_clipping": CLIP}


def made(seed=0):
    torch.manual_seed(seed)
    return Words().double().eval()


@lamina.step
def evaluate(model, batch):
    return model(batch)


class Job:
    """A model in some layout, and its optimizer."""

    def __init__(self, make=adamw, seed=0, tp=2, pp=2, **keys):
        sliced = {"tensor_parallel_degree": 2, "prescaled_batch": True} if tp == 2 else {}
        lamina.init(partitions=pp, microbatches=4, ddp=True, timeout_s=60, **sliced, **keys)
        module = made(seed).to(torch.bfloat16 if keys.get("bf16") else torch.double)
        for name, partition in PLACES.items() if pp == 2 else ():
            lamina.set_partition(module.get_submodule(name), partition)
        if tp == 2:
            lamina.set_tensor_parallelism(module, plan=ALL)
        self.model = lamina.DistributedModel(module)
        self.optimizer = lamina.DistributedOptimizer(make(self.model.parameters()))
        self.model.eval()
        self.steps = 0

    def train(self, steps):
        for _ in range(steps):
            loss = train(self.model, words(self.steps * lamina.rdp_size() + lamina.rdp_rank()))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
        return lamina.allgather(loss.reduce_mean(), lamina.RDP_GROUP)

    def resume(self, path, tag):
        """Loads a checkpoint, also where it waits for the first step."""
        lamina.resume_from_checkpoint(path, tag)
        with torch.no_grad():
            evaluate(self.model, words(0))

    def states(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))


class Plain:
    def __init__(self, make=adamw):
        self.model = made()
        self.optimizer = make(self.model.parameters())

    def train(self, steps, copies=2):
        for step in range(steps):
            losses = []
            for number in range(copies):
                losses.append(sum(self.model(part) / 4 for part in words(step * copies + number).chunk(4)))
                (losses[-1] / copies).backward()
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses


def require_plain_training(make, steps, rtol=1e-10, **keys):
    job, plain = Job(make, **SHARDS | keys), Plain(make)
    found, expected = job.train(steps), plain.train(steps)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected).detach(), rtol=rtol, atol=0)
    assert abs(job.optimizer._global_grad_norm - plain.norm.item()) <= rtol * plain.norm.item()
    model, optimizer = job.states()
    require_equal_states(model, plain.model.state_dict())
    require_equal_optimizers(optimizer, plain.optimizer.state_dict())
    return job


def case_updates_are_those_of_the_plain_model_in_all_schedules():
    for schedule in ("interleaved", "simple", "zero_bubble"):
        job = require_plain_training(adamw, 4, pipeline=schedule)
        sharded = [each for each in job.model.local_parameters() if hasattr(each, "ds_tensor")]
        assert any(job.model.is_distributed_parameter(each) for each in sharded)
        assert not all(job.model.is_distributed_parameter(each) for each in sharded)
        lamina.shutdown()


def case_gathers_and_collectives_of_slices_have_one_order():
    """Without memory in common: teams of four ranks."""
    require_plain_training(adamw, 4, ddp_dist_backend="nccl")


def case_optimizers_that_need_or_measure_whole_parameters():
    for make in (adafactor, muon, lambda parameters: lamina.optim.LAMB(parameters, lr=1e-2)):
        require_plain_training(make, 3)
        lamina.shutdown()


def case_checkpoints_go_into_other_layouts_and_back():
    layouts = ({"tp": 1, "pp": 1}, {}, {"pp": 1} | SHARDS, {"tp": 1} | SHARDS, {"shard_optimizer_state": True})
    with folder() as path:
        job = Job(deterministic_server=True, **SHARDS)
        job.train(2)
        expected = job.states()
        lamina.save_checkpoint(path, "0")
        lamina.save_checkpoint(path, "whole", partial=False)
        job.train(1)
        after = job.states()
        lamina.shutdown()
        for number, layout in enumerate(layouts):
            job = Job(seed=5, **layout)
            job.resume(path, str(number))
            require_same(job.states(), expected)
            lamina.save_checkpoint(path, str(number + 1))
            lamina.shutdown()
        job = Job(seed=6, deterministic_server=True, **SHARDS)
        job.resume(path, str(len(layouts)))
        require_same(job.states(), expected)
        job.steps = 2
        job.train(1)
        require_same(job.states(), after)
        lamina.resume_from_checkpoint(path, "whole", partial=False)
        require_same(job.states()[0], expected[0])


def case_masters_of_halves():
    with folder() as path:
        job = Job(bf16=True, **SHARDS)
        job.train(2)
        expected = job.states()
        lamina.save_checkpoint(path, "two")
        lamina.save_checkpoint(path, "old", form="smp")
        job.model.load_state_dict(expected[0])
        job.optimizer.load_state_dict(expected[1])
        require_same(job.states(), expected)
        lamina.shutdown()
        for tag in ("two", "old"):
            job = Job(seed=5, tp=1, pp=1, bf16=True)
            lamina.resume_from_checkpoint(path, tag)
            require_same(job.states(), expected)
            lamina.shutdown()
