# SPDX-License-Identifier: Apache-2.0
"""The Python side of test_both_faces_slice.py: each case trains a net with a plan over two ranks, and whole, as a line
`case<TAB>numbers<TAB>numbers of the whole`, or says what it is refused with. Functions of the same names make up the
C++ side, tests/frontend/slicing_plans.cc.

    lamina run -n 2 slicing_plans.py
"""

import listed_cases
import torch
from torch import nn
from torch.nn import functional

import lamina

WIDTH, WORDS, HEAD = 8, 9, 2


class Attention(nn.Module):
    def __init__(self, key_heads=4, dropout=0.0, name="num_heads", heads=WIDTH // HEAD):
        super().__init__()
        self.head_dim, self.num_key_value_heads, self.name = HEAD, key_heads, name
        setattr(self, name, heads)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, key_heads * HEAD), nn.Linear(WIDTH, key_heads * HEAD)
        self.norm, self.dropout = nn.LayerNorm(HEAD), nn.Dropout(dropout)

    def forward(self, x):
        heads, keys = getattr(self, self.name), self.num_key_value_heads
        query = self.norm(self.query(x).unflatten(-1, (heads, HEAD))).transpose(1, 2)
        key, value = (
            layer(x).unflatten(-1, (keys, HEAD)).transpose(1, 2).repeat_interleave(heads // keys, 1)
            for layer in (self.key, self.value)
        )
        found = self.dropout((query @ key.transpose(-2, -1)).softmax(-1))
        return self.out((found @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, inner=7, gated=False, dropout=0.0):
        super().__init__()
        self.gated, self.p = gated, dropout
        self.up, self.down = nn.Linear(WIDTH, (1 + gated) * inner), nn.Linear(inner, WIDTH)

    def forward(self, x):
        x = self.up(x).tanh()
        if self.gated:
            gate, x = x.chunk(2, -1)
            x = gate * x
        return self.down(functional.dropout(x, self.p, self.training))


class Net(nn.Module):
    def __init__(self, attention=None, block=None, padding=None, max_norm=None):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=padding, max_norm=max_norm)
        self.attention = attention or Attention()
        self.layers = nn.ModuleList([block or Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()
        for number, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_((torch.arange(parameter.numel(), dtype=torch.double) + number).sin().view_as(parameter))

    def forward(self, words):
        x = self.words(words)
        x = x + self.attention(x)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x.flatten(0, 1)), words.flatten())


def trained(model, optimizer):
    """The losses of three steps, and a sum of all values."""
    torch.manual_seed(7)
    numbers = []
    for number in range(3):
        loss = model((torch.arange(12).view(2, 6) * (number + 2)) % WORDS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    state = model.state_dict()
    numbers.append(sum((value * torch.arange(value.numel()).view_as(value)).sum().item() for value in state.values()))
    return " ".join(f"{number:.8g}" for number in numbers)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sliced(plan, make=Net, inner=None, **keys):
    """The numbers of a net with such a plan, and of a whole one.

    Args:
        inner: a plan of its first layer.
        keys: of the plan.
    """
    lamina.init(tensor_parallel_degree=2, ddp=True, prescaled_batch=True, prove_slices=False)
    plain, net = make(), make()
    lamina.set_tensor_parallelism(net, plan=plan, **keys)
    if inner is not None:
        lamina.set_tensor_parallelism(net.layers[0], plan=inner)
    model = lamina.DistributedModel(net)
    return trained(model, lamina.DistributedOptimizer(sgd(model))) + "\t" + trained(plain, sgd(plain))


HEADS = {
    "attention.query": "colwise",
    "attention.key": "colwise",
    "attention.value": "colwise",
    "attention.out": "rowwise",
    "attention.norm": "replicated_with_grad_allreduce",
}


def columns_and_rows():
    return sliced({"layers.*.up": "colwise", "layers.*.down": "rowwise"})


def whole_inputs_and_outputs():
    return sliced({"layers.*.up": "colwise_gather_output", "layers.*.down": "rowwise_split_input"})


def other_names_of_styles():
    return sliced({"layers.*.up": "colwise_rep", "layers.*.down": "rowwise_rep", "head": "replicate"})


def matrices_side_by_side():
    plan = {"layers.0.up": "packed_colwise", "layers.0.down": "rowwise"}
    return sliced(plan, lambda: Net(block=Block(gated=True)))


def an_embedding_by_words():
    return sliced({"words": "embedding_rowwise"}, lambda: Net(padding=7))


def an_embedding_by_features():
    return sliced({"words": "embedding_colwise"}, lambda: Net(padding=7))


def tied():
    net = Net()
    net.head.weight = net.words.weight
    return net


def a_tied_head():
    return sliced({"words": "embedding_rowwise", "head": "colwise_gather_output"}, tied)


def heads_by_their_own_number():
    return sliced(HEADS)


def fewer_heads_of_keys_than_ranks():
    return sliced(HEADS, lambda: Net(Attention(key_heads=1)))


def heads_under_another_name():
    return sliced(HEADS, lambda: Net(Attention(name="nhead")), heads="nhead")


def dropout_between_layers():
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    return sliced(plan, lambda: Net(block=Block(dropout=0.3)))


def dropout_of_heads():
    return sliced(HEADS, lambda: Net(Attention(dropout=0.3)))


def a_plan_inside_another():
    return sliced(
        {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, inner={"up": "replicate", "down": "replicate"}
    )


def a_plan_around_another():
    return sliced({"head": "colwise_gather_output", "layers.0.*": "replicate"})


def a_name_that_is_not_there():
    return sliced({"layers.*.upp": "colwise"})


def a_style_that_is_not_known():
    return sliced({"layers.*.up": "colwis"})


def a_module_that_is_no_layer():
    return sliced({"attention": "colwise"})


def a_layer_in_a_style_of_embeddings():
    return sliced({"head": "embedding_rowwise"})


def an_embedding_with_options():
    return sliced({"words": "embedding_rowwise"}, lambda: Net(max_norm=1.0))


def fewer_features_than_ranks():
    return sliced({"layers.0.up": "colwise"}, lambda: Net(block=Block(inner=1)))


def matrices_that_do_not_divide():
    return sliced({"layers.0.up": "packed_colwise"})


def heads_that_do_not_divide():
    return sliced(HEADS, lambda: Net(Attention(key_heads=3, heads=3)))


def a_name_of_heads_that_is_not_there():
    return sliced(HEADS, heads="nhead")


def a_name_of_heads_that_is_none():
    return sliced(HEADS, heads="4 heads")


def a_head_that_is_tied_to_what_is_whole():
    return sliced({"head": "colwise_gather_output"}, tied)


CASES = (
    columns_and_rows,
    whole_inputs_and_outputs,
    other_names_of_styles,
    matrices_side_by_side,
    an_embedding_by_words,
    an_embedding_by_features,
    a_tied_head,
    heads_by_their_own_number,
    fewer_heads_of_keys_than_ranks,
    heads_under_another_name,
    dropout_between_layers,
    dropout_of_heads,
    a_plan_inside_another,
    a_plan_around_another,
    a_name_that_is_not_there,
    a_style_that_is_not_known,
    a_module_that_is_no_layer,
    a_layer_in_a_style_of_embeddings,
    an_embedding_with_options,
    fewer_features_than_ranks,
    matrices_that_do_not_divide,
    heads_that_do_not_divide,
    a_name_of_heads_that_is_not_there,
    a_name_of_heads_that_is_none,
    a_head_that_is_tied_to_what_is_whole,
)


if __name__ == "__main__":
    listed_cases.run(CASES)
