# SPDX-License-Identifier: Apache-2.0
"""Contexts that scripts write around the creation of a model."""

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
def test_a_model_is_created_in_a_dtype(dtype):
    with smp.model_creation(tensor_parallelism=True, dtype=dtype, distribute_embedding=True, zero_init=False):
        model = nn.Linear(2, 2)
    assert model.weight.dtype == (dtype or torch.float32) and torch.get_default_dtype() == torch.float32


def test_an_error_inside_leaves_the_default_dtype():
    with pytest.raises(KeyError), smp.model_creation(dtype=torch.float64):
        raise KeyError
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("dtype", ["float16", torch.int64])
def test_what_is_no_floating_point_type(dtype):
    with pytest.raises(smp.UsageError, match="floating-point"), smp.model_creation(dtype=dtype):
        pass


def test_modules_marked_to_be_sliced_are_what_they_were(start):
    with smp.tensor_parallelism(), smp.tensor_parallelism(enabled=False, fused_softmax=True):
        model = nn.Linear(2, 2)
    smp.set_tensor_parallelism(model, True, fused_bias_gelu=True)
    assert type(model) is nn.Linear
    with pytest.raises(smp.UsageError, match="not str"):
        smp.set_tensor_parallelism("model")
