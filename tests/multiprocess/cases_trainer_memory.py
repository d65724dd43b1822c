# SPDX-License-Identifier: Apache-2.0
"""Cases of the Trainer for two ranks: microbatches become smaller where memory is lacking, and nothing else changes."""

import pytest
import torch
from multiprocess.cases_checkpoints import folder
from soak import some
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lamina
from lamina.errors import UsageError
from lamina.trainer import Callback, ComposerModel, Trainer

LAYOUTS = {
    "copies": {},
    "shards": {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
    "partitions": {"partitions": 2, "deterministic_server": True},
    "slices": {"tensor_parallel_degree": 2},
    "slices of one batch": {"tensor_parallel_degree": 2, "prescaled_batch": True},
}
BATCH, FITS = 8, 2  # samples of a copy's batch, and of the microbatches for which memory is enough
ERRORS = {
    "CUDA": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    "host": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 64 bytes"
    ),
    "Python": MemoryError,
}


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fail is not None:
            raise ctx.fail()
        return gradient, None


class Lacking(nn.Module):
    """Passes on what it gets. On a rank it fails in the last microbatch of a step, while they have too many samples."""

    def __init__(self, rank, backward, kind, first):
        super().__init__()
        self._rank, self._backward, self._error, self._first = rank, backward, ERRORS[kind], first
        self.calls = self.batches = 0

    def forward(self, x):
        self.calls += 1
        lacks = len(x) > FITS and self.calls == BATCH // len(x) and self.batches > self._first
        if not self.training or lamina.rank() != self._rank or not lacks:
            return _Backward.apply(x, None)
        self.calls = 0
        if not self._backward:
            raise self._error()
        return _Backward.apply(x, self._error)


class Model(ComposerModel):
    def __init__(self, rank, backward, kind, first):
        super().__init__()
        torch.manual_seed(0)
        self.lacking = Lacking(rank, backward, kind, first)
        first, second, last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        norm = nn.BatchNorm1d(8) if FITS else nn.LayerNorm(8)
        self.net = nn.Sequential(first, nn.Dropout(0.2), second, norm, self.lacking, last)

    def forward(self, batch):
        return self.net(batch[0].mul_(0.5))  # as a model may do that scales its inputs

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, batch[1])


class Counting(Callback):
    """Begins to count anew with each batch; from the second one on microbatches are as large as they are given."""

    def __init__(self, lacking, size=None):
        self._lacking, self._size, self.sizes = lacking, size, []

    def before_train_batch(self, state, logger):
        self._lacking.calls, self._lacking.batches = 0, self._lacking.batches + 1
        if self._size is not None and state.timestamp.batch.value:
            state.device_train_microbatch_size = self._size

    def batch_end(self, state, logger):
        self.sizes.append(state.device_train_microbatch_size)


def trained(layout, rank=None, backward=False, kind="CUDA", first=0, size="auto", then=None, until="2ep", **options):
    """The state after two epochs, and the sizes of microbatches in each batch."""
    model = Model(rank, backward, kind, first)
    if "slices" in layout:
        lamina.set_tensor_parallelism(model.net, plan={"0": "colwise", "2": "rowwise"})
    data = TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3)
    counting = Counting(model.lacking, then)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, BATCH, sampler=lamina.dist.get_sampler(data, shuffle=True)),
        max_duration=until,
        optimizers=torch.optim.AdamW(model.parameters(), 0.01),
        device_train_microbatch_size=size,
        seed=1,
        callbacks=counting,
        progress_bar=False,
        lamina_config={"timeout_s": 60} | LAYOUTS[layout],
        **options,
    )
    trainer.fit()
    trainer.close()
    return model.state_dict(), counting.sizes


def require_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def fits_everywhere(layout):
    expected, _ = trained(layout, size=FITS)
    for rank, backward in some(
        [(rank, backward) for rank in (0, 1) for backward in (False, True)], 2, seed=len(layout)
    ):
        found, sizes = trained(layout, rank, backward)
        runs_here = layout != "partitions" or sizes[0] == FITS  # the other rank may own what fails
        assert set(sizes) == {FITS} if runs_here else {BATCH}
        if sizes[0] == FITS:
            require_same_bits(found, expected)


def case_copies_halve_on_all_ranks():
    fits_everywhere("copies")


def case_shards_halve_on_all_ranks():
    fits_everywhere("shards")


def case_partitions_halve_on_all_ranks():
    fits_everywhere("partitions")


def case_slices_halve_on_all_ranks():
    fits_everywhere("slices")
    fits_everywhere("slices of one batch")


def case_the_size_that_was_found_goes_on_after_a_resumption():
    expected, sizes = trained("copies", 1, first=1)
    for stop in some(range(2, len(sizes)), 2):
        with folder() as path:
            trained("copies", 1, first=1, until=f"{stop}ba", save_folder=path, save_interval="1ba")
            found, after = trained("copies", size="auto", load_path=path)
        assert after == sizes[stop:]
        require_same_bits(found, expected)


def case_a_later_batch_may_be_the_first_that_lacks_memory():
    for layout in some(LAYOUTS, 1):
        expected, _ = trained(layout, size=BATCH, then=FITS)
        for kind in ERRORS:
            for rank in (0, 1):
                found, sizes = trained(layout, rank, kind=kind, first=1)
                if sizes[-1] == FITS:
                    assert sizes == [BATCH] + [FITS] * (len(sizes) - 1)
                    require_same_bits(found, expected)


def case_one_sample_that_does_not_fit_is_an_error_on_all_ranks():
    global FITS
    before, FITS = FITS, 0
    try:
        with pytest.raises(UsageError, match=r"microbatches of one sample. rank 1: .*20.00 MiB.*trainer-memory"):
            trained("copies", 1)
    finally:
        FITS = before


def case_another_error_is_no_lack_of_memory():
    ERRORS["CUDA"], before = (lambda: RuntimeError("not that")), ERRORS["CUDA"]
    try:
        with pytest.raises(RuntimeError, match="not that"):
            trained("copies", 0)
    finally:
        ERRORS["CUDA"] = before
