# SPDX-License-Identifier: Apache-2.0
"""Single layers under the names of the original."""

import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import nn

from lamina.tensor_parallel.plans import STYLE_OF_ITSELF, WHOLE
from lamina.tensor_parallel.registry import DistributedModule

Kind = TypeVar("Kind", bound=type[nn.Module])


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
        weight, bias = self.weight, self.bias
        if weight is None or bias is None or weight.dtype == input.dtype or not input.is_floating_point():
            return nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        dtype = torch.promote_types(weight.dtype, input.dtype)
        out = nn.functional.layer_norm(
            input.to(dtype), self.normalized_shape, weight.to(dtype), bias.to(dtype), self.eps
        )
        return out.to(input.dtype)


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


def added(input: torch.Tensor, output: torch.Tensor, in_fp32: bool) -> torch.Tensor:
    """The sum of what a layer was given and what it has computed, in the type of these."""
    if not in_fp32 or input.dtype.itemsize >= torch.float32.itemsize:
        return input + output
    return (input.float() + output.float()).to(output.dtype)


def norms_in_parts(module: nn.Module) -> dict[str, str]:
    """The styles of a module's norms where these are given parts of positions."""
    names = ("pre_layernorm", "layernorm")
    return {name: "replicated_with_grad_allreduce" for name in names if module._modules.get(name) is not None}


def begin_normal(module: nn.Module, deviation: float) -> None:
    """Gives Linears normal values, and biases of zero."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=deviation)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def hands_on_to(other: type[nn.Module], but: Collection[str] = ()) -> Callable[[Kind], Kind]:
    """A decorator of a class that hands arguments on, which it does not name, to another one: its signature says
    them.

    Args:
        but: those that it gives itself.
    """

    def with_signature(kind: Kind) -> Kind:
        own = inspect.signature(kind.__init__)
        names = [each for each in own.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
        takes_positions = any(each.kind is each.VAR_POSITIONAL for each in own.parameters.values())
        named = {*own.parameters, *but}
        rest = [each for name, each in inspect.signature(other).parameters.items() if name not in named]
        if not takes_positions:
            rest = [each.replace(kind=each.KEYWORD_ONLY) for each in rest]
        kind.__init__.__signature__ = own.replace(parameters=[*names, *rest])
        return kind

    return with_signature
