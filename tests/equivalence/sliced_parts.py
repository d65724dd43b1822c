# SPDX-License-Identifier: Apache-2.0
"""Parts of random models that are sliced: see random_parts.py. Each has a `plan`, or is sliced of itself. Most sizes
are not divided by 2 or 4, heads of keys may be fewer than either, and all sizes fit both.
"""

from typing import ClassVar

from equivalence.random_parts import KINDS, WIDTH
from torch import nn
from torch.nn import functional

import lamina

INNER, WORDS = 13, 7
DROPOUT = 0.3


class Core(nn.Module):
    """Attention of heads, in a module without sliced layers."""

    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value):
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        return self.dropout(scores.softmax(-1)) @ value


class Attention(nn.Module):
    plan: ClassVar[dict[str, str]] = dict.fromkeys(("query", "key", "value"), "colwise") | {"out": "rowwise"}

    def __init__(self, heads: int, keys: int, how: str, dropout: float = 0.0, has_norms: bool = False):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim, self.how = heads, keys, 2, how
        self.query = nn.Linear(WIDTH, 2 * heads)
        self.key = nn.Linear(WIDTH, 2 * keys, bias=False)  # a bias has no effect, and a gradient of rounding errors
        self.value, self.out = nn.Linear(WIDTH, 2 * keys), nn.Linear(2 * heads, WIDTH)
        self.norm = nn.LayerNorm(2) if has_norms else nn.Identity()
        self.core, self.dropout = Core(dropout), nn.Dropout(dropout)

    def forward(self, x):
        query, key, value = (
            each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        query, groups = self.norm(query), self.num_heads // self.num_key_value_heads
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        if self.how == "core":
            heads = self.core(query, key, value)
        else:
            dropout = self.dropout.p if self.training else 0.0
            heads = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return x + self.dropout(self.out(heads.transpose(1, 2).flatten(2)))


class Packed(nn.Module):
    """Queries, keys and values of one Linear, side by side."""

    plan: ClassVar[dict[str, str]] = {"both": "packed_colwise", "out": "rowwise"}

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 7, 2
        self.both, self.out = nn.Linear(WIDTH, 3 * 14, bias=False), nn.Linear(14, WIDTH)

    def forward(self, x):
        heads = [each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in self.both(x).chunk(3, -1)]
        return x - self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Inner(nn.Module):
    plan: ClassVar[dict[str, str]] = {"up": "colwise", "down": "rowwise"}

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.act, self.down = nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        inner = self.dropout(self.act(self.up(self.dropout(self.norm(x)))))
        return x + self.dropout(self.down(inner))


class Gated(nn.Module):
    plan: ClassVar[dict[str, str]] = {"both": "packed_colwise", "down": "rowwise"}

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(self.dropout(gate.tanh() * up))


class Mixed(Attention):
    """Heads and inner features in one module; the features are twice as many as the others."""

    plan: ClassVar[dict[str, str]] = Attention.plan | {"up": "colwise", "down": "rowwise"}

    def __init__(self, dropout: float = 0.0):
        super().__init__(8, 8, "core", dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x) + self.down(self.dropout(self.up(self.dropout(x)).relu()))


class LowRank(nn.Module):
    """A Linear with a correction of low rank, as peft's."""

    def __init__(self, base: nn.Linear, dropout: float):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base.out_features, bias=False)})

    def forward(self, x):
        whole = self.base_layer(x)
        return whole + self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))


class Corrected(nn.Module):
    """Two of them that take the same, with inner features of twice or four times the others."""

    plan: ClassVar[dict[str, str]] = {"gate": "colwise", "up": "colwise", "down": "rowwise"}

    def __init__(self, dropout: float = 0.0, times: int = 2):
        super().__init__()
        self.gate, self.up = (LowRank(nn.Linear(WIDTH, times * WIDTH), dropout) for _ in range(2))
        self.down = LowRank(nn.Linear(times * WIDTH, WIDTH), dropout)

    def forward(self, x):
        return x + self.down(self.gate(x).tanh() * self.up(x))


class Sharing(nn.Module):
    """Layers that two modules have, and such as are in a list."""

    plan: ClassVar[dict[str, str]] = {"listed.0": "colwise", "listed.1": "rowwise"}

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.inner = nn.ModuleList([Inner(dropout), Inner(dropout)])
        self.inner[1].up = self.inner[0].up
        self.heads = nn.ModuleList([Attention(7, 7, "core", dropout), Attention(7, 7, "torch", dropout)])
        self.heads[1].query, self.heads[1].key = self.heads[0].query, self.heads[0].key
        self.heads[1].value = self.heads[0].value
        self.listed, self.dropout = (
            nn.ModuleList([nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)]),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        for each in (*self.inner, *self.heads):
            x = each(x)
        return x + self.listed[1](self.dropout(self.listed[0](x)))


class Words(nn.Module):
    """An embedding cut over words, whose weight is that of scores."""

    takes_tokens = True
    plan: ClassVar[dict[str, str]] = {"table": "embedding_rowwise", "score": "colwise_gather_output"}

    def __init__(self):
        super().__init__()
        self.table, self.score = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.score.weight = self.table.weight

    def forward(self, x, tokens):
        x = x + self.table(tokens)
        return x + functional.pad(self.score(x), (0, WIDTH - WORDS)).tanh()


class Features(nn.Module):
    """An embedding cut over features."""

    takes_tokens = True
    plan: ClassVar[dict[str, str]] = {"table": "embedding_colwise"}

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=1)

    def forward(self, x, tokens):
        return x * self.table(tokens)


class Stack(nn.Module):
    """Layers of the original's, between which activations may lie in parts of positions."""

    def __init__(self, dropout: float = 0.0, **options):
        super().__init__()
        probabilities = dict.fromkeys(("attention_dropout_prob", "hidden_dropout_prob"), dropout)
        sizes = {"attention_head_size": 2, "hidden_size": WIDTH, "intermediate_size": INNER, "qkv_bias": False}
        self.layers = lamina.nn.DistributedTransformer(2, 7, **sizes, **probabilities, **options)

    def forward(self, x):
        return self.layers(x)


def row(dropout: float = 0.0) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Dropout(dropout), nn.Linear(INNER, WIDTH))
    made.plan = {"0": "colwise", "3": "rowwise"}
    return made


def one(style: str) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    made.plan = {"0": style}
    return made


PLAIN = {
    "heads": lambda: Attention(7, 7, "core"),
    "few_keys": lambda: Attention(8, 2, "torch"),
    "one_key": lambda: Attention(7, 1, "core", has_norms=True),
    "uneven_keys": lambda: Attention(12, 3, "torch"),
    "packed": Packed,
    "inner": Inner,
    "gated": Gated,
    "mixed": Mixed,
    "corrected": Corrected,
    "sharing": Sharing,
    "row": row,
    "gathered": lambda: one("colwise_gather_output"),
    "split": lambda: one("rowwise_split_input"),
    "words": Words,
    "features": Features,
    "stack": lambda: Stack(causal_mask_size=8),
    "pre_stack": lambda: Stack(pre_layernorm=True, post_layernorm=False),
}
DRAWING = {
    "heads_drop": lambda: Attention(7, 7, "core", DROPOUT),
    "few_keys_drop": lambda: Attention(8, 2, "torch", DROPOUT),
    "uneven_keys_drop": lambda: Attention(12, 3, "core", DROPOUT),
    "inner_drop": lambda: Inner(DROPOUT),
    "gated_drop": lambda: Gated(DROPOUT),
    "mixed_drop": lambda: Mixed(DROPOUT),
    "corrected_drop": lambda: Corrected(DROPOUT),
    "corrected_more_drop": lambda: Corrected(DROPOUT, 4),
    "sharing_drop": lambda: Sharing(DROPOUT),
    "row_drop": lambda: row(DROPOUT),
    "stack_drop": lambda: Stack(DROPOUT, pre_layernorm=True),
}
KINDS.update(PLAIN | DRAWING)


def sliced_parts(model: nn.Module) -> list[nn.Module]:
    """The parts that are sliced."""
    return [part for part in model.modules() if hasattr(part, "plan") or isinstance(part, Stack)]


def mark(model: nn.Module) -> None:
    """Marks them."""
    for part in sliced_parts(model):
        if not isinstance(part, Stack):
            lamina.set_tensor_parallelism(part, plan=part.plan)
