# SPDX-License-Identifier: Apache-2.0
"""Memory of the devices, and pinned memory."""

import emulated
import torch

DEVICE = "emulated:0"
MIB = 1 << 20


def mebibytes(count, device=DEVICE):
    return torch.empty(count * MIB // 4, device=device)


def freed_memory_is_nan():
    x = torch.ones(1000, device=DEVICE)
    storage, there = x.untyped_storage(), x.data_ptr()
    del x, storage
    again = torch.empty(1000, device=DEVICE)
    assert again.data_ptr() == there
    assert again.isnan().all().item()
    assert torch.empty(77, device=DEVICE).isnan().all().item()  # and so is fresh memory


def memory_is_limited():
    """With EMULATED_MEMORY of 64 MiB."""
    held = [mebibytes(20), mebibytes(20)]
    try:
        mebibytes(30)
    except torch.OutOfMemoryError as error:
        assert "Tried to allocate 30.00 MiB. Device 0 has a total capacity of 64.00 MiB" in str(error), error
    else:
        raise AssertionError("64 MiB held 70")
    mebibytes(30, "emulated:1")
    held.pop()
    mebibytes(40)  # what was cached is given back
    assert torch.accelerator.get_memory_info()[1] == 64 * MIB


def memory_comes_back_from_other_streams():
    """With EMULATED_MEMORY of 64 MiB, and delays."""
    x, side = mebibytes(40), torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.mul_(2)
    x.record_stream(side)
    del x
    mebibytes(40)


def bytes_are_counted():
    x = mebibytes(3, "emulated:2")
    y = mebibytes(2, "emulated:2")
    del y
    counts = emulated.counts()
    assert counts["bytes"] == [0, 0, 3 * MIB, 0]
    assert counts["peak_bytes"] == [0, 0, 5 * MIB, 0]
    assert counts["contexts"] == [2]
    assert torch.accelerator.memory_allocated(2) == 3 * MIB
    assert torch.accelerator.max_memory_allocated(2) == 5 * MIB
    assert torch.accelerator.memory_reserved(2) == 5 * MIB
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(2) == 3 * MIB
    emulated.reset_counts()
    assert emulated.counts()["peak_bytes"] == [0, 0, 3 * MIB, 0]
    assert x.isnan().all().item()


def steps_leave_no_memory():
    model = torch.nn.Linear(8, 8).to(DEVICE)
    seen = []
    for _ in range(200):
        model(torch.ones(4, 8, device=DEVICE)).sum().backward()
        model.zero_grad()
        seen.append((torch.accelerator.memory_allocated(0), torch.accelerator.memory_reserved(0)))
    assert seen[10] == seen[-1]


def pinned_copies_run_in_the_stream():
    """With delays. Pinned memory that is let go during a copy is freed after it."""
    source = torch.full((MIB,), 3.0, device=DEVICE)
    host = torch.zeros(MIB, pin_memory=True)
    assert host.is_pinned() and not torch.zeros(8).is_pinned()
    for _ in range(20):
        source = source * 1.0
    host.copy_(source, non_blocking=True)
    assert host[5] == 0  # not yet
    torch.accelerator.synchronize()
    assert host[5] == 3
    back = torch.empty(MIB, device=DEVICE)
    for _ in range(5):
        back.copy_(torch.full((MIB,), 4.0).pin_memory(), non_blocking=True)
    assert (back == 4).all().item()
    later = torch.full((8,), 1.0).pin_memory()
    back[:8].copy_(later, non_blocking=True)
    later.fill_(2)  # the copy has not begun
    assert (back[:8] == 2).all().item()


def unused_devices_stay_untouched():
    """With EMULATED_DEVICES of 2."""
    assert torch.accelerator.device_count() == 2
    try:
        torch.ones(1, device="emulated:2")
    except RuntimeError as error:
        assert "device 2" in str(error), error
    assert emulated.counts()["contexts"] == []
    torch.emulated.get_rng_state_all()
    assert emulated.counts()["contexts"] == [0, 1]
