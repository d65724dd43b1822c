# SPDX-License-Identifier: Apache-2.0
"""Layers under the names of the original, on one rank: compared with torch's own."""

import math
import re

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize(
    "argument, text",
    [
        (dict(hidden_size="12"), "hidden_size of a layer is an integer, not '12'"),
        (dict(causal_mask_size=2.5), "causal_mask_size of a layer is an integer or None, not 2.5"),
        (dict(hidden_dropout_prob=None), "hidden_dropout_prob of a layer is a number, not None"),
        (dict(num_attention_heads=0), "num_attention_heads of a layer is above 0, not 0"),
        (dict(attention_dropout_prob=1.5), "attention_dropout_prob of a layer is from 0 to 1, not 1.5"),
    ],
)
def test_a_value_that_an_argument_cannot_have_is_refused_by_name(argument, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        lamina.nn.DistributedTransformerLayer(**argument)


def test_an_argument_of_another_layer_is_refused_by_the_name_of_the_class():
    for argument in ("vocab_size", "cross_attention", "add_input", "num_layers"):
        with pytest.raises(TypeError, match=rf"DistributedTransformerLayer\(\): .*'{argument}'"):
            lamina.nn.DistributedTransformerLayer(**{argument: 1})
    with pytest.raises(TypeError, match="too many positional"):
        lamina.nn.DistributedTransformerLayer(*[1] * 19)


ODD = dict(use_alibi=True, causal_mask_size=16, window_size=3, rotary_dim=2, attention_in_fp32=True)


def layer_and_states(positions, **options):
    torch.manual_seed(0)
    layer = lamina.nn.DistributedTransformerLayer(3, 4, 12, 10, 0.0, 0.0, **options)
    return layer, torch.randn(2, positions, 12), torch.zeros(2, 1, 1, positions).index_fill(-1, torch.tensor([1]), -1e4)


def test_a_compiled_layer_has_no_break_and_takes_other_lengths():
    layer, _, _ = layer_and_states(5, **ODD)
    found = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for positions in (5, 7, 9):
        _, states, mask = layer_and_states(positions, **ODD)
        torch.testing.assert_close(found((states, mask))[0], layer((states, mask))[0])


def test_a_layer_gives_shapes_of_tensors_without_values():
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer, states, mask = layer_and_states(5, **ODD)
        assert layer((states, mask))[0].shape == (2, 5, 12)
    layer, states, mask = layer_and_states(5, **ODD)
    assert layer.to("meta")((states.to("meta"), mask.to("meta")))[0].shape == (2, 5, 12)


def test_a_checkpointed_layer_has_the_same_gradients_with_dropout():
    found = []
    for call in (lambda layer, given: layer(given), lambda *given: checkpoint(*given, use_reentrant=False)):
        layer, states, mask = layer_and_states(5, **ODD)
        layer.attention.attention_dropout_prob = 0.3
        torch.manual_seed(1)
        call(layer, (states, mask))[0].square().sum().backward()
        found.append([parameter.grad for parameter in layer.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


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
