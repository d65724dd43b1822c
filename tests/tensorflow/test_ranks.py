# SPDX-License-Identifier: Apache-2.0
"""Models of TensorFlow over ranks, which train as in one process."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lamina_operators") is None,
        reason="takes TensorFlow and lamina's operators for it: make test-tensorflow",
    ),
    pytest.mark.timeout(1300),
]
CASES = Path(__file__).with_name("cases.py")
BY_FIT = Path(__file__).with_name("cases_fit.py")
OF_COPIES = Path(__file__).with_name("cases_copies.py")
ON_TORCH = Path(__file__).with_name("cases_keras_torch.py")

# Each rank imports TensorFlow, traces and trains: a launch takes a minute of two cores, and more where others use them.
DEADLINE_S = 1200.0

# One thread between operations: nothing may wait in it.
ENVIRONMENT = {"LAMINA_PYTHON": sys.executable, "TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTEROP_THREADS": "1"}


def run(launcher, ranks, *arguments, program=CASES, **environment):
    env = ENVIRONMENT | environment
    ran = launcher.run("run", "-n", ranks, program, *arguments, env=env, deadline_s=DEADLINE_S)
    assert ran.returncode == 0, ran.stderr


# Model, schedule, gradients, microbatches, options; each list is one launch.
SUBJECTS = {
    1: [["convolutions:interleaved:tape:4", "transformer:simple:get_gradients:8:clip"]],
    2: [
        ["convolutions:simple:tape:4", "convolutions:interleaved:get_gradients:2:function"],
        ["transformer:interleaved:tape:4:clip", "transformer:simple:get_gradients:1:clip_keras"],
        ["heads:interleaved:tape:2:decay", "heads:simple:get_gradients:4:decay"],
        ["losses:interleaved:tape:2:clip", "losses:simple:get_gradients:2"],
        ["loops:interleaved:tape:2:clip_keras", "loops:simple:get_gradients:3"],
        ["recurrent:simple:tape:2", "recurrent:interleaved:get_gradients:4"],
        ["own_gradients:interleaved:tape:2:decay", "own_gradients:simple:get_gradients:3"],
    ],
    3: [
        ["transformer:interleaved:tape:5", "convolutions:simple:get_gradients:2:clip_keras"],
        ["own_gradients:interleaved:get_gradients:4", "recurrent:simple:tape:3:clip", "loops:interleaved:tape:2"],
    ],
    # Gradients of a shift before a normalization are rounding alone, of which Adam would make steps.
    4: [["mobilenet:interleaved:tape:3:sgd", "heads:interleaved:tape:8:decay"]],
}


# 1 partition of 2 copies, 2 of 2, and 1 of 4.
COPIES = {
    2: [["convolutions:interleaved:tape:2:copies2:clip_keras", "heads:simple:get_gradients:2:copies2:decay"]],
    4: [
        ["convolutions:interleaved:get_gradients:2:copies2", "transformer:simple:tape:2:copies2:clip:function"],
        ["transformer:interleaved:get_gradients:2:copies4:clip", "own_gradients:simple:tape:1:copies4"],
    ],
}


@pytest.mark.parametrize(("ranks", "subjects"), [(ranks, each) for ranks in SUBJECTS for each in SUBJECTS[ranks]])
def test_ranks_train_as_one_process_does(launcher, ranks, subjects):
    run(launcher, ranks, "compare", *subjects)


@pytest.mark.parametrize(("ranks", "subjects"), [(ranks, each) for ranks in COPIES for each in COPIES[ranks]])
def test_copies_train_as_one_process_with_all_batches(launcher, ranks, subjects):
    run(launcher, ranks, "compare", *subjects)


@pytest.mark.parametrize("case", ["interface", "within", "scales", "small", "told", "interrupted"])
def test_copies_give_each_other_values_and_errors(launcher, tmp_path, case):
    run(launcher, 4, case, tmp_path, program=OF_COPIES)


def test_a_lost_rank_of_a_copy_ends_the_steps_of_all(launcher):
    ranks = launcher.start_ranks(4, OF_COPIES, "lost", env=ENVIRONMENT)
    outputs = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    assert ranks[3].returncode == -9, outputs[3]
    for output in outputs[:3]:
        assert "it was told" in output[0], output


def test_by_hand_layers_are_where_the_script_places_them(launcher):
    run(launcher, 2, "by_hand")


@pytest.mark.parametrize(
    ("ranks", "subjects"),
    [
        (2, ["d0.d1.d0:tape", "s0.d1:tape", "d0.s1.d0:get_gradients", "d1.d1:tape", "d0.d0:get_gradients"]),
        (3, ["d2.s0.d1.d0.d2:tape", "d1.s2:get_gradients", "d0.d1:tape"]),
    ],
)
def test_ranks_may_have_nothing_or_be_come_back_to(launcher, ranks, subjects):
    run(launcher, ranks, "placed", *subjects)


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_an_operation_that_fails_ends_the_step_on_both(launcher, where):
    run(launcher, 2, "failing", where)


def test_a_lost_rank_ends_the_step(launcher):
    ranks = launcher.start_ranks(2, CASES, "lost", env=ENVIRONMENT)
    outputs = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    assert ranks[1].returncode == -9, outputs[1]
    assert "rank 0 was told" in outputs[0][0], outputs[0]


@pytest.mark.parametrize("case", ["refused", "foreign_variables", "different", "interrupted"])
def test_errors_are_told_on_both_ranks(launcher, case):
    run(launcher, 2, case)


@pytest.mark.parametrize(
    ("ranks", "subjects"),
    [
        (2, ["plain:4:weights:tiny:steps2", "transformer:4:global", "several:2:dataset", "masked_twice:3:tiny"]),
        (
            2,
            ["masked:4:weights:tiny", "plain:2:copies2:weights:ema", "plain:2:classes:stop", "plain:3:sum:ignore:clip"],
        ),
        (4, ["masked:2:copies2:tiny:weights", "transformer:2:copies2:dataset"]),
    ],
)
def test_fit_trains_as_in_one_process(launcher, ranks, subjects):
    run(launcher, ranks, "compare", *subjects, program=BY_FIT)


def test_fit_takes_what_scripts_give_it(launcher):
    run(launcher, 2, "others", program=BY_FIT)


@pytest.mark.parametrize(("ranks", "case"), [(2, "told"), (4, "copies_told")])
def test_fit_tells_errors_on_all_ranks(launcher, ranks, case):
    run(launcher, ranks, case, program=BY_FIT)


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (2, ["compare", "masked_twice:3:tiny", "several:4:dataset:tiny", "plain:3:sum:ignore:clip:steps2"]),
        (4, ["compare", "transformer:2:copies2:global:legacy", "plain:2:copies2:classes:ema:stop"]),
        (2, ["others"]),
        (2, ["told"]),
    ],
)
def test_fit_of_keras_2_does_as_well(launcher, ranks, case):
    run(launcher, ranks, *case, program=BY_FIT, TF_USE_LEGACY_KERAS="1")


@pytest.mark.parametrize("keys", [["partitions=2", "microbatches=4"], ["microbatches=2"]])
def test_models_of_keras_on_torch_train_over_partitions_and_copies(keys, launcher):
    run(launcher, 2, *keys, program=ON_TORCH)
