# SPDX-License-Identifier: Apache-2.0
"""Goes on from its last checkpoint, in the middle of an epoch, as if it had never ended.

    lamina run -n 2 --restarts 1 examples/resume.py --fail-at 8     it dies once, and is started again

Needs torchdata.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import lamina

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--fail-at", type=int, help="die before this step, unless started again")
parser.add_argument("--folder", default="checkpoints", help="of the checkpoints, which all ranks see")
args = parser.parse_args()

lamina.init(ddp=True)  # a copy of the model on each rank, which reads its own share of the data
torch.manual_seed(0)
x = torch.randn(80, 8)
data = TensorDataset(x, x.flip(1))
model = lamina.DistributedModel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 8)))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = lamina.DistributedOptimizer(adamw)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, args.steps)
sampler = lamina.dist.get_sampler(data, shuffle=True)
random = torch.Generator()  # of its own, so that a new iterator takes no number from the model's dropout
loader = StatefulDataLoader(data, batch_size=8, sampler=sampler, generator=random)


@lamina.step
def train_step(x, y):
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


step = epoch = 0
saved = lamina.resume_from_checkpoint(args.folder, missing_ok=True)
if saved is not None:
    step, epoch = saved["step"], saved["epoch"]
    schedule.load_state_dict(saved["schedule"])
    loader.load_state_dict(saved["loaders"][lamina.rank()])

while step < args.steps:
    sampler.set_epoch(epoch)
    for x, y in loader:
        if step + 1 == args.fail_at and os.environ.get("LAMINA_RESTART") == "0":
            os._exit(3)
        optimizer.zero_grad()
        loss = lamina.allgather(train_step(x, y).reduce_mean().item(), lamina.DP_GROUP)
        optimizer.step()
        schedule.step()
        step += 1
        if lamina.rank() == 0:
            print(f"step {step}, epoch {epoch}: loss {sum(loss) / len(loss):.6f}", flush=True)
        if step % 3 == 0:
            loaders = lamina.allgather(loader.state_dict(), lamina.WORLD)  # each rank has read others
            content = {"step": step, "epoch": epoch, "schedule": schedule.state_dict(), "loaders": loaders}
            lamina.save_checkpoint(args.folder, f"step{step}", user_content=content, num_kept_partial_checkpoints=2)
        if step == args.steps:
            break
    epoch += 1
