# SPDX-License-Identifier: Apache-2.0
"""The emulated accelerator does what accelerators do, each case in a process of its own."""

import os
import pathlib
import signal

import pytest
from launch.forked_ranks import ForkedRank

HERE = pathlib.Path(__file__).parent
LONGEST_S = 120.0  # only a hang reaches it

SLOW = {"EMULATED_DELAY_US": "2000"}
SMALL = {"EMULATED_MEMORY": str(64 << 20)}
CASES = [
    ("cases_training", "gpt_trains", {}),
    ("cases_training", "cnn_trains", {}),
    ("cases_training", "lstm_trains", {}),
    ("cases_training", "autocast_lowers_and_scales", {}),
    ("cases_training", "half_models_train", {}),
    ("cases_training", "seeds_reach_each_device", {}),
    ("cases_training", "checkpointing_draws_again", {}),
    ("cases_training", "odd_operations_are_right", {}),
    ("cases_training", "saves_and_loads", {}),
    ("cases_streams", "host_runs_ahead", {"EMULATED_DELAY_US": "10000"}),
    ("cases_streams", "streams_wait_for_events", SLOW),
    ("cases_streams", "streams_wait_for_events", SLOW | {"EMULATED_IGNORE": "waits"}),
    ("cases_streams", "memory_waits_for_other_streams", SLOW),
    ("cases_streams", "memory_waits_for_other_streams", SLOW | {"EMULATED_IGNORE": "record_stream"}),
    ("cases_streams", "events_are_timed", SLOW),
    ("cases_streams", "waits_are_counted", {}),
    ("cases_streams", "threads_have_their_own_devices", {}),
    ("cases_streams", "an_event_comes_from_another_thread", SLOW),
    ("cases_streams", "errors_come_later_and_stay", {}),
    ("cases_streams", "bad_arguments_are_told_at_once", {}),
    ("cases_streams", "an_operation_without_a_kernel_names_itself", {}),
    ("cases_streams", "a_fork_says_so", {}),
    ("cases_streams", "ends_while_kernels_run", {}),
    ("cases_streams", "nobody_reads_a_tensor", {}),
    ("cases_memory", "freed_memory_is_nan", {}),
    ("cases_memory", "memory_is_limited", SMALL),
    ("cases_memory", "memory_comes_back_from_other_streams", SMALL | SLOW),
    ("cases_memory", "bytes_are_counted", {}),
    ("cases_memory", "steps_leave_no_memory", {}),
    ("cases_memory", "pinned_copies_run_in_the_stream", SLOW),
    ("cases_memory", "unused_devices_stay_untouched", {"EMULATED_DEVICES": "2"}),
]
COLLECTIVES = [
    ("each_collective_is_right", {}),
    ("a_wait_orders_streams", SLOW),
    ("a_wait_orders_streams", SLOW | {"EMULATED_IGNORE": "waits"}),
    ("replicas_train", {}),
    ("an_absent_member_is_waited_for_until_an_abort", {}),
    ("a_lost_member_leaves_the_others_spinning", {}),
]


def start(folder, settings, *words, rank=0):
    environment = {name: text for name, text in os.environ.items() if not name.startswith("EMULATED_")}
    environment |= {"OMP_NUM_THREADS": "1"} | settings
    return ForkedRank([str(HERE / "run_case.py"), *words], environment, folder, rank)


def ends(process):
    """How the process ended, and what it said."""
    said = "\n".join(process.communicate(timeout=LONGEST_S))
    return process.returncode, said


def named(case):
    return "-".join([*case[:-1], *case[-1].values()])


@pytest.mark.parametrize("case", CASES, ids=named)
def test_case(case, tmp_path):
    file, function, settings = case
    arguments = [str(tmp_path / "file")] if function == "saves_and_loads" else []
    code, said = ends(start(tmp_path, settings, file, function, *arguments))
    assert code == 0, said


@pytest.mark.parametrize("case", COLLECTIVES, ids=named)
def test_collectives(case, tmp_path):
    function, settings = case
    words = [str(tmp_path / "store")]
    ranks = [start(tmp_path, settings, "cases_collectives", function, str(r), *words, rank=r) for r in range(2)]
    ended = [ends(rank) for rank in ranks]
    assert [code for code, _ in ended] == [0, 0], "\n".join(said for _, said in ended)


def test_the_host_cannot_read_a_tensor(tmp_path):
    code, said = ends(start(tmp_path, {}, "cases_streams", "host_reads_a_tensor"))
    assert code == -signal.SIGSEGV, said


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("EMULATED_DEVICES", "0", "a number of 1 to 16"),
        ("EMULATED_DELAY_US", "1ms", "a number of 0 to 10000000"),
        ("EMULATED_IGNORE", "wait", '"waits", "record_stream" or both'),
    ],
)
def test_a_bad_setting_is_told_by_the_import(name, value, wanted, tmp_path):
    code, said = ends(start(tmp_path, {name: value}, "cases_memory", "freed_memory_is_nan"))
    assert code == 1 and f"{name}={value}: {wanted}" in said, said
