# SPDX-License-Identifier: Apache-2.0
"""Calls of modules with sliced layers, proven to compute what they would with whole layers.

[Note: proofs] A plan says which layers are cut, and nothing of the code between and around them. That may normalise
over what lies in parts, compute a scale from a number of heads that is this rank's, or have parameters of its own. So
the ranks of a TP_GROUP run the *region* around the layers twice before its first call of each kind: with whole layers,
and with slices, from the same inputs and random numbers. It is the smallest module that nothing in parts goes into or
comes out of. Results, gradients of inputs and gradients of parameters are compared by value; see
lamina/tensor_parallel/proof.h. Kinds of calls differ in modes, flags and types of arguments.

What follows for a whole parameter in a region is measured: its gradient is alike on all ranks, or theirs add up to the
whole one's, as that of a learned activation between layers does. From then on these are added (`partial`). Where a
result is a part of the whole's, a stand-in for the whole is returned (`parts`). All else is an error that names the
operation where the runs part.
"""

import itertools
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import Error, UsageError
from lamina.proof import parts
from lamina.proof.outside import ProvenRegions
from lamina.proof.places import Operations, first_parted
from lamina.proof.runs import NoDropout, Outcome, Runs, hooks, random_like
from lamina.proof.signatures import CallKind, Kind, kinds_of
from lamina.tensor_parallel import layers, partial, regions
from lamina.tensor_parallel.partial import Partial
from lamina.tensor_parallel.registry import DistributedModule
from lamina.tensor_parallel.unslicing import kind_before, remember
from lamina.util.call_sites import place_of_error
from lamina.util.told import tell

_SMALL_BYTES = 1 << 28  # of a region's parameters in doubles, up to which these are computed with
# Relative differences of norms that are rounding, and what counts as zero beside the largest gradient.
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 2e-3}
_OF_HALF = 5e-2
_ZERO = 0.1

Pair = tuple[torch.Tensor | None, torch.Tensor | None]  # of the run with whole layers, and with slices
Verdict = tuple[str, int, list[int]]


@dataclass
class Findings:
    """Results of the proof of calls of one kind.

    Attributes:
        partial: names of modules in the region, and of their parameters, whose gradients are added.
        cuts: of results of which each rank has a part, by number.
        proven: whether the runs were compared.
    """

    partial: list[tuple[str, str]] = field(default_factory=list)
    cuts: dict[int, parts.ResultCut] = field(default_factory=dict)
    proven: bool = True

    def added(self, region: nn.Module) -> Partial:
        """Parameters of a region whose gradients are added."""
        return frozenset((id(region.get_submodule(path)), name) for path, name in self.partial)


class _Proven:
    """A region whose calls are proven."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        proofs: Proofs = self.__dict__[layers.PROOF]
        return proofs.call(self, super().forward, args, kwargs)


class Proofs:
    """The proofs of a model.

    Args:
        root: the model, whose layers are sliced.
    """

    def __init__(self, root: nn.Module, session: _lamina.Session):
        found = {name: module for name, module in regions.smallest(root).items() if not _is_known(module)}
        self._session = session
        self._names = {id(module): name for name, module in found.items()}
        self._kinds = {id(found[name]): kind for name, kind in kinds_of(found).items()}
        self._call_kinds = {id(module): CallKind(module) for module in found.values()}
        self._findings: dict[tuple[Kind, Kind], Findings] = {}
        self._made: dict[tuple[int, Kind], tuple[Findings, Partial]] = {}
        self._running = threading.local()
        self._regions = ProvenRegions(found, session.rank == 0 and session.group_size("partitions") == 1)
        self._seconds, self._is_told = 0.0, False
        self._modes: set[tuple[bool, bool]] = set()
        for name, module in found.items():
            remember(module)
            module.__dict__[layers.PROOF], module.__dict__[layers.PROVEN_AS] = self, name
            module.__class__ = layers.with_other_forward(_Proven, type(module))

    def __deepcopy__(self, memo: Any) -> "Proofs":
        return self

    def __reduce__(self) -> Any:
        return _nothing_to_prove, ()

    def call(self, region: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of a region, which is proven before where no such was."""
        if torch.compiler.is_compiling() or layers.is_transformed():
            return forward(*args, **kwargs)
        with self._regions.inside(region.__dict__[layers.PROVEN_AS]):
            return self._called(region, forward, args, kwargs)

    def _called(self, region: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if getattr(self._running, "now", False) or id(region) not in self._kinds:
            return forward(*args, **kwargs)
        if _lamina.is_alone():
            return self._explained(region, forward, args, kwargs)
        key = id(region), self._call_kinds[id(region)].of(args, kwargs)
        if (made := self._made.get(key)) is None:
            found = self._found(region, key[1], args, kwargs)
            made = found or Findings(proven=False), frozenset() if found is None else found.added(region)
            if found is not None:
                self._made[key] = made
        found, added = made
        args, kwargs = parts.own((args, kwargs))
        if not found.proven:
            return self._explained(region, forward, args, kwargs)
        with partial.inside(added):
            output = forward(*args, **kwargs)
        return parts.given(output, found.cuts)

    def _explained(self, region: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call that is not proven: in a trace, which is of one rank, or where parameters are on other partitions. An
        error that only slices have is told as a proof would."""
        try:
            return forward(*args, **kwargs)
        except Error:
            raise
        except Exception as error:
            if _lacks_memory(error):
                raise
            self._running.now = True
            try:
                refusal = _Proof(self._session, self._names[id(region)], region, args, kwargs).explained(error)
            finally:
                self._running.now = False
            if refusal is None:
                raise
            raise refusal from error

    @contextmanager
    def watching(self, root: nn.Module) -> Iterator[None]:
        """Around calls of the model. The first in each mode runs compiled modules as they were written, for proofs are
        made of those. Afterwards it is said once what they took."""
        mode = torch.is_grad_enabled(), root.training
        is_first = mode not in self._modes and not torch.compiler.is_compiling()
        with _eager() if is_first and "torch._dynamo" in sys.modules else nullcontext():
            yield
        self._modes.add(mode)
        self._say_cost()

    def _say_cost(self) -> None:
        if self._seconds and not self._is_told and self._session.rank == 0:
            tell(
                f"{len(self._findings)} kinds of modules with sliced layers were compared with whole ones, in "
                f"{self._seconds:.1f} s (prove_slices: false leaves that out)"
            )
        self._is_told = self._is_told or self._seconds > 0

    def _found(self, region: nn.Module, call: Kind, args: tuple, kwargs: dict[str, Any]) -> Findings | None:
        key = self._kinds[id(region)], call
        if key not in self._findings:
            began = time.monotonic()
            self._running.now = True
            try:
                made = _Proof(self._session, self._names[id(region)], region, args, kwargs).run()
            finally:
                self._running.now = False
                self._seconds += time.monotonic() - began
            if made is None:
                return None
            self._findings[key] = made
        found = self._findings[key]
        _add_gradients(region, found, self._session)
        return found


class _Proof:
    """The proof of one call."""

    def __init__(self, session: _lamina.Session, name: str, region: nn.Module, args: tuple, kwargs: dict[str, Any]):
        self._session, self._region, self._args, self._kwargs = session, region, args, kwargs
        self._whose = f"{name or 'the model'} ({type(region).__name__})"
        self._sliced = [each for each in region.modules() if layers.is_sliced(each)]
        self._index = session.group_rank("tp")

    def run(self) -> Findings | None:
        """Returns None where there is no memory for it now.

        Errors:
            UsageError: slices compute something else.
        """
        if why := _why_not(self._region):
            return self._unproven(why)
        error: Exception | None = None
        has_hooks = len({number for (number,) in self._of_all(hooks(self._region))}) == 1  # a rank may look at its own
        for dtype in self._dtypes():
            runs = Runs(self._region, self._session, self._args, self._kwargs, dtype, has_hooks)
            try:
                whole, error = runs.run(True, random_like), None
            except Error:
                raise
            except Exception as raised:
                error = raised
            failed = [number for (number,) in self._of_all(0 if error is None else 2 if _lacks_memory(error) else 1)]
            if 2 in failed:
                self._unproven("there is no memory for it")
                return None
            if error is None:  # where another rank has failed, the next collective says so
                return self._compared(runs, whole, self._tolerance(dtype))
            if 0 in failed:
                raise error
        return self._unproven(f"with whole layers it ends in {type(error).__name__}: {str(error)[:200]}")

    def explained(self, error: Exception) -> UsageError | None:
        """The refusal of a call with slices that ended with an error; None where it might with whole layers, too. Not
        collective: whole layers have any values."""
        has_hooks = not _lamina.is_alone()  # a trace calls none
        try:
            with _lamina.Alone():
                Runs(self._region, None, self._args, self._kwargs, None, has_hooks).run(True, None)
        except Exception:
            return None
        return self._ended(error)

    def _ended(self, error: Exception) -> UsageError:
        place = place_of_error(error)
        at = f" in {place}" if place else ""
        return self._refusal(f"with slices it ends{at} in {type(error).__name__}: {str(error)[:200]}")

    def _of_all(self, *numbers: int) -> list[list[int]]:
        """The numbers that each rank gives; collective."""
        device = next((each.device for each in self._region.parameters()), torch.device("cpu"))
        own, size = torch.tensor([numbers], device=device), self._session.group_size("tp")
        return torch.ops.lamina.tp_gather(own, 0, [1] * size, self._session.team()).tolist()

    def _compared(self, runs: Runs, whole: Outcome, tolerance: float) -> Findings:
        found, wrong = self._findings(runs, whole, tolerance, None)
        if not wrong:
            self._require_added(runs, whole, tolerance, found)
            return found
        if whole.has_drawn:
            without = runs.run(True, random_like, NoDropout())
            found, still = self._findings(runs, without, tolerance, NoDropout())
            if not still:
                if self._session.rank == 0:
                    tell(f"{self._whose}: dropout of what lies in parts draws other numbers than the plain model's")
                self._require_added(runs, without, tolerance, found, NoDropout())
                return found
        raise self._refusal(f"{wrong} differs{self._where(runs, tolerance)}")

    def _findings(
        self, runs: Runs, whole: Outcome, tolerance: float, surroundings: NoDropout | None
    ) -> tuple[Findings, str]:
        """Results of a run with slices, and the first thing that differs in it; "" for nothing."""
        found, wrong = Findings(), []

        def gradients(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
            verdicts = self._verdicts(zip(whole.outputs, outputs, strict=False), tolerance, 1e-6)
            if len(outputs) != len(whole.outputs):
                wrong.append("the number of its results")
            for number, (verdict, dimension, sizes) in enumerate(verdicts):
                if verdict == "part":
                    found.cuts[number] = parts.ResultCut(dimension, tuple(sizes), self._session.team())
                elif verdict != "alike":
                    wrong.append(f"result {number}" if len(outputs) > 1 else "its result")
            return self._given_to(whole, found) if not wrong else [torch.zeros_like(each) for each in outputs]

        try:
            own = runs.run(False, gradients, surroundings)
        except Error:
            raise
        except Exception as error:
            if _lacks_memory(error):
                raise
            raise self._ended(error) from error
        if not torch.is_grad_enabled():
            gradients(own.outputs)
        left, written = self._alike(
            sorted(whole.beside.keys() | own.beside.keys()), sorted(whole.written.keys() | own.written.keys())
        )
        of_left, of_written = self._verdicts_of(
            [(whole.beside.get(name), own.beside.get(name)) for name in left],
            [(whole.written.get(name), own.written.get(name)) for name in written],
            tolerance=tolerance,
            zero=1e-6,
        )
        wrong += [
            f"its {name}, which it leaves to others,"
            for name, (verdict, _, _) in zip(left, of_left, strict=True)
            if verdict != "alike"
        ]
        wrong += [
            f"{name}, which it writes,"
            for name, (verdict, _, _) in zip(written, of_written, strict=True)
            if verdict not in ("alike", "part", "scattered")
        ]
        if torch.is_grad_enabled() and not wrong:
            wrong += self._of_gradients(runs, whole, own, tolerance, found)
        return found, wrong[0] if wrong else ""

    def _alike(self, *names: list[str]) -> list[list[str]]:
        """These names; none where ranks have others, as where one of them keeps a log. Collective."""
        found = zip(*self._of_all(*(zlib.crc32("\n".join(each).encode()) for each in names)), strict=True)
        return [each if len(set(ranks)) == 1 else [] for each, ranks in zip(names, found, strict=True)]

    def _require_added(
        self, runs: Runs, whole: Outcome, tolerance: float, found: Findings, surroundings: NoDropout | None = None
    ) -> None:
        """UsageError where code reads a parameter in another way than as an attribute, so that a gradient is not
        added."""
        if not found.partial:
            return
        _add_gradients(self._region, found, self._session)
        gradients = lambda _: self._given_to(whole, found)  # noqa: E731
        own = runs.run(False, gradients, surroundings, added=found.added(self._region))
        if wrong := self._of_gradients(runs, whole, own, tolerance, Findings(), adds=False):
            raise self._refusal(
                f"{wrong[0]} is a part on each rank, and is not added, for it is read in another way than as an "
                "attribute of its module"
            )

    def _given_to(self, whole: Outcome, found: Findings) -> list[torch.Tensor]:
        """Gradients of what the region returns with slices."""
        given = random_like(whole.outputs)
        for number, cut in found.cuts.items():
            given[number] = given[number].split(cut.sizes, cut.dimension)[self._index]
        return given

    def _of_gradients(
        self, runs: Runs, whole: Outcome, own: Outcome, tolerance: float, found: Findings, adds: bool = True
    ) -> list[str]:
        wrong = []
        parameters = [
            (left if left is None or each.slicing is None else self._session.slice_of(left, each.slicing), right)
            for each, left, right in zip(runs.trained, whole.of_parameters, own.of_parameters, strict=True)
        ]
        others = [(left, own.of_others.get(key)) for key, left in whole.of_others.items()]
        inputs = list(zip(whole.of_inputs, own.of_inputs, strict=True))
        of_inputs, of_parameters, of_others = self._verdicts_of(
            inputs, parameters, others, tolerance=tolerance, zero=_ZERO
        )
        for number, (verdict, _, _) in enumerate(of_inputs):
            if verdict not in ("alike", "zero"):
                wrong.append(f"the gradient of its input {number}")
        for each, (verdict, _, _) in zip(runs.trained, of_parameters, strict=True):
            if each.slicing is None and verdict in ("terms", "zero") and adds:
                found.partial.append((each.name.rpartition(".")[0], each.key))
            elif verdict not in ("alike", "zero"):
                wrong.append(f"the gradient of {each.name}")
        for (left, _), (verdict, _, _) in zip(others, of_others, strict=True):
            if verdict not in ("alike", "zero"):
                wrong.append(f"the gradient of a parameter {list(left.shape)} of a module outside of it")
        return wrong

    def _verdicts(self, pairs: Any, tolerance: float, zero: float) -> list[Verdict]:
        return self._verdicts_of(list(pairs), tolerance=tolerance, zero=zero)[0]

    def _verdicts_of(self, *kinds: list[Pair], tolerance: float, zero: float) -> list[list[Verdict]]:
        """Verdicts on values of several kinds, in one exchange. What is much smaller than the largest one of its kind
        is taken for zero."""
        values = []
        for pairs in kinds:
            sizes = [each.double().square().mean().sqrt().item() for each, _ in pairs if _is_finite(each)]
            values += [(whole, own, zero * max(sizes, default=0.0)) for whole, own in pairs]
        verdicts = iter(self._session.compare_slices(values, tolerance))
        return [list(itertools.islice(verdicts, len(pairs))) for pairs in kinds]

    def _where(self, runs: Runs, tolerance: float) -> str:
        """Where the runs part, in words; "" where that is not found."""
        found = {}
        for whole in (True, False):
            operations = Operations(self._sliced)
            try:
                runs.run(whole, None, operations.recording(), in_training=False)
            except Exception:
                return ""
            found[whole] = operations.found
        compare = lambda pairs: [each[0] for each in self._verdicts(pairs, tolerance, 1e-6)]  # noqa: E731
        parted = first_parted(found[True], found[False], compare)
        return "" if parted is None else f" from {parted} on, which needs what the other ranks have"

    def _refusal(self, difference: str) -> UsageError:
        styles = ", ".join(
            f'{path or "itself"} "{style}"'
            for path, module in self._region.named_modules()
            if (style := layers.style_of(module)) is not None
        )
        return UsageError(
            f"{self._whose} computes something else with sliced layers than with whole ones: {difference} (its layers: "
            f'{styles}). Let what needs the whole get it, by "colwise_gather_output" and "rowwise_split_input" in the '
            "places of the layers before and after it; say how many heads there are, where that stands under a name of "
            "its own (set_tensor_parallelism(..., heads=...)); or leave the layers out of the plan",
            code="tp-unproven",
        )

    def _unproven(self, why: str) -> Findings:
        if self._session.rank == 0:
            tell(f"{self._whose} has sliced layers, and was not compared with the whole: {why}")
        return Findings(proven=False)

    def _dtypes(self) -> list[torch.dtype | None]:
        elements = sum(each.numel() for each in self._region.parameters()) * self._session.group_size("tp")
        return [torch.float64 if elements * 8 <= _SMALL_BYTES else torch.float32, None]

    def _tolerance(self, dtype: torch.dtype | None) -> float:
        if dtype is None:
            dtype = next((each.dtype for each in self._region.parameters()), torch.float32)
        return _TOLERANCES.get(dtype, _OF_HALF)


def _add_gradients(region: nn.Module, found: Findings, session: _lamina.Session) -> None:
    """From now on gradients of these parameters are added in calls of the region."""
    for path, parameter in found.partial:
        module = region.get_submodule(path)
        remember(module)
        partial.make_partial(module, (parameter,), session.team())


def _is_known(region: nn.Module) -> bool:
    """True for a module of which it is known that it computes alike: a layer alone, and those of lamina's own."""
    if layers.is_sliced(region):
        return not layers.has_own_forward(region)
    if any(layers.place_of(module) is not None for module in region.modules()):
        return True
    kinds = map(kind_before, region.modules())
    is_ours = isinstance(region, DistributedModule) and kind_before(region).__module__.startswith("lamina.")
    return is_ours and all(kind.__module__.partition(".")[0] in ("lamina", "torch") for kind in kinds)


def _why_not(region: nn.Module) -> str:
    for name, tensor in [*region.named_parameters(), *region.named_buffers()]:
        if tensor.is_meta or _lamina.is_released(tensor):
            return f"{name} is on another rank"
    return ""


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def _is_finite(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0 and bool(tensor.isfinite().all())


def _nothing_to_prove() -> Any:
    return None


@contextmanager
def _eager() -> Iterator[None]:
    """Inside, compiled modules run as they were written, but where compiled code itself has called."""
    try:
        stance = torch.compiler.set_stance("force_eager")
    except RuntimeError:
        yield
        return
    with stance:
        yield
