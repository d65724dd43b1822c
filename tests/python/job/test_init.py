# SPDX-License-Identifier: Apache-2.0
"""init and shutdown, in a process that no launcher started."""

import concurrent.futures
import json
import warnings

import pytest
import torch

import lamina


def test_all_degrees_and_microbatches_may_be_absent():
    lamina.init()
    assert (lamina.size(), lamina.pp_size(), lamina.num_microbatches()) == (1, 1, 1)


def test_a_second_init_without_or_with_the_same_configuration_does_nothing():
    lamina.init({"microbatches": 3})
    lamina.init()
    lamina.init({})
    lamina.init(microbatches=3)
    lamina.init({"enabled": True, "parameters": {"microbatches": 3}})
    assert lamina.num_microbatches() == 3


def test_a_second_init_with_another_configuration_names_the_difference():
    lamina.init(microbatches=3)
    with pytest.raises(lamina.ConfigError, match=r"microbatches: 3 and 4"):
        lamina.init(microbatches=4)
    assert lamina.num_microbatches() == 3


def test_after_shutdown_another_configuration_may_begin():
    lamina.init(microbatches=3)
    lamina.shutdown()
    assert not lamina.is_initialized()
    lamina.init(microbatches=4)
    assert lamina.num_microbatches() == 4


def test_threads_that_shut_down_at_the_same_moment_do_it_once():
    for _ in range(10):
        lamina.init()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for call in [pool.submit(lamina.shutdown) for _ in range(4)]:
                call.result()
        assert not lamina.is_initialized()


def test_shutdown_without_init_does_nothing():
    lamina.shutdown()
    assert not lamina.is_initialized()


def test_a_dictionary_and_keywords_at_once_are_an_error():
    with pytest.raises(lamina.ConfigError, match="not both; keywords: schedule"):
        lamina.init({"microbatches": 2}, schedule="simple")


@pytest.mark.parametrize("config", [[], "partitions", 3])
def test_a_configuration_that_is_no_dictionary_is_an_error(config):
    with pytest.raises(lamina.ConfigError, match="takes a dictionary"):
        lamina.init(config)


def test_a_value_that_json_cannot_hold_is_an_error():
    with pytest.raises(lamina.ConfigError, match="JSON"):
        lamina.init(microbatches={1, 2})


def test_wrong_keys_are_an_error_that_is_also_a_value_error():
    with pytest.raises(ValueError, match="microbatches") as caught:
        lamina.init(microbatches=0, partitons=2)
    assert isinstance(caught.value, lamina.ConfigError)
    assert "partitions" in str(caught.value)
    assert not lamina.is_initialized()


def test_the_environment_counts_instead_of_the_arguments(monkeypatch):
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps({"microbatches": 5}))
    with pytest.warns(UserWarning, match=r"SM_HP_MP_PARAMETERS .*no effect: bf16: true, microbatches: 2;"):
        lamina.init({"microbatches": 2, "bf16": True})
    lamina.init()
    assert lamina.num_microbatches() == 5


def test_a_configuration_of_ours_counts_before_that_of_others(monkeypatch):
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps({"microbatches": 5}))
    monkeypatch.setenv("LAMINA_CONFIG", json.dumps({"microbatches": 6}))
    with pytest.warns(UserWarning, match=r"LAMINA_CONFIG .*of SM_HP_MP_PARAMETERS this has no effect: microbatches: 5"):
        lamina.init()
    assert lamina.num_microbatches() == 6


def test_without_a_job_ranks_are_what_the_launcher_says(monkeypatch):
    assert (lamina.rank(), lamina.size(), lamina.local_rank(), lamina.local_size()) == (0, 1, 0, 1)
    lamina.init()
    lamina.shutdown()
    assert (lamina.rank(), lamina.size()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (lamina.rank(), lamina.size()) == (3, 4)
    with pytest.raises(lamina.UsageError, match=r"call lamina.init\(\) first"):
        lamina.local_rank()


def test_without_a_launcher_degrees_become_one_with_one_warning():
    with pytest.warns(UserWarning, match="partitions") as caught:
        lamina.init(partitions=4, microbatches=2, default_partition=3)
    assert len(caught) == 1
    assert lamina.pp_size() == 1


def test_a_launcher_of_one_process_changes_nothing_of_that(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.warns(UserWarning, match=r"this job has one process, so partitions: 4 became 1; .*lamina run -n N"):
        lamina.init(partitions=4)
    assert lamina.pp_size() == 1
    lamina.set_partition(torch.nn.Linear(1, 1), 3)


def test_a_configuration_that_needs_no_change_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lamina.init(microbatches=2)


def test_the_old_names_of_keys_are_read():
    lamina.init(pipeline="simple", pipeline_parallel_degree=1)
    assert (lamina.state.cfg.schedule, lamina.state.cfg.pipeline) == ("simple", "simple")


def test_every_key_of_the_configuration_can_be_read():
    lamina.init(microbatches=2)
    cfg = lamina.state.cfg
    assert (cfg.fp16, cfg.prescaled_batch, cfg.shard_optimizer_state) == (False, False, False)
    assert (cfg.partitions, cfg.pipeline_parallel_degree, cfg.microbatches) == (1, 1, 2)
    assert cfg.sharded_data_parallel_degree == 1
    assert not hasattr(cfg, "no_such_key")


@pytest.mark.parametrize(
    "call",
    [
        lamina.pp_size,
        lamina.get_mp_group,
        lamina.num_microbatches,
        lamina.barrier,
        lambda: lamina.allgather(1, lamina.WORLD),
        lambda: lamina.step(lambda: None)(),
    ],
)
def test_before_init_the_error_says_to_call_it(call):
    with pytest.raises(lamina.UsageError, match=r"call lamina.init\(\) first"):
        call()
