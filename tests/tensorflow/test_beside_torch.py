# SPDX-License-Identifier: Apache-2.0
"""TensorFlow in processes that train a model of torch: it exports functions by OpenSSL's names."""

import importlib.util

import pytest
from python.test_foreign_libraries import runs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lamina_operators") is None, reason="takes TensorFlow: make test-tensorflow"
)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_job_of_torch_trains_beside_tensorflow(when, launcher):
    runs(launcher, when, "__import__('tensorflow')")
