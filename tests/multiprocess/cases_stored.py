# SPDX-License-Identifier: Apache-2.0
"""Cases for two ranks: checkpoints that earlier versions wrote, loaded into every layout."""

import pathlib

import torch
from multiprocess.cases_checkpoints import require_same
from multiprocess.stored_jobs import LAYOUTS, SAMPLES, Job

import lamina

STORED = pathlib.Path(__file__).with_name("stored")
VERSIONS = sorted(path.name for path in STORED.iterdir())


def require_loaded(sample):
    """Everything that was saved is there to the bit, in the layout that saved it and in every other one."""
    own, precision, save = SAMPLES[sample]
    draws = own if save is lamina.save_checkpoint else None  # the original's form has no generators
    for version in VERSIONS:
        expected = torch.load(STORED / version / sample / "state.pt")
        for layout in LAYOUTS:
            require_state(STORED / version / sample, layout, precision, expected, drawn=layout == draws)


def require_state(path, layout, precision, expected, drawn):
    job = Job(layout, precision)
    job.train()
    assert lamina.resume_from_checkpoint(path, "three")["steps"] == 3  # shards of the original add their names
    require_same(job.state(), {key: expected[key] for key in ("model", "optimizer")})
    if drawn:
        require_same(torch.rand(4), expected["drawn"])
    job.train()
    lamina.shutdown()


def case_a_pipeline():
    require_loaded("pipeline")


def case_divided_states_and_half_precision():
    require_loaded("divided_bf16")


def case_shards_and_a_loss_scale():
    require_loaded("sharded_fp16")


def case_the_original_s_form_of_a_pipeline():
    require_loaded("smp_pipeline")


def case_the_original_s_form_of_shards():
    require_loaded("smp_sharded")
