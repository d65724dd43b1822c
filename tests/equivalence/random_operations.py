# SPDX-License-Identifier: Apache-2.0
"""Operations of a Composite on the parts that it calls, each operation one thing that a pipeline can get wrong.

An operation is a function (parent, parts, x, y, tokens) -> tensor like x, where `parts` are the parts it may call, x
and y two earlier tensors of the program, and tokens (B, T) integers. Its name is the trait's.
"""

import torch
import torch.nn.functional as F
from equivalence.random_parts import KINDS, WIDTH
from torch import nn
from torch.utils.checkpoint import checkpoint

OPERATIONS = {}  # name -> (function, kinds of the parts it calls: a kind, "simple" or "writable"; calls of each)


def operation(*kinds, calls=1):
    def register(function):
        OPERATIONS[function.__name__] = (function, kinds, calls)
        return function

    return register


def run(part, x, tokens):
    return part(tokens=tokens, x=x) if getattr(part, "takes_tokens", False) else part(x)


@operation("simple")
def call(parent, parts, x, y, tokens):
    return run(parts[0], x, tokens)


@operation("simple")
def skip(parent, parts, x, y, tokens):
    return run(parts[0], x, tokens) + y


@operation("simple")
def product(parent, parts, x, y, tokens):
    return torch.tanh(y) * run(parts[0], x + y, tokens)


@operation("simple", calls=3)
def repeated(parent, parts, x, y, tokens):
    for _ in range(3):
        x = run(parts[0], x, tokens)
    return x


@operation("simple", "simple")
def branch(parent, parts, x, y, tokens):
    # Not 0, which after a normalisation is the mean up to rounding.
    return run(parts[0] if x.mean().item() > 0.01 else parts[1], y, tokens)


@operation("simple", calls=3)
def data_loop(parent, parts, x, y, tokens):
    for _ in range(1 + int(tokens.sum().item()) % 3):
        x = run(parts[0], x, tokens) + y
    return x


@operation("simple")
def no_grad(parent, parts, x, y, tokens):
    with torch.no_grad():
        fixed = run(parts[0], x, tokens)
    return fixed * y


@operation("simple")
def detached(parent, parts, x, y, tokens):
    return run(parts[0], x.detach(), tokens) + y


@operation("simple")
def ignored(parent, parts, x, y, tokens):
    run(parts[0], x, tokens)
    return x + y


@operation("simple", calls=2)
def checkpointed(parent, parts, x, y, tokens):
    return checkpoint(run, parts[0], x, tokens, use_reentrant=False) + y


@operation("simple", calls=2)
def reentrant_checkpointed(parent, parts, x, y, tokens):
    return checkpoint(run, parts[0], x, tokens, use_reentrant=True) + y


@operation("writable")
def writes_received(parent, parts, x, y, tokens):
    z = run(parts[0], x, tokens)
    z.mul_(0.5).add_(y)
    return z


@operation("writable")
def writes_a_part_of_received(parent, parts, x, y, tokens):
    z = run(parts[0], x, tokens)
    z[..., 0] = y.sum(-1)
    return z


@operation("simple")
def views(parent, parts, x, y, tokens):
    z = run(parts[0], x[:, :1].expand_as(x), tokens)
    return z.transpose(0, 1).flip(0).transpose(0, 1) + run(parts[0], y.flip(1)[:, :2], tokens[:, :2]).sum(1, True)


@operation("simple", calls=2)
def hooked(parent, parts, x, y, tokens):
    z = run(parts[0], x, tokens)
    if z.requires_grad:
        z.register_hook(lambda gradient: gradient * 0.5)
    return z + run(parts[0], z, tokens)


@operation("writer")
def writes_argument(parent, parts, x, y, tokens):
    return parts[0](x * 1.5) + y


@operation("writer")
def changed_argument(parent, parts, x, y, tokens):
    x = x * 1.5
    z = parts[0](x)
    return x + z


@operation("aliases")
def aliased_outputs(parent, parts, x, y, tokens):
    z, same_memory, itself = parts[0](x)
    z.mul_(0.5)
    return z + same_memory + itself


@operation("identity")
def aliased_argument(parent, parts, x, y, tokens):
    x = x * 1.5
    z = parts[0](x)
    z.add_(1.0)
    return x + z


@operation("structured", calls=2)
def structured(parent, parts, x, y, tokens):
    one = parts[0]({"x": x, "more": (y, None)}, scale=0.5)
    again = {"x": one.first, "more": (one.rest[3][1][0], None)}
    two = parts[0](again, scale=2.0, mode="relu", mask=tokens > 2, rows=slice(0, None))
    assert one.rest["none"] is None and two.rest[3][1][1] == "relu"
    assert two.rest["empty"].shape[0] == 0
    return one.rest["b"] + two.first + two.rest[3][0] + one.rest["sum"].tanh()


@operation("sieve", "simple")
def missing_gradients(parent, parts, x, y, tokens):
    used, _, detached = parts[0](x, run(parts[1], y, tokens))
    return used + detached


@operation("objects", "linear")
def objects(parent, parts, x, y, tokens):
    given = parts[0](x, parts[1])
    assert given.flags == {"a", 1} and given.triple.dtype is torch.float64 and given.triple.nothing is None
    return given.value + given.triple.tensor * y


@operation("simple")
def no_autocast(parent, parts, x, y, tokens):
    with torch.autocast("cpu", enabled=False):
        return run(parts[0], x.float() if x.dtype == torch.bfloat16 else x, tokens) + y


@operation("simple")
def derivative(parent, parts, x, y, tokens):
    z = run(parts[0], x, tokens)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return z
    (gradient,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
    return z + gradient.detach()


@operation("identity")
def returns_argument(parent, parts, x, y, tokens):
    return parts[0](x) + y


@operation("picker")
def integers(parent, parts, x, y, tokens):
    picked = parts[0](x)
    assert not picked.is_floating_point()
    return y + y.gather(-1, picked.unsqueeze(-1))


@operation("giver")
def gives_parameter(parent, parts, x, y, tokens):
    return x * parts[0]()


@operation("scaler")
def passes_parameter(parent, parts, x, y, tokens):
    return parts[0](x, gain=parent.gain) + y * parent.gain


@operation("linear")
def reads_weight(parent, parts, x, y, tokens):
    return F.linear(x, parts[0].weight) + parts[0](y)


class Composite(nn.Module):
    """Runs a program over parts; each of its tensors may be read by any later operation."""

    takes_tokens = True

    def __init__(self, program, parts):
        super().__init__()
        self.program = program
        self.parts = nn.ModuleDict({str(number): parts[number] for op in program for number in op.parts})
        self.gain = None
        if any(op.name == "passes_parameter" for op in program):
            self.gain = nn.Parameter(torch.rand(WIDTH))
        # Modules whose parameters this one reads.
        self.__dict__["reads"] = [parts[op.parts[0]] for op in program if op.name == "reads_weight"]

    def forward(self, x, tokens):
        seen = [x]
        for op in self.program:
            function, _, _ = OPERATIONS[op.name]
            parts = [self.parts[str(number)] for number in op.parts]
            seen.append(function(self, parts, seen[op.x], seen[op.y], tokens))
        return (seen[-1] + seen[len(seen) // 2]) * 0.5


def build_part(part, parts):
    return Composite(part.program, parts) if part.kind == "composite" else KINDS[part.kind]()
