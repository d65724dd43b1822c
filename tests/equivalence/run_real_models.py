# SPDX-License-Identifier: Apache-2.0
"""Runs every model of real_models; each rank writes a JSON line per model with what is wrong on it.

lamina run -n 2 tests/equivalence/run_real_models.py gpt2     prints what is wrong with one
"""

import functools
import os
import sys
import traceback
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from equivalence.collected import COLLECTED
from equivalence.real_models import MODELS, check
from launch.case_report import Report

CHECKS = {model.name: functools.partial(check, model) for model in MODELS} | COLLECTED


def verdict(name: str) -> list[str]:
    try:
        return CHECKS[name]()
    except Exception:
        return [traceback.format_exc()]


def main() -> None:
    if chosen := sys.argv[1:]:
        for name in chosen:
            print(name, *verdict(name), sep="\n  ", flush=True)
        return
    with Report() as report:
        for name in filter(report.runs, CHECKS):
            report.add(name, verdict(name))


if __name__ == "__main__":
    main()
