# SPDX-License-Identifier: Apache-2.0
"""Transformers whose layers are cut over the ranks of a TP_GROUP.

Shapes: N samples, S positions, H features, V words. All sizes are those of the whole.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from lamina.errors import refusal
from lamina.layers.attention import DistributedAttentionLayer
from lamina.layers.basic import DistributedLayerNorm, added, begin_normal, hands_on_to, norms_in_parts
from lamina.tensor_parallel import layers
from lamina.tensor_parallel.registry import DistributedModule

_SCORES_DIMENSIONS = 3
_NO_LABEL = -100
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class DistributedTransformerOutputLayer(DistributedModule):
    """Two Linears with a function between them, and what is around them: norms, dropout, and the sum with the input.

    Args:
        hidden_size, intermediate_size: the features of the states, and between the Linears.
        hidden_dropout_prob: of dropout of the result, before it is added.
        activation: the function: "gelu", "gelu_new" or "relu".
        add_input: whether the input is added to the result; this and all others: see DistributedAttentionLayer.
    """

    slicing_plan: ClassVar[Mapping[str, str]] = {"dense1": "colwise_of_ready", "dense2": "rowwise"}

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        add_input: bool = True,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise refusal("other-activation", ", ".join(ACTIVATIONS), activation)
        self.activation, self.fp32_residual_addition, self.add_input = activation, fp32_residual_addition, add_input
        self.dense1, self.dense2 = nn.Linear(hidden_size, intermediate_size), nn.Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon) if post_layernorm else None
        if use_normal_initialization:
            begin_normal(self, initializer_range)

    @property
    def positions_plan(self) -> Mapping[str, str]:
        return {**self.slicing_plan, "dense2": "rowwise_to_positions"} | norms_in_parts(self)

    def forward(self, states: torch.Tensor, positions: int | None = None) -> torch.Tensor:
        """Takes and gives states [N, S, H].

        Args:
            positions: how many there are, where the states here are those of a part of them.
        """
        normed = states if self.pre_layernorm is None else self.pre_layernorm(states)
        normed = layers.ready(self, normed, positions)
        output = self.dropout(self.dense2(ACTIVATIONS[self.activation](self.dense1(normed))))
        if self.add_input:
            output = added(states, output, self.fp32_residual_addition)
        return output if self.layernorm is None else self.layernorm(output)


@hands_on_to(DistributedAttentionLayer, but=("cross_attention", "add_input"))
class DistributedTransformerLayer(DistributedModule):
    """Attention, with add_cross_attention that to other states, and an output layer.

    Args:
        intermediate_size, activation: see DistributedTransformerOutputLayer.
        add_cross_attention: whether there is attention to other states.
        pre_layernorm, post_layernorm: whether each part has a norm of its input, and one of its result; one at least.
        parallel_attn_output: whether both parts take the same, behind one norm, and the three are added, as in GPT-J.
        kwargs: these and all others: see DistributedAttentionLayer.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
        fp32_residual_addition: bool = False,
        parallel_attn_output: bool = False,
        **kwargs: Any,
    ):
        super().__init__()
        if not pre_layernorm and not post_layernorm:
            raise refusal("no-layernorm")
        if parallel_attn_output and (post_layernorm or add_cross_attention):
            raise refusal("parallel-parts")
        common: dict[str, Any] = {
            "hidden_size": hidden_size,
            "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "pre_layernorm": pre_layernorm and not parallel_attn_output,
            "post_layernorm": post_layernorm,
            "add_input": not parallel_attn_output,
            "fp32_residual_addition": fp32_residual_addition,
        }
        attention = {
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob,
            "causal_mask_size": causal_mask_size,
            "use_alibi": use_alibi,
            "alibi_bias_max": alibi_bias_max,
        }
        make_attention = functools.partial(DistributedAttentionLayer, **common, **attention, **kwargs)
        self.attention = make_attention()
        self.cross_attention = make_attention(cross_attention=True) if add_cross_attention else None
        self.output = DistributedTransformerOutputLayer(
            intermediate_size=intermediate_size, activation=activation, **common
        )
        self.layernorm = DistributedLayerNorm(hidden_size, layernorm_epsilon) if parallel_attn_output else None

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


@hands_on_to(DistributedTransformerLayer)
class DistributedTransformer(DistributedModule):
    """Layers of a transformer, one after the other.

    Args:
        num_layers: how many.
        args, kwargs: these and all others: see DistributedTransformerLayer. window_size may be a list, with one for
            each layer.
    """

    is_stack = True

    def __init__(self, num_layers: int = 12, *args: Any, **kwargs: Any):
        super().__init__()
        window = kwargs.pop("window_size", None)
        windows = window if isinstance(window, list) else [window] * num_layers
        self.seq_layers = nn.Sequential(
            *(DistributedTransformerLayer(*args, window_size=each, **kwargs) for each in windows[:num_layers])
        )

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


@hands_on_to(DistributedTransformerLayer)
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

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        embedding_dropout_prob: float | None = None,
        tie_lm_head: bool = True,
        lm_head_bias: bool = False,
        loss_in_fp32: bool = False,
        **kwargs: Any,
    ):
        super().__init__()
        self.slicing_plan = {"word_embedding": "embedding_rowwise"}
        self.is_causal, self.loss_in_fp32 = causal_mask_size is not None, loss_in_fp32
        self.word_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(num_positions, hidden_size) if num_positions > 0 else None
        self.token_type_embedding = nn.Embedding(num_token_types, hidden_size) if num_token_types > 0 else None
        for part in self.children():
            nn.init.normal_(part.weight, std=initializer_range)
        self.dropout = nn.Dropout(hidden_dropout_prob if embedding_dropout_prob is None else embedding_dropout_prob)
        self.transformer = DistributedTransformer(
            num_layers,
            num_attention_heads=num_attention_heads,
            attention_head_size=attention_head_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            attention_dropout_prob=attention_dropout_prob,
            hidden_dropout_prob=hidden_dropout_prob,
            activation=activation,
            layernorm_epsilon=layernorm_epsilon,
            causal_mask_size=causal_mask_size,
            add_cross_attention=add_cross_attention,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            pre_layernorm=pre_layernorm,
            post_layernorm=post_layernorm,
            **kwargs,
        )
        self.layernorm = None if post_layernorm else DistributedLayerNorm(hidden_size, layernorm_epsilon)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=lm_head_bias) if add_lm_head else None
        if self.lm_head is not None:
            if tie_lm_head:
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
        return given if labels is None else (self._loss(scores, labels), given)

    def as_plain(self, output: torch.Tensor) -> torch.Tensor:
        return self._ordered(output) if output.dim() == _SCORES_DIMENSIONS else output

    def _ordered(self, scores: torch.Tensor) -> torch.Tensor:
        is_sliced = self.lm_head is not None and layers.is_sliced(self.lm_head)
        return scores.transpose(0, 1) if is_sliced else scores.view_as(scores)  # no gradient of the loss in either

    def _loss(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.is_causal:  # the last position has none; the sums are in transformers' order
            labels = functional.pad(labels[:, 1:], (0, 1), value=_NO_LABEL)
        is_wide = scores.dtype.itemsize > torch.float32.itemsize
        given = scores.flatten(0, 1) if is_wide and not self.loss_in_fp32 else scores.flatten(0, 1).float()
        loss = functional.cross_entropy(given, labels.to(scores.device).flatten(), ignore_index=_NO_LABEL)
        return loss.to(scores.dtype) if is_wide else loss  # wide, so that a mean of several is not rounded


def _added_mask(mask: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor | None:
    """A mask [N, S], 1 where a position is not seen, as what is added to scores: [N, 1, 1, S]."""
    if mask is None:
        return None
    return mask[:, None, None, :].to(states.dtype) * torch.finfo(states.dtype).min


def _sized(mask: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
    """A mask that says how many positions there are, where layers are given a part of them. In the place of None it is
    one without numbers."""
    positions = states.shape[1]
    if mask is None:
        return torch.empty(1, 1, 0, positions, dtype=torch.bool, device=states.device)
    return mask.expand(*mask.shape[:-1], positions)
