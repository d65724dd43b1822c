# SPDX-License-Identifier: Apache-2.0
"""A job runs the cases of the tests that pytest has selected, and no others."""

import pytest
from launch import case_jobs
from launch.case_jobs import TESTS, choose, results

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from launch.case_report import Report

with Report() as report:
    for case in filter(report.runs, ("one", "two [a@b]", "three")):
        report.add(case, [])
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The names of the cases that job `job` runs when these tests are selected."""
    monkeypatch.setattr(case_jobs, "_chosen", {})
    (program := tmp_path / "program.py").write_text(PROGRAM.format(tests=str(TESTS)))

    def run(*tests: str) -> set[str]:
        choose(tests)
        found = results.__wrapped__("job", 1, program)
        assert found.pop("launch") == []
        return set(found)

    return run


def test_a_job_runs_the_selected_cases(run):
    assert run("f.py::test[two [a@b]@job]", "f.py::test[one@other]", "f.py::test_ends[@job]") == {"two [a@b]"}


def test_a_job_that_is_asked_only_how_it_ends_runs_all(run):
    assert run("f.py::test_ends[@job]", "f.py::test_of_no_job[one]", "f.py::test") == {"one", "two [a@b]", "three"}
