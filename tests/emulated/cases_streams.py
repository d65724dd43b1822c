# SPDX-License-Identifier: Apache-2.0
"""Streams, events, threads and errors."""

import os
import threading
import time

import emulated
import torch

DEVICE = "emulated:0"
ROUNDS = 20
BROKEN = os.environ.get("EMULATED_IGNORE")


def kernels(tensor, count=3):
    for _ in range(count):
        tensor = tensor * 1.0
    return tensor


def host_runs_ahead():
    """With delays of EMULATED_DELAY_US."""
    x = torch.zeros(1000, device=DEVICE)
    begin = time.perf_counter()
    for _ in range(50):
        x = x + 1
    host = time.perf_counter() - begin
    assert x.sum().item() == 50_000
    assert host < 0.5 * (time.perf_counter() - begin)


def streams_wait_for_events():
    """Without the waits, some of these read too early; that is what BROKEN says."""
    side, main = torch.Stream(DEVICE), torch.accelerator.current_stream()
    wrong = 0
    for value in range(ROUNDS):
        x = kernels(torch.full((1000,), float(value), device=DEVICE))
        made, used = torch.Event("emulated"), torch.Event("emulated")
        made.record(main)
        with side:
            side.wait_event(made)
            y = x + 1
            used.record(side)
        main.wait_event(used)
        y.record_stream(main)
        wrong += not bool((kernels(y).cpu() == value + 1).all())
    assert (wrong > 0) == (BROKEN == "waits"), wrong


def memory_waits_for_other_streams():
    side, main = torch.Stream(DEVICE), torch.accelerator.current_stream()
    wrong = 0
    for value in range(ROUNDS):
        x = torch.full((4096,), float(value), device=DEVICE)
        side.wait_stream(main)
        with side:
            kernels(x)
            y = x + 1
        x.record_stream(side)
        del x
        torch.full((4096,), -7.0, device=DEVICE)  # takes the memory, if that is free
        main.wait_stream(side)
        wrong += not bool((y.cpu() == value + 1).all())
        y.record_stream(main)
    assert (wrong > 0) == (BROKEN == "record_stream"), wrong


def events_are_timed():
    """With delays of EMULATED_DELAY_US."""
    begin, end = (torch.Event("emulated", enable_timing=True) for _ in range(2))
    begin.record()
    kernels(torch.ones(8, device=DEVICE), 50)
    end.record()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) > 1


def waits_are_counted():
    x = torch.ones(8, device=DEVICE)
    torch.accelerator.synchronize()
    event = torch.Event("emulated")
    event.record()
    waiting = [
        lambda: torch.accelerator.synchronize(),
        lambda: torch.accelerator.current_stream().synchronize(),
        event.synchronize,
        lambda: x.sum().item(),
        x.cpu,
        lambda: torch.ones(8).to(DEVICE),
    ]
    pinned = torch.ones(8, pin_memory=True)
    free = [
        lambda: x + 1,
        lambda: x.to("emulated:1"),
        lambda: pinned.copy_(x, non_blocking=True),
        lambda: x.copy_(pinned, non_blocking=True),
        event.query,
    ]
    for call in waiting:
        emulated.reset_counts()
        call()
        assert emulated.counts()["waits"] == 1, call
    for call in free:
        emulated.reset_counts()
        call()
        assert emulated.counts()["waits"] == 0, call
    emulated.reset_counts()
    assert x.nonzero().shape == (8, 1)
    assert emulated.counts()["drains"] == {"aten::nonzero": 1}


def threads_have_their_own_devices():
    """Each computes on a device and a stream of its own; autograd follows the forward's."""
    failures = []

    def compute(index):
        try:
            assert torch.accelerator.current_device_index() == 0
            torch.accelerator.set_device_index(index)
            with torch.Stream(f"emulated:{index}") as stream:
                ran = []
                x = torch.ones(64, device="emulated", requires_grad=True)
                x.register_hook(lambda _: ran.append(torch.accelerator.current_stream(index)))
                for _ in range(20):
                    kernels(x, 20).sum().backward()
                assert x.device.index == index
                assert set(ran) == {stream}
                assert (x.grad == 20).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=compute, args=(index % 4,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert emulated.counts()["contexts"] == [0, 1, 2, 3]


def an_event_comes_from_another_thread():
    x = torch.zeros(1000, device=DEVICE)
    event = torch.Event("emulated")

    def compute():
        with torch.Stream(DEVICE) as stream:
            kernels(x, 20).copy_(x)
            x.add_(1)
            event.record(stream)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.accelerator.current_stream().wait_event(event)
    assert (x + 1).sum().item() == 2000


def errors_come_later_and_stay():
    x = torch.ones(4, device=DEVICE)
    x.index_select(0, torch.tensor([9], device=DEVICE))  # says nothing yet
    for attempt in (torch.accelerator.synchronize, lambda: x.sum().item(), lambda: x + 1):
        try:
            attempt()
        except torch.AcceleratorError as error:
            assert "a kernel failed on device 0" in str(error), error
            assert "out of range" in str(error), error
        else:
            raise AssertionError("nothing was said")
    assert torch.ones(4, device="emulated:1").sum().item() == 4  # another device goes on


def bad_arguments_are_told_at_once():
    x = torch.ones(4, device=DEVICE)
    for attempt in (lambda: x + torch.ones(3, device=DEVICE), lambda: x.add_(torch.ones(3, device=DEVICE))):
        try:
            attempt()
        except RuntimeError as error:
            assert "must match the size" in str(error), error
        else:
            raise AssertionError("nothing was said")
    torch.accelerator.synchronize()


def an_operation_without_a_kernel_names_itself():
    x = torch.ones(2, 8, 4, 8, device=DEVICE)
    try:
        torch.ops.aten._scaled_dot_product_flash_attention(x, x, x)
    except NotImplementedError as error:
        assert "no kernel for aten::_scaled_dot_product_flash_attention" in str(error), error
    else:
        raise AssertionError("nothing was said")


def a_fork_says_so():
    x = torch.ones(4, device=DEVICE)
    torch.accelerator.synchronize()
    if (child := os.fork()) == 0:
        try:
            x + 1
        except RuntimeError as error:
            os._exit(0 if "a fork" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def ends_while_kernels_run():
    """A process ends in order, whatever its streams do; without that this crashes now and then."""
    x = torch.randn(400, 400, device=DEVICE)
    with torch.Stream(DEVICE):
        for _ in range(200):
            x = x @ x


def host_reads_a_tensor():
    """Ends in SIGSEGV."""
    import ctypes

    x = torch.ones(10, device=DEVICE)
    torch.accelerator.synchronize()
    ctypes.string_at(x.data_ptr(), 4)


def nobody_reads_a_tensor():
    import ctypes

    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    libc = ctypes.CDLL(None, use_errno=True)
    x, buffer = torch.ones(10, device=DEVICE), ctypes.create_string_buffer(4)
    here, there = Piece(ctypes.addressof(buffer), 4), Piece(x.data_ptr(), 4)
    got = libc.process_vm_readv(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    assert (got, os.strerror(ctypes.get_errno())) == (-1, "Bad address")
    try:
        x.numpy()
    except TypeError:
        pass
    else:
        raise AssertionError("a tensor of the device became an array of the host")
