# SPDX-License-Identifier: Apache-2.0
"""Memory of two devices from step to step."""

import emulated
from devices.cases_copies import Training, live_bytes, passed_on, require_no_more
from soak import SOAK

import lamina

STEPS = 1000 if SOAK else 60


def case_memory_stays_as_it_is_from_step_to_step():
    training = Training(passed_on)
    for _ in range(10):
        training.step()
    before = live_bytes(training)
    peaks = []
    for _ in range(2):
        emulated.reset_counts()
        for _ in range(STEPS // 2):
            training.step()
        peaks.append(emulated.counts()["peak_bytes"][lamina.device().index])
        require_no_more(training, before)
    assert peaks[1] <= 1.5 * peaks[0], peaks
