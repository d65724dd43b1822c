# SPDX-License-Identifier: Apache-2.0
"""Transformers whose layers are cut over the ranks of a TP_GROUP.

Shapes: N samples, S positions, H features, V words. All sizes are those of the whole.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import refusal
from lamina.layers.attention import DistributedAttentionLayer
from lamina.layers.basic import DistributedLayerNorm, input_of, make_around, norms_in_parts, result_of
from lamina.layers.options import arguments, options_of, takes_options
from lamina.tensor_parallel import layers
from lamina.tensor_parallel.registry import DistributedModule

_SCORES_DIMENSIONS = 3


@takes_options
class DistributedTransformerOutputLayer(DistributedModule):
    """Two Linears with a function between them, and what is around them: norms, dropout, and the sum with the input.

    Args:
        hidden_size, intermediate_size: the features of the states, and between the Linears.
        hidden_dropout_prob: of dropout of the result, before it is added.
        activation: the function: "gelu", "gelu_new" or "relu".
        add_input: whether the input is added to the result; this and all others: see DistributedAttentionLayer.
    """

    slicing_plan: ClassVar[Mapping[str, str]] = {"dense1": "colwise_of_ready", "dense2": "rowwise"}

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
        options = options_of(DistributedTransformerOutputLayer, args, kwargs)
        hidden, inside = options["hidden_size"], options["intermediate_size"]
        self.activation = options["activation"]
        self.dense1, self.dense2 = nn.Linear(hidden, inside), nn.Linear(inside, hidden)
        make_around(self, options)

    @property
    def positions_plan(self) -> Mapping[str, str]:
        return {**self.slicing_plan, "dense2": "rowwise_to_positions"} | norms_in_parts(self)

    def forward(self, states: torch.Tensor, positions: int | None = None) -> torch.Tensor:
        """Takes and gives states [N, S, H].

        Args:
            positions: how many there are, where the states here are those of a part of them.
        """
        inside = torch.ops.lamina.activation(self.dense1(input_of(self, states, positions)), self.activation)
        return result_of(self, states, self.dense2(inside))


@takes_options
class DistributedTransformerLayer(DistributedModule):
    """Attention, with add_cross_attention that to other states, and an output layer.

    Args:
        intermediate_size, activation: see DistributedTransformerOutputLayer.
        add_cross_attention: whether there is attention to other states.
        pre_layernorm, post_layernorm: whether each part has a norm of its input, and one of its result; one at least.
        parallel_attn_output: whether both parts take the same, behind one norm, and the three are added, as in GPT-J.
        kwargs: these and all others: see DistributedAttentionLayer.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
        options = options_of(DistributedTransformerLayer, args, kwargs)
        part = _lamina.options_of_part(options)
        attention = arguments(DistributedAttentionLayer, part)
        self.attention = DistributedAttentionLayer(**attention)
        has_others, is_parallel = options["add_cross_attention"], options["parallel_attn_output"]
        attention["cross_attention"] = True
        self.cross_attention = DistributedAttentionLayer(**attention) if has_others else None
        self.output = DistributedTransformerOutputLayer(**arguments(DistributedTransformerOutputLayer, part))
        norm = DistributedLayerNorm(options["hidden_size"], options["layernorm_epsilon"]) if is_parallel else None
        self.layernorm = norm

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """
        Args:
            inputs: states [N, S, H] and a mask that is added to scores, [N, 1, 1, S] or None. With add_cross_attention
                states, other states, a mask, and a mask of the other states; without other states there is no attention
                to them.

        Returns:
            The same, with other states [N, S, H] in the first place.

        Errors:
            UsageError: other states without add_cross_attention.
        """
        states, *rest = inputs
        others, mask, mask_of_others = (None, *rest, None) if len(rest) == 1 else rest
        if others is not None and self.cross_attention is None:
            raise refusal("unused-states")
        in_parts: dict[str, int] = {}
        if layers.place_of(self) is not None:
            in_parts = {"positions": mask.shape[-1]}
            mask = None if mask.numel() == 0 else mask
        if self.layernorm is not None:
            normed = self.layernorm(states)
            return self.attention((normed, mask), **in_parts) + self.output(normed, **in_parts) + states, *rest
        states = self.attention((states, mask), **in_parts)
        if others is not None:
            states = self.cross_attention((states, others, mask_of_others), **in_parts)
        return self.output(states, **in_parts), *rest

    @property
    def positions_plan(self) -> Mapping[str, str]:
        return norms_in_parts(self)


@takes_options
class DistributedTransformer(DistributedModule):
    """Layers of a transformer, one after the other.

    Args:
        num_layers: how many.
        args, kwargs: these and all others: see DistributedTransformerLayer. window_size may be a list, with one for
            each layer.
    """

    is_stack = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
        options = _options_of_stack(DistributedTransformer, args, kwargs)
        count, window = options["num_layers"], options["window_size"]
        windows = window if isinstance(window, list) else [window] * count
        every = (arguments(DistributedTransformerLayer, options | {"window_size": each}) for each in windows[:count])
        self.seq_layers = nn.Sequential(*(DistributedTransformerLayer(**each) for each in every))

    def forward(self, inputs: Any) -> Any:
        """Takes what a layer takes, and returns what the last one does. Of states alone it returns states."""
        if isinstance(inputs, torch.Tensor):
            return self.forward((inputs, None))[0]
        if (place := layers.place_of(self)) is None:
            return self.seq_layers(inputs)
        states, *rest = inputs
        cut = place.cut(states.shape[1])
        mask = rest[-1 if len(rest) == 1 else -2]
        rest[-1 if len(rest) == 1 else -2] = _sized(mask, states)
        states = self.seq_layers((torch.ops.lamina.tp_scatter(states, *cut), *rest))[0]
        return torch.ops.lamina.tp_gather(states, *cut), *inputs[1:]


@takes_options
class DistributedTransformerLMHead(DistributedModule):
    """Embeddings of words and positions, a transformer, and with add_lm_head scores of words, by a Linear that has the
    embedding's weight. Both are cut over the words.

    Args:
        num_layers: of the transformer.
        vocab_size, num_positions: of the embeddings; 0 positions for none.
        num_token_types: of an embedding of types of tokens; 0 for none.
        add_lm_head: whether the model gives scores of words; else it gives states.
        embedding_dropout_prob: of dropout of the embeddings; None for hidden_dropout_prob.
        tie_lm_head, lm_head_bias: whether the head has the embedding's weight, and whether it has a bias.
        post_layernorm: whether each part of a layer has a norm of its result; without, the last layer alone has one.
        loss_in_fp32: whether the loss of wider scores is computed in float32, too, as transformers' models do.
        use_normal_initialization: of the layers; embeddings begin with normal values in any case.
        kwargs: these and all others: see DistributedTransformerLayer.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
        options = _options_of_stack(DistributedTransformerLMHead, args, kwargs)
        hidden, words = options["hidden_size"], options["vocab_size"]
        places, types = options["num_positions"], options["num_token_types"]
        self.slicing_plan = {"word_embedding": "embedding_rowwise"}
        self.is_causal, self.loss_in_fp32 = options["causal_mask_size"] is not None, options["loss_in_fp32"]
        self.word_embedding = nn.Embedding(words, hidden)
        self.position_embedding = nn.Embedding(places, hidden) if places > 0 else None
        self.token_type_embedding = nn.Embedding(types, hidden) if types > 0 else None
        for part in self.children():
            nn.init.normal_(part.weight, std=options["initializer_range"])
        dropout = options["embedding_dropout_prob"]
        self.dropout = nn.Dropout(options["hidden_dropout_prob"] if dropout is None else dropout)
        self.transformer = DistributedTransformer(**arguments(DistributedTransformer, options))
        has_norm = not options["post_layernorm"]
        self.layernorm = DistributedLayerNorm(hidden, options["layernorm_epsilon"]) if has_norm else None
        self.lm_head = nn.Linear(hidden, words, bias=options["lm_head_bias"]) if options["add_lm_head"] else None
        if self.lm_head is not None:
            if options["tie_lm_head"]:
                self.lm_head.weight = self.word_embedding.weight
            self.slicing_plan |= {"lm_head": "colwise_gather_output"}

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> Any:
        """
        Args:
            inputs: words [N, S]; their mask; types of tokens; positions [N, S]; with add_cross_attention other states
                and their mask, or neither; labels [N, S]. All but words may be None: positions are 0, 1, ...
                then. Masks [N, S] are 1 where a position is not seen. With causal_mask_size scores of a position are
                for the label of the next one. Labels of -100 do not count.

        Returns:
            The loss, where there are labels, and scores; else scores alone. These are [N, S, V], and [S, N, V] where
            they are cut over ranks. Without a head states [N, S, H].
        """
        words, mask, types, places, *others, labels = inputs
        states = self.word_embedding(words)
        if self.position_embedding is not None:
            places = torch.arange(words.shape[-1], device=words.device) if places is None else places
            states = states + self.position_embedding(places)
        if types is not None and self.token_type_embedding is not None:
            states = states + self.token_type_embedding(types)
        states = self.dropout(states)
        mask = _added_mask(mask, states)
        if others:
            states = self.transformer((states, others[0], mask, _added_mask(others[1], states)))[0]
        else:
            states = self.transformer((states, mask))[0]
        states = states if self.layernorm is None else self.layernorm(states)
        if self.lm_head is None:
            return states
        scores = self.lm_head(states)
        given = self._ordered(scores)
        if labels is None:
            return given
        return torch.ops.lamina.token_loss(scores, labels, self.is_causal, self.loss_in_fp32), given

    def as_plain(self, output: torch.Tensor) -> torch.Tensor:
        return self._ordered(output) if output.dim() == _SCORES_DIMENSIONS else output

    def _ordered(self, scores: torch.Tensor) -> torch.Tensor:
        is_sliced = self.lm_head is not None and layers.is_sliced(self.lm_head)
        return scores.transpose(0, 1) if is_sliced else scores.view_as(scores)  # no gradient of the loss in either


def _options_of_stack(kind: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All options of a transformer, of which window_size may be a list."""
    window = kwargs.get("window_size")
    if not isinstance(window, list):
        return options_of(kind, args, kwargs)
    return options_of(kind, args, kwargs | {"window_size": None}) | {"window_size": window}


def _added_mask(mask: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor | None:
    """A mask [N, S], 1 where a position is not seen, as what is added to scores: [N, 1, 1, S]."""
    return None if mask is None else torch.ops.lamina.padding_bias(mask, states.dtype)


def _sized(mask: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
    """A mask that says how many positions there are, where layers are given a part of them. In the place of None it is
    one without numbers."""
    positions = states.shape[1]
    if mask is None:
        return torch.empty(1, 1, 0, positions, dtype=torch.bool, device=states.device)
    return mask.expand(*mask.shape[:-1], positions)
