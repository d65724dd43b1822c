# SPDX-License-Identifier: Apache-2.0
"""The names by which scripts reach lamina."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lamina
import smdistributed.modelparallel as modelparallel
import smdistributed.modelparallel.torch as smp

NAMES = [
    "init",
    "is_initialized",
    "shutdown",
    "step",
    "StepOutput",
    "DistributedModel",
    "DistributedOptimizer",
    "partition",
    "set_partition",
    "num_microbatches",
    "rank",
    "size",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "dp_rank",
    "dp_size",
    "pp_rank",
    "pp_size",
    "tp_rank",
    "tp_size",
    "rdp_rank",
    "rdp_size",
    "get_mp_group",
    "get_dp_group",
    "get_pp_group",
    "get_tp_group",
    "get_rdp_group",
    "get_world_process_group",
    "get_mp_process_group",
    "get_dp_process_group",
    "get_pp_process_group",
    "get_tp_process_group",
    "get_rdp_process_group",
    "CommGroup",
    "WORLD",
    "MP_GROUP",
    "DP_GROUP",
    "PP_GROUP",
    "TP_GROUP",
    "RDP_GROUP",
    "RankType",
    "barrier",
    "dp_barrier",
    "mp_barrier",
    "allgather",
    "broadcast",
    "recv_from",
    "send",
    "set_activation_checkpointing",
    "state",
    "save",
    "load",
    "tp_register",
    "tp_register_with_module",
    "delay_param_initialization",
    "get_device_mesh",
]


@pytest.mark.parametrize("name", NAMES)
def test_both_packages_offer_the_same_object(name):
    assert getattr(smp, name) is getattr(lamina, name)


@pytest.mark.parametrize("name", ["model_creation", "tensor_parallelism", "set_tensor_parallelism"])
def test_marked_modules_become_the_originals_classes_under_its_names(name):
    assert getattr(smp, name).func is getattr(lamina, name)
    assert getattr(smp, name).keywords == {"replace": True}


def test_submodules_that_scripts_import():
    from smdistributed.modelparallel.torch.model import DistributedModel

    assert smp.model.DistributedModel is DistributedModel is lamina.DistributedModel
    assert smp.core.barrier is lamina.barrier
    assert smp.patches.checkpoint.checkpoint is lamina.checkpoint
    assert smp.patches.checkpoint.checkpoint_sequential is lamina.checkpoint_sequential


def test_what_scripts_import_at_their_top(start):
    from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_hf_state_dict_to_smdistributed
    from smdistributed.modelparallel.torch.nn.huggingface.gptj import translate_hf_state_dict_to_smdistributed_gptj
    from smdistributed.modelparallel.torch.nn.huggingface.gptneo import translate_state_dict_to_hf_gptneo
    from smdistributed.modelparallel.torch.state_mod import state
    from smdistributed.modelparallel.torch.utils import get_distribution_axis

    assert (state.cfg.fp16, state.cfg.prescaled_batch, state.cfg.shard_optimizer_state) == (False, False, False)
    assert get_distribution_axis(torch.nn.Linear(1, 1).weight) is None
    names = {"transformer.h.0.ln_1.weight": torch.ones(1)}
    assert list(translate_hf_state_dict_to_smdistributed(names)) == [
        "transformer.seq_layers.0.attention.pre_layernorm.weight"
    ]
    assert list(translate_hf_state_dict_to_smdistributed_gptj(names)) == ["transformer.seq_layers.0.layernorm.weight"]
    assert translate_state_dict_to_hf_gptneo(names, max_seq_len=8) == names
    assert smp.nn.huggingface.bert and smp.nn.huggingface.roberta
    assert smp.nn.DistributedTransformer is lamina.nn.DistributedTransformer


def test_scripts_find_the_package_and_compare_its_version():
    assert importlib.util.find_spec("smdistributed") is not None
    assert [int(number) for number in modelparallel.__version__.split(".")] >= [1, 10]


@pytest.mark.parametrize("package", [lamina, smp])
def test_what_does_not_exist_yet_says_so(package):
    with pytest.raises(AttributeError, match="CheckpointManager is not available yet"):
        _ = package.CheckpointManager
    with pytest.raises(AttributeError, match="has no 'no_such_name'"):
        _ = package.no_such_name


def test_every_public_name_exists():
    assert all(hasattr(lamina, name) for name in lamina.__all__)
    assert (Path(lamina.cmake_prefix_path) / "lib/cmake/lamina/laminaConfig.cmake").exists()


def test_what_a_user_is_shown_is_what_scripts_use():
    shown = [name for name in dir(lamina) if not name.startswith("__")]
    assert {"init", "step", "dist", "nn", "trainer"} <= set(shown)
    assert not {"job", "util", "calls", "shared_state", "torch_patches", "_lamina"} & set(shown)
    with pytest.raises(AttributeError, match=r"there is lamina.dist.get_sampler"):
        _ = lamina.get_sampler
    with pytest.raises(AttributeError, match=r"there is lamina.DistributedModel"):
        _ = lamina.DistributedModl


def test_groups_and_rank_types_are_what_the_originals_are_called():
    assert [group.name for group in lamina.CommGroup] == [
        "WORLD",
        "MP_GROUP",
        "DP_GROUP",
        "PP_GROUP",
        "TP_GROUP",
        "RDP_GROUP",
    ]
    assert [kind.name for kind in lamina.RankType] == [
        "WORLD_RANK",
        "MP_RANK",
        "DP_RANK",
        "PP_RANK",
        "TP_RANK",
        "RDP_RANK",
    ]


def test_errors_are_of_the_builtin_kinds_too():
    assert issubclass(lamina.TimeoutError, TimeoutError)
    assert issubclass(lamina.PeerError, ConnectionError)
    assert issubclass(lamina.ConfigError, ValueError)
    for name in ("ConfigError", "UsageError", "DesyncError", "PeerError", "TimeoutError", "RemoteError"):
        assert issubclass(getattr(lamina, name), lamina.Error)


def test_importing_twice_over_and_decorating_needs_no_init():
    program = "import smdistributed.modelparallel.torch as smp\n@smp.step()\ndef f(x): return x\nimport lamina"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_checkpoints_differ_in_their_form_and_in_objects_of_classes():
    assert smp.resume_from_checkpoint.func is lamina.resume_from_checkpoint
    assert smp.resume_from_checkpoint.keywords == {"allow_pickle": True}  # as scripts for the original have them
    assert smp.save_checkpoint.func is lamina.save_checkpoint
    assert smp.save_checkpoint.keywords == {"form": "smp"}


def test_nothing_is_translated_while_nothing_is_replaced():
    assert smp.state.module_manager.translate_functions == []
    assert smp.state_mod.state.module_manager is smp.state.module_manager
