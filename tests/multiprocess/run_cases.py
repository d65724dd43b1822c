# SPDX-License-Identifier: Apache-2.0
"""A rank of the job: runs the cases of the module named as argument, one after the other in one process."""

import faulthandler
import json
import os
import pathlib
import sys
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from multiprocess.job import cases

import lamina

HANG_S = 100  # of one case; longer than its `timeout_s`


def main() -> None:
    path = pathlib.Path(os.environ["DIR"], "verdicts-" + os.environ["RANK"])
    with path.open("w") as verdicts:
        for name, case in cases(sys.argv[1]).items():
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            verdict = ""
            try:
                try:
                    case()
                finally:
                    lamina.shutdown()
            except BaseException:
                verdict = traceback.format_exc()
            print(json.dumps([name, verdict]), file=verdicts, flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
