# SPDX-License-Identifier: Apache-2.0
"""Layers under the names of the original, on one rank: compared with torch's own."""

import math

import pytest
import torch
from torch import nn

import lamina
from lamina.errors import UsageError
from lamina.tensor_parallel import correspondence

TORCHS = (
    lamina.nn.Row(
        "self_attn.in_proj_weight", ("attention.query.weight", "attention.key.weight", "attention.value.weight")
    ),
    lamina.nn.Row("self_attn.in_proj_bias", ("attention.query.bias", "attention.key.bias", "attention.value.bias")),
    *(
        lamina.nn.Row(f"{theirs}.{kind}", f"{ours}.{kind}")
        for kind in ("weight", "bias")
        for theirs, ours in [
            ("self_attn.out_proj", "attention.dense"),
            ("linear1", "output.dense1"),
            ("linear2", "output.dense2"),
        ]
    ),
)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_layer_is_torchs(is_first, activation):
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        12, 3, 20, 0.0, activation, batch_first=True, norm_first=is_first, layer_norm_eps=1e-3, dtype=torch.double
    )
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    norm = "pre_layernorm" if is_first else "layernorm"
    norms = tuple(
        lamina.nn.Row(f"norm{place}.{kind}", f"{part}.{norm}.{kind}")
        for place, part in ((1, "attention"), (2, "output"))
        for kind in ("weight", "bias")
    )
    ours = lamina.nn.DistributedTransformerLayer(
        3,
        4,
        12,
        20,
        0.0,
        0.0,
        activation,
        1e-3,
        pre_layernorm=is_first,
        post_layernorm=not is_first,
        causal_mask_size=9,
    )
    ours.double().load_state_dict(correspondence.from_original(TORCHS + norms, theirs.state_dict()))
    states = torch.randn(2, 5, 12, dtype=torch.double)
    hidden = torch.zeros(2, 1, 1, 5, dtype=torch.double)
    hidden[1, :, :, 3:] = -math.inf
    found, mask = ours((states, hidden))
    unseen = torch.ones(5, 5).triu(1).bool()
    expected = theirs(states, src_mask=unseen, src_key_padding_mask=hidden[:, 0, 0] < 0)
    torch.testing.assert_close(found, expected)
    assert mask is hidden
    torch.testing.assert_close(lamina.nn.DistributedTransformer(0)(states), states)


def test_wrong_arguments_and_masks_are_refused():
    for wrong in (dict(post_layernorm=False), dict(activation="swish")):
        with pytest.raises(UsageError):
            lamina.nn.DistributedTransformerLayer(**wrong)
    layer = lamina.nn.DistributedAttentionLayer(2, 2, 4, causal_mask_size=3)
    with pytest.raises(UsageError, match="no booleans"):
        layer((torch.zeros(1, 3, 4), torch.zeros(1, 1, 1, 3).bool()))
    with pytest.raises(UsageError, match="4 positions, and causal_mask_size is 3"):
        layer((torch.zeros(1, 4, 4), None))


def test_half_states_with_scores_and_sums_of_floats():
    layer = lamina.nn.DistributedTransformerLayer(2, 2, 4, 6, attention_in_fp32=True, fp32_residual_addition=True)
    states = torch.randn(1, 3, 4)
    layer.eval()
    found = layer.bfloat16()((states.bfloat16(), None))[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), layer.float()((states, None))[0], rtol=0.05, atol=0.05)


def test_weights_begin_as_they_are_asked_to():
    torch.manual_seed(0)
    layer = lamina.nn.DistributedTransformerOutputLayer(64, 256, initializer_range=0.5, use_normal_initialization=True)
    assert layer.dense1.weight.std().item() == pytest.approx(0.5, rel=0.05) and not layer.dense1.bias.any()


@pytest.mark.parametrize("heads, steepest", [(4, 0.25), (8, 0.5), (6, 2**-2)])
def test_scores_fall_with_the_distance(heads, steepest):
    layer = lamina.nn.FlashAttentionLayer(0.0, use_alibi=True)
    query = torch.zeros(1, 3, 3, heads, 2, dtype=torch.double)
    query[:, :, 2, :, 0] = torch.tensor([0.0, 1.0, 0.0])[:, None]
    found = layer(query, causal=True)
    assert found.shape == (1, heads, 3, 2)
    # The last position sees two before it, one and two places away.
    weights = torch.tensor([-2.0, -1.0, 0.0]) * steepest
    assert found[0, 0, 2, 0].item() == pytest.approx(weights.softmax(0)[1].item(), rel=1e-6)


def test_attention_alone_is_torchs():
    torch.manual_seed(0)
    qkv = torch.randn(2, 5, 3, 4, 8)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    mask = torch.randn(2, 1, 5, 5)
    layer = lamina.nn.FlashAttentionLayer(scale_attn_by_layer_idx=True, layer_idx=1).eval()
    attend = nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(layer(qkv), attend(query, key, value, scale=8**-0.5 / 2))
    causal = mask.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    found = lamina.nn.FlashAttentionLayer(scale=2.0).eval()(qkv, mask, causal=True)
    torch.testing.assert_close(found, attend(query, key, value, causal, scale=2.0))
    with pytest.raises(UsageError, match="needs layer_idx"):
        lamina.nn.FlashAttentionLayer(scale_attn_by_layer_idx=True)
