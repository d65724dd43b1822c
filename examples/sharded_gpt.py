# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT whose parameters, gradients and states are shared out among the ranks.

    lamina run -n 2 examples/sharded_gpt.py

The model is that of gpt.py, in bfloat16 with float32 masters.
"""

import argparse

import torch
from gpt import GPT
from text import VOCABULARY, Batches, standard_library

import lamina

CONTEXT = 64
SEQUENCES = 8  # of each rank

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()
lamina.init(
    ddp=True,
    sharded_data_parallel_degree=lamina.dist.get_world_size(),
    sdp_param_persistence_threshold=1024,  # smaller parameters stay whole
    sdp_gradient_clipping=1.0,
    bf16=True,
)
torch.manual_seed(0)
model = GPT(vocabulary=VOCABULARY, width=96, layers=3, heads=4, context=CONTEXT)
parameters = sum(parameter.numel() for parameter in model.parameters())
model = lamina.DistributedModel(model)
optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=4e-3))
lamina.set_activation_checkpointing(model.module.blocks)  # activations are computed again in the backward


@lamina.step
def train_step(x, y):
    loss = model(x, y)
    model.backward(loss)
    return loss


text, _ = standard_library()
batches = Batches(text, sequences=SEQUENCES, context=CONTEXT, seed=lamina.dp_rank())
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    loss = train_step(*batches.next()).reduce_mean()
    optimizer.step()
    if step == 1 or step % 20 == 0:
        losses = lamina.allgather(loss.item(), lamina.DP_GROUP)
        if lamina.rank() == 0:
            print(f"step {step}: loss {sum(losses) / len(losses):.3f}")

states = sum(t.numel() for of_one in optimizer.state.values() for t in of_one.values() if t.dim() > 0)
held = lamina.allgather(states // 2, lamina.WORLD)  # Adam has two states for each element that it updates
if lamina.rank() == 0:
    print(f"of {parameters:,} parameters the ranks update " + ", ".join(f"{each:,}" for each in held))
