# SPDX-License-Identifier: Apache-2.0
"""Configurations of the Trainer become keys of init, or one error that names all that is wrong."""

import itertools

import pytest
import torch

import composer.core
from lamina.errors import ConfigError
from lamina.trainer.precision import Precision, ensure_precision, get_precision_context
from lamina.trainer.settings import Given, settings

OF_TWO = Given(ranks=2, batch_size=16)
SHARDED = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": None,
}


def sharded(after_forward, after_backward, **keys):
    freed = {"sdp_reshard_after_forward": after_forward, "sdp_reshard_after_backward": after_backward}
    return SHARDED | freed | keys


POST = {"sdp_backward_prefetch": "post"}
STATES = {"ddp": True, "shard_optimizer_state": True, "sharded_data_parallel_degree": 1}
WHOLE = {"ddp": True, "shard_optimizer_state": False, "sharded_data_parallel_degree": 1}
ROWS = [
    ({"fsdp_config": {}}, "FULL_SHARD", sharded(True, True, **POST)),
    ({"fsdp_config": {"sharding_strategy": "full_shard"}}, "FULL_SHARD", sharded(True, True, **POST)),
    ({"fsdp_config": {"sharding_strategy": "Shard_Grad_Op"}}, "SHARD_GRAD_OP", sharded(False, True, **POST)),
    ({"fsdp_config": {"sharding_strategy": "NO_SHARD"}}, "NO_SHARD", WHOLE),
    ({"deepspeed_config": {}}, "stage 0", WHOLE),
    ({"deepspeed_config": {"zero_optimization": {}}}, "stage 0", WHOLE),
    ({"deepspeed_config": {"zero_optimization": {"stage": 1}}}, "stage 1", STATES),
    ({"deepspeed_config": {"zero_optimization": {"stage": "2"}}}, "stage 2", sharded(False, False)),
    ({"deepspeed_config": {"zero_optimization": {"stage": 3}}}, "stage 3", sharded(True, True)),
]


def of(given=OF_TWO, **arguments):
    return settings(given=given, **arguments)


def problems(given=OF_TWO, **arguments):
    """The lines of the error."""
    with pytest.raises(ConfigError) as caught:
        settings(given=given, **arguments)
    first, *lines = str(caught.value).split("\n  ")
    assert first == f"configuration of the Trainer: {len(lines)} error{'s' * (len(lines) > 1)}"
    return lines


@pytest.mark.parametrize("arguments, layout, keys", ROWS, ids=[f"{each[1]} {at}" for at, each in enumerate(ROWS)])
def test_each_row_has_its_keys(arguments, layout, keys):
    found = of(**arguments)
    assert found.layout == layout
    assert found.keys == {"fp16": False, "bf16": False, "reduce_dtype": None, "buffer_dtype": None} | keys
    assert (found.precision, found.autocast, found.clipping_norm) == (Precision.FP32, Precision.FP32, None)
    assert not found.grad_scaler and not found.optimizer_arguments


def test_without_a_configuration_lamina_config_counts_alone():
    own = {"partitions": 2, "bf16": True}
    found = of(lamina_config=own)
    assert found.keys == own and found.layout is None
    assert of().keys == {}


def test_the_defaults_of_an_fsdp_config():
    found = of(fsdp_config={})
    assert found.min_params == 1e8 and found.keys["sdp_backward_prefetch"] == "post"
    assert not found.activation_checkpointing and not found.verbose and "offload_activations" not in found.keys


@pytest.mark.parametrize("text", [str, lambda value: f" {value} ", lambda value: value])
def test_numbers_may_be_texts_and_strings_in_any_case(text):
    given = {"min_params": text(2e6), "backward_prefetch": "none", "verbose": "TRUE", "activation_checkpointing": True}
    found = of(fsdp_config=given | {"activation_cpu_offload": "true", "cpu_offload": "False"})
    assert (found.min_params, found.verbose) == (2e6, True)
    assert found.keys["sdp_backward_prefetch"] == "none"
    assert found.activation_checkpointing and found.keys["offload_activations"] is True


def test_degree_and_threshold_may_be_those_of_lamina_config():
    own = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 100, "sdp_gradient_clipping": 3.0}
    given = Given(ranks=4, batch_size=16)
    assert of(given, fsdp_config={}, lamina_config=own).keys.items() >= own.items()
    assert of(given, fsdp_config={}).keys["sharded_data_parallel_degree"] == 4


@pytest.mark.parametrize(
    "own, degree",
    [
        ({"partitions": 2}, 4),
        ({"pipeline_parallel_degree": 4}, 2),
        ({"tensor_parallel_degree": 2}, 4),
        ({"partitions": 2, "tensor_parallel_degree": 2}, 2),
        ({"partitions": 9}, 8),  # which init refuses
    ],
)
def test_a_parameter_is_sharded_among_the_ranks_that_hold_it(own, degree):
    found = of(Given(ranks=8), fsdp_config={}, lamina_config=own)
    assert found.keys["sharded_data_parallel_degree"] == degree


@pytest.mark.parametrize("prescaled, readers", [(True, 2), (False, 4)])
def test_the_batch_of_all_is_that_of_the_ranks_that_read_different_data(prescaled, readers):
    own = {"partitions": 2, "tensor_parallel_degree": 2, "prescaled_batch": prescaled}
    given = Given(ranks=8, batch_size=3)
    assert of(given, deepspeed_config={"train_batch_size": 3 * readers}, lamina_config=own)
    [line] = problems(given, deepspeed_config={"train_batch_size": 64}, lamina_config=own)
    assert "64" in line and str(3 * readers) in line


# Precision and dtypes.


@pytest.mark.parametrize(
    "name, precision",
    [(name, each) for each in Precision for name in (each.value, each.name)]
    + [("amp", "amp_fp16"), ("AMP", "amp_fp16"), ("fp16", "amp_fp16"), ("bf16", "amp_bf16"), ("Amp_Bf16", "amp_bf16")],
)
def test_precisions_have_old_names_and_any_case(name, precision):
    assert ensure_precision(name) is Precision(name) is Precision(precision)
    assert ensure_precision(Precision(precision)) is Precision(precision)
    assert Precision(precision) == Precision(name).value


def test_the_default_is_float32_on_the_cpu_and_half_on_an_accelerator():
    assert ensure_precision(None) is Precision.FP32
    assert ensure_precision(None, "cuda") is Precision.AMP_FP16
    assert of(Given(device_type="cuda")).grad_scaler


@pytest.mark.parametrize("name", ["fp32", "amp_fp16", "amp_bf16"])
def test_a_context_computes_in_its_precision_and_in_no_other(name):
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    for outer in ("amp_bf16", "fp32"):
        with get_precision_context(outer, "cpu"), get_precision_context(name, "cpu"):
            assert linear(x).dtype is Precision(name).dtype
    assert linear(x).dtype is torch.float32


@pytest.mark.parametrize("precision, half", [("amp_fp16", "fp16"), ("amp_bf16", "bf16")])
def test_pure_makes_the_model_half_and_its_optimizer_scale(precision, half):
    found = of(fsdp_config={"mixed_precision": "pure"}, precision=precision)
    assert [key for key in ("fp16", "bf16") if found.keys[key]] == [half]
    assert found.autocast is Precision(precision) and not found.grad_scaler
    assert bool(found.optimizer_arguments) == (half == "fp16")
    found = of(fsdp_config={"mixed_precision": "FULL"}, precision=precision)
    assert not found.keys["fp16"] and not found.keys["bf16"] and not found.optimizer_arguments
    assert found.grad_scaler == (half == "fp16")


NAMES = ["FULL", "DEFAULT", "PURE", {}, {"param_dtype": "fp32"}, {"param_dtype": "fp32", "buffer_dtype": torch.float32}]


@pytest.mark.parametrize("mixed", NAMES)
def test_all_that_is_float32_stays_as_it_is(mixed):
    keys = of(fsdp_config={"mixed_precision": mixed}).keys
    assert not keys["fp16"] and not keys["bf16"] and keys["reduce_dtype"] is keys["buffer_dtype"] is None


def dtypes(param, reduce, buffer):
    return {"param_dtype": param, "reduce_dtype": reduce, "buffer_dtype": buffer}


def in_words(mixed, precision="amp_bf16"):
    """The dtypes of parameters, travelling gradients and buffers that `init` is given, None where they stay."""
    keys = of(fsdp_config={"mixed_precision": mixed}, precision=precision).keys
    [param] = [key for key in ("fp16", "bf16") if keys[key]] or [None]
    return param, keys["reduce_dtype"], keys["buffer_dtype"]


@pytest.mark.parametrize("param, reduce, buffer", list(itertools.product((None, "fp32", "fp16", "bf16"), repeat=3)))
def test_each_combination_of_dtypes_has_its_keys(param, reduce, buffer):
    half, same = param in ("fp16", "bf16"), None
    expected = (
        param if half else None,
        reduce if half or reduce != "fp32" else None,  # gradients of float32 travel as they are
        same if buffer == param or (not half and buffer in (None, "fp32")) else buffer or "own",
    )
    assert in_words(dtypes(param, reduce, buffer)) == expected


@pytest.mark.parametrize("precision, half", [("amp_fp16", "fp16"), ("amp_bf16", "bf16")])
def test_names_of_dtypes_are_those_of_the_precision(precision, half):
    assert in_words("FULL", precision) == (None, None, None)
    assert in_words("DEFAULT", precision) == (None, half, None)
    assert in_words("PURE", precision) == (half, half, None)
    assert in_words({"param_dtype": half}, precision) == (half, None, "own")


# DeepSpeed's.


@pytest.mark.parametrize("argument", [None, "amp_bf16"])
def test_deepspeed_makes_the_model_half_and_nothing_else(argument):
    found = of(deepspeed_config={"bf16": {"enabled": True}}, precision=argument)
    assert found.keys["bf16"] and not found.keys["fp16"]
    assert (found.precision, found.autocast) == (Precision.AMP_BF16, Precision.FP32)
    assert not found.grad_scaler and not found.optimizer_arguments


def test_deepspeed_takes_the_precision_of_the_trainer():
    assert of(deepspeed_config={}, precision="amp_fp16").keys["fp16"]
    assert of(Given(device_type="cuda"), deepspeed_config={}).keys["fp16"]
    found = of(Given(device_type="cuda"), deepspeed_config={"fp16": {"enabled": False}})
    assert found.precision is Precision.FP32 and not found.keys["fp16"]
    assert of(Given(device_type="cuda"), deepspeed_config={"bf16": {"enabled": True}}).keys["bf16"]


def test_the_loss_scale_of_deepspeed():
    found = of(deepspeed_config={"fp16": {"enabled": True, "loss_scale": "128"}}).optimizer_arguments
    assert found == {"static_loss_scale": 128.0}
    given = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 2}
    expected = {"init_scale": 16.0, "scale_window": 7, "min_scale": 2.0, "delayed_shift": 3}
    found = of(deepspeed_config={"fp16": given}).optimizer_arguments
    assert found.pop("dynamic_loss_scale")
    assert found == {"dynamic_loss_args": expected | {"consecutive_hysteresis": False}}


def test_buckets_and_thresholds_of_deepspeed():
    given = {
        "reduce_bucket_size": 5e6,
        "stage3_max_live_parameters": "1e7",
        "stage3_param_persistence_threshold": 3,
        "stage3_prefetch_bucket_size": 1e6,
        "overlap_comm": True,
        "offload_param": {"device": "none"},
        "offload_optimizer": None,
    }
    sharded = {
        "sdp_reduce_bucket_size": 5000000,
        "sdp_max_live_parameters": 10000000,
        "sdp_param_persistence_threshold": 3,
    }
    for stage in range(4):
        found = of(deepspeed_config={"zero_optimization": given | {"stage": stage}}).keys
        expected = {0: {}, 1: {}, 2: {"sdp_reduce_bucket_size": 5000000}, 3: sharded}[stage]
        assert {key: found[key] for key in sharded if key in found and found[key] != 0} == expected


def test_clipping_is_the_trainers_and_no_other():
    found = of(deepspeed_config={"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}})
    assert found.clipping_norm == 0.5 and found.keys["sdp_gradient_clipping"] is None
    assert of(deepspeed_config={"gradient_clipping": 0}).clipping_norm is None


@pytest.mark.parametrize(
    "given, fits, wrong",
    [
        (Given(2, batch_size=16), (32, 16, 1), (16, 8, 2)),
        (Given(2, batch_size=16, grad_accum=4), (32, 4, 4), (64, 16, 1)),
        (Given(2, batch_size=16, grad_accum=None, device_train_microbatch_size=8), (32, 8, 2), (16, 16, 1)),
        (Given(2, batch_size=16, grad_accum=None, device_train_microbatch_size=99), (32, 16, 1), (16, 99, 2)),
        (Given(3, batch_size=5, grad_accum=2), (15, None, 2), (10, 3, 3)),
        (Given(3, grad_accum=2), (None, None, 2), (10, 3, 3)),
        (Given(3, grad_accum=None, device_train_microbatch_size=4), (None, 4, None), (10, 3, 3)),
        (Given(1, batch_size=8, grad_accum=None, device_train_microbatch_size="auto"), (8, None, None), (9, 8, 1)),
    ],
)
def test_sizes_of_batches_are_those_of_the_trainer(given, fits, wrong):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    of(given, deepspeed_config={key: value for key, value in zip(keys, fits, strict=True) if value})
    lines = problems(given, deepspeed_config=dict(zip(keys, wrong, strict=True)))
    for key, value, line in zip(keys, wrong, lines, strict=True):
        assert line.startswith(f"deepspeed_config[{key!r}]: {value}, but the Trainer has ")


# Errors.

SECTIONS = [
    "fsdp_config",
    "fsdp_config['mixed_precision']",
    *("deepspeed_config", "deepspeed_config['zero_optimization']"),
    *("deepspeed_config['fp16']", "deepspeed_config['bf16']"),
]
NOT_THERE = {"cpu_offload", "optimizer", "scheduler", "amp", "offload_param", "offload_optimizer"}
NOT_THERE |= {"fp16_master_weights_and_grads"}


def nested(where, given):
    """Arguments in which this dictionary stands there."""
    name, *inner = where.replace("']", "").split("['")
    return {name: {inner[0]: given} if inner else given}


def misspelt(key):
    return sorted({key[:-1], key + "s", key.upper(), key[0] + key[2:], key.replace("_", "-", 1), key + "_"} - {key})


@pytest.mark.parametrize("where", SECTIONS)
def test_a_misspelt_key_is_named_with_the_nearest(where):
    [line] = problems(**nested(where, {"~" * 20: True}))
    keys = line.partition("no key is called so; there are ")[2].split(", ")
    assert len(keys) > 2
    for key in keys:
        for wrong in (each for each in misspelt(key) if each not in keys):
            [line] = problems(**nested(where, {wrong: True}))
            assert line == f"{where}[{wrong!r}]: no key is called so; the nearest is {key}"


BAD_FLAGS = ["yes", 1, 0, None, 2.5, [], {}]
BAD_COUNTS = [0, -1, 1.5, "1.5", "many", True, None, float("nan"), float("inf"), [], 10**400]
BAD_NUMBERS = [-1, "-1", "many", False, None, float("nan"), "inf", [4]]
BAD_NAMES = ["", "FULL", "sharded", 1, None, True, []]
BAD_DTYPES = ["fp64", "", 16, True, torch.float64, "int8", []]
BAD = {
    "fsdp_config": {
        "sharding_strategy": BAD_NAMES,
        "min_params": BAD_NUMBERS,
        "cpu_offload": [True, "true", 1, {"offload_params": True}],
        "mixed_precision": ["", "HALF", "bf16", 1, None, True],
        "backward_prefetch": [*BAD_NAMES, "BACKWARD", "PRE", "FORWARD_PRE"],
        **dict.fromkeys(("activation_checkpointing", "activation_cpu_offload", "verbose"), BAD_FLAGS),
    },
    "fsdp_config['mixed_precision']": dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), BAD_DTYPES),
    "deepspeed_config": {
        **dict.fromkeys(("train_batch_size", "gradient_accumulation_steps"), BAD_COUNTS),
        **{key: [1, "on", None, True, []] for key in ("zero_optimization", "fp16", "bf16")},
        "gradient_clipping": BAD_NUMBERS,
        "communication_data_type": BAD_DTYPES,
        "optimizer": [{}, {"type": "Adam"}, {"type": "Adam", "params": {"lr": 1}}, "Adam"],
        "scheduler": [{}, {"type": "WarmupLR"}],
        "amp": [{"enabled": True}, {}, True, {"enabled": True, "opt_level": "O1"}],
    },
    "deepspeed_config['zero_optimization']": {
        "stage": [-1, 4, 1.5, "three", True, None],
        "reduce_bucket_size": BAD_COUNTS,
        "stage3_max_live_parameters": BAD_COUNTS,
        "stage3_param_persistence_threshold": [-1, 0.5, "x", None],
        "stage3_max_reuse_distance": BAD_NUMBERS,
        "overlap_comm": BAD_FLAGS,
        **{key: [{"device": "cpu"}, {"device": "nvme"}, True, {}] for key in ("offload_param", "offload_optimizer")},
        "cpu_offload": [True, "true"],
    },
    "deepspeed_config['fp16']": {
        "enabled": BAD_FLAGS,
        "loss_scale": BAD_NUMBERS,
        "initial_scale_power": [-1, 128, 1.5, "x", True],
        "hysteresis": BAD_COUNTS,
        "min_loss_scale": [0, *BAD_NUMBERS],
        "fp16_master_weights_and_grads": [True, 1],
    },
    "deepspeed_config['bf16']": {"enabled": BAD_FLAGS},
}
EVERY = [(where, key, value) for where in BAD for key, values in BAD[where].items() for value in values]


@pytest.mark.parametrize(
    "where, key, value", EVERY, ids=[f"{where}-{key}-{at}" for at, (where, key, _) in enumerate(EVERY)]
)
def test_a_wrong_value_is_named_with_what_is_expected(where, key, value):
    [line] = problems(**nested(where, {key: value}))
    says = ": " if key in NOT_THERE else " is not allowed; expected "
    assert line.startswith(f"{where}[{key!r}]: {value!r}{says}")


@pytest.mark.parametrize("name", ["fsdp_config", "deepspeed_config", "lamina_config"])
@pytest.mark.parametrize("value", ["FULL_SHARD", 3, True, [("min_params", 1)]])
def test_a_configuration_is_a_dictionary(name, value):
    assert problems(**{name: value}) == [f"{name}: {value!r} is not allowed; expected a dictionary"]


def test_all_is_named_at_once():
    where, fsdp = "fsdp_config", {key: values[0] for key, values in BAD["fsdp_config"].items()}
    lines = problems(fsdp_config=fsdp | {"min_parms": 1}, precision="fp8", lamina_config={"ddp": False})
    assert [line.split("]")[0] for line in lines[1:-1]] == [f"{where}[{key!r}" for key in (*fsdp, "min_parms")]
    assert lines[0].startswith("precision='fp8'") and "the nearest is" in lines[0]
    assert lines[-1].startswith("lamina_config['ddp']: False")


@pytest.mark.parametrize("value", ["fp8", "", 16, True, torch.float16, ["fp32"]])
def test_a_precision_that_is_none_is_named_with_the_nearest(value):
    [line] = problems(precision=value)
    assert line.startswith(f"precision={value!r}: it is one of fp32, amp_fp16, amp_bf16; the nearest is ")
    with pytest.raises(ConfigError):
        get_precision_context(value, "cpu")


def test_two_configurations_contradict_each_other():
    [line] = problems(fsdp_config={}, deepspeed_config={})
    assert "both" in line


@pytest.mark.parametrize(
    "arguments, own",
    [
        ({"fsdp_config": {}}, {"ddp": False}),
        ({"fsdp_config": {}}, {"sharded_data_parallel_degree": 1}),
        ({"fsdp_config": {}}, {"bf16": True}),
        ({"fsdp_config": {"sharding_strategy": "NO_SHARD"}}, {"sharded_data_parallel_degree": 2}),
        ({"fsdp_config": {"sharding_strategy": "NO_SHARD"}}, {"shard_optimizer_state": True}),
        ({"fsdp_config": {"mixed_precision": "PURE"}, "precision": "amp_bf16"}, {"bf16": False}),
        (
            {"fsdp_config": {"activation_checkpointing": True, "activation_cpu_offload": True}},
            {"offload_activations": False},
        ),
        ({"deepspeed_config": {"zero_optimization": {"stage": 1}}}, {"shard_optimizer_state": False}),
        ({"deepspeed_config": {"zero_optimization": {"stage": 1}}}, {"sharded_data_parallel_degree": 2}),
        ({"deepspeed_config": {"gradient_clipping": 1}}, {"sdp_gradient_clipping": 2.0}),
        ({"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}, {"sdp_reshard_after_forward": True}),
        ({"fsdp_config": {"backward_prefetch": "NONE"}}, {"sdp_backward_prefetch": "pre"}),
        (
            {"deepspeed_config": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}}},
            {"sdp_reduce_bucket_size": 8},
        ),
    ],
)
def test_what_lamina_config_contradicts_is_named_with_both_values(arguments, own):
    [line] = problems(lamina_config=own, **arguments)
    [(key, value)] = own.items()
    assert line.startswith(f"lamina_config[{key!r}]: {value!r}, but ")
    changed = of(**arguments).keys[key]
    assert f"{changed!r}" in line


@pytest.mark.parametrize(
    "config, precision",
    [
        ({"fp16": {"enabled": True}}, "fp32"),
        ({"fp16": {"enabled": True}}, "amp_bf16"),
        ({"bf16": {"enabled": True}}, "amp_fp16"),
        ({"fp16": {"enabled": False}}, "amp_fp16"),
        ({"bf16": {}}, "amp_bf16"),
    ],
)
def test_a_precision_that_contradicts_deepspeed_is_named(config, precision):
    [line] = problems(deepspeed_config=config, precision=precision)
    assert line.startswith("deepspeed_config has ") and line.endswith(f"precision={precision!r}")


def test_half_of_two_kinds_is_a_contradiction():
    [line] = problems(deepspeed_config={"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert "fp16 and bf16" in line


def test_activations_on_the_host_are_checkpointed_ones():
    [line] = problems(fsdp_config={"activation_cpu_offload": True})
    assert "not there yet" in line


@pytest.mark.parametrize("name", [None, "fp32", "fp16", "bf16"])
def test_gradients_of_deepspeed_travel_in_the_dtype_of_parameters_or_another(name):
    given = {} if name is None else {"communication_data_type": name}
    keys = of(deepspeed_config={"fp16": {"enabled": True}} | given).keys
    assert (keys["reduce_dtype"], keys["buffer_dtype"]) == (name or "fp16", None)


def test_what_is_given_is_left_as_it_is():
    fsdp, own = {"mixed_precision": {"param_dtype": "fp32"}}, {"timeout_s": 9.0}
    found = of(fsdp_config=fsdp, lamina_config=own)
    assert fsdp == {"mixed_precision": {"param_dtype": "fp32"}} and own == {"timeout_s": 9.0}
    assert found.keys["timeout_s"] == 9.0


def test_composer_offers_the_same_precision():
    assert composer.core.Precision is Precision
    assert composer.core.get_precision_context is get_precision_context


WITHOUT_EFFECT = {
    "fsdp_config": {
        "limit_all_gathers": True,
        "forward_prefetch": True,
        "use_orig_params": False,
        "state_dict_type": "sharded",
        "sync_module_states": False,  # all ranks get the values of rank 0
    },
    "deepspeed_config": {
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "tensorboard": {"enabled": True, "output_path": "logs"},
        "activation_checkpointing": {"partition_activations": True},
    },
    "deepspeed_config['zero_optimization']": {
        "overlap_comm": True,
        "stage3_max_reuse_distance": 1e9,
        "leaf_module": {},
    },
    "deepspeed_config['bf16']": {"check_grad_overflow": True},
}


@pytest.mark.parametrize("where, keys", WITHOUT_EFFECT.items(), ids=str)
def test_keys_that_change_no_result_are_taken_and_told(where, keys):
    plain = of(**nested(where, {}))
    found = of(**nested(where, keys))
    assert found.unheeded == [f"{where}[{key!r}]" for key in keys]
    assert found.keys == plain.keys and plain.unheeded == []
    assert of(fsdp_config={"sync_module_states": True}).unheeded == []


OTHER_NUMBERS = {
    "fsdp_config": {
        "keep_low_precision_grads": True,
        "process_group": "node",
        "load_planner": "a planner",
        "ignored_modules": "all",
    },
    "deepspeed_config": {
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
        "gradient_allreduce_op": "sum",
        "fp32_allreduce": True,
        "elasticity": {"enabled": True},
        "curriculum_learning": {"enabled": True},
        "sparse_attention": {"mode": "fixed"},
        "tensor_parallel": {"autotp_size": 2},
    },
    "deepspeed_config['zero_optimization']": {"zero_quantized_weights": True, "offload_param": {"device": "nvme"}},
    "deepspeed_config['data_types']": {"grad_accum_dtype": "bf16"},
    "deepspeed_config['fp16']": {"fp16_master_weights_and_grads": True},
}


@pytest.mark.parametrize("where, keys", OTHER_NUMBERS.items(), ids=str)
def test_keys_that_change_numbers_and_are_not_there_are_refused_by_name(where, keys):
    for line, (key, value) in zip(problems(**nested(where, keys)), keys.items(), strict=True):
        assert line.startswith(f"{where}[{key!r}]: {value!r}") and "no key is called so" not in line


def test_what_deepspeed_does_anyway_is_no_error():
    same = {"prescale_gradients": False, "gradient_predivide_factor": 1, "gradient_allreduce_op": "mean"}
    same |= {"data_types": {"grad_accum_dtype": "fp32"}, "elasticity": {"enabled": False}, "mp_size": 1}
    assert of(deepspeed_config=same).unheeded == []


def test_keys_have_their_other_names():
    by_name = {"zero_optimization": {"stage": 3, "max_live_parameters": 7, "param_persistence_threshold": 3}}
    assert of(deepspeed_config=by_name | {"bfloat16": {"enabled": True}}).keys["sdp_max_live_parameters"] == 7
    assert of(deepspeed_config={"bfloat16": {"enabled": True}}).precision is Precision.AMP_BF16


def test_a_key_that_is_like_none_is_told_with_all():
    [line] = problems(fsdp_config={"quite_another": 1})
    assert "no key is called so; there are sharding_strategy, min_params" in line
