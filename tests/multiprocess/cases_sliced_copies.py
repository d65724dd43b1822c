# SPDX-License-Identifier: Apache-2.0
"""Layers that are cut over two ranks, in two copies of the model: four ranks."""

import copy

import torch
from multiprocess.cases_checkpoints import folder, require_same
from multiprocess.cases_sliced import made, require_equal_states, sliced, words
from multiprocess.cases_sliced_batches import RANK, RANKS, loss_of, require_same_training
from multiprocess.cases_sliced_batches import start as start_own_batches
from multiprocess.cases_sliced_partial_states import adafactor
from multiprocess.cases_sliced_state import Job, Plain, require_equal

import lamina


def trained_alike(steps, make=None, **options):
    """A job and a plain model that have trained, and are equal."""
    job, plain = Job(make, **options), Plain(make)
    job.model.eval()
    plain.model.eval()
    job.train(steps)
    plain.train(steps, copies=2)
    require_equal(job, plain)
    return job, plain


def case_own_batches_of_two_copies():
    start_own_batches()
    plain = made()
    require_same_training(sliced(plain), plain)


def case_own_batches_and_states_that_copies_divide():
    start_own_batches(shard_optimizer_state=True)
    plain = made()
    model = sliced(plain)
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    plains = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for seed in range(2):
        model.backward(loss_of(model, seed, RANK))
        sum(loss_of(plain, seed, rank) for rank in range(RANKS)).div(RANKS).backward()
        optimizer.clip_master_grads(0.5)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for each in (optimizer, plains):
            each.step()
            each.zero_grad()
    require_equal_states(model.state_dict(), plain.state_dict())


def case_whole_parameters_of_which_copies_divide_slices():
    with folder() as path:
        job, _ = trained_alike(3, adafactor, shard_optimizer_state=True)
        expected = job.states()
        lamina.save_checkpoint(path, "a")
        lamina.save_checkpoint(path, "old", form="smp")
        for tag in ("a", "old"):
            job.train(1)
            lamina.resume_from_checkpoint(path, tag)
            require_same(job.states(), expected)
        lamina.shutdown()
        job = Job(adafactor, seed=5, tp=1)
        lamina.resume_from_checkpoint(path, "a")
        require_same(job.states(), expected)


def case_divided_masters_of_slices_in_the_original_s_form():
    with folder() as path:
        job = Job(shard_optimizer_state=True, bf16=True)
        job.train(2)
        expected = job.states()
        lamina.save_checkpoint(path, "old", form="smp")
        lamina.shutdown()
        job = Job(seed=5, tp=1, bf16=True)
        lamina.resume_from_checkpoint(path, "old")
        require_same(job.states(), expected)


def case_shards_of_slices():
    keys = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20, "sdp_gradient_clipping": 0.5}
    with folder() as path:
        job, _ = trained_alike(3, **keys)
        expected = copy.deepcopy(job.states())
        lamina.save_checkpoint(path, "a")
        lamina.shutdown()
        job = Job(seed=5, tp=1)
        lamina.resume_from_checkpoint(path, "a")
        require_same(job.states(), expected)
        lamina.save_checkpoint(path, "b")
        lamina.shutdown()
        job = Job(seed=6, **keys)
        lamina.resume_from_checkpoint(path, "b")
        require_same(job.states(), expected)


def case_whole_parameters_of_which_both_ranks_of_a_sharding_group_have_the_slice():
    keys = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.5}  # all are small, and not divided
    with folder() as path:
        job, plain = trained_alike(2, adafactor, **keys)
        expected = job.states()
        lamina.save_checkpoint(path, "a")
        lamina.shutdown()
        for tp in (1, 2):
            job = Job(adafactor, seed=5, tp=tp, **(keys if tp == 2 else {}))
            lamina.resume_from_checkpoint(path, "a")
            require_same(job.states(), expected)
            if tp == 1:
                lamina.shutdown()
        job.model.eval()
        job.train(1)
        plain.train(1, copies=2)
        require_equal(job, plain)
        lamina.save_checkpoint(path, "b")  # copies are equal


def case_copies_of_slices_join():
    job, plain = Job(), Plain()
    job.model.eval()
    plain.model.eval()
    copy_number = lamina.rdp_rank()
    with job.model.join():
        for step in range(2 + copy_number):
            job.model(words(2 * step + copy_number)).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
    for step in range(3):
        for number in range(2) if step < 2 else [1]:
            (plain.model(words(2 * step + number)) / 2).backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    require_equal_states(job.model.state_dict(), plain.model.state_dict())
