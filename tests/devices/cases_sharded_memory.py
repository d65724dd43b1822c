# SPDX-License-Identifier: Apache-2.0
"""Memory that sharded models take on devices whose kernels run late, so that the host is far ahead: two ranks."""

import os

import emulated
import torch
from torch import nn

import lamina

WIDTH, LAYERS, ROWS = 256, 24, 4
OWN = torch.device("emulated", int(os.environ.get("LOCAL_RANK", 0)))
LAYER = 4 * WIDTH * WIDTH  # bytes
VALUES = 1 + 8  # whole layers: the one that computes, and the next ones ("Memory" in docs/sharding.md)
GRADIENTS = 1 + 2 * 1.5  # whole layers: the one that is computed, and two under way with their sums' halves


def train(optimizer, **keys):
    """The largest use of the device's memory in two passes, beside what the device held before."""
    held = emulated.counts()["bytes"][OWN.index]
    emulated.reset_counts()
    lamina.init(
        {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "timeout_s": 60} | keys
    )
    torch.manual_seed(0)
    model = lamina.DistributedModel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))))
    update = lamina.DistributedOptimizer(optimizer(model.parameters(), lr=1e-3))
    x = torch.randn(ROWS, WIDTH, device=OWN)
    waits = []
    for _ in range(3):
        before = emulated.counts()["waits"]
        model(x).square().mean().backward()
        update.step()
        update.zero_grad()
        waits.append(emulated.counts()["waits"] - before)
    peak = emulated.counts()["peak_bytes"][OWN.index]
    lamina.shutdown()
    return peak - held, waits[1:]


def case_live_bytes_are_the_closed_form_however_far_the_host_is_ahead():
    for optimizer, states in ((torch.optim.SGD, 0), (torch.optim.AdamW, 2)):
        peak, waits = train(optimizer, sdp_reduce_bucket_size=WIDTH * WIDTH, sdp_gradient_clipping=None)
        parts = (2 + states) * LAYERS * LAYER // 2
        most = parts + (VALUES + GRADIENTS) * LAYER
        assert parts < peak < 1.05 * most, (optimizer, peak / LAYER, most / LAYER)
        assert waits == [1, 1], waits  # an update over shards takes a norm


def case_values_that_come_ahead_stop_at_what_may_be_live():
    none_ahead, _ = train(torch.optim.SGD, sdp_max_live_parameters=1, sdp_reduce_bucket_size=WIDTH * WIDTH)
    all_stay, _ = train(torch.optim.SGD, sdp_reshard_after_forward=False, sdp_reduce_bucket_size=WIDTH * WIDTH)
    assert all_stay - none_ahead > (LAYERS - VALUES) * LAYER
