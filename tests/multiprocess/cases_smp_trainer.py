# SPDX-License-Identifier: Apache-2.0
"""Cases for two ranks: the calls of Hugging Face's Trainer."""

from multiprocess.trainer_calls import require_resumed


def case_a_trainer_over_a_pipeline_resumes():
    require_resumed(partitions=2)


def case_a_trainer_over_copies_resumes():
    require_resumed(partitions=1)
    require_resumed(partitions=1, shard_optimizer_state=True)


def case_a_trainer_resumes_from_older_files():
    require_resumed(older=True, partitions=2)
