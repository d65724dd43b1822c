# SPDX-License-Identifier: Apache-2.0
"""One rank on the accelerator, against plain torch on the CPU, by one of the checks below: one_rank.py gpt"""

import json
import os
import sys
import tempfile
from pathlib import Path

import device
import torch
import training
from torch.utils.data import DataLoader, TensorDataset

import lamina
import lamina.trainer

HERE = device.find()
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def against_the_cpu(model):
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-9)):
        yield from training.against_plain("one rank", model, dtype, tolerance)


@check
def gpt():
    return against_the_cpu(training.GPT)


@check
def cnn():
    return against_the_cpu(training.CNN)


@check
def groups():
    """torch's groups of one rank, over the backend that the device has: NCCL of one for CUDA."""
    yield from training.against_plain("a copy alone", training.MLP, torch.float64, 1e-9, ddp=True)
    lamina.init(ddp=True)
    group = lamina.get_world_process_group()
    print(torch.distributed.get_backend_config(group), lamina.get_device_mesh())
    with torch.Stream(device=HERE):
        summed = torch.full((1 << 20,), 3.0, device=HERE) * 2
        torch.distributed.all_reduce(summed, group=group, async_op=True).wait()
        wrong = (summed != 6).sum().item()
    lamina.shutdown()
    if wrong:
        yield f"{wrong} numbers of a sum are wrong"


class Classifier(lamina.trainer.ComposerModel):
    """The CNN for the Trainer, which gives it batches of its loader."""

    def __init__(self):
        super().__init__()
        self.net = training.CNN()

    def forward(self, batch):
        return self.net(*batch)

    def loss(self, outputs, batch):
        return outputs


@check
def trainer():
    losses = {}
    for place in ("cpu", "gpu"):
        os.environ["LAMINA_DEVICE"] = place  # which may name another one, and counts
        torch.manual_seed(3)
        data = TensorDataset(*map(torch.cat, zip(*training.batches(training.CNN, 8), strict=True)))
        model = training.made(Classifier)
        used = lamina.Trainer(
            model=model,
            train_dataloader=DataLoader(data, batch_size=training.SAMPLES),
            max_duration="2ep",
            optimizers=training.adamw(model.parameters()),
            precision="fp32",
            device=place,
        )
        used.fit()
        losses[place] = [float(used.state.total_loss_dict["loss/train/total"])]
        used.close()
    print(losses)
    return training.differences("the Trainer's last loss", losses["gpu"], losses["cpu"], 1e-3)


@check
def dropout():
    """One seed gives the same bits twice, another one others."""
    data = training.batches(training.GPT, 3)

    def losses(seed):
        model = training.made(training.GPT, dropout=0.3)
        with training.Job(model) as job:
            torch.manual_seed(seed)
            return job.steps(data)

    first, again, other = losses(1), losses(1), losses(2)
    print(first, again, other)
    if first != again:
        yield "losses differ with the same seed"
    if first == other:
        yield "losses are equal with another seed"


@check
def amp():
    """Losses fall as they do without, and stay finite."""
    data = training.batches(training.GPT, 1) * 20
    with training.Job(training.made(training.GPT)) as job:
        whole = job.steps(data)
    for dtype in (torch.float16, torch.bfloat16):
        with training.Job(training.made(training.GPT)) as job:
            losses = [loss.item() for loss in steps_in(dtype, job, data)]
        print(f"{dtype}: {losses[0]:.4f} to {losses[-1]:.4f}, in float32 {whole[-1]:.4f}")
        yield from training.differences(f"autocast to {dtype}", losses, whole, 0.05)


def steps_in(dtype, job, data):
    scaler = lamina.amp.GradScaler(HERE.type, enabled=dtype is torch.float16)

    @lamina.step
    def step(model, *batch):
        with torch.autocast(HERE.type, dtype):
            loss = model(*batch)
        model.backward(scaler.scale(loss))
        return loss

    for batch in data:
        job.optimizer.zero_grad()
        loss = step(job.model, *training.here(batch)).reduce_mean()
        scaler.step(job.optimizer)
        scaler.update()
        yield loss


@check
def memory():
    """200 steps: no more bytes than after ten."""
    batch, seen = training.batches(training.GPT, 1)[0], []
    with training.Job(training.made(training.GPT)) as job:
        for count in range(200):
            job.step(batch)
            if count in (9, 199):
                torch.accelerator.synchronize()
                seen.append(torch.accelerator.memory_allocated())
    print("bytes after 10 steps and after 200:", seen)
    if seen[1] > seen[0]:
        yield f"{seen[1] - seen[0]} bytes more after 200 steps than after 10"


def step_ms(width):
    """Times of a step of a GPT of that width: until the host has called it, and until the device is done."""
    generator = torch.Generator().manual_seed(7)
    with training.Job(training.made(training.GPT, width=width, depth=4, heads=4, context=256)) as job:
        batch = training.here(training.GPT.batch(generator, torch.float32, samples=width // 16, context=256))
        for _ in range(3):
            job.step(batch)
        return training.host_and_whole_ms(lambda: job.step(batch), rounds=5)


@check
def host():
    """The host is done with a step long before a device that has much to do: one that waits would be as late as it. How
    much is much depends on the device, so models grow until they are."""
    for width in (128, 256, 512, 1024):
        took, whole = step_ms(width)
        print(f"a step of width {width}: the host takes {took:.2f} ms of {whole:.2f}", flush=True)
        if took <= whole / 5:
            return
    yield f"the host takes {took:.2f} ms of a step of {whole:.2f}, which is more than a fifth"


def float32_tensors(file):
    """The tensors of a safetensors file, read on the host by nothing of lamina's."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    rows = {name: row for name, row in json.loads(content[8:begin]).items() if name != "__metadata__"}
    found = {}
    for name, row in rows.items():
        assert row["dtype"] == "F32", row
        first, last = (begin + offset for offset in row["data_offsets"])
        found[name] = torch.frombuffer(bytearray(content[first:last]), dtype=torch.float32).reshape(row["shape"])
    return found


@check
def save():
    """A checkpoint has what the steps before it gave, though these run on a stream of their own, behind other work."""
    data, busy = training.batches(training.GPT, 3), device.Busy(HERE)
    expected = training.made(training.GPT)
    training.plain(expected, data)
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.Stream(device=HERE),
        training.Job(training.made(training.GPT)) as job,
    ):
        busy(200)
        job.steps(data[:2])
        busy(200)
        job.step(data[2])
        lamina.save_checkpoint(folder, tag="side", partial=False)
        (file,) = Path(folder, "side").glob("*.safetensors")
        found = float32_tensors(file)
    return training.differences("what was saved", found, expected.state_dict(), 1e-4)


@check
def room():
    """Without room the step ends with torch's error, and the next one, of a smaller batch, goes on."""
    generator = torch.Generator().manual_seed(7)
    free, _ = torch.accelerator.get_memory_info()
    samples = max(64, free // (4 * 32 * training.WORDS) * 2)  # whose logits alone take twice of what is free
    words = torch.zeros(1, 32, dtype=torch.long, device=HERE).expand(samples, 32)
    with training.Job(training.made(training.GPT)) as job:
        job.step(training.GPT.batch(generator, torch.float32))
        try:
            job.step((words, words))
            yield f"{samples} samples found room in {free} bytes"
        except torch.OutOfMemoryError as problem:
            print(f"{type(problem).__name__}: {problem}")
        loss = job.step(training.GPT.batch(generator, torch.float32)).item()
    if not loss < 10:
        yield f"the step after it has a loss of {loss}"


if __name__ == "__main__":
    sys.exit(training.told(CHECKS[sys.argv[1]]()))
