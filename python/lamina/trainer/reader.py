# SPDX-License-Identifier: Apache-2.0
"""Reading of a loader by a copy of the model, and where that goes on amid an epoch.

[Note: where an epoch goes on] A job that goes on amid an epoch may have other batches, or another number of copies.
Where the sampler deals samples to the copies in one order, all of them together have read a first part of that order.
The rest is dealt anew, from the next sample on: see Deal. Any other loader has an order of its own on each copy.
There, on as many copies, each goes past as many samples as it has read. What is not known then is said in a line.

With the batches that it had before, each copy goes past as many batches. So what a loader's workers, samplers and
datasets draw is what they would have drawn.
"""

import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lamina.dist.batches import samplers
from lamina.dist.workers import ending_workers
from lamina.job.messages import allgather
from lamina.job.ranks import WORLD, rank
from lamina.script_state import generators
from lamina.trainer.data_spec import DataSpec
from lamina.trainer.deals import Deal, goes_past_batches, is_torchdatas
from lamina.trainer.moves import on_rank
from lamina.trainer.ranks import copies, leads, own_copy
from lamina.trainer.states_of_ranks import are_alike
from lamina.util.told import tell

END = object()  # of what is read


class Reader:
    """Reads a loader, on the ranks that lead; on the others it gives nothing. See [Note: where an epoch goes on].

    Attributes:
        copy: that it reads for; None on a rank that does not lead.
        is_dealt_anew: whether the epoch goes on with other batches than those that it began with.
    """

    def __init__(self, spec: DataSpec):
        self._spec, self._loader, self._deal = spec, spec.dataloader, Deal.of(spec.dataloader)
        self.copy = own_copy() if leads() else None
        self._place = [copies(), self.copy]
        self._began: dict[str, Any] = {}  # the generators when the epoch began
        self._saved: dict[str, Any] | None = None
        self._is_through = False  # the loader has ended
        self._loads = False  # the saved state of the loader, where that is of this copy
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._read = self._given = 0  # batches of all copies: before a job went on amid the epoch, and since
        self._begun = self._samples = 0  # samples: where it went on in the order of all copies, and of this one
        self.is_dealt_anew = False

    @property
    def is_read(self) -> bool:
        """Tells whether batches were asked for."""
        return bool(self._began)

    @property
    def batches(self) -> int | None:
        """How many batches of all copies the epoch has; None where that is not known."""
        left = None if self._deal is None else self._deal.batches(self._begun)
        return self._longest if left is None else self._read + left

    @functools.cached_property
    def _longest(self) -> int | None:
        lengths = [length for copy, length in allgather((self.copy, self._length), WORLD) if copy is not None]
        return None if None in lengths else max(lengths)

    @property
    def _length(self) -> int | None:
        try:
            return len(self._loader)
        except (TypeError, NotImplementedError):
            return None

    def state_dict(self) -> dict[str, Any]:
        """How far this rank has read, and its random generators."""
        if self._saved is not None:
            return {"now": generators.states(self._loader)} | self._saved
        loader = getattr(self._loader, "state_dict", None)
        read = {} if loader is None or not leads() else {"loader": loader()}
        own = {"began": self._began, "now": generators.states(self._loader), "is_through": self._is_through}
        return {"place": self._place, **own, **read, "read": self._facts() | self._counted()}

    def handed_on(self) -> dict[str, Any]:
        """As `state_dict`, for processes that go on in another layout, with their generators as they are then."""
        if self._saved is not None:
            return self._saved
        return {name: value for name, value in self.state_dict().items() if name != "now"}

    def handed_on_after(self, batches: int) -> dict[str, Any]:
        """As `handed_on`, after so many batches of the epoch, of one whose place in the data is known: what was read
        beyond is read again."""
        dealt = self._deal.after(max(batches - self._read, 0), self._begun)
        read = self._facts() | {"samples": self._samples, "dealt": dealt}
        return {"place": self._place, "began": self._began, "is_through": False, "read": read}

    @property
    def of_all(self) -> int | None:
        """How many samples a full batch of all copies has, where that is known."""
        return self._deal.of_all if self._is_placed else None

    def sizes(self, samples: int) -> list[int] | None:
        """See Share."""
        return self._deal.sizes(samples) if self._is_placed else None

    def _facts(self) -> dict[str, Any]:
        """Says on what batches depend."""
        rows = self.of_all // copies() if self._is_placed else self._spec.batch_size
        workers = getattr(self._loader, "num_workers", 0)
        return {"rows": rows, "workers": workers, "length": self._length, "order": self._order}

    @property
    def _order(self) -> list[Any] | None:
        """Says on what the order of samples depends, as far as that is known."""
        if self._is_placed:
            return self._deal.order
        if not isinstance(self._loader, DataLoader) or self._is_iterable:
            return None
        *_, kind = (type(each).__qualname__ for each in samplers(self._loader) if each is not None)
        return [operator.length_hint(self._loader.dataset, -1), kind]

    def _counted(self) -> dict[str, Any]:
        if not self._is_placed:
            return {"samples": self._samples, "anew": self.is_dealt_anew}
        return {"samples": self._samples, "dealt": self._deal.after(self._given, self._begun)}

    def go_on(self, saved: list[dict[str, Any]], batches: int, samples: int, is_told: bool = True) -> None:
        """See Shares.

        Args:
            saved: states of the ranks of a job, see `state_dict`.
            batches: of all copies, that were read of the epoch.
            samples: of all copies, in these.
            is_told: whether a line says how the epoch goes on, where that is in another way.
        """
        self._begin_epoch()
        own = next((each for each in (*saved[rank() :], *saved) if each["place"] == self._place), None)
        leading = [each for each in saved if each["place"][1] is not None] or saved
        self._saved, self._read, before = own or saved[0], batches, leading[0]["place"][0]
        read = leading[0].get("read", {})
        if batches:
            self._find_place(read, before, samples)
            self._samples = self._samples_before(own, samples)
        states = [each["loader"] for each in leading if "loader" in each]
        is_known = before == copies() or are_alike(states)
        self._loads = bool(states) and is_known and self._fits(own is not None)
        if not is_told:
            return
        if batches:
            self._tell(read, before)
        elif states and not is_known and rank() == 0 and not is_torchdatas(self._loader):
            tell(f"the loader had a state of its own on each of {before} copies: on {copies()} it begins anew")

    def _find_place(self, read: dict[str, Any], before: int, samples: int) -> None:
        """Finds out where the epoch goes on, and whether with other batches."""
        facts, batches = self._facts(), self._read
        names = ("rows", "length", "workers") if self._is_iterable else ("rows", "length")
        has_same = all(read.get(name, facts[name]) == facts[name] for name in names)
        is_like = before == copies() and has_same and not read.get("anew")
        if self._is_placed:
            by_batches = self._deal.after(batches)
            begun = read.get("dealt", by_batches if self._spec.cuts_itself else min(samples, self._deal.samples))
            self._begun, is_like = begun, is_like and begun == by_batches
        self.is_dealt_anew = not is_like

    @property
    def _is_placed(self) -> bool:
        """Tells whether what all copies together have read is known."""
        return self._deal is not None and self._deal.of_all is not None

    def _samples_before(self, own: dict[str, Any] | None, samples: int) -> int:
        """How many samples this copy has read of the epoch."""
        if own is not None and "read" in own:
            return own["read"]["samples"]
        return len(range(own_copy(), samples, copies()))

    @property
    def _is_iterable(self) -> bool:
        return isinstance(getattr(self._loader, "dataset", None), IterableDataset)

    def _tell(self, read: dict[str, Any], before: int) -> None:
        """Says how the epoch goes on with other batches."""
        doubt = self._doubt(read, before)
        if rank() != 0 or not (self.is_dealt_anew or doubt):
            return
        if self._loads:
            where = "as the state of the loader says"
        elif self._is_placed:
            where = f"after {self._begun} of its {self._deal.samples} samples"
        else:
            where = "after the samples that each copy of the model has read"
        facts = self._facts()
        ways = [f"on {copies()} copies of the model instead of {before}"] if before != copies() else []
        for name, words in (("rows", "batches of {}"), ("workers", "{} workers")):
            if name in read and read[name] != facts[name]:
                ways.append(f"with {words.format(facts[name])} instead of {read[name]}")
        end = f". Some may be read twice and some never, for {doubt}" if doubt else ""
        tell(f"the epoch goes on {', '.join([where, *ways])}{end}")

    def _doubt(self, read: dict[str, Any], before: int) -> str:
        """Says why samples may be read twice or never; "" where each is read once."""
        if "order" in read and read["order"] != self._order:
            return "its number of samples, or the sampler, its shuffle or its seed, is another than before"
        if self._is_placed:
            return ""
        if before != copies() and self._loads:
            return f"the state is that of {before} copies: only the loader knows what it means on {copies()}"
        if self._loads or not self.is_dealt_anew:
            return ""
        if before != copies():
            return "the loader splits itself: which samples each copy has read is not known"
        if self._is_iterable and max(self._facts()["workers"], read.get("workers", 0)) > 1:
            return "several workers read the dataset: which samples each has read is not known"
        return ""

    def of_epoch(self, most: int, by_sigterm: bool) -> Iterator[Any]:
        """The batches of the epoch, and then END again and again."""
        saved, self._saved = self._saved, None
        if saved is None:
            self._begin_epoch()
        self._is_through = False
        bounds = [self._deal.batches(self._begun)] if self._is_placed else []
        bounds += [] if most < 0 else [most - self._read]
        left = max(min(bounds), 0) if bounds else None
        batches = self._begin(saved, by_sigterm)
        for number in itertools.count():
            is_cut_off = left is not None and self._given >= left
            found = END if is_cut_off else next(batches, END)
            self._is_through = found is END and not is_cut_off
            if self.is_dealt_anew and self._is_placed and not number:
                self._deal.begin()  # for whoever reads the loader next: these batches are being dealt
            yield found

    def count(self, samples: int) -> None:
        """Counts a batch of all copies, of which so many samples are of this one."""
        self._given, self._samples = self._given + 1, self._samples + samples

    def end(self) -> None:
        """The epoch has no batch more."""
        self._begin_epoch()

    def _begin(self, saved: dict[str, Any] | None, by_sigterm: bool) -> Iterator[Any]:
        """An iterator over the loader, after what is read already. What it draws when it is made is what it drew when
        the epoch began."""
        if saved is not None:
            now = saved.get("now") or generators.states(self._loader)
            generators.put_states(saved["began"] if self._read else now, self._loader)
        self._began = generators.states(self._loader)
        loader = self._loader if leads() else ()
        goes_on = saved is not None and leads() and self._loads
        if goes_on:
            loader.load_state_dict(saved["loader"])
        elif self.is_dealt_anew and self._is_placed:
            self._deal.begin(self._begun)
        with ending_workers(loader, by_parent=by_sigterm):
            batches = iter(loader)
        past = 0 if goes_on or (self.is_dealt_anew and self._is_placed) else self._samples
        is_read = self._is_iterable or getattr(loader, "num_workers", 0) or not hasattr(batches, "_sampler_iter")
        if past and not (is_read or self.is_dealt_anew):  # by indices in this process
            past = sum(0 for _ in itertools.islice(batches._sampler_iter, self._read))
        batches = map(self._spec.device_transforms, on_rank(batches))
        if past:
            batches = _after(batches, past, self._spec)
            if rank() == 0 and not self.is_dealt_anew:
                tell(f"{self._read} batches of the epoch are read again, to go on after them")
        if saved is not None and self._read:
            generators.put_states(now, self._loader)
        return batches

    def _fits(self, is_own: bool) -> bool:
        """Tells whether the loader goes on with its saved state. One of torchdata's counts samples of its copy in the
        order in which they are dealt, and at the end of an epoch it would draw numbers to find that."""
        if is_torchdatas(self._loader):
            if self._is_iterable and goes_past_batches(self._saved.get("loader")):
                return False
            return bool(self._read) and is_own and not self.is_dealt_anew
        return not (self.is_dealt_anew and self._is_placed) if self._read else self._saved["is_through"]


def _after(batches: Iterator[Any], samples: int, spec: DataSpec) -> Iterator[Any]:
    """The batches after so many samples, of which some may be in a batch with others."""
    while samples > 0 and (batch := next(batches, END)) is not END:
        count = spec.get_num_samples_in_batch(batch)
        if count > samples:
            return itertools.chain(spec.rest(batch, samples), batches)
        samples -= count
    return batches
