# SPDX-License-Identifier: Apache-2.0
"""Which device a job, a Trainer and torch's groups are on, for one rank."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lamina
from lamina.composer.devices import DeviceCPU, DeviceGPU, get_device
from lamina.errors import ConfigError, UsageError
from lamina.trainer import ComposerClassifier, Trainer

OWN = torch.device("emulated", 0)


@contextmanager
def environment(**variables):
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def trainer_on(device, **options):
    return Trainer(model=ComposerClassifier(nn.Linear(4, 2), num_classes=2), device=device, **options)


def case_a_trainer_takes_each_way_to_name_a_device():
    ways = {
        "gpu": OWN,
        None: OWN,
        "emulated": OWN,
        "emulated:2": torch.device("emulated", 2),
        "cpu": torch.device("cpu"),
    }
    for device, expected in ways.items():
        state = trainer_on(device).state
        assert (lamina.device(), state.device.there) == (expected, expected), device
        assert state.device.name == ("cpu" if expected.type == "cpu" else "gpu")
        assert isinstance(state.device, DeviceCPU if expected.type == "cpu" else DeviceGPU)
    for device in (torch.device("emulated", 3), DeviceGPU(3)):
        assert trainer_on(device).state.device.there == torch.device("emulated", 3)
    assert trainer_on(None, lamina_config={"device": "cpu"}).state.device.name == "cpu"
    assert trainer_on("gpu", lamina_config={"device": "auto"}).state.device.name == "gpu"


def case_what_the_environment_names_counts():
    with environment(LAMINA_DEVICE="emulated:1"):
        assert trainer_on("cpu").state.device.there == torch.device("emulated", 1) == lamina.device()
    with environment(LAMINA_DEVICE=""):
        assert trainer_on("emulated:2").state.device.there == torch.device("emulated", 2) == lamina.device()
    with environment(LAMINA_DEVICE="cpu"):
        assert trainer_on("gpu").state.device.there.type == lamina.device().type == "cpu"
    lamina.shutdown()
    with (
        environment(LAMINA_DEVICE="emulated:9"),
        pytest.raises(ConfigError, match='LAMINA_DEVICE: "emulated:9" is not'),
    ):
        lamina.init()


def case_the_precision_without_one_is_that_of_the_device():
    assert trainer_on("gpu").state.precision.value == "amp_fp16"
    assert trainer_on("cpu").state.precision.value == "fp32"


def case_a_device_that_is_not_here_is_named_before_a_job_begins():
    wrong = {"cuda": '"cuda"', "gpus": '"gpus"', "emulated:4": '"emulated:4"', torch.device("cuda", 1): '"cuda:1"'}
    for device, shown in wrong.items():
        with pytest.raises(ConfigError, match=f"device: {shown} is not .* cpu, emulated:0 to emulated:3"):
            trainer_on(device)
        assert not lamina.is_initialized()
        with pytest.raises(ConfigError, match=f"device: {shown} is not .* cpu, emulated:0 to emulated:3"):
            lamina.init(device=str(device))
    for device in (3, DeviceCPU):
        with pytest.raises(ConfigError, match=r"it is 'cpu', 'gpu' or a torch\.device"):
            trainer_on(device)
    with pytest.raises(ConfigError, match="emulated:7"):
        DeviceGPU(7)


def case_a_trainer_and_its_configuration_that_contradict_each_other_are_an_error_before_a_job_begins():
    with pytest.raises(ConfigError, match="device: it is 'gpu', but lamina_config has 'cpu': say it once"):
        trainer_on("gpu", lamina_config={"device": "cpu"})
    with pytest.raises(ConfigError, match='lamina_config: device: "cuda" is not'):
        trainer_on(None, lamina_config={"device": "cuda"})
    assert not lamina.is_initialized()


def case_objects_are_moved_by_a_device():
    device = get_device("gpu")
    batch = {"x": torch.ones(2), "of": [torch.ones(1), "text", 3], "own": SimpleNamespace(to=lambda where: where.type)}
    there = device.batch_to_device(batch)
    assert there["x"].device == there["of"][0].device == device.tensor_to_device(torch.ones(1)).device == OWN
    assert there["of"][1:] == ["text", 3] and there["own"] == "emulated"
    assert device.batch_to_device(there)["x"] is there["x"]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert device.module_to_device(model).weight.device == OWN
    device.optimizer_to_device(optimizer)
    state = next(iter(optimizer.state.values()))
    assert state["exp_avg"].device == OWN and state["step"].device.type == "cpu"
    assert device.dist_backend == torch.distributed.get_default_backend_for_device("emulated")


def case_a_device_that_the_script_made_current_is_taken():
    torch.accelerator.set_device_index(2)
    lamina.init()
    assert lamina.device() == torch.device("emulated", 2)
    lamina.shutdown()
    torch.accelerator.set_device_index(0)


def case_an_init_with_the_same_keys_again_does_nothing():
    for _ in range(2):
        lamina.init(microbatches=2)
    for _ in range(2):
        lamina.init({"microbatches": 2})


def case_a_job_takes_a_device_of_torch():
    lamina.init(device=torch.device("emulated", 1))
    assert lamina.device() == torch.device("emulated", 1)


def case_a_model_moves_to_its_own_device_alone():
    lamina.init()
    model = lamina.DistributedModel(nn.Linear(2, 2))
    assert model.to("emulated") is model and model.to(OWN) is model
    for device in ("emulated:1", "cuda"):
        with pytest.raises(UsageError, match="this rank computes on emulated:0") as caught:
            model.to(device)
        assert caught.value.code == "model-device"
    with pytest.raises(UsageError, match="this rank computes on emulated:0"):
        model.cuda()


def case_an_optimizer_that_was_made_before_goes_on_with_its_states():
    x = torch.ones(3, 4)
    kinds = [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.LBFGS, {"history_size": 2}),
        (lamina.optim.AdamW, {"lr": 1e-3}),
    ]
    for kind, options in kinds:
        for wraps in (False, True) if kind is torch.optim.AdamW else (False,):
            weights = []
            for device in ("cpu", "gpu"):
                torch.manual_seed(0)
                model = nn.Linear(4, 2)
                optimizer = kind(model.parameters(), **options)
                train_once(optimizer, lambda model=model: model(x).square().sum())
                lamina.init(device=device)
                wrapped = lamina.distribute(model)
                used = lamina.DistributedOptimizer(optimizer) if wraps else optimizer
                for _ in range(2):
                    train_once(used, lambda wrapped=wrapped: wrapped(x).square().sum())
                weights.append(model.weight.detach().cpu())
                lamina.shutdown()
            torch.testing.assert_close(*weights, msg=f"{kind.__name__}, {options}, {wraps}")


def train_once(optimizer, loss_of):
    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    optimizer.step(closure)


def case_a_loss_scale_is_on_the_device_of_the_job():
    assert lamina.amp.GradScaler()._device == "emulated"
    lamina.init(device="cpu")
    assert lamina.amp.GradScaler()._device == "cpu"


def case_groups_and_meshes_are_of_the_device():
    lamina.init(ddp=True)
    backend = torch.distributed.get_default_backend_for_device("emulated")
    assert f"emulated:{backend}" in torch.distributed.get_backend_config(lamina.get_world_process_group())
    assert lamina.get_device_mesh().device_type == "emulated"
    lamina.shutdown()
    lamina.init(ddp=True, device="cpu")
    assert "emulated" not in torch.distributed.get_backend_config(lamina.get_world_process_group())
    assert lamina.get_device_mesh().device_type == "cpu"


def case_a_default_group_serves_the_accelerator():
    for device in ("gpu", "emulated", None, OWN):
        lamina.dist.initialize_dist(device)
        config = torch.distributed.get_backend_config()
        assert config == f"cpu:gloo,emulated:{torch.distributed.get_default_backend_for_device('emulated')}", device
        lamina.dist.initialize_dist("cpu")  # which it serves, too
        torch.distributed.destroy_process_group()
    with pytest.raises(ConfigError, match="must be one of cpu, gpu, mps, tpu, emulated"):
        lamina.dist.initialize_dist("cuda")
