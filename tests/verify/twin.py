# SPDX-License-Identifier: Apache-2.0
"""The twin of tests/frontend/verified.cc: the same model and steps, from the same random numbers.

lamina verify -n 2 tests/verify/twin.py (pipeline | shards | loop | slices)
lamina verify -n 4 tests/verify/twin.py sliced_pipeline
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import lamina

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(torch.relu(self.linear(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.Sequential(*[Block() for _ in range(4)]), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.layers(x))


def words_model():
    options = {"num_layers": 2, "num_attention_heads": 3, "attention_head_size": 4, "hidden_size": 12}
    sizes = {"intermediate_size": 10, "vocab_size": 21, "num_positions": 6, "causal_mask_size": 6}
    return lamina.nn.DistributedTransformerLMHead(**options, **sizes, initializer_range=0.3)


def loss_of_words(words):
    scores = model((words, None, None, None, None))
    scores = scores if lamina.tp_size() == 1 else scores.transpose(0, 1)
    return functional.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


SHARDS = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}
PIPELINE = {"partitions": 2, "microbatches": 2}
SLICES = {"tensor_parallel_degree": 2, "microbatches": 2, "ddp": True, "prescaled_batch": True}
KEYS = {"pipeline": PIPELINE, "slices": SLICES, "sliced_pipeline": SLICES | PIPELINE}
kind = sys.argv[1]
has_words = kind in ("slices", "sliced_pipeline")
lamina.init(KEYS.get(kind, SHARDS))
torch.manual_seed(0)
model = lamina.DistributedModel(words_model() if has_words else Net())
adam = lamina.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
torch.manual_seed(1 + lamina.rdp_rank())


def loss_of(x):
    return loss_of_words(x) if has_words else model(x).square().mean()


@lamina.step
def train(x):
    loss = loss_of(x)
    model.backward(loss)
    return loss


for _ in range(10):
    adam.zero_grad()
    x = torch.randint(0, 21, (8, 6)) if has_words else torch.randn(8, WIDTH)
    loss_of(x).backward() if kind == "loop" else train(x)
    adam.step()
