# SPDX-License-Identifier: Apache-2.0
"""The Trainer on two ranks, each with an accelerator of its own, trains as on the host."""

import torch
from devices.cases_trainer import Language, Pictures, Seen, trained
from devices.cases_waits import text, waits_of_trainer

import lamina

LAYOUTS = [{}, {"partitions": 2}, {"sharded_data_parallel_degree": 2}]


class Losses(Seen):
    """The losses alone: of a model that is cut a rank has not all parameters."""

    def run_event(self, event, state, logger):
        self.keep_losses(event, state)


def case_each_layout_trains_as_on_the_host():
    for layout in LAYOUTS:
        for kind in (Language, Pictures):
            options = {"lamina_config": {"timeout_s": 60} | layout, "max_duration": "1ep", "seen": Losses}
            expected, values, state_there = trained(kind, "cpu", **options)
            measured = dict(state_there.eval_metric_values)
            lamina.shutdown()
            seen, found, state = trained(kind, "gpu", **options)
            assert lamina.device() == torch.device("emulated", lamina.rank())
            torch.testing.assert_close(seen.losses, expected.losses, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(dict(state.eval_metric_values), measured, rtol=1e-4, atol=1e-5)
            lamina.shutdown()


def case_no_batch_waits_for_a_device():
    for layout, waits in zip(LAYOUTS, (0, 0, 1), strict=True):  # an update of shards waits for their norm
        config = {"timeout_s": 60} | layout
        assert waits_of_trainer(text, progress_bar=False, lamina_config=config) == waits, layout
        lamina.shutdown()
