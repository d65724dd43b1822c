# SPDX-License-Identifier: Apache-2.0
"""Loops of other libraries, and torch's meshes, on devices of one or two ranks: they train as on the host."""

import pytest
import pytorch_lightning as pl
import torch
from multiprocess import cases_lightning as lightning
from multiprocess import cases_transformers as transformers
from multiprocess.cases_checkpoints import folder
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

import lamina
from lamina.errors import UsageError
from lamina.job.ranks import size

LAYOUTS = [{}] if size() == 1 else [{"partitions": 2}, {}]  # copies, without partitions
SAMPLES = 24  # divide into batches and microbatches of any layout
ROWS = 8  # in a batch, of all copies


class Emulated(pl.accelerators.Accelerator):
    """The accelerator as Lightning is told of one of a vendor's."""

    def setup_device(self, device):
        torch.accelerator.set_device_index(device.index)

    def teardown(self):
        pass

    def get_device_stats(self, device):
        return torch.accelerator.memory_stats(device)

    @staticmethod
    def parse_devices(devices):
        return devices

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("emulated", index) for index in range(devices)]

    @staticmethod
    def auto_device_count():
        return torch.accelerator.device_count()

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def name():
        return "emulated"


def on_host(found):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), found)


def own_places(model):
    return {each.device for each in (*model.local_parameters(), *model.local_buffers())}


def case_lightning_trains_as_on_the_host():
    data, options = lightning.data(SAMPLES), {"gradient_clip_val": 0.5, "max_epochs": 1}
    expected = lightning.run("auto", DataLoader(data, ROWS), **options)
    for layout in LAYOUTS:
        strategy = lightning.strategy(2, **layout)
        loader = DataLoader(data, ROWS // lamina.dp_size())
        found = on_host(lightning.run(strategy, loader, accelerator=Emulated(), **options))
        assert own_places(strategy.model) == {lamina.device()} == {torch.device("emulated", lamina.rank())}
        losses = torch.tensor(lamina.allgather(found["losses"], lamina.DP_GROUP)).mean(0)
        torch.testing.assert_close(losses, torch.tensor(expected["losses"]))
        names = ("state_dict", "optimizer_states", "global_step")
        lightning.require_close({name: found[name] for name in names}, {name: expected[name] for name in names})
        lamina.shutdown()


def case_lightning_lowers_precision_on_the_device():
    data, losses = lightning.data(SAMPLES), []
    for precision in ("32-true", "bf16-mixed"):
        strategy = lightning.strategy(2, **LAYOUTS[0])
        trainer = lightning.trainer_of(strategy, accelerator=Emulated(), precision=precision, max_epochs=1)
        torch.manual_seed(0)
        trainer.fit(lightning.Net(), DataLoader(data, ROWS))
        losses.append(trainer.callbacks[0].steps)
        lamina.shutdown()
    whole, lowered = losses
    assert lowered != whole
    assert lowered == pytest.approx(whole, rel=0.1)


class Asks(lightning.Net):
    """Makes tensors where it is told to be, and has a metric."""

    def __init__(self):
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch, batch_idx):
        found = super().training_step(batch, batch_idx)
        return {**found, "loss": found["loss"] + torch.zeros((), device=self.device)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.error.update(outputs["seen"], batch[0][:, 0])


def case_a_module_of_lightnings_and_its_metrics_are_on_the_device():
    net = Asks()
    trainer = lightning.trainer_of(lightning.strategy(2, **LAYOUTS[0]), accelerator=Emulated(), max_epochs=1)
    trainer.fit(net, DataLoader(lightning.data(SAMPLES), ROWS))
    assert net.device == net.error.device == lamina.device()
    assert float(net.error.compute()) == 0


def case_an_accelerator_of_lightnings_that_is_not_the_ranks_is_named():
    strategy = lightning.strategy()
    with pytest.raises(UsageError, match="Lightning's accelerator is cpu, but this rank computes on emulated:"):
        lightning.trainer_of(strategy)


def over_ranks(path, layout, make, **options):
    lamina.shutdown()
    lamina.init(microbatches=2, ddp=True, timeout_s=60, **layout)
    options |= {"copies": lamina.dp_size(), "use_cpu": False}
    return transformers.run(transformers.Trainer, make, path / "over_ranks", **options)


def case_transformers_train_as_on_the_host():
    options = {"rows": SAMPLES, "max_grad_norm": 0.5, "num_train_epochs": 1}
    with folder() as path:
        for make in (transformers.language_model, transformers.classifier):
            expected = transformers.alone(make, path, **options)
            for layout in LAYOUTS:
                found = over_ranks(path, layout, make, **options)
                assert own_places(found["trainer"].model_wrapped) == {lamina.device()}
                assert found["trainer"].args.device == lamina.device()
                transformers.require_as_alone(on_host(found), dict(expected))


def case_transformers_go_on_from_a_checkpoint_of_the_device():
    with folder() as path:
        options = {"rows": SAMPLES, "save_strategy": "steps", "save_steps": 2}
        over_ranks(path, LAYOUTS[0], transformers.language_model, **options)
        whole = transformers.alone(transformers.language_model, path, rows=SAMPLES)
        place = str(path / "over_ranks/checkpoint-4")
        for layout in LAYOUTS:
            found = over_ranks(path, layout, transformers.language_model, rows=SAMPLES, resume=place)
            transformers.require_close(on_host(found["state"]), whole["state"], atol=1e-7)


def case_a_mesh_has_tensors_on_the_devices():
    for layout in LAYOUTS:
        lamina.init(ddp=True, timeout_s=60, **layout)
        mesh = lamina.get_device_mesh()
        assert mesh.device_type == "emulated"
        axis = "pp" if layout else "rdp"
        numbers = distribute_tensor(torch.arange(8.0, device=lamina.device()), mesh[axis], [Shard(0)])
        assert numbers.to_local().device == lamina.device() and len(numbers.to_local()) == 8 // lamina.size()
        assert (numbers * 2).full_tensor().tolist() == list(range(0, 16, 2))
        assert (numbers.sum() + 1).full_tensor().item() == 29
        lamina.shutdown()
