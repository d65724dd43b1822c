# SPDX-License-Identifier: Apache-2.0
"""Facts that the design of devices rests on, beside docs/gpu-facts.md; needs torch alone. Each is asked in a process of
its own with a limit. Exits with 1 if one has no answer."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import device
import torch
from torch import nn
from torch.nn import functional

LIMIT_S = 40
FACTS = {}


def fact(ask):
    FACTS[ask.__name__] = ask
    return ask


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def on_a_stream(here, work):
    with torch.Stream(device=here):
        found = work()
    torch.accelerator.synchronize()
    return found


def host_ms(work):
    begin = time.perf_counter()
    kept = work()
    took = (time.perf_counter() - begin) * 1e3
    del kept
    return took


@fact
def machine(here):
    print(device.name(here), "torch", torch.__version__, "CUDA", torch.version.cuda)
    print("free and whole memory", *(f"{each / 2**30:.1f} GiB" for each in torch.accelerator.get_memory_info()))
    for words in ("g++ --version", "cmake --version", "nvidia-smi -L", "cuda-gdb --version", "nproc"):
        said = subprocess.run(words, shell=True, capture_output=True, text=True, timeout=20).stdout
        print(f"{words}:", said.split("\n")[0] or "not there")


@fact
def bits_on_other_streams_and_in_other_threads(here):
    """Layouts are compared bit by bit: a kernel must not compute otherwise on another stream or in another thread."""
    torch.manual_seed(0)
    a = torch.randn(512, 512, device=here)
    image, filters = torch.randn(8, 16, 32, 32, device=here), torch.randn(32, 16, 3, 3, device=here)
    work = {
        "mm float32": lambda: a @ a,
        "mm bfloat16": lambda: a.bfloat16() @ a.bfloat16(),
        "conv2d": lambda: functional.conv2d(image, filters, padding=1),
        "index_add": lambda: torch.zeros(64, device=here).index_add_(0, (a[0] * 31).long().abs() % 64, a[0]),
    }
    for name, compute in work.items():
        expected = compute()
        torch.accelerator.synchronize()
        places = {
            "again": compute(),
            "a stream": on_a_stream(here, compute),
            "a thread": in_a_thread(compute),
            "a stream of a thread": in_a_thread(lambda compute=compute: on_a_stream(here, compute)),
        }
        torch.accelerator.synchronize()
        print(f"{name}: same bits:", {place: torch.equal(expected, found) for place, found in places.items()})
    rows = (a @ a)[:8]
    print("mm of 8 rows alone: same bits:", torch.equal(rows, a[:8] @ a))


@fact
def a_new_threads_first_product(here):
    """Each body of a pipeline runs in a thread: libraries keep handles and workspaces by thread and stream."""
    a = torch.randn(512, 512, device=here)

    def product():
        return host_ms(lambda: ((a @ a).sum(), torch.accelerator.synchronize()))

    def reserved():
        return torch.accelerator.memory_reserved() >> 20

    print(f"this thread: {product():.2f} ms, then {product():.2f} ms; {reserved()} MiB reserved")
    for count in range(4):
        print(f"thread {count}: {in_a_thread(product):.2f} ms; {reserved()} MiB reserved")
    for count in range(4):
        print(f"stream {count}: {on_a_stream(here, product):.2f} ms; {reserved()} MiB reserved")


@fact
def random_numbers(here):
    """The generator's state moves with the slot; dropout computes the same from it wherever it is computed."""
    module, a = torch.get_device_module(here), torch.ones(1 << 20, device=here)
    busy = device.Busy(here)
    state = module.get_rng_state()
    print("state", state.dtype, tuple(state.shape), state.device)
    busy(100)
    waits = host_ms(module.get_rng_state), host_ms(lambda: module.set_rng_state(state))
    print(f"beside 100 ms of kernels: get {waits[0]:.2f} ms, set {waits[1]:.2f} ms")

    def dropped():
        module.set_rng_state(state)
        return functional.dropout(a, 0.3)

    expected = dropped()
    torch.accelerator.synchronize()
    places = {"thread": in_a_thread(dropped), "stream": on_a_stream(here, dropped)}
    torch.accelerator.synchronize()
    print("dropout: same bits:", {place: torch.equal(expected, found) for place, found in places.items()})


def training_operations(here):
    """Operations of a step by their names, each ready to be called."""
    net = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256)).to(here)
    x, pinned = torch.randn(64, 256, device=here), torch.empty(1 << 20, pin_memory=True)
    device_copy, labels = torch.empty(1 << 20, device=here), torch.zeros(64, dtype=torch.long, device=here)
    words = nn.Embedding(100, 256, device=here)
    parameters, event, stream = list(net.parameters()), torch.Event(here), torch.Stream(device=here)
    net(x).sum().backward()
    scaler, sgd = torch.amp.GradScaler(here.type), torch.optim.SGD(parameters, lr=0.0)
    fused, foreach = (torch.optim.AdamW(parameters, lr=0.0, **{kind: True}) for kind in ("fused", "foreach"))

    def with_a_scale():
        scaler.scale(net(x).sum()).backward()
        scaler.step(sgd)
        scaler.update()

    return {
        "forward and backward with BatchNorm": lambda: net(x).sum().backward(),
        "embedding's backward": lambda: words(labels).sum().backward(),
        "cross_entropy": lambda: functional.cross_entropy(x, labels),
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        "clip_grad_norm_, error_if_nonfinite": lambda: nn.utils.clip_grad_norm_(
            parameters, 1.0, error_if_nonfinite=True
        ),
        "AdamW fused": fused.step,
        "AdamW foreach": foreach.step,
        "a step with GradScaler": with_a_scale,
        "item()": lambda: x[0, 0].item(),
        "nonzero": lambda: x.nonzero(),
        "a mask as index": lambda: x[x > 0],
        "to the host, pageable": lambda: device_copy.cpu(),
        "to the host, pinned, non_blocking": lambda: pinned.copy_(device_copy, non_blocking=True),
        "from the host, pinned, non_blocking": lambda: device_copy.copy_(pinned, non_blocking=True),
        "from the host, pageable, non_blocking": lambda: device_copy.copy_(torch.empty(1 << 20), non_blocking=True),
        "torch.tensor(1.0, device)": lambda: torch.tensor(1.0, device=here),
        "17 MiB of new pinned memory": lambda: torch.empty(17 << 20, dtype=torch.uint8, pin_memory=True),
        "512 MiB of new memory": lambda: torch.empty(512 << 20, dtype=torch.uint8, device=here),
        "empty_cache": torch.accelerator.empty_cache,
        "get_memory_info": torch.accelerator.get_memory_info,
        "Event.record": event.record,
        "Event.query": event.query,
        "Stream.wait_event": lambda: stream.wait_event(event),
        "a new stream": lambda: torch.Stream(device=here),
    }


@fact
def what_waits_for_the_device(here):
    """Beside 60 ms of kernels that were enqueued before: the host waits where the call takes most of that."""
    busy, operations = device.Busy(here), training_operations(here)
    for name, call in operations.items():
        try:
            call()  # once before, for what only a first call does
            torch.accelerator.synchronize()
            busy(60)
            took = host_ms(call)
            left = host_ms(torch.accelerator.synchronize)
            print(f"{name}: {took:.2f} ms, {'waits' if took > left else 'goes on'}")
        except (RuntimeError, AttributeError, NotImplementedError) as problem:
            print(f"{name}: {type(problem).__name__}: {str(problem).splitlines()[0][:100]}")


@fact
def copies_beside_kernels(here):
    """A snapshot or a message leaves on a stream of its own while the next kernels run."""
    busy, out = device.Busy(here), torch.Stream(device=here)
    source = torch.ones(64 << 20, dtype=torch.uint8, device=here)
    target = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)

    def copy():
        with out:
            for at in range(0, 64 << 20, 4 << 20):
                target[at : at + (4 << 20)].copy_(source[at : at + (4 << 20)], non_blocking=True)

    def whole(*parts):
        torch.accelerator.synchronize()
        return host_ms(lambda: ([part() for part in parts], torch.accelerator.synchronize()))

    whole(copy)
    print(f"64 MiB in pieces of 4: {whole(copy):.2f} ms, 20 ms of kernels: {whole(lambda: busy(20)):.2f} ms, "
          f"both: {whole(lambda: busy(20), copy):.2f} ms")  # fmt: skip


@fact
def events_cost(here):
    """The transport's thread asks an event for each piece of a message."""
    stream, other = torch.accelerator.current_stream(), torch.Stream(device=here)
    events = [torch.Event(here) for _ in range(1000)]
    costs = {
        "record": lambda each: each.record(stream),
        "query": lambda each: each.query(),
        "make a stream wait": lambda each: other.wait_event(each),
    }
    for name, call in costs.items():
        took = host_ms(lambda call=call: [call(each) for each in events])
        torch.accelerator.synchronize()
        print(f"{name}: {took:.2f} us")  # ms for a thousand


@fact
def without_room(here):
    """Tells what is raised; the process goes on."""
    free, _ = torch.accelerator.get_memory_info()
    try:
        torch.empty(2 * free, dtype=torch.uint8, device=here)
        print(f"{2 * free} bytes were given, of {free} free")
    except RuntimeError as problem:
        print(f"{type(problem).__name__}: {str(problem).splitlines()[0][:160]}")
    print("goes on:", (torch.ones(8, device=here) * 2).sum().item() == 16)


@fact
def pinned_memory_counts(here):
    """Tells whether a container's limit of memory counts pinned memory, and what the allocator keeps of it."""
    used = next(filter(Path.exists, map(Path, ("/sys/fs/cgroup/memory.current", "/proc/self/statm"))))

    def shown():
        numbers = used.read_text().split()
        return int(numbers[-1]) >> 20 if len(numbers) == 1 else int(numbers[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    torch.ones(1, device=here)
    before = shown()
    pinned = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
    during = shown()
    del pinned
    print(f"{used}: {before} MiB, with 256 MiB pinned {during} MiB, once they are freed {shown()} MiB")


GLOO = """
import datetime, sys, time, device, torch, torch.distributed as dist
here = device.find()
own = dist.get_default_backend_for_device(here)  # NCCL takes one rank a GPU
dist.init_process_group("gloo" if own == "nccl" else own, timeout=datetime.timedelta(seconds=30))
busy, side = device.Busy(here), torch.Stream(device=here)
value = torch.zeros(1 << 22, device=here)
torch.accelerator.synchronize()
with side:
    busy(50)
    value += dist.get_rank() + 1
    begin = time.perf_counter()
    work = dist.all_reduce(value, async_op=True)
    begun = time.perf_counter() - begin
    work.wait()
    over = time.perf_counter() - begin
    doubled = value * 2
torch.accelerator.synchronize()
print(f"rank {dist.get_rank()}: begun after {begun * 1e3:.1f} ms, wait() over after {over * 1e3:.1f} ms,",
      "right:", bool((doubled == 6).all()), flush=True)
"""


@fact
def gloo_on_a_side_stream(here):
    """16 MiB that a kernel of another stream has yet to write: Gloo reads them after it, later kernels read its sum."""
    variables = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29577",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ranks = [
        subprocess.Popen([sys.executable, "-c", GLOO], env=os.environ | variables | {"RANK": str(rank)})
        for rank in (0, 1)
    ]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], codes


def ask(name: str) -> tuple[str, bool]:
    """Returns what the program says of a fact, and whether it ended well."""
    words = [sys.executable, __file__, name]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode() + f"not over after {LIMIT_S} s\n", False
    last = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    return done.stdout + "".join(f"rc {done.returncode}: {line}\n" for line in last), done.returncode == 0


def main() -> int:
    silent = []
    for name in FACTS:
        begin = time.perf_counter()
        said, answered = ask(name)
        print(f"{name} ({time.perf_counter() - begin:.0f} s)\n{said}", flush=True)
        if not answered:
            silent.append(name)
    print("without an answer:", ", ".join(silent) or "none")
    return 1 if silent else 0


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    FACTS[sys.argv[1]](device.find())
