# SPDX-License-Identifier: Apache-2.0
"""Calls of smdistributed.modelparallel that the Trainer of transformers 4.28 and 4.44 makes when it trains, saves,
resumes and takes the best model, in its order; on any number of ranks."""

import copy
import pathlib

import torch
from multiprocess.cases_checkpoints import Net, folder, require_same

import smdistributed.modelparallel.torch as smp

WEIGHTS, OPTIMIZER, SCHEDULER = "pytorch_model.bin", "optimizer.pt", "scheduler.pt"
ROWS = 4


@smp.step()
def forward_backward(model, inputs, passes=1):
    loss = torch.nn.functional.cross_entropy(model(inputs["ids"]).flatten(0, 1), inputs["ids"].flatten())
    loss /= passes
    model.backward(loss)
    return loss


@smp.step()
def forward_only(model, inputs):
    return model(**inputs)


def gather(tensor):
    return torch.cat([part.cpu() for part in smp.allgather(tensor, smp.CommGroup.DP_GROUP)])


class Trainer:
    """Trains a model, which a checkpoint may be loaded into first."""

    def __init__(self, resume_from: pathlib.Path | None = None, **keys):
        smp.init({"microbatches": 2, "ddp": True, "timeout_s": 30, **keys})
        assert (smp.state.cfg.fp16, smp.state.cfg.prescaled_batch) == (False, False)
        assert smp.rank() < smp.size() and smp.local_rank() >= 0
        self.model = smp.DistributedModel(without_dropout(Net()), backward_passes_per_step=1)
        assert isinstance(self.model, smp.model.DistributedModel)
        if resume_from:
            self.load_model(resume_from)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(trained, lr=0.01))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.steps = 0
        if resume_from:
            self.load_optimizer(resume_from)

    def train(self):
        """The loss of one step more."""
        self.model.train()
        generator = torch.Generator().manual_seed(self.steps)
        rows = torch.randint(101, (ROWS * smp.dp_size(), 5), generator=generator)
        loss = forward_backward(self.model, {"ids": rows[smp.dp_rank() * ROWS :][:ROWS]}).reduce_mean().detach()
        self.optimizer.step()
        self.scheduler.step()
        self.model.zero_grad()
        self.steps += 1
        return float(gather(loss.reshape(1)).mean())

    def evaluate(self):
        self.model.eval()
        rows = torch.arange(ROWS * 5).reshape(ROWS, 5)
        with torch.no_grad():
            output = forward_only(self.model, {"x": rows})
        return gather(output.concat().detach().cpu())

    def save(self, path: pathlib.Path):
        """Model, optimizer and schedule, as checkpoints of the Trainer."""
        path.mkdir(parents=True, exist_ok=True)
        state = self.model.state_dict()
        if smp.rank() == 0:
            for to_hugging_face, _ in smp.state.module_manager.translate_functions:
                state = to_hugging_face(state)
            torch.save(state, path / WEIGHTS)
        (path / "user_content.pt").touch()
        state = self.optimizer.local_state_dict(gather_if_shard=False)
        smp.barrier()
        divided = smp.state.cfg.shard_optimizer_state
        if smp.rdp_rank() == 0 or divided:
            smp.save(state, str(path / OPTIMIZER), partial=True, v3=divided)
        if smp.rank() == 0:
            torch.save(self.scheduler.state_dict(), path / SCHEDULER)
        smp.barrier()

    def load_model(self, path: pathlib.Path):
        if (path / "user_content.pt").is_file():
            smp.resume_from_checkpoint(path=str(path), tag=WEIGHTS, partial=False, load_optimizer=False)
            return
        state = torch.load(path / WEIGHTS, map_location="cpu", weights_only=True)
        state["_smp_is_partial"] = False
        self.model.load_state_dict(state, strict=True)

    def load_optimizer(self, path: pathlib.Path):
        assert list(path.glob(f"{OPTIMIZER}_*"))
        back = {} if (path / "user_content.pt").is_file() else {"back_compat": True}

        def load(_, optimizer):
            optimizer.load_state_dict(smp.load(str(path / OPTIMIZER), partial=True, **back))

        self.model.register_post_step_hook(load)
        self.scheduler.load_state_dict(torch.load(path / SCHEDULER))


def without_dropout(model):
    """So that a step depends on no random numbers, which the Trainer restores by itself."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def require_resumed(older: bool = False, **keys):
    """A training that is saved and resumed makes the next step as the one that went on, and finds its best model again.

    Args:
        older: as of a checkpoint from before 1.10, which has no user_content.pt.
    """
    with folder() as path:
        trainer, place = Trainer(**keys), path / "checkpoint-2"
        trainer.train()
        trainer.train()
        trainer.save(place)
        best = trainer.evaluate()
        expected = copy.deepcopy((trainer.train(), trainer.model.state_dict(), trainer.optimizer.state_dict()))
        smp.barrier()
        trainer.load_model(place)
        require_same(trainer.evaluate(), best)
        smp.shutdown()

        if older and (place / "user_content.pt").exists():
            (place / "user_content.pt").unlink(missing_ok=True)
        trainer = Trainer(resume_from=place, **keys)
        trainer.steps = 2
        found = trainer.train(), trainer.model.state_dict(), trainer.optimizer.state_dict()
        require_same(found, expected)
        smp.shutdown()
