# SPDX-License-Identifier: Apache-2.0
"""An epoch that goes on with other batches, or on another number of copies of the model, reads each sample once."""

import itertools
import random

import pytest
import torch
from soak import some
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lamina.dist.sampler import ExactSampler
from lamina.trainer import deals, reader
from lamina.trainer.data_spec import DataSpec
from lamina.trainer.reader import END, Reader


@pytest.fixture
def place(monkeypatch):
    """The place of this process among copies of a model, which it takes one after the other."""
    here = {"copies": 1, "own": 0}
    for module in deals, reader:
        monkeypatch.setattr(module, "copies", lambda: here["copies"])
        monkeypatch.setattr(module, "own_copy", lambda: here["own"])
    monkeypatch.setattr(reader, "leads", lambda: True)
    monkeypatch.setattr(reader, "rank", lambda: here["own"])
    monkeypatch.setattr(reader, "allgather", lambda own, group: [own])
    return here


ALL = 1000  # batches


class Split(IterableDataset):
    """Each copy's own samples; may have a state."""

    def __init__(self, samples, copy, copies):
        self.at, self._own = 0, [torch.tensor(number) for number in range(copy, samples, copies)]

    def __iter__(self):
        while self.at < len(self._own):
            self.at += 1
            yield self._own[self.at - 1]
        self.at = 0


class Stateful(Split):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def numbers(samples):
    return TensorDataset(torch.arange(samples))


def seeded(copy):
    return torch.Generator().manual_seed(copy)


# Loaders of copies, by samples, rows of a batch, copies and the copy. These deal one order to all.
DEALT = {
    "torch": lambda n, rows, of, own: DataLoader(numbers(n), rows, sampler=DistributedSampler(numbers(n), of, own)),
    "in order": lambda n, rows, of, own: DataLoader(
        numbers(n), rows, sampler=DistributedSampler(numbers(n), of, own, shuffle=False, drop_last=True)
    ),
    "exact": lambda n, rows, of, own: DataLoader(numbers(n), rows, sampler=ExactSampler(numbers(n), of, own)),
    "rows": lambda n, rows, of, own: DataLoader(
        numbers(n), rows, sampler=ExactSampler(numbers(n), of, own, batch_size=rows)
    ),
    "batch sampler": lambda n, rows, of, own: DataLoader(
        numbers(n), batch_sampler=BatchSampler(DistributedSampler(numbers(n), of, own), rows, False)
    ),
    "torchdata": lambda n, rows, of, own: StatefulDataLoader(
        numbers(n), rows, sampler=DistributedSampler(numbers(n), of, own)
    ),
    "torchdata's sampler": lambda n, rows, of, own: StatefulDataLoader(
        numbers(n), rows, sampler=StatefulDistributedSampler(numbers(n), of, own)
    ),
}


class Unsized:
    """Batches of another library, which says neither how many there are nor how large."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


SPLIT = {
    "iterable": lambda n, rows, of, own: DataLoader(Split(n, own, of), rows),
    "torchdata's iterable": lambda n, rows, of, own: StatefulDataLoader(Split(n, own, of), rows),
    "iterable with a state": lambda n, rows, of, own: StatefulDataLoader(Stateful(n, own, of), rows),
    "shuffled": lambda n, rows, of, own: DataLoader(
        Subset(numbers(n), range(own, n, of)), rows, shuffle=True, generator=seeded(own)
    ),
    "without a length": lambda n, rows, of, own: Unsized(torch.arange(own, n, of).split(rows)),
    "list": lambda n, rows, of, own: list(torch.arange(own, n, of).split(rows)),
}


def read(batches, place, make, samples, rows, copies, saved, before):
    """Goes on for so many batches with new copies. Returns what they have read, and their states."""
    place["copies"], found, states = copies, [], []
    for own in range(copies):
        place["own"] = own
        each = Reader(DataSpec(make(samples, rows, copies, own)))
        if saved:
            each.go_on(saved, *before)
        for batch in itertools.islice(each.of_epoch(-1, False), batches):
            if batch is END and batches == ALL:
                break
            own_samples = [] if batch is END else batch[0].tolist() if isinstance(batch, list) else batch.tolist()
            found += own_samples
            each.count(len(own_samples))
        states.append(each.state_dict())
    return found, states


def stages(seed, copies=None):
    """Sizes of batches, and numbers of copies and of batches that are read, of several jobs; the last reads all."""
    draw = random.Random(seed)
    for last in (False, False, True):
        yield draw.randint(1, 7), copies or draw.randint(1, 4), ALL if last else draw.randint(1, 2)


def require_each_once(place, make, samples, every):
    seen, saved, batches = [], [], 0
    for rows, copies, count in every:
        if len(seen) == samples:
            break  # where an epoch has ended
        found, saved = read(count, place, make, samples, rows, copies, saved, (batches, len(seen)))
        seen += found
        batches += count
    assert sorted(seen) == list(range(samples)), every


@pytest.mark.parametrize("kind", DEALT)
def test_samples_that_are_dealt_are_read_once_on_any_copies(kind, place):
    for seed in some(range(40), 6):
        require_each_once(place, DEALT[kind], random.Random(seed).choice((5, 30, 37, 64)), list(stages(seed)))


@pytest.mark.parametrize("kind", SPLIT)
def test_samples_that_copies_have_of_their_own_are_read_once_on_as_many(kind, place, capsys):
    for seed in some(range(40), 6):
        copies = 1 + seed % 3
        require_each_once(place, SPLIT[kind], random.Random(seed).choice((30, 37, 64)), list(stages(seed, copies)))
    assert "twice" not in capsys.readouterr().err


def test_what_is_not_known_of_other_copies_or_workers_is_said(place, capsys):
    _, saved = read(2, place, SPLIT["iterable"], 40, 3, 2, [], ())
    read(ALL, place, SPLIT["iterable"], 40, 3, 4, saved, (2, 12))
    said = capsys.readouterr().err
    assert "on 4 copies of the model instead of 2. Some may be read twice and some never, for the loader splits" in said
    _, saved = read(2, place, SPLIT["iterable with a state"], 40, 3, 2, [], ())
    read(ALL, place, SPLIT["iterable with a state"], 40, 3, 4, saved, (2, 12))
    assert "Some may be read twice and some never, for the state is that of 2 copies" in capsys.readouterr().err
    _, saved = read(2, place, DEALT["torch"], 40, 3, 2, [], ())
    other = lambda n, rows, of, own: DataLoader(  # noqa: E731
        numbers(n), rows, sampler=DistributedSampler(numbers(n), of, own, seed=5)
    )
    read(ALL, place, other, 40, 3, 2, saved, (2, 12))
    random_order = lambda n, rows, of, own: DataLoader(numbers(n), rows, shuffle=True)  # noqa: E731
    read(ALL, place, random_order, 40, 3, 1, saved, (2, 12))
    _, saved = read(2, place, random_order, 40, 3, 1, [], ())
    read(ALL, place, DEALT["torch"], 40, 3, 1, saved, (2, 6))
    said = capsys.readouterr().err
    assert said.count("or the sampler, its shuffle or its seed, is another than before") == 3, said
    _, saved = read(2, place, random_order, 40, 3, 1, [], ())
    read(ALL, place, random_order, 41, 3, 1, saved, (2, 6))
    in_order = lambda n, rows, of, own: DataLoader(numbers(n), rows)  # noqa: E731
    read(ALL, place, in_order, 40, 3, 1, saved, (2, 6))
    said = capsys.readouterr().err
    assert said.count("for its number of samples, or the sampler") == 2, said


def test_batches_that_are_as_before_are_gone_past_without_a_line(place, capsys):
    found, saved = read(2, place, DEALT["torch"], 40, 3, 2, [], ())
    rest, _ = read(ALL, place, DEALT["torch"], 40, 3, 2, saved, (2, 12))
    assert sorted(found + rest) == list(range(40)) and not capsys.readouterr().err


def test_an_older_checkpoint_says_by_its_samples_where_it_was(place):
    found, saved = read(2, place, DEALT["exact"], 40, 3, 2, [], ())
    for state in saved:
        del state["read"]
    rest, _ = read(ALL, place, DEALT["exact"], 40, 5, 2, saved, (2, 12))
    assert sorted(found + rest) == list(range(40))


def test_the_last_batch_is_left_out_as_the_new_ones_say(place):
    make = lambda n, rows, of, own: DataLoader(  # noqa: E731
        numbers(n), rows, sampler=ExactSampler(numbers(n), of, own), drop_last=True
    )
    found, saved = read(1, place, make, 21, 4, 2, [], ())
    rest, _ = read(ALL, place, make, 21, 3, 2, saved, (1, 8))
    assert len(found) == 8 and len(rest) == 12 and len({*found, *rest}) == 20


def test_the_sampler_deals_all_samples_to_whoever_reads_next(place):
    _, saved = read(2, place, DEALT["exact"], 40, 3, 1, [], ())
    loader = DEALT["exact"](40, 5, 1, 0)
    each = Reader(DataSpec(loader))
    each.go_on(saved, 2, 6)
    next(each.of_epoch(-1, False))
    assert len(list(loader.sampler)) == 40


def test_a_second_fit_goes_on_with_what_its_own_rank_has_read(place):
    for make in DEALT["exact"], DEALT["torchdata"], SPLIT["iterable"]:
        seen, saved = read(2, place, make, 40, 3, 2, [], ())
        more, saved = read(1, place, make, 40, 4, 2, saved, (2, len(seen)))
        for own in range(2):
            place["own"] = own
            each = Reader(DataSpec(make(40, 4, 2, own)))
            each.go_on([saved[own]], 3, len(seen) + len(more))
            for batch in itertools.takewhile(lambda batch: batch is not END, each.of_epoch(-1, False)):
                more += batch[0].tolist() if isinstance(batch, list) else batch.tolist()
        assert sorted(seen + more) == list(range(40))
