# SPDX-License-Identifier: Apache-2.0
"""`lamina doctor` where there is an accelerator: its two ranks are there, too."""

import json
import sys

import pytest
from emulated.run_case import folder
from soak import SOAK


def facts(launcher, device):
    own = {"LAMINA_PYTHON": sys.executable, "PYTHONPATH": str(folder()), "LAMINA_DEVICE": device}
    result = launcher.run("doctor", "--json", env=own)
    return result.returncode, json.loads(result.stdout)


def test_a_doctor_has_its_ranks_compute_on_the_accelerator(launcher):
    code, found = facts(launcher, "auto")
    assert code == 0 and found["advice"] == [], found["advice"]
    assert found["torch"]["accelerator"] == "emulated" and found["torch"]["devices"] == 4
    ranks = found["ranks"]
    assert ranks["devices"] == ["emulated:0", "emulated:1"]
    assert ranks["pipeline_step_s"] > 0 and ranks["device_step_s"] > 0 and ranks["device_pipeline_step_s"] > 0
    assert ranks["all_reduce"] is ranks["device_all_reduce"] is True


@pytest.mark.skipif(not SOAK, reason="takes 40 s: in the soak")
def test_a_doctor_names_a_device_that_is_not_there_and_what_works_without(launcher):
    code, found = facts(launcher, "emulated:9")
    assert code == 1
    assert found["ranks"]["pipeline_step_s"] > 0 and "devices" not in found["ranks"]
    assert len(found["advice"]) == 1 and 'LAMINA_DEVICE: "emulated:9" is not' in found["advice"][0], found["advice"]
