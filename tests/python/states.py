# SPDX-License-Identifier: Apache-2.0
"""The Python side of test_both_faces_state.py: what becomes of the state of an optimizer in each case, as a line
`case<TAB>outcome` in a file of each rank. Each begins jobs of its own. Functions of the same names make up the C++
side, tests/frontend/states.cc.

    STATES_FOLDER=FOLDER lamina run -n 2 states.py
"""

import copy
import os
from pathlib import Path

import torch
from torch import nn

import lamina

FOLDER = Path(os.environ["STATES_FOLDER"])
PIPELINE = {"partitions": 2}
SHARDS = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e9}
DIVIDED = {"ddp": True, "shard_optimizer_state": True}
HALVES = DIVIDED | {"fp16": True}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower, self.upper = nn.Linear(4, 6), nn.Linear(6, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))

    def forward(self, x):
        return self.upper(self.lower(x).tanh())


@lamina.step
def train(model, x):
    model.backward(model(x).float().square().mean())


class Job:
    """One that trains; `first`: the partition of the lower layer, `leaves_out`: the parameter that is not trained,
    `groups_own`: each rank makes the groups of what it owns."""

    def __init__(self, keys, first=0, leaves_out=None, groups_own=False):
        lamina.init(**keys, timeout_s=30)
        net = Net()
        if keys == PIPELINE:
            lamina.set_partition(net.lower, first)
            lamina.set_partition(net.upper, 1 - first)
        self.dtype = torch.half if keys == HALVES else torch.float
        self.model = lamina.DistributedModel(net)
        trained = [each for name, each in self.model.named_parameters() if name != leaves_out]
        if groups_own:
            self.compute()
            trained = list(self.model.local_parameters())
        scale = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 256}} if keys == HALVES else {}
        self.optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(trained, lr=0.1), **scale)
        self.optimizer.zero_grad()

    def compute(self):
        rows = 4 // lamina.dp_size()
        x = torch.linspace(0, 1, 16).view(4, 4).narrow(0, lamina.dp_rank() * rows, rows)
        train(self.model, x.to(self.dtype))

    def train(self, steps):
        for _ in range(steps):
            self.compute()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self):
        return copy.deepcopy(dict(self.model.state_dict()))


def whole(optimizer):
    return optimizer.state_dict()


def first(optimizer):
    return optimizer.state_dict(gather_to_rank0=True)


def parts(optimizer):
    return optimizer.local_state_dict(gather_if_shard=False)


def joined(optimizer):
    return optimizer.local_state_dict(gather_if_shard=True)


def saved(keys, form, **others):
    """Trains, and saves; returns the values, the state, and the values a step later."""
    job = Job(keys, **others)
    job.train(2)
    values, state = job.values(), copy.deepcopy(form(job.optimizer))
    job.train(1)
    expected = job.values()
    lamina.shutdown()
    return values, state, expected


def goes_on(state, keys, early=False, first=0):
    """Says whether a new job goes on from what saved() has returned."""
    values, state, expected = state
    job = Job(keys, first)
    if early:
        job.optimizer.load_state_dict(state)
    job.compute()
    job.optimizer.zero_grad()
    if not early:
        job.optimizer.load_state_dict(state)
    job.model.load_state_dict(values)
    job.train(1)
    found = job.values()
    lamina.shutdown()
    same = all(torch.allclose(found[name].float(), expected[name].float()) for name in found)
    return "goes on" if same else "differs"


def exchanged(state, shift=1):
    """The state that the other rank has saved, or with shift 0 that of the first."""
    values, own, expected = state
    lamina.init()
    torch.save(own, FOLDER / f"python_{lamina.rank()}")
    lamina.barrier()
    given = torch.load(FOLDER / f"python_{(lamina.rank() + 1) % 2 if shift else 0}")
    lamina.barrier()
    lamina.shutdown()
    return values, given, expected


def the_whole_goes_on():
    return goes_on(saved(PIPELINE, whole), PIPELINE)


def the_whole_waits_for_the_cut():
    return goes_on(saved(PIPELINE, whole), PIPELINE, early=True)


def the_whole_goes_on_in_another_layout():
    return goes_on(saved(PIPELINE, whole), SHARDS)


def the_whole_of_groups_of_own_parameters():
    return goes_on(saved(PIPELINE, whole, groups_own=True), PIPELINE)


def the_whole_on_the_first_alone():
    state = saved(PIPELINE, first)
    lamina.init()
    others = "" if lamina.rank() == 0 or not state[1] else "others have it; "
    lamina.shutdown()
    return others + goes_on(exchanged(state, shift=0), PIPELINE)


def parts_go_on():
    return goes_on(saved(PIPELINE, parts), PIPELINE)


def parts_wait_for_the_cut():
    return goes_on(saved(PIPELINE, parts), PIPELINE, early=True)


def parts_of_another_cut_are_put_together():
    return goes_on(saved(PIPELINE, parts), PIPELINE, first=1)


def parts_of_another_cut_wait_and_are_put_together():
    return goes_on(saved(PIPELINE, parts), PIPELINE, early=True, first=1)


def parts_of_shards_go_on():
    return goes_on(saved(SHARDS, parts), SHARDS)


def shards_that_were_joined_go_on():
    return goes_on(saved(SHARDS, joined), SHARDS)


def joined_ones_of_another_rank_go_on():
    return goes_on(exchanged(saved(DIVIDED, joined)), DIVIDED)


def masters_and_the_scale_go_on():
    return goes_on(saved(HALVES, whole), HALVES) + ", " + goes_on(saved(HALVES, parts), HALVES)


def the_scale_is_the_saved_one():
    _, state, _ = saved(HALVES, joined)
    job = Job(HALVES)
    for _ in range(2):
        job.model.backward(job.model(torch.full((2, 4), torch.inf, dtype=torch.half)).float().square().mean())
        job.optimizer.step()
        job.optimizer.zero_grad()
    job.optimizer.load_state_dict(state)
    return str(int(job.optimizer.state_dict()["loss_scale"]["scale"]))


def random_numbers_go_on():
    _, state, _ = saved(PIPELINE | {"seed": 3}, whole)
    job = Job(PIPELINE | {"seed": 3})
    job.optimizer.load_state_dict(state)
    return str(lamina.rng_step())


def parts_of_another_rank():
    return goes_on(exchanged(saved(DIVIDED, parts)), DIVIDED)


def parts_where_states_are_whole():
    return goes_on(saved(DIVIDED, parts), {"ddp": True})


def parts_of_more_partitions():
    return goes_on(saved(PIPELINE, parts), DIVIDED)


def parts_on_one_rank_and_the_whole_on_another():
    one, other = saved(PIPELINE, parts), saved(PIPELINE, whole)
    lamina.init()
    given = one if lamina.rank() == 0 else other
    lamina.shutdown()
    return goes_on(given, PIPELINE)


def parts_that_lack_a_parameter():
    return goes_on(saved(PIPELINE, parts, leaves_out="upper.bias"), PIPELINE)


def parts_with_one_too_many():
    _, state, _ = saved(PIPELINE, parts)
    job = Job(PIPELINE, leaves_out="upper.bias")
    job.compute()
    job.optimizer.load_state_dict(state)


def what_does_not_fit_on_one_rank():
    one, other = saved(PIPELINE, whole, leaves_out="upper.bias"), saved(PIPELINE, whole)
    lamina.init()
    given = one if lamina.rank() == 1 else other
    lamina.shutdown()
    return goes_on(given, PIPELINE)


def what_does_not_fit_before_the_cut():
    return goes_on(saved(PIPELINE, whole, leaves_out="upper.bias"), PIPELINE, early=True)


def a_save_while_another_one_waits():
    _, state, _ = saved(PIPELINE, parts)
    job = Job(PIPELINE)
    job.optimizer.load_state_dict(state)
    job.optimizer.state_dict()


CASES = (
    the_whole_goes_on,
    the_whole_waits_for_the_cut,
    the_whole_goes_on_in_another_layout,
    the_whole_of_groups_of_own_parameters,
    the_whole_on_the_first_alone,
    parts_go_on,
    parts_wait_for_the_cut,
    parts_of_another_cut_are_put_together,
    parts_of_another_cut_wait_and_are_put_together,
    parts_of_shards_go_on,
    shards_that_were_joined_go_on,
    joined_ones_of_another_rank_go_on,
    masters_and_the_scale_go_on,
    the_scale_is_the_saved_one,
    random_numbers_go_on,
    parts_of_another_rank,
    parts_where_states_are_whole,
    parts_of_more_partitions,
    parts_on_one_rank_and_the_whole_on_another,
    parts_that_lack_a_parameter,
    parts_with_one_too_many,
    what_does_not_fit_on_one_rank,
    what_does_not_fit_before_the_cut,
    a_save_while_another_one_waits,
)


def main():
    """The Python side, on each rank."""
    rank = int(os.environ["RANK"])
    for case in CASES:
        outcome = "nothing"
        try:
            outcome = case() or outcome
        except lamina.errors.Error as error:
            outcome = str(error).splitlines()[0]
        with (FOLDER / f"python_of_{rank}").open("a") as file:
            file.write(f"{case.__name__} on {rank}\t{outcome}\n")
        lamina.shutdown()


if __name__ == "__main__":
    main()
