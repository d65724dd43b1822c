# SPDX-License-Identifier: Apache-2.0
import random

import numpy
import pytest
import torch

import composer.utils
from lamina.errors import ConfigError
from lamina.trainer import reproducibility


@pytest.fixture(autouse=True)
def as_before():
    states = reproducibility.get_rng_state()
    yield
    reproducibility.load_rng_state(states)


def drawn():
    return random.random(), numpy.random.rand(), torch.rand(()).item()


def test_a_seed_is_that_of_all_generators():
    reproducibility.seed_all(7)
    first = drawn()
    reproducibility.seed_all(7)
    assert drawn() == first != drawn()


def test_states_that_are_loaded_go_on():
    (state,) = states = reproducibility.get_rng_state()
    first = drawn()
    reproducibility.load_rng_state(states)
    assert drawn() == first
    with pytest.warns(UserWarning, match="of 2 ranks are given to 1"):
        reproducibility.load_rng_state([state, state])
    assert drawn() == first
    with pytest.warns(UserWarning, match="of 0 ranks are given to 1"):
        reproducibility.load_rng_state([])


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "1", None, True])
def test_a_seed_has_a_range(seed):
    with pytest.raises(ConfigError, match=r"it is a whole number, 0 to 2\^32 - 1"):
        reproducibility.seed_all(seed)


def test_a_random_seed_draws_nothing():
    (before,) = reproducibility.get_rng_state()
    assert 0 <= reproducibility.get_random_seed() <= reproducibility.MAX_SEED
    reproducibility.seed_all(reproducibility.MAX_SEED)
    reproducibility.load_rng_state([before])
    (after,) = reproducibility.get_rng_state()
    assert after["python"] == before["python"] and torch.equal(after["torch"], before["torch"])


def test_deterministic_algorithms_are_taken(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", True)
    monkeypatch.setattr(cudnn, "deterministic", False)
    try:
        reproducibility.configure_deterministic_mode()
        assert torch.are_deterministic_algorithms_enabled() and cudnn.deterministic and not cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)


def test_composer_offers_the_same_objects():
    names = composer.utils.reproducibility.__all__
    assert all(getattr(composer.utils.reproducibility, name) is getattr(reproducibility, name) for name in names)
