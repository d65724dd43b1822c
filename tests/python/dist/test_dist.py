# SPDX-License-Identifier: Apache-2.0
"""lamina.dist in a world of one, and what it makes of the environment."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch.utils.data import DataLoader, TensorDataset

import composer.utils
import lamina
from lamina import dist

LAUNCHER = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR",
            "MASTER_PORT"]  # fmt: skip


@pytest.fixture(autouse=True)
def nobody_launched(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def set_all(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def torchrun(monkeypatch, rank, size, local_rank, local_size):
    set_all(monkeypatch, RANK=rank, WORLD_SIZE=size, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=local_size,
            MASTER_ADDR="127.0.0.1", MASTER_PORT=29500)  # fmt: skip


def places():
    ranks = (dist.get_global_rank, dist.get_world_size, dist.get_local_rank, dist.get_local_world_size)
    return [each() for each in ranks] + [dist.get_node_rank()]


def use_every_collective():
    tensor = torch.arange(3.0)
    dist.barrier()
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, "max")
    dist.broadcast(tensor, 0)
    assert torch.equal(tensor, torch.arange(3.0))
    assert [part.tolist() for part in dist.all_gather(tensor)] == [[0.0, 1.0, 2.0]]
    assert dist.all_gather_object({"a": 1}) == [{"a": 1}]
    objects = ["a", 2]
    dist.broadcast_object_list(objects)
    assert objects == ["a", 2]


@pytest.mark.parametrize("initialized", [False, True])
def test_a_script_that_nobody_launched_is_a_world_of_one(initialized):
    if initialized:
        dist.initialize_dist("cpu")
    assert dist.is_available() and dist.is_initialized() == initialized
    assert places() == [0, 1, 0, 1, 0]
    use_every_collective()
    with dist.run_local_rank_zero_first():
        pass
    with pytest.raises(KeyError, match="mine"), dist.run_local_rank_zero_first():
        raise KeyError("mine")


@pytest.mark.parametrize("wait", [dist.busy_wait_for_local_rank_zero, dist.local_rank_zero_download_and_wait])
@pytest.mark.parametrize("initialized", [False, True])
def test_alone_nobody_waits_and_no_file_stays(wait, initialized, tmp_path):
    if initialized:
        dist.initialize_dist("cpu")
    with wait(str(tmp_path)):
        pass
    with pytest.raises(ZeroDivisionError), wait(str(tmp_path)):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_the_signal_file_is_written_in_a_folder_that_is_made(tmp_path):
    name = dist.get_node_signal_file_name()
    assert name.startswith("._signal_file_node0_") and name != dist.get_node_signal_file_name()
    path = dist.write_signal_file(name, str(tmp_path / "new"))
    assert path == str(tmp_path / "new" / name) and (tmp_path / "new" / name).exists()


def test_ranks_come_from_torchrun_which_says_the_machine_in_its_own_word(monkeypatch):
    torchrun(monkeypatch, 5, 8, 1, 4)
    assert places() == [5, 8, 1, 4, 1]
    set_all(monkeypatch, GROUP_RANK=3)
    assert places() == [5, 8, 1, 4, 3]
    set_all(monkeypatch, NODE_RANK=2)
    assert places() == [5, 8, 1, 4, 2]


def test_ranks_come_from_srun_without_a_launcher(monkeypatch):
    set_all(monkeypatch, SLURM_JOB_ID=7, SLURM_STEP_ID=0, SLURM_PROCID=5, SLURM_LOCALID=1, SLURM_NODEID=1,
            SLURM_STEP_NUM_TASKS=7, SLURM_STEP_NUM_NODES=2, SLURM_STEP_TASKS_PER_NODE="4,3",
            SLURM_STEP_NODELIST="n[08-09]")  # fmt: skip
    assert places() == [5, 7, 1, 3, 1]


def test_ranks_come_from_mpirun_without_a_launcher(monkeypatch):
    names = {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}
    set_all(monkeypatch, MASTER_ADDR="10.0.0.1", **{f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()})
    assert places() == [3, 4, 1, 2, 1]


def test_a_variable_alone_is_believed_and_a_wrong_one_named(monkeypatch):
    set_all(monkeypatch, WORLD_SIZE=2)
    assert dist.get_world_size() == 2 and dist.get_global_rank() == 0
    set_all(monkeypatch, WORLD_SIZE="two")
    with pytest.raises(lamina.ConfigError, match="WORLD_SIZE: 'two'"):
        dist.get_world_size()


COLLECTIVES = {
    "barrier": dist.barrier,
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "broadcast": lambda: dist.broadcast(torch.ones(1), 0),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1]),
    "all_gather": lambda: dist.all_gather(torch.ones(1)),
    "all_gather_object": lambda: dist.all_gather_object(1),
    "run_local_rank_zero_first": lambda: dist.run_local_rank_zero_first().__enter__(),
    "busy_wait_for_local_rank_zero": lambda: dist.busy_wait_for_local_rank_zero().__enter__(),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_several_ranks_without_a_group_are_an_error_that_says_what_to_call(name, monkeypatch):
    torchrun(monkeypatch, 0, 2, 0, 2)
    with pytest.raises(lamina.UsageError, match=rf"{name}\(\): the world_size\(2\) > 1, .*initialize_dist"):
        COLLECTIVES[name]()


def test_the_environment_must_agree_with_torch(monkeypatch):
    dist.initialize_dist("cpu")
    set_all(monkeypatch, WORLD_SIZE=2, RANK=1)
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2 in the environment, but 1"):
        dist.get_world_size()
    with pytest.raises(RuntimeError, match="RANK is 1 in the environment, but 0"):
        dist.get_global_rank()


def test_an_unknown_operation_is_refused_in_any_world():
    with pytest.raises(lamina.UsageError, match="'mean' is not allowed; expected one of SUM, PRODUCT"):
        dist.all_reduce(torch.ones(1), "mean")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_initializing_twice_is_once(device):
    dist.initialize_dist(device, timeout=5)
    group = torch.distributed.group.WORLD
    dist.initialize_dist(device)
    assert torch.distributed.group.WORLD is group


def test_a_group_for_other_devices_is_an_error():
    torch.distributed.init_process_group("cuda:gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match=r"the device cpu needs cpu:gloo, but .* with cuda:gloo"):
        dist.initialize_dist("cpu")


@pytest.mark.parametrize("device, timeout, message", [
    ("gpus", 1, r"must be one of cpu, gpu, mps, tpu"), ("tpu", 1, "torch_xla"), ("cpu", 0, "timeout: 0 is not"),
])  # fmt: skip
def test_what_cannot_be_initialized_is_said_before_anything_starts(device, timeout, message):
    with pytest.raises(ValueError, match=message):
        dist.initialize_dist(device, timeout)
    assert not dist.is_initialized()


def test_an_incomplete_environment_is_named(monkeypatch):
    set_all(monkeypatch, RANK=0, WORLD_SIZE=2)
    with pytest.raises(lamina.ConfigError, match="MASTER_ADDR is not set"):
        dist.initialize_dist("cpu")


def test_the_variables_of_a_single_rank_need_no_address(monkeypatch):
    set_all(monkeypatch, RANK=0, WORLD_SIZE=1)
    dist.initialize_dist("cpu")
    use_every_collective()


def test_lamina_starts_beside_it(start):
    dist.initialize_dist("cpu")
    assert (lamina.size(), dist.get_world_size()) == (1, 1)


def test_nobody_who_tells_the_local_rank_is_a_typed_error(monkeypatch):
    dist.initialize_dist("cpu")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    for ask in (dist.get_local_rank, dist.get_local_world_size, dist.get_node_rank):
        with pytest.raises(dist.MissingEnvironmentError, match="no launcher tells it"):
            ask()


def test_a_script_ends_well_with_its_group_alive():
    program = "from lamina import dist; dist.initialize_dist('cpu'); dist.barrier()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_composer_offers_the_same_objects():
    assert all(getattr(composer.utils.dist, name) is getattr(dist, name) for name in dist.__all__)
    assert lamina.dist is dist


def test_the_arguments_are_those_that_scripts_pass():
    def signature(name):
        return str(inspect.signature(getattr(dist, name)).replace(return_annotation=inspect.Signature.empty))

    for name in ("get_world_size", "get_global_rank", "barrier"):
        assert list(inspect.signature(getattr(dist, name)).parameters) == ["group"]
    assert "reduce_operation: str = 'SUM'" in signature("all_reduce")
    assert "src: int," in signature("broadcast") and "src: int = 0" in signature("broadcast_object_list")
    assert "timeout: float = 300.0" in signature("initialize_dist")
    sampler = inspect.signature(dist.get_sampler).parameters
    assert {name: each.default for name, each in sampler.items() if name != "dataset"} == {
        "drop_last": False, "shuffle": False, "num_replicas": None, "rank": None, "seed": 0, "exact": False,
        "batch_size": None,
    }  # fmt: skip


def test_the_example_of_the_documentation_trains():
    page = (Path(__file__).resolve().parents[3] / "docs/launching.md").read_text()
    example = re.search(r"```python\n(from lamina import dist\n.*?)```", page, re.DOTALL)[1]
    data, model = TensorDataset(torch.randn(20, 3)), torch.nn.Linear(3, 1)
    names = {"download": lambda: data, "loss": lambda batch: model(batch[0]).square().mean(), "epochs": 2}
    exec(example, names | {"DataLoader": DataLoader})
    assert model.weight.grad.abs().sum() > 0 and dist.is_initialized()
