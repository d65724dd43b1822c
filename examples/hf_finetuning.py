# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a model of transformers in a pipeline of two processes, and loads the result as a plain one.

    lamina run -n 2 examples/hf_finetuning.py

Weights are random here, so that nothing is downloaded: `from_pretrained` takes their place. Needs transformers.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lamina

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--out", default="finetuned", help="folder of the model that comes of it")
args = parser.parse_args()

lamina.init(partitions=2, microbatches=2)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
)  # fmt: skip
model = lamina.DistributedModel(LlamaForCausalLM(config))  # or LlamaForCausalLM.from_pretrained(...)
adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = lamina.DistributedOptimizer(adamw)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, args.steps)


def batch():
    """Sequences that count on from any number, in steps of three."""
    return (torch.randint(0, 64, (16, 1)) + 3 * torch.arange(24)) % 64


@lamina.step
def train_step(ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    loss = train_step(batch()).reduce_mean()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if lamina.rank() == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step}: loss {loss.item():.4f}")

lamina.save_checkpoint(args.out, "model", partial=False)
if lamina.rank() == 0:
    plain = LlamaForCausalLM.from_pretrained(f"{args.out}/model")
    told = plain.generate(torch.tensor([[5, 8, 11, 14]]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    print("goes on with", told[0, 4:].tolist())
