# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that one face writes and the other loads: model, optimizer and content, then further steps, all compared
with a plain loop. The C++ side is tests/frontend/other_face.cc."""

import json
import os
import subprocess

import pytest
import torch
from launch.launcher_harness import built, command, require_success

PYTHON = """
import sys
import torch
import lamina

STEPS = 3


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("in", torch.nn.Linear(4, 6))
        self.norm = torch.nn.BatchNorm1d(6)
        self.out = torch.nn.Linear(6, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))

    def forward(self, x):
        return self.out(self.norm(self.get_submodule("in")(x).tanh()))


KEYS = {
    "torch": {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "betas": (0.8, 0.99), "amsgrad": True},
    "NAdam": {"lr": 0.01, "betas": (0.9, 0.9), "decoupled_weight_decay": True, "weight_decay": 0.1},
    "Rprop": {"lr": 0.01, "etas": (0.4, 1.3), "step_sizes": (1e-6, 0.02)},
    "QHM": {"lr": 0.1, "momentum": 0.8, "nu": 0.7, "weight_decay": 0.1, "weight_decay_type": "direct"},
    "NovoGrad": {"lr": 0.01, "betas": (0.8, 0.999), "norm_type": 0},
}


def made(parameters, **keys):
    if kind == "torch":  # with a parameter that is not the model's
        return torch.optim.AdamW([*parameters, torch.nn.Parameter(torch.ones(3))], **keys)
    return getattr(lamina.optim, kind)(parameters, **keys)


def train(model, optimizer):
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.linspace(0, 9, 20).sin().view(5, 4)).square().mean().backward()
        optimizer.step()


def require_same(model, plain):
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


mode, folder, kind = sys.argv[1:]
keys = KEYS[kind]
lamina.init()
model = lamina.DistributedModel(Net())
if mode == "write":
    optimizer = lamina.DistributedOptimizer(made(model.parameters(), **keys))
    train(model, optimizer)
    for tag, form in ("python", "lamina"), ("original", "smp"):
        lamina.save_checkpoint(folder, tag, user_content={"step": STEPS, "pair": (1, 2.5)}, form=form)
    torch.save(model.state_dict(), folder + "/state.pt")
else:
    optimizer = lamina.DistributedOptimizer(
        made(model.parameters(), **({"lr": 0.5, "momentum": 0.1, "nu": 0.1} if kind == "QHM" else {"lr": 0.5}))
    )
    content = lamina.resume_from_checkpoint(folder, "cpp")
    assert content == {"step": STEPS, "pair": (1, 2.5)}, content
    plain = Net()
    other = made(plain.parameters(), **keys)
    train(plain, other)
    require_same(model, plain)
    train(plain, other)
    train(model, optimizer)
    require_same(model, plain)
lamina.shutdown()
"""


def run(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def run_python(launcher, mode, kind):
    """In the launcher's folder, which is the test's."""
    (script := launcher.folder / "script.py").write_text(PYTHON)
    require_success(launcher.start_ranks(1, script, mode, launcher.folder, kind))


def program():
    return built("bin/frontend_other_face")


KINDS = ["torch", "AdamW", "NAdam", "Rprop", "QHM", "NovoGrad"]


@pytest.mark.parametrize("kind", KINDS)
def test_python_goes_on_from_a_checkpoint_of_cpp(kind, launcher, tmp_path):
    run(program(), "write", tmp_path, kind)
    run_python(launcher, "read", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_cpp_goes_on_from_a_checkpoint_of_python(kind, launcher, tmp_path):
    run_python(launcher, "write", kind)
    run(program(), "read", tmp_path, kind)


class Hostile:
    def __reduce__(self):
        return os.system, ("false",)


def test_cpp_loads_plain_state_dicts_of_torch_save(launcher, tmp_path):
    run_python(launcher, "write", "torch")
    state = torch.load(tmp_path / "state.pt")
    for name in ("one", "two", "damaged", "hostile"):
        (tmp_path / name).mkdir()
    torch.save(state, tmp_path / "one" / "pytorch_model.bin")
    torch.save({f"theirs.{name}": value for name, value in state.items()}, tmp_path / "theirs.pt")
    torch.save({**state, "evil": Hostile()}, tmp_path / "hostile" / "pytorch_model.bin")
    names, places = list(state), {}
    for number, part in enumerate((names[:3], names[3:])):
        file = f"pytorch_model-{number + 1:05}-of-00002.bin"
        torch.save({name: state[name] for name in part}, tmp_path / "two" / file)
        places |= dict.fromkeys(part, file)
    (tmp_path / "two" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    damaged = bytearray((tmp_path / "one" / "pytorch_model.bin").read_bytes())
    damaged[damaged.index(state["in.weight"].numpy().tobytes()) + 5] ^= 4
    (tmp_path / "damaged" / "pytorch_model.bin").write_bytes(damaged)
    run(command(), "run", "-n", "2", "--no-python", program(), "plain", tmp_path, "torch")
