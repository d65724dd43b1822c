# SPDX-License-Identifier: Apache-2.0
"""The Python face over several processes. The cases are in cases_*.py; each file is one launch."""

import pytest
from multiprocess.job import cases, verdicts

LAUNCHES = {
    "multiprocess.cases_pair": 2,
    "multiprocess.cases_travel_pair": 2,
    "multiprocess.cases_order": 2,
    "multiprocess.cases_checkpointing": 2,
    "multiprocess.cases_replicas": 2,
    "multiprocess.cases_memory": 2,
    "multiprocess.cases_partial_model": 2,
    "multiprocess.cases_failures": 3,
    "multiprocess.cases_four": 4,
    "multiprocess.cases_replicated_pipelines": 4,
}


@pytest.mark.parametrize("module, case", [(module, case) for module in LAUNCHES for case in cases(module)])
def test_case(module, case):
    ranks = LAUNCHES[module]
    found = verdicts(module, ranks)
    said = found.get(case, [])
    assert len(said) == ranks, f"it ended on {len(said)} of {ranks} ranks; the launch: {found['launch']}"
    assert not any(said), "\n".join(said)


@pytest.mark.parametrize("module", LAUNCHES)
def test_the_launch_ends_well_and_leaves_nothing_behind(module):
    assert not any(verdicts(module, LAUNCHES[module])["launch"])
