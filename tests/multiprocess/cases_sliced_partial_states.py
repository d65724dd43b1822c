# SPDX-License-Identifier: Apache-2.0
"""Parts of states of a model with layers that are cut over two ranks, and optimizers that need whole parameters."""

import os

import pytest
import torch
from multiprocess.cases_checkpoints import folder, require_same
from multiprocess.cases_sliced import WIDTH
from multiprocess.cases_sliced_state import Job, Plain, require_equal

import lamina
from lamina.errors import UsageError

RANK = int(os.environ.get("RANK", 0))


def matrices(parameters):
    """Leaves out the others: gradients of biases of keys are rounding errors, which Adafactor makes large."""
    return [each for each in parameters if each.requires_grad_(each.dim() == 2).requires_grad]


def adafactor(parameters):
    return torch.optim.Adafactor(matrices(parameters), lr=1e-2)


def muon(parameters):
    return torch.optim.Muon(matrices(parameters), lr=1e-2)


def case_partial_states_are_this_ranks_slices():
    with folder() as path:
        job = Job()
        job.train(2)
        expected = job.states()
        model, optimizer = job.model.local_state_dict(), job.optimizer.local_state_dict()
        assert model["_smp_is_partial"] and model["blocks.0.up.weight"].shape == (3 * WIDTH // 2, WIDTH)
        assert optimizer["state"]["blocks.0.up.weight"]["exp_avg"].shape == (3 * WIDTH // 2, WIDTH)
        lamina.save({"model": model, "optimizer": optimizer}, os.path.join(path, "f"))
        assert os.path.exists(os.path.join(path, f"f_0_{RANK}"))
        saved = lamina.load(os.path.join(path, "f"))
        job.train(1)
        job.model.load_state_dict(saved["model"])
        job.optimizer.load_state_dict(saved["optimizer"])
        require_same(job.states(), expected)
        saved = lamina.allgather(saved, lamina.WORLD)
        wrong = saved[1 - RANK]
        for takes, part in ((job.model, wrong["model"]), (job.optimizer, wrong["optimizer"])):
            with pytest.raises(UsageError, match=r"was saved with slice \d of 2, and this rank has slice \d of 2"):
                takes.load_state_dict(part)
        require_same(job.states(), expected)
        lamina.shutdown()
        with pytest.raises(UsageError, match=r"was saved with slice 0 of 2, and this rank has slice 0 of 1"):
            Job(tp=1).optimizer.load_state_dict(saved[0]["optimizer"])


def case_a_save_names_a_copy_that_differs():
    with folder() as path:
        job = Job()
        lamina.save_checkpoint(path, "fine")
        with torch.no_grad():
            job.model.module.blocks[1].down.bias[3] += RANK * 1e-9
        for form in ("lamina", "smp"):
            with pytest.raises(
                lamina.DesyncError, match=r"blocks.1.down.bias has other values on rank 1 than on rank 0"
            ):
                lamina.save_checkpoint(path, "not", form=form)


def case_the_original_s_form_goes_into_other_degrees_and_back():
    for make in (None, adafactor):
        with folder() as path:
            job = Job(make)
            job.train(2)
            expected = job.states()
            lamina.save_checkpoint(path, "two", form="smp")
            assert os.path.exists(os.path.join(path, "two_partial", f"model_0_{RANK}.pt"))
            lamina.save_checkpoint(path, "full", form="smp", partial=False)
            job.train(1)
            lamina.resume_from_checkpoint(path, "two")
            require_same(job.states(), expected)
            lamina.shutdown()
            job = Job(make, seed=5, tp=1)
            lamina.resume_from_checkpoint(path, "two")
            require_same(job.states(), expected)
            lamina.save_checkpoint(path, "one", form="smp")
            lamina.shutdown()
            job = Job(make, seed=6)
            lamina.resume_from_checkpoint(path, "one")
            require_same(job.states(), expected)
            job.train(1)
            lamina.resume_from_checkpoint(path, "full", partial=False)
            require_same(job.states()[0], expected[0])
            lamina.shutdown()


def case_masters_of_the_original_s_form():
    with folder() as path:
        job = Job(bf16=True)
        job.train(2)
        expected = job.states()
        lamina.save_checkpoint(path, "two", form="smp")
        lamina.shutdown()
        job = Job(seed=5, tp=1, bf16=True)
        lamina.resume_from_checkpoint(path)
        require_same(job.states(), expected)


def case_whole_parameters_are_updated_by_one_rank_for_all():
    with folder() as path:
        for make in (adafactor, muon):
            job, plain = Job(make), Plain(make)
            job.train(3)
            plain.train(3)
            require_equal(job, plain)
            _, state = job.states()
            job.train(1)
            job.optimizer.load_state_dict(state)
            require_same(job.optimizer.state_dict(), state)
            expected = job.states()
            lamina.save_checkpoint(path, make.__name__)
            job.train(1)
            lamina.resume_from_checkpoint(path, make.__name__)
            require_same(job.states(), expected)
            lamina.shutdown()
            job = Job(make, seed=5, tp=1)
            lamina.resume_from_checkpoint(path, make.__name__)
            require_same(job.states(), expected)
            lamina.shutdown()


def case_masters_of_whole_parameters():
    job = Job(adafactor, bf16=True)
    job.train(2)
    model, optimizer = job.states()
    names = [name for name, each in job.model.module.named_parameters() if each.requires_grad]
    masters = {name: optimizer["masters"][number] for number, name in enumerate(names)}
    assert all(torch.equal(model[name], master.bfloat16()) for name, master in masters.items())
    require_same(lamina.allgather(model, lamina.WORLD)[1 - RANK], model)


def case_names_of_parameters_by_number_on_each_rank():
    job = Job()
    names = [name for name, _ in job.model.module.named_parameters()]
    assert lamina.state.param_index_to_name_tp_group == [dict(enumerate(names))] * 2
    assert lamina.state.param_name_to_index_tp_group[1][names[3]] == 3
