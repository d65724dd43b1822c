# SPDX-License-Identifier: Apache-2.0
"""Into which microbatches a batch is cut, and smaller ones where memory is lacking."""

from collections.abc import Sequence
from typing import Any

import torch

from lamina.errors import UsageError
from lamina.job import current
from lamina.job.ranks import device, num_microbatches, rank, set_num_microbatches
from lamina.trainer.data_spec import count_of
from lamina.trainer.ranks import leads
from lamina.trainer.shares import Share
from lamina.trainer.training_state import TrainingState
from lamina.util.told import tell

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED", "bad_alloc")


def is_out_of_memory(error: Exception) -> bool:
    """Tells whether an error of this rank or another one says that memory is lacking, of a device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def expect(state: TrainingState, share: Share) -> None:
    """Makes steps have as many microbatches as that copy has whose batch has the most samples."""
    most = share.everyone.most_samples
    if state.auto_microbatching and state.device_train_microbatch_size is None:
        state.device_train_microbatch_size = most
    sizes, size = _sizes(state, share), state.device_train_microbatch_size
    set_num_microbatches(count_of(most, size, state.grad_accum or 1) if sizes is None else len(sizes))


def _sizes(state: TrainingState, share: Share) -> list[int] | None:
    """Gives those of the share, unless they get smaller where memory is lacking."""
    return None if state.auto_microbatching else share.sizes


def cut(state: TrainingState, share: Share) -> tuple[list[Any], list[float]]:
    """The microbatches of this copy, and which part each is of the batch of all copies. One of which nothing counts
    may have a loss that is no number: it is another one again. Where shards need that, there are as many as all copies
    have. All ranks call it; those that do not lead have none.

    Errors:
        UsageError: nothing counts of the batch of all copies, on all ranks; or of this one's, as it is now.
    """
    microbatches, counts = _microbatches(state, share) if leads() else ([None], [0])
    if share.spec.cuts_itself:
        set_num_microbatches(int(current.session().largest("world", len(microbatches))))
    own = sum(counts)  # of the batch as it is now: where an algorithm has changed it, that has the weight it had before
    if not share.all_counts or (share.counts and not own):
        raise UsageError(
            "nothing counts of a batch: it has no samples, or where those count no tokens, which "
            "DataSpec(loader, get_num_tokens_in_batch=...) counts"
        )
    parts = [number * share.counts / (max(own, 1) * share.all_counts) for number in counts]
    again = next((each for each, part in zip(microbatches, parts, strict=True) if part), microbatches[0])
    microbatches = [each if part else again for each, part in zip(microbatches, parts, strict=True)]
    missing = num_microbatches() - len(parts) if current.session().needs_all_microbatches else 0
    return [*microbatches, *[again] * missing], [*parts, *[0.0] * missing]


def _microbatches(state: TrainingState, share: Share) -> tuple[list[Any], list[int]]:
    """This copy's batch in pieces, and how much each counts; one is enough where nothing does."""
    size, pieces, sizes = state.device_train_microbatch_size, state.grad_accum or 1, _sizes(state, share) or []
    numbers = [number for number, each in enumerate(sizes) if each]
    found, counts = share.spec.microbatches(state.batch, size, pieces, [sizes[number] for number in numbers])
    if not share.counts:
        return found[:1], [0]
    if share.by_tokens:
        counts = list(map(share.spec.get_num_tokens_in_batch, found))
    if len(numbers) != len(found):
        return found, counts
    there = dict(zip(numbers, zip(found, counts, strict=True), strict=True))
    placed = [there.get(number, (found[0], 0)) for number in range(numbers[-1] + 1)]
    return [each for each, _ in placed], [count for _, count in placed]


def halve(state: TrainingState, lacking: Sequence[tuple[int, str]]) -> None:
    """Makes microbatches half as large.

    Args:
        lacking: ranks whose memory was lacking, and what they say of it; alike on all ranks.

    Errors:
        UsageError: they are of one sample.
    """
    size = state.device_train_microbatch_size
    if size == 1:
        words = "; ".join(f"rank {number}: {why}" for number, why in lacking)
        raise UsageError(
            f"out of memory with microbatches of one sample. {words}. Give each rank less of the model: activation "
            "checkpointing, fsdp_config={}, or partitions in lamina_config",
            code="trainer-memory",
        )
    state.device_train_microbatch_size = size // 2
    if device().type != "cpu":
        torch.accelerator.empty_cache()  # blocks of the sizes before
    if rank() == 0:
        ranks = ", ".join(str(number) for number, _ in lacking)
        tell(f"out of memory on rank {ranks}: microbatches of {size // 2} in the place of {size}")
