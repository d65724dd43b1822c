# SPDX-License-Identifier: Apache-2.0
"""The training of a random case, whoever carries it out: model, data, what a step does, and the loop."""

import contextlib
from dataclasses import dataclass, field

import torch
from equivalence.cases import STEPS, on_host, snapshot
from equivalence.random_cases import RandomCase
from equivalence.random_operations import build_part
from equivalence.random_parts import VOCABULARY, WIDTH
from torch import nn

MAX_NORM = 0.05


@dataclass
class Trained:
    outputs: list[dict] = field(default_factory=list)  # per call of a step, by name and microbatch
    first_gradients: dict | None = None
    gradients: dict = field(default_factory=dict)
    parameters: dict = field(default_factory=dict)
    buffers: dict = field(default_factory=dict)
    others: dict = field(default_factory=dict)  # gradients of inputs, norms


class Model(nn.Module):
    """The parts, a head, and a loss; dictionaries in and out."""

    def __init__(self, case: RandomCase):
        super().__init__()
        parts = []
        for spec in case.parts:
            parts.append(part := build_part(spec, parts))
            if spec.shares_weight_with is not None:
                part.weight = parts[spec.shares_weight_with].weight
            if spec.hooked:
                part.register_forward_hook(lambda module, arguments, output: output * 0.9)
            if spec.frozen:
                part.requires_grad_(False)
        called = {number for part in case.parts for op in part.program for number in op.parts}
        self.idle = nn.ModuleList(part for number, part in enumerate(parts[:-1]) if number not in called)
        self.body = parts[-1]
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, y, tokens):
        hidden = self.head(self.body(x, tokens))
        return {"hidden": hidden, "text": "text", **losses(hidden, y)}


def losses(hidden, y) -> dict:
    return {"loss": (hidden - y).square().mean(), "other": hidden.abs().mean()}


def build(case: RandomCase) -> Model:
    torch.manual_seed(case.number)
    model = Model(case)
    return model if case.traits & {"float32", "autocast"} else model.double()


def batches(case: RandomCase) -> list[dict]:
    """The whole batch of each call of the step function."""
    generator = torch.Generator().manual_seed(case.number)
    rows = sum(map(sum, case.sizes))
    found = []
    for at in range(STEPS * (2 if "accumulated" in case.traits else 1)):
        length = 2 + (case.number + at) % 3 if "lengths" in case.traits else 3
        x, y = torch.randn(2, rows, length, WIDTH, generator=generator, dtype=torch.float64)
        if case.traits & {"float32", "autocast"}:
            x, y = x.float(), y.float()
        tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
        found.append({"x": x, "y": y, "tokens": tokens})
    return found


def train_body(case: RandomCase, model, backward, x, y, tokens) -> dict:
    """The work of a step on one microbatch."""

    def forward(x):
        on = "autocast" in case.traits
        with torch.autocast(x.device.type, torch.bfloat16) if on else contextlib.nullcontext():
            return model(x, y=y, tokens=tokens)

    if "writes_input" in case.traits:
        x.mul_(0.9)
    out = forward(x)
    if "retained" in case.traits:
        out["hidden"].retain_grad()
        # An output that the module itself used: only what its caller makes of it counts for its gradient here.
        out |= losses(out["hidden"], y)
    if "two_losses" in case.traits:
        backward([out["loss"], out["other"]])
    elif "given_gradient" in case.traits:
        backward(out["hidden"], y.to(out["hidden"].dtype))
    elif "two_calls" in case.traits or "two_calls_reversed" in case.traits:
        again = forward(x * 0.5)
        both = [out["loss"], again["other"]]
        for loss in reversed(both) if "two_calls_reversed" in case.traits else both:
            backward(loss)
    else:
        backward(out["loss"])
        if "backward_between" in case.traits:
            backward(forward(x * 0.5)["other"])
    gradient = out["hidden"].grad if "retained" in case.traits else None
    return {**out, "largest": out["hidden"].argmax(-1), "gradient": gradient}


def evaluation_body(model, x, y, tokens) -> dict:
    out = model(x, y=y, tokens=tokens)
    return {**out, "graph": out["hidden"].requires_grad}


def train(case: RandomCase, model, optimizer, step, evaluate, clip, named_parameters, device="cpu") -> Trained:
    """The loop that both sides run. step(batch) and evaluate(batch) give outputs by microbatch of the whole batch,
    which is on that device. What comes of it is on the host."""
    trained = Trained()
    calls = 2 if "accumulated" in case.traits else 1
    for at, given in enumerate(batches(case)):
        batch = {name: tensor.to(device) for name, tensor in given.items()}
        if at % calls == 0:
            optimizer.zero_grad(set_to_none="zeroed" not in case.traits)
        batch["x"].requires_grad_("input_gradient" in case.traits)
        trained.outputs.append(by_name(step(batch)))
        trained.others[f"gradient of the input of call {at}"] = batch["x"].grad
        if (at + 1) % calls == 0:
            trained.first_gradients = trained.first_gradients or snapshot(named_parameters())
            if "clipped" in case.traits:
                trained.others[f"norm in call {at}"] = torch.as_tensor(clip(MAX_NORM))
            optimizer.step()
        if "toggled" in case.traits:
            for parameter in [p for name, p in model.named_parameters() if "head" not in name][at % 2 :: 2]:
                parameter.requires_grad_(not parameter.requires_grad)
        if case.traits & {"evaluated", "inference"}:
            model.eval()
            with torch.no_grad() if "evaluated" in case.traits else torch.inference_mode():
                trained.outputs.append(by_name(evaluate(batch)))
            model.train()
    trained.gradients = snapshot(named_parameters())
    trained.parameters = on_host(dict(named_parameters()))
    trained.others = on_host(trained.others)
    return trained


def by_name(outputs: dict[int, dict]) -> dict:
    values = {f"{name} of microbatch {at}": value for at, output in outputs.items() for name, value in output.items()}
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def states(optimizer) -> dict[str, torch.Tensor]:
    """Tensors that an optimizer keeps, by number of the parameter and name."""
    state = optimizer.state_dict()["state"]
    return {
        f"state {name} of {number}": value.to("cpu", copy=True)
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
