# SPDX-License-Identifier: Apache-2.0
"""The faults that faulty.py can have: in which layout each is planted, and what the first difference is then."""

from dataclasses import dataclass

AT = 2  # the layer that is spoiled
WEIGHT = f"layers.{AT}.linear.weight"
MEAN = f"layers.{AT}.norm.running_mean"
LAYOUTS = {
    "pipeline": {"partitions": 2, "microbatches": 2, "ddp": True, "auto_partition": False, "default_partition": 0},
    "copies": {"ddp": True},
    "sharded": {
        "ddp": True,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 0,
        "sdp_gradient_clipping": 1e9,
    },
    "divided": {"ddp": True, "shard_optimizer_state": True},
}
# Where a fault is first seen: of a tensor of this kind, of this module or parameter.
LAYER, LINEAR, NORM, DROPOUT = (f"layers.{AT}{child}" for child in ("", ".linear", ".norm", ".dropout"))


@dataclass(frozen=True)
class Fault:
    shown: str  # in the first line
    layout: str = "pipeline"
    of_itself: bool = False  # both runs do the same, and the layout makes something else of it
    in_job: str = ""  # what `verify_steps` says, where that is not the same


OUTPUT = Fault(f"output of {LAYER} ")
SHARED = Fault(f"output of {LAYER} ", of_itself=True)
FAULTS = {
    # A module computes something else.
    "output": OUTPUT,
    "sign": OUTPUT,
    "noise": OUTPUT,
    "shuffled": OUTPUT,
    "not_finite": OUTPUT,
    "not_a_number": OUTPUT,
    "half": OUTPUT,
    "dtype": Fault("output of the model on rank 0 is float64 instead of float32"),
    "averaged": OUTPUT,
    "one_element": OUTPUT,
    "offset": OUTPUT,
    "skipped_module": OUTPUT,
    "second_microbatch": Fault(f"microbatch 1: output of {LAYER} "),
    "second_step": Fault(f"step 1, microbatch 0: output of {LAYER} "),
    "other_microbatch": Fault(f"microbatch 1: output of {LAYER} ", in_job=f"step 1, microbatch 0: output of {LAYER} "),
    "rows_mixed": Fault(f"input of {LINEAR} "),
    "old_weight": Fault(f"step 1, microbatch 0: output of {LINEAR} "),
    "autocast": Fault(f"output of {LINEAR} "),
    "evaluation": Fault(f"output of {DROPOUT} "),
    "other_stream": Fault(f"output of {DROPOUT} "),
    "one_more_draw": Fault(f"output of {DROPOUT} "),
    "other_rate_of_dropout": Fault(f"output of {DROPOUT} "),
    "running_statistics": Fault(f"output of {NORM} "),
    "momentum_of_norm": Fault(f"buffer layers.{AT}.norm.running_"),
    "norm_twice": Fault(f"buffer layers.{AT}.norm."),
    "order_of_norm": Fault(f"buffer layers.{AT}.norm.running_"),
    # It reads what another one writes, in places that nobody watches.
    "array": SHARED,
    "cached_function": SHARED,
    "environment": SHARED,
    "umask": SHARED,
    "denormal_numbers": SHARED,
    "class_attribute": SHARED,
    # The backward goes another way.
    "doubled_gradient": Fault(f"gradient of the output of {DROPOUT} "),
    "dropped_gradient": Fault(f"gradient of the output of {DROPOUT} is missing"),
    "dropped_part": Fault(f"gradient of the output of {DROPOUT} "),
    "doubled_gradient_of_weight": Fault(f"gradient of {WEIGHT} "),
    "hook_on_weight": Fault(f"gradient of {WEIGHT} "),
    "kept_gradient": Fault(f"step 1: gradient of {WEIGHT} "),
    "exchanged_gradients": Fault(f"gradient of {WEIGHT} "),
    "skipped_parameter": Fault(f"gradient of {WEIGHT} is missing"),
    "wrong_clip": Fault("gradient of layers."),
    # The update, and what comes between two.
    "rate": Fault("parameter layers."),
    "weight_decay": Fault(f"parameter layers.{AT}.norm.weight "),
    "momentum_reset": Fault(f"optimizer's state of {WEIGHT} momentum_buffer "),
    "written_parameter": Fault(f"parameter {WEIGHT} "),
    "written_norm": Fault(f"parameter layers.{AT}.norm.weight "),
    "stale_buffer": Fault(f"buffer {MEAN} "),
    # Copies of the model.
    "missed_reduction": Fault(f"gradient of {WEIGHT} ", "copies"),
    "sum_for_mean": Fault("gradient of ", "copies"),
    "same_rows": Fault("the runs read different data: input of the model on rank 1 ", "copies"),
    "parted_copy": Fault(f"parameter {WEIGHT} ", "copies"),
    "output_of_a_copy": Fault(f"copy 1, microbatch 0: output of {LAYER} ", "copies"),
    "wrong_shard": Fault(f"parameter {WEIGHT} ", "sharded"),
    "shard_without_gradient": Fault(f"gradient of {WEIGHT} ", "sharded"),
    "sharded_output": Fault(f"output of {LAYER} ", "sharded"),
    "state_of_a_copy": Fault(f"optimizer's state of {WEIGHT} momentum_buffer ", "divided"),
}
# Names of faults of which `verify_steps` says nothing, by their nature.
UNSEEN_IN_JOBS = {
    # It compares the first microbatch.
    *("second_microbatch",),
    # It compares no buffers, which have no bearing on what is computed in training.
    *("momentum_of_norm", "norm_twice", "order_of_norm", "stale_buffer"),
    # They come after the backward.
    *("doubled_gradient_of_weight", "kept_gradient", "exchanged_gradients", "skipped_parameter", "wrong_clip"),
    *("missed_reduction", "sum_for_mean", "shard_without_gradient"),
    *("rate", "weight_decay", "momentum_reset", "written_parameter", "written_norm"),
    *("parted_copy", "wrong_shard", "state_of_a_copy"),
    # The layout takes nothing apart.
    *("same_rows", "output_of_a_copy"),
}
