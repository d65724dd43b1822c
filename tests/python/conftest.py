# SPDX-License-Identifier: Apache-2.0
import gc

import pytest
import torch._dynamo  # noqa: F401 -- optimizers would

import lamina

gc.freeze()  # a trace looks through all objects, most of which are of these modules


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Each test begins without a job, without a launcher and without a configuration from outside."""
    for name in ("RANK", "WORLD_SIZE", "SM_HP_MP_PARAMETERS", "LAMINA_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    yield
    lamina.shutdown()


@pytest.fixture
def start():
    """A job of one process with four microbatches."""
    lamina.init(microbatches=4)
