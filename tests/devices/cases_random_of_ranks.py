# SPDX-License-Identifier: Apache-2.0
"""Random numbers of devices of four ranks: those of one rank, however a model is cut."""

import os

import torch
from equivalence.random_sides import world_of_one
from multiprocess import drawing
from torch import nn

import lamina

OWN = torch.device("emulated", int(os.environ.get("LOCAL_RANK", 0)))
BATCH = drawing.BATCH.to(OWN)


def trained(partitions, **options):
    return drawing.train(partitions, batch=BATCH, **options)


def case_over_four_partitions_they_are_those_of_one_rank():
    alone = trained(1, replica=0)
    for schedule in ("simple", "interleaved"):
        drawing.assert_same(trained(4, schedule=schedule), alone)


def case_parts_that_are_computed_again_over_four_partitions_draw_what_they_drew():
    alone = trained(1, replica=0)
    for reentrant in (False, True):  # whose blocks lie on several ranks: computing again waits for them
        drawing.assert_same(trained(4, reentrant=reentrant, default_partition=3), alone)


def case_of_two_pipelines_they_are_those_of_one_rank_with_both_batches():
    whole = trained(4)
    lamina.init(partitions=2, microbatches=2, timeout_s=30)
    replica = lamina.dp_rank()
    lamina.shutdown()
    half = drawing.train(2, microbatches=2, batch=BATCH[4 * replica : 4 * replica + 4])
    for losses, of_all in zip(half.losses, whole.losses, strict=True):
        assert torch.equal(losses, of_all[2 * replica : 2 * replica + 2])


class Dropping(nn.Module):
    """Drops where layers are cut in slices, between them, and after them."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.4)

    def forward(self, x):
        return self.drop(self.down(nn.functional.dropout(self.up(x).relu(), 0.3, self.training)))


def sliced(degree, partitions=1):
    """Losses by step and microbatch, and gradients, of two such blocks."""
    layout = {"tensor_parallel_degree": degree, "partitions": partitions, "ddp": True, "prescaled_batch": True}
    lamina.init(layout | {"device": str(OWN), "microbatches": 2, "seed": 3, "timeout_s": 30})
    torch.manual_seed(0)
    net = nn.Sequential(Dropping(), Dropping()).double()
    for block in net:
        lamina.set_tensor_parallelism(block, plan={"up": "colwise", "down": "rowwise"})
    model = lamina.distribute(net)

    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = [step(BATCH).stack() for _ in range(2)]
    gradients = {name: lamina.get_full_gradient(each) for name, each in model.local_named_parameters()}
    found = lamina.allgather((losses, gradients), lamina.WORLD)
    lamina.shutdown()
    return found[0][0], {name: each for _, named in found for name, each in named.items()}


def case_in_slices_they_are_those_of_one_rank():
    with world_of_one():
        losses, gradients = sliced(1)
    for degree, partitions in ((4, 1), (2, 2)):
        losses_here, gradients_here = sliced(degree, partitions)
        for one, other in zip(losses_here, losses, strict=True):
            assert torch.allclose(one, other, rtol=1e-12), (degree, partitions)
        assert gradients_here.keys() == gradients.keys()
        for name, gradient in gradients_here.items():
            assert torch.allclose(gradient, gradients[name], rtol=1e-9, atol=1e-12), (degree, partitions, name)
