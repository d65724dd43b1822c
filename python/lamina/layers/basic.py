# SPDX-License-Identifier: Apache-2.0
"""Single layers under the names of the original."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lamina.tensor_parallel import layers
from lamina.tensor_parallel.plans import STYLE_OF_ITSELF, WHOLE
from lamina.tensor_parallel.registry import DistributedModule


class FusedLayerNorm(nn.LayerNorm):
    """torch's LayerNorm, whose parameters may be of another floating-point type than its input, as float32 for half
    inputs. It computes in the type that both fit into; the result has the input's.

    Args:
        normalized_shape, eps, elementwise_affine: torch's.
    """

    def __init__(
        self, normalized_shape: int | list[int] | torch.Size, eps: float = 1e-5, elementwise_affine: bool = True
    ):
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.ops.lamina.mixed_layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class DistributedLinear(DistributedModule, nn.Linear):
    """torch's Linear, whose inputs are cut over the ranks of TP_GROUP when its model is wrapped, marked or not: each
    rank has some columns of the weight. It takes and gives whole tensors.

    Args:
        in_features, out_features, bias: torch's, of the whole.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__(in_features, out_features, bias)
        setattr(self, STYLE_OF_ITSELF, "rowwise_split_input")


class DistributedEmbedding(DistributedModule, nn.Embedding):
    """torch's Embedding, whose features are cut over the ranks of TP_GROUP when its model is wrapped, marked or not.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight: torch's,
            of the whole.
        initializer_range: the standard deviation of the values that it begins with.
        _skip_allgather: whether each rank gives its own features alone, not all.
        _skip_scatter_and_merge: no effect: all ranks of a TP_GROUP have the same batch.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
    ):
        self._initializer_range = initializer_range
        options: dict[str, Any] = {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse, "_weight": _weight}
        super().__init__(num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, **options)
        setattr(self, STYLE_OF_ITSELF, "colwise" if _skip_allgather else "embedding_colwise")

    def reset_parameters(self) -> None:
        """Draws the values anew."""
        nn.init.normal_(self.weight, std=self._initializer_range)
        self._fill_padding_idx_with_zero()


class DistributedLayerNorm(DistributedModule, FusedLayerNorm):
    """FusedLayerNorm, which all ranks of a TP_GROUP have whole.

    Args:
        normalized_shape, eps, elementwise_affine: torch's.
    """

    def __init__(
        self, normalized_shape: int | list[int] | torch.Size, eps: float = 1e-5, elementwise_affine: bool = True
    ):
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
        setattr(self, STYLE_OF_ITSELF, WHOLE)


def make_around(part: nn.Module, options: Mapping[str, Any]) -> None:
    """Gives a part of a layer what is around its Linears: dropout of the result, norms, and the first values."""
    part.add_input, part.fp32_residual_addition = options["add_input"], options["fp32_residual_addition"]
    part.dropout = nn.Dropout(options["hidden_dropout_prob"])
    for name, option in (("pre_layernorm", "pre_layernorm"), ("layernorm", "post_layernorm")):
        norm = DistributedLayerNorm(options["hidden_size"], options["layernorm_epsilon"]) if options[option] else None
        setattr(part, name, norm)
    for layer in part.modules() if options["use_normal_initialization"] else ():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=options["initializer_range"])
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def input_of(part: nn.Module, states: torch.Tensor, positions: int | None) -> torch.Tensor:
    """The input of the first Linears in a part of a layer."""
    normed = states if part.pre_layernorm is None else part.pre_layernorm(states)
    return layers.ready(part, normed, positions)


def result_of(part: nn.Module, states: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    """The result of a part of a layer, of its input and what it has computed of that."""
    output = part.dropout(computed)
    if part.add_input:
        output = torch.ops.lamina.residual_sum(states, output, part.fp32_residual_addition)
    return output if part.layernorm is None else part.layernorm(output)


def norms_in_parts(module: nn.Module) -> dict[str, str]:
    """The styles of a module's norms where these are given parts of positions."""
    names = ("pre_layernorm", "layernorm")
    return {name: "replicated_with_grad_allreduce" for name in names if module._modules.get(name) is not None}
