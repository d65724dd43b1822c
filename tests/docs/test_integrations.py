# SPDX-License-Identifier: Apache-2.0
"""Programs of other libraries run as the page on them says."""

import re
import shlex
import sys

import pytest
from docs.raised import ROOT
from soak import some

PAGE = (ROOT / "docs/integrations.md").read_text()
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^```sh\nlamina (.*?)\n```$", PAGE, re.MULTILINE)
PRINTED = {
    "with_accelerate.py": r"2 ranks, loss [\d.]+",
    "with_fabric.py": r"2 ranks over lamina loss [\d.]+",
    "with_trainer.py": r"2 ranks over lamina loss [\d.]+",
    "with_prometheus.py": r"2 ranks lamina_step 7 .*lamina_loss_train_total [\d.]+",
    "lightning_pipeline.py": r"2 ranks, loss [\d.]+",
    "trainer_pipeline.py": r"2 ranks, loss [\d.]+",
}


def test_every_program_has_its_command():
    assert [command.split()[-1] for command in COMMANDS] == list(PROGRAMS) == list(PRINTED)


@pytest.mark.multiprocess
@pytest.mark.parametrize("command", some(COMMANDS, 1))
def test_a_program_runs_over_two_ranks(command, launcher):
    words = shlex.split(command)
    program = launcher.folder / words[-1]
    program.write_text(PROGRAMS[words[-1]])
    run = launcher.run(*words[:-1], program, env={"LAMINA_PYTHON": sys.executable})
    assert run.returncode == 0, run.stderr
    assert len(re.findall(PRINTED[words[-1]], run.stdout)) == 1, run.stdout
