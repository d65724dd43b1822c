# SPDX-License-Identifier: Apache-2.0
"""A rank of the job: runs the cases of the subjects named as arguments, one after the other in one process."""

import faulthandler
import pathlib
import sys
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from launch.case_report import Report
from multiprocess.cases import cases

import lamina

HANG_S = 300  # of one case; longer than its `timeout_s`


def main(package: str = "multiprocess") -> None:
    with Report() as report:
        for name, case in cases(*sys.argv[1:], package=package).items():
            if not report.runs(name):
                continue
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            wrong = []
            try:
                try:
                    case()
                finally:
                    lamina.shutdown()
            except BaseException:
                wrong = [traceback.format_exc()]
            report.add(name, wrong)
            report.wait_for_others()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
