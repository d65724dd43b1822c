# SPDX-License-Identifier: Apache-2.0
"""Models train as on the CPU, and nearly all their operations are enqueued."""

import functools

import emulated
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

DEVICE = "emulated:1"
ENQUEUED = 0.95


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.project(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(17, 16), nn.Embedding(8, 16)
        self.blocks, self.head = nn.Sequential(Block(16), Block(16)), nn.Linear(16, 17)

    def forward(self, x):
        return self.head(self.blocks(self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTM(3, 5, 2, batch_first=True), nn.GRU(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.head(self.gru(self.lstm(x[..., 0].transpose(1, 2))[0])[0][:, -1])


def cnn():
    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Conv2d(8, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 5))


def texts():
    return [(torch.randint(17, (4, 8)), torch.randint(17, (4, 8))) for _ in range(3)]


def images():
    return [(torch.randn(4, 3, 8, 8), torch.randint(5, (4,))) for _ in range(3)]


def train(model, batches, device, make_optimizer):
    """The losses, the state and what was counted."""
    torch.manual_seed(0)
    model = model().to(device)
    optimizer = make_optimizer(model.parameters())
    batches = [(x.to(device), y.to(device)) for x, y in batches]
    emulated.reset_counts()
    losses = []
    for x, y in batches:
        losses.append(F.cross_entropy(model(x).flatten(0, -2), y.flatten()))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    counts = emulated.counts()
    model.eval()
    with torch.no_grad():
        losses.append(model(batches[0][0]).sum())
    return [loss.detach().cpu() for loss in losses], {n: t.cpu() for n, t in model.state_dict().items()}, counts


def trains_as_on_the_cpu(model, batches):
    torch.manual_seed(1)
    batches = batches()
    for make_optimizer in (
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    ):
        losses, state, _ = train(model, batches, "cpu", make_optimizer)
        losses_there, state_there, counts = train(model, batches, DEVICE, make_optimizer)
        torch.testing.assert_close(losses_there, losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state_there, state, rtol=1e-3, atol=1e-4)
        assert counts["enqueued"] >= ENQUEUED * (counts["enqueued"] + counts["drained"]), counts
        assert counts["waits"] == 0, counts
        assert counts["contexts"] == [1]


def gpt_trains():
    trains_as_on_the_cpu(GPT, texts)


def cnn_trains():
    trains_as_on_the_cpu(cnn, images)


def lstm_trains():
    trains_as_on_the_cpu(Recurrent, images)


def autocast_lowers_and_scales():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("emulated")
    x, y = torch.randn(8, 16, device=DEVICE), torch.arange(8, device=DEVICE) % 4
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("emulated", dtype=dtype):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        assert (logits.dtype, loss.dtype) == (dtype, torch.float32)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() > 0


def _half_gpt(dtype):
    return GPT().to(dtype)


def half_models_train():
    torch.manual_seed(1)
    batches = texts()
    for dtype in (torch.bfloat16, torch.float16):
        model = functools.partial(_half_gpt, dtype)
        make_optimizer = functools.partial(torch.optim.SGD, lr=0.1)
        plain, _, _ = train(model, batches, "cpu", make_optimizer)
        losses, _, counts = train(model, batches, DEVICE, make_optimizer)
        torch.testing.assert_close(losses[:-1], plain[:-1], rtol=4 * torch.finfo(dtype).eps, atol=0)
        assert counts["enqueued"] >= ENQUEUED * (counts["enqueued"] + counts["drained"]), counts

    x = torch.randn(6, 5, dtype=torch.bfloat16, device=DEVICE)
    _, mean, deviation = torch.native_layer_norm(x, (5,), None, None, 1e-5)
    assert mean.dtype == deviation.dtype == torch.float32
    torch.testing.assert_close(mean.cpu(), x.cpu().float().mean(1, keepdim=True))


def seeds_reach_each_device():
    def draws(device):
        return torch.rand(4, device=device).cpu(), F.dropout(torch.ones(64, device=device), 0.5).cpu()

    def drawn(seed):
        torch.manual_seed(seed)
        return [draws(f"emulated:{index}") for index in range(4)]

    torch.testing.assert_close(drawn(5), drawn(5), rtol=0, atol=0)
    assert not torch.equal(drawn(5)[0][0], drawn(6)[0][0])
    first, second = draws(DEVICE), draws(DEVICE)
    assert not torch.equal(first[1], second[1])
    before = torch.emulated.get_rng_state(DEVICE)
    again = draws(DEVICE)
    torch.emulated.set_rng_state(before, DEVICE)
    torch.testing.assert_close(draws(DEVICE), again, rtol=0, atol=0)
    generator = torch.Generator(DEVICE).manual_seed(3)
    own = torch.rand(4, device=DEVICE, generator=generator)
    assert torch.equal(own.cpu(), torch.rand(4, device=DEVICE, generator=generator.manual_seed(3)).cpu())


def checkpointing_draws_again():
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(DEVICE)
    x = torch.ones(64, 4, device=DEVICE, requires_grad=True)
    kept = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    kept.sum().backward()
    # Where the output was dropped, the recomputation dropped it, too.
    torch.testing.assert_close(layer[0].bias.grad.cpu(), 2.0 * (kept != 0).sum(0).cpu().float())


def odd_operations_are_right():
    def values(device):
        x = torch.arange(16.0).to(device)
        pairs = torch.view_as_complex(x.view(4, 2, 2))
        yield (pairs.conj() * 2).resolve_conj()
        yield x.clone().resize_(4)
        yield x.clone().resize_(20)[:16]
        yield x[x > 5]
        yield F.embedding_bag(torch.tensor([[1, 2]], device=device), x.view(4, 4))
        yield x.unfold(0, 4, 2)
        yield torch.empty(0, device=device).set_(x.untyped_storage(), 2, (3,))
        yield x.half().sum() + x.to(torch.int64).max()

    for there, here in zip(values(DEVICE), values("cpu"), strict=True):
        torch.testing.assert_close(there.cpu(), here)


def saves_and_loads(path):
    tensor = torch.arange(5.0, device=DEVICE)
    torch.save({"a": tensor, "b": tensor[1:]}, path)
    loaded = torch.load(path)
    assert loaded["b"].device == torch.device(DEVICE)
    loaded["a"].add_(1)
    assert loaded["b"].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert torch.load(path, map_location="cpu")["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
