# SPDX-License-Identifier: Apache-2.0
"""The engine as the Python face sees it. Nothing here is public."""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, Protocol, overload

import torch
from torch.distributed import Backend, ProcessGroup, Store

# The axes, and groups by their meaning: see [Note: axes] and [Note: groups by meaning].
Axis = Literal["world", "mp", "dp", "pp", "tp", "rdp", "shard", "shard_copies", "shard_within", "shard_across", "node"]
Kind = Axis | Literal["one_copy", "partitions", "replicas", "same_parts"]
# The dimension along which a tensor is sliced, and the extent and unit of each of its sections.
Slicing = tuple[int, Sequence[tuple[int, int]]]

def set_hooks(
    *,
    run_module: Callable[[int, bytes, tuple, dict], Any],
    capture_state: Callable[[int], tuple[bytes, bytes]],
    hear: Callable[[bytes], None],
    describe_exception: Callable[[BaseException, int], tuple[str, str, str, int, bytes | None]],
    rebuild_exception: Callable[[str, str, str, int, bytes | None], BaseException],
    pack: Callable[[Any], tuple[bytes, list[torch.Tensor]]],
    unpack: Callable[[bytes, list[torch.Tensor]], Any],
    name_call: Callable[[], tuple[str, str, str]],
    make_remote: Callable[[bytes], Any],
    errors: ModuleType,
) -> None:
    """Sets what the engine calls back, once at import. All are called with the GIL held.

    run_module(index, state, args, kwargs) runs a module that this rank owns. capture_state(index) gives the state that
    a call of the module should run under, and the news that its owner is to hear(news) before.
    describe_exception(exception, rank) gives (type, message, traceback, rank, pickled or None): an exception that came
    from another rank keeps that rank's. Its inverse is rebuild_exception. The codec of objects without an encoding of
    their own is pack and unpack. name_call() gives the public function that the calling thread is in, the place in the
    user's code that called it, and the line of ours that is executed. make_remote(data) serves a request of another
    rank to the face. In `errors` are the exception classes, by the names of the C++ ones: Error, ConfigError,
    UsageError, DesyncError, PeerError, TimeoutError, FormatError, CancelledError, InternalError.
    """

def says_info() -> bool:
    """True unless LAMINA_LOG asks for warnings or errors alone."""

def says_details() -> bool:
    """True where LAMINA_LOG is "debug"."""

def coded(text: bytes, code: str) -> str:
    """The message of an error, printable: its first line ends with the code, and the whole with a line that says how
    to read more of it. Without a code the line is that of the error that it takes in, if any."""

def without_hints(text: str) -> str:
    """The text without the lines that say how to read more of an error."""

def end_with_python(kept: Any) -> None:
    """At exit: lets Python end with its exit code, but never frees `kept`; the process ends then at once."""

def require_own_code(path: str, variable: str) -> None:
    """Refuses code that others may have put there, which a variable of the environment names: see
    lamina/base/own_code.h. Raises ConfigError."""

def printable(text: bytes) -> str:
    """UTF-8 with each character that a terminal would obey as "\\x1b"; tabs and ends of lines stay."""

def printable_line(text: bytes) -> str:
    """As `printable`, and ends of lines and tabs, too."""

def said(name: str, values: Sequence[str]) -> tuple[str, str]:
    """The text of that name in lamina/faces/sayings.h with its values, and its code, "" for none."""

def counted(samples: Sequence[int], microbatches: int) -> int:
    """How many of so many microbatches are not repeated: see lamina/pipeline/pieces.h."""

class KnownLists:
    """How lists of a step function's batches are cut: see lamina/pipeline/batch_splitter.h."""

class BatchSplitter:
    """Splits the arguments of one call of a step function: see lamina/pipeline/batch_splitter.h."""

    def __init__(self, microbatches: int, needs_all: bool) -> None: ...
    def begin_argument(self, name: str, axis: int, is_said: bool, /) -> None: ...
    def add_tensor(self, name: str, tensor: torch.Tensor, /) -> None: ...
    def add_array(
        self, name: str, shape: Sequence[int], dtype: int, identity: int, values: torch.Tensor | None, /
    ) -> None: ...
    def add_self_slicing(self, name: str, type: str, /) -> None: ...
    def add_read_once(self, name: str, type: str, /) -> None: ...
    def add_packed(self, name: str, type: str, /) -> None: ...
    def add_other(self, name: str, /) -> None: ...
    def begin_list(self, name: str, size: int, is_size: bool, identity: int, /) -> None: ...
    def begin_container(self, name: str, /) -> None: ...
    def end(self) -> None: ...
    def lists(self, known: KnownLists) -> tuple[list[int], str | None]:
        """The numbers of lists of samples, and the name of one that may be either."""
    def decide(self, known: KnownLists) -> None: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def distinct(self) -> int:
        """How many microbatches there are before the last one is repeated."""
    @property
    def samples(self) -> list[int]:
        """The samples of each microbatch; [] where nothing is cut."""
    def cut(self, number: int) -> str:
        """How a value is cut: "whole", "rows", "elements", "itself" or "within"."""
    def axis(self, number: int) -> int: ...
    def places(self, number: int) -> list[tuple[int, int]]:
        """Where the piece of each microbatch begins, and its length."""
    def remarks(self) -> list[str]:
        """Lists those that are to be told once: "fewer", "split", "nothing"."""
    def text(self, remark: str) -> str: ...

def mean_of_outputs(outputs: Sequence[torch.Tensor], samples: Sequence[int], /) -> torch.Tensor:
    """See lamina/pipeline/outputs.h."""

def concat_outputs(outputs: Sequence[torch.Tensor], /) -> torch.Tensor: ...
def stack_outputs(outputs: Sequence[torch.Tensor], /) -> torch.Tensor: ...
def encode_roundtrip(value: Any) -> Any:
    """Value tree there and back through bytes: for tests."""

def in_step() -> bool:
    """True where this thread runs a step body, or a module for another rank."""

def microbatch() -> int:
    """Which one this thread works on; -1 for none, and with one partition."""

def leave_note(note: bytes) -> None:
    """In a module that runs for another rank: what that rank's `Session.take_notes` gives when the answer is there."""

def call_in_stream(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls the function. In a step, it draws from a stream that is seeded by one draw from the caller's."""

def is_pending(tensor: torch.Tensor) -> bool:
    """True for a reference that has not become its value."""

def materialise(tensor: torch.Tensor) -> None:
    """Makes a pending reference become its value; does nothing to other tensors."""

def settle() -> None:
    """Fetches what calls of other ranks have returned to this thread and somebody may still read."""

def is_away(tensor: torch.Tensor) -> bool:
    """True for one that is sharded, or other such memory, whose value is gone for now."""

def where_released(tensor: torch.Tensor) -> str:
    """The place of the value of a tensor of other ranks: "0.weight lives in partition 1 on rank 1". "" for any
    other."""

def why_guarded(tensor: torch.Tensor) -> str:
    """Says of what a guarded slice is one: "up.weight is sliced, and this rank has [8, 4] of its [16, 4]". "" for any
    other tensor. See lamina/value/guarded.h."""

def name_guarded(tensor: torch.Tensor) -> str:
    """The name of the parameter of which that is a guarded slice, or comes of one; "" for any other tensor."""

def require_whole(tensor: torch.Tensor, operation: str) -> None:
    """UsageError for a guarded slice that `operation` is about to take for the whole, but in an update."""

def guard_again(slice: torch.Tensor) -> None:
    """Guards a parameter that was, and had another value since."""

def guard_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    """Guards the gradient of a slice, as that is; does nothing for others, and inside `Unguarded`."""

def set_updating(updates: bool) -> None:
    """From now on, what this thread computes of slices is not guarded, as states of optimizers are; or is again."""

class Unguarded:
    """Inside, this thread does as it likes with slices."""

    def __enter__(self) -> None: ...
    def __exit__(self, *args: Any) -> None: ...

class Judged:
    """Inside, what this thread does with slices is judged, in a backward, too."""

    def __enter__(self) -> None: ...
    def __exit__(self, *args: Any) -> None: ...

def release(tensor: torch.Tensor, why: str, like: torch.Tensor) -> None:
    """Frees the value of a tensor, which becomes one of the dtype, device and strides of `like`; the Python object
    stays, and any use of the value is an error with the text `why`: lamina/value/released.h."""

def is_released(tensor: torch.Tensor) -> bool:
    """True where the value of `tensor` was freed."""

def watch_parameters(
    kind: type[torch.Tensor], sharding: Sharding | None = None, optimizer: Optimizer | None = None
) -> None:
    """From now on reading the gradient of a released tensor of that class warns once, unless torch or lamina reads, and
    setting its gradient or data is an error. The gradient of a sharded parameter is that of its shard. To scripts, a
    tensor that stands for a parameter in the optimizer has its part of the parameter's gradient, which is told once,
    too."""

def forget_parameters(kind: type[torch.Tensor]) -> None:
    """Ends what `watch_parameters` began."""

def restore(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a tensor that has no value a value again, of the same shape and dtype, in the memory of that one."""

class Config:
    """The checked configuration: one read-only attribute per key, as in lamina/config/config.h."""

    partitions: int
    microbatches: int
    schedule: str
    active_microbatches: int
    auto_partition: bool
    default_partition: int
    ddp: bool
    prove_slices: bool
    buffer_dtype: str | None
    timeout_s: float
    seed: int | None
    def differences(self, other: Config) -> str: ...

def parse_config(config_json: str) -> tuple[Config, list[str], list[str]]:
    """Config, warnings and the keys that are given, from the caller's JSON and the environment (LAMINA_CONFIG,
    SM_HP_MP_PARAMETERS, launcher)."""

def training_settings(
    fsdp_config: tuple[Any, str],
    deepspeed_config: tuple[Any, str],
    precision: tuple[Any, str],
    lamina_config: tuple[Any, str],
    ranks: int,
    device_type: str,
    batch_size: int | None,
    microbatch_size: int | str | None,
    microbatches: int | None,
) -> dict[str, Any]:
    """Settings of a training, of words of lamina.composer.user_words; see lamina/config/training_settings.h.
    ConfigError: all that is wrong with them."""

def precision_named(name: str) -> str | None:
    """The name of a precision in place of an older one, in any case of its letters; None where there is no such one."""

def read_precision(words: tuple[Any, str], device_type: str) -> str:
    """The name of a precision; None is the default of that device. ConfigError: there is no such precision."""

class World:
    """This process among those of its job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    master_addr: str
    master_port: int
    launched: bool

def read_world() -> World:
    """Returns what the launcher's environment (torchrun's variables, srun, mpirun) says; a world of one without any.
    Raises ConfigError naming what is missing or wrong."""

def report_consequence(words: str) -> bool:
    """Tells `lamina run` that this process ends because of an error of another rank. True when it is there: it shows
    the first cause, or these words if it finds none."""

def told(name: str) -> int | None:
    """Returns what the environment says of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE or NODE_RANK: the variable,
    else the launcher in its own words; None when nobody tells. Raises ConfigError."""

def batch_weights(samples: int, num_replicas: int, rank: int, batch_size: int, drop_last: bool) -> list[float]:
    """The weights of the losses of this rank's batches, of samples that are split exactly; see Sampler in
    lamina/dist/sampler.h."""

def world_to_meet() -> World:
    """As read_world; a world of one where WORLD_SIZE is 1, also when the rest is not set."""

def make_backend(
    store: Store,
    rank: int,
    members: list[int],
    timeout_s: float,
    job: Session | None = None,
    makes_within_s: float = 0.0,
) -> Backend:
    """torch's backend of a group of these world ranks, of which this one is number `rank`: over shared memory where
    they are processes of one host, else Gloo's. A job's is made within `makes_within_s`, and hears of lost ranks; a
    script's own within `timeout_s`. Collective. See lamina/collective/backend.h."""

def make_hierarchical(
    within: ProcessGroup,
    across: ProcessGroup,
    timeout_s: float,
    posted_over: Session | None = None,
    hosts: Sequence[int] = (),
) -> ProcessGroup:
    """A group that works by the levels `within`, the ranks of one host, and `across`, those of one index on each host.
    It has `_allgather_base`, `_reduce_scatter_base` and `allreduce`. See lamina/collective/hierarchical.h."""

def interface_of(world: World) -> str:
    """The network interface by which this rank reaches MASTER_ADDR; "" where none has the address."""

class JobStore:
    """The job's store; rank 0 hosts it while this lives, on the loopback device only where all ranks meet there."""

    def __init__(self, world: World, timeout_s: float):
        """Raises TimeoutError when nothing answers in time. Notices signals."""

class Meeting:
    """All ranks of a launched world, met at the job's store, which rank 0 hosts while this lives."""

    def __init__(self, world: World, name: str, timeout_s: float):
        """`name` is new for each meeting. Raises TimeoutError, which names the ranks that did not come, ConfigError
        when two processes have one rank, or ranks know of different numbers of ranks. Notices signals."""

INTERRUPTED: str  # the cause of a PeerError where Ctrl-C ended the rank that is gone

class Session:
    """The engine of this rank, from init to shutdown. Calls that wait release the GIL and notice signals."""

    def __init__(self, config: Config) -> None:
        """Reads the launcher's environment, connects the ranks."""

    config: Config
    rank: int
    size: int
    local_rank: int
    local_size: int
    launched: bool
    def group_rank(self, kind: Kind) -> int: ...
    def group_size(self, kind: Kind) -> int: ...
    def group_members(self, kind: Kind, rank: int | None = None) -> list[int]:
        """World ranks of this rank's group of that kind."""
    def translate(self, kind: Kind, index: int) -> int:
        """World rank of member `index` of this rank's group of that kind."""
    @property
    def leads(self) -> bool:
        """True where this rank runs the bodies of step functions."""
    @property
    def updates_masters(self) -> bool:
        """True where optimizers update masters in the place of parameters of half precision."""
    @property
    def updates_divided_over(self) -> str | None:
        """The group whose ranks share out what an optimizer updates of a parameter; None where each updates all."""
    def share_of(self, numel: int) -> tuple[int, int, int]:
        """This rank's share of so many elements in its sharding group: (begin, end, size); see layout::Share."""
    @property
    def stuck(self) -> bool:
        """A collective of a group was left that may never end; also true afterwards."""
    def make_groups_by(self, make: Callable[[Kind], ProcessGroup]) -> None:
        """Has `make` give torch's process group of a kind when the engine first uses it."""

    def order_turns(self, parameters: list[torch.Tensor]) -> None: ...  # lamina/session/sharding.h
    @property
    def needs_all_microbatches(self) -> bool: ...

    # Layers that are cut over a TP_GROUP: lamina/session/slicing.h, lamina/tensor_parallel/team.h.
    def slice(
        self, parameters: Sequence[tuple[str, torch.Tensor, Slicing]], make: Callable[[list[torch.Tensor]], None]
    ) -> None: ...
    def compare_slices(
        self, values: Sequence[tuple[torch.Tensor | None, torch.Tensor | None, float]], tolerance: float
    ) -> list[tuple[str, int, list[int]]]:
        """Returns what this rank's values are of whole ones, each pair with what counts as zero: "alike", "part",
        "scattered", "terms", "zero" or "another", and of parts the dimension and the sizes of all; collective."""
    def note_call(self, tensors: Sequence[torch.Tensor], training: bytes, trained: bytes, on_devices: bool) -> None:
        """Notes a call of the model, for the ranks of the team to compare as they next compute together."""
    def whole_of(self, slice: torch.Tensor, slicing: Slicing) -> torch.Tensor: ...
    def slice_of(self, whole: torch.Tensor, slicing: Slicing) -> torch.Tensor: ...
    def team(self) -> str:
        """The name by which operators find this rank's team; "" where layers are whole."""
    def give_up_step(self, exception: BaseException) -> None:
        """Has the other members of the team stop in what they wait for."""

    # Modules and parameters that ranks own and others use: lamina/parameter_server/service.h.
    parameter_server: ParameterServer
    def place(
        self, name: str, function: Callable[..., Any], parameters: list[tuple[str, torch.Tensor]]
    ) -> tuple[int, int, int, str, list]: ...
    def find(self, owner: int, name: str) -> tuple[int, int, int, str, list]: ...
    def call_placed(self, module: Address, label: str, arguments: tuple) -> Any: ...
    def make_remote_optimizer(
        self, functional: str, hyper: Sequence[float], parameters: Sequence[Address]
    ) -> RemoteOptimizer: ...
    def serve(self) -> None: ...
    def remote_backward(
        self,
        context: RemoteContext,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        keep_graph: bool,
    ) -> None: ...
    def remote_step(self, context: RemoteContext, optimizer: RemoteOptimizer) -> None: ...
    def share_remote(self, module: bool, address: Address) -> None:
        """Says to the owner of a module, or of an optimizer, that other ranks than its maker will name it."""

    # Objects between ranks, outside steps.
    def send(self, rank: int, channel: str, value: Any) -> None: ...
    def receive(self, rank: int, channel: str) -> Any: ...
    def all_gather(self, kind: Kind, value: Any) -> list[Any]: ...
    def first_given(self, kind: Kind, value: Any) -> tuple[int, Any] | None:
        """The first rank that gives something but None, and that."""

    def are_alike(self, kind: Kind, text: str) -> bool: ...
    def largest(self, kind: Kind, number: float) -> float: ...
    def totals(self, kind: Kind, sums: Sequence[float], largest: Sequence[float]) -> tuple[list[float], list[float]]:
        """Numbers of all ranks, each by its place: sums of the first ones, and of the others the largest."""

    def differing_arguments(self, kind: Kind, call: str, given: list[tuple[str, str]]) -> str: ...
    def barrier(self, kind: Kind) -> None: ...
    def loss(self, rank: int, within_s: float) -> str:
        """Waits until `rank` is lost and says why; "" when it is not in that time."""

    # The model.
    def plan(self, tree: ModuleTree, measures: Sequence[Any] | None, kept: dict[str, int]) -> Plan:
        """Says who is to own what, as the configuration asks, given what a trace has measured of each node; or as it
        was, where `kept` has the partition of each module."""
    def begin_life(self, face: object) -> None:
        """Cuts a model; collective over the world. `face` lends what Python does: see ModelFace in
        lamina/session/model_life.h and in lamina/pipeline/model_face.py. ConfigError with the error of world rank 0, if
        it has one; UsageError where a rank has another model, which names the first line of the description that
        differs."""
    def gather_state(self, own: dict[str, Any], to_first: bool = False, cut: Cut | None = None) -> dict[str, Any]:
        """Collective over the pipeline: what its ranks own of a state as one, on each, or else on the first alone and
        nothing on the others. It is in the order of the ranks, the later one's where two have a name, or in the plain
        model's with its cut."""
    def release_others(self, table: ParameterTable) -> None:
        """Frees the values that are not this rank's, also where views of them are alive."""
    def release(self, tensor: torch.Tensor, name: str, partition: int, like: torch.Tensor | None = None) -> None:
        """Frees the value of a tensor that another partition owns; shape, dtype and the Python object stay, and any use
        of the value is an error that names it. With `like` it first becomes that tensor, of another dtype or device."""
    def norms(
        self, table: ParameterTable, given: Sequence[tuple[torch.Tensor, torch.Tensor | None]], norm_type: float
    ) -> list[torch.Tensor]:
        """Collective over this rank's pipeline: the norms of what its ranks measure of the model's parameters, in the
        model's order; those of other tensors come last. Given as (a parameter or its gradient, what is measured of
        it)."""
    def hooked_modules(self, names: Sequence[str]) -> list[int]:
        """Numbers the model's modules; returns those whose calls have hooks."""
    def begin_call(
        self, module: int, remote: bool, inputs: Sequence[torch.Tensor] = (), shown: bool | None = None
    ) -> HookedCall:
        """A call of such a module on this rank, given these tensors."""
    @property
    def hooks_want_tensors(self) -> bool:
        """True where hooks are to be told what calls are given."""
    @property
    def is_recorded(self) -> bool:
        """True where this run is recorded, to be compared with another."""
    @property
    def is_collapsed(self) -> bool:
        """True in a run without the script's layout, to which another is compared."""
    @property
    def looked_at(self) -> set[str]:
        """The module of which it is recorded what its calls read."""
    def record_reads(self, module: str, variables: Sequence[tuple[str, str, Sequence[torch.Tensor], str]]) -> None:
        """Records what the call of this module that has begun last reads: name, value, tensors in it, and what
        another module does with it."""
    def set_model(
        self,
        cut: Cut,
        names: Sequence[str],
        own_stream: Sequence[bool],
        dynamic: Sequence[bool],
        runs: Sequence[tuple[str, int, int]],
    ) -> None:
        """The modules by index, before the first call: their names, whether calls of each run in a random stream of
        their own, and whether its results must not be predicted. Then runs, modules that are called as one: the name,
        the partition, and how many streams a call starts."""
    def watch_flags(self, names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> None:
        """Before a step, alike on every rank of the pipeline: the tensors whose requires_grad a step body may set."""
    def set_order(self, parameters: Sequence[torch.Tensor], forwards_change_the_model: bool) -> None:
        """With `deterministic_server`, before each step, on every rank: the parameters that this rank owns, and whether
        forwards change the model, wherever it lives and but for `set_statistics`, so that microbatches have to take
        turns."""
    def set_statistics(
        self, modules: Sequence[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, float | None]]
    ) -> None:
        """After it, before each step: (name, running mean, running variance, count, momentum) of the BatchNorms of this
        rank. After the step they are those of the plain loop."""

    # The step.
    def run_step(
        self,
        microbatches: int,
        body: Callable[[int], Any],
        merge: Callable[[list[Any], list[int]], Any],
        *,
        cut: Callable[[], None] | None = None,
        call: tuple[str, str] = ("", ""),
        samples: Sequence[int] = (),
        backwards: Backwards | None = None,
        parameters: Callable[[], Sequence[torch.Tensor]] | None = None,
        reducer: Reducer | None = None,
        training: bool = False,
    ) -> Any:
        """Runs one step; every rank of the pipeline calls it. `body(microbatch)` runs on worker threads of the leading
        rank (pp_rank 0) only; where the pipeline is this rank alone, for one microbatch after the other in this thread.
        Returns what `merge` makes of its results, one per microbatch, on every rank. With `cut` this is the step in
        which the model is cut: that does so where no body has called `cut_here`. `call` is the step function's name,
        the same on all ranks (DesyncError else), and where it was called.

        Of a model: its `backwards`; why one in this step is an error, if it is; and its parameters, by which others are
        noticed. With several copies of it `reducer` is theirs, and ends the pass; `training` is the model's mode."""
    def cut_here(self, cut: Callable[[], None]) -> None:
        """In a body of the step in which the model is cut: has the thread that entered the step run `cut`, unless the
        model is cut already, and waits for that. UsageError in another thread; CancelledError where a cut failed."""
    def take_notes(self) -> list[bytes]:
        """Returns what owners of modules left for this rank in their answers, each once."""
    def require_everywhere(self, what: str) -> None:
        """Refuses `what` in the body of a step: every rank of a pipeline is to do it."""
    @property
    def seeded_steps(self) -> int | None:
        """With the key `seed`, how many steps have drawn random numbers; to be set outside of steps."""
    @seeded_steps.setter
    def seeded_steps(self, steps: int) -> None: ...
    def set_seed(self, seed: int) -> None: ...  # of the next steps
    @property
    def microbatches(self) -> int:
        """Into how many a step cuts its batch."""
    @microbatches.setter
    def microbatches(self, microbatches: int) -> None: ...
    def call(self, index: int, args: tuple, kwargs: dict) -> Any:
        """Calls module `index` on the rank that owns it. Inside a step only."""
    def tell_leaving(self, how: str) -> None:
        """Tells the other ranks how this one comes to leave: before close() or leave()."""
    def leave(self, interrupted: bool) -> bool:
        """At the end of the process: as close(), but the connections stay until the process has ended, so that the
        peers take that for this rank's end. Where it was `interrupted` (Ctrl-C), they are told so at once."""
    def close(self, orderly: bool) -> bool:
        """Ends the session; idempotent. `orderly` waits a bounded time until the peers have what was sent. False when a
        thread is still in the user's code of a step that failed."""

class ModuleTree:
    """The modules that can be owned: see [Note: module tree] in lamina/model/module_tree.h.

    Attributes:
        names, parents, ids: per node; the root is node 0, with the parent -1.
        homes: by id of each module, the node that it is, or is part of.
        starting_stream, waited_for: ids of the nodes whose calls run in a random stream of their own, and are waited
            for.
    """

    names: list[str]
    parents: list[int]
    ids: list[int]
    homes: dict[int, int]
    starting_stream: set[int]
    waited_for: set[int]
    def add(
        self,
        path: str,
        id: int,
        type: str,
        role: Literal["called", "container", "part"],
        tensors: Sequence[tuple[str, torch.Tensor, bool, bool, Sequence[int]]],
        *,
        indivisible: bool = False,
        same_everywhere: bool = False,
        draws: bool = False,
        dynamic: bool = False,
        keeps_statistics: bool = False,
        placed_at: int | None = None,
    ) -> None:
        """A module in one of its places, parents first. Its tensors: name, tensor, is it a buffer, has it a shape."""
    def paths(self) -> list[tuple[str, int]]:
        """Gives the home of each module, under each of its names."""
    def tensors(self) -> list[tuple[str, torch.Tensor, int]]:
        """(name, tensor, node) of every parameter, then of every buffer, each once."""
    def description(self) -> str:
        """A line for each module and tensor: equal texts, equal models."""
    def rows(self, measures: Sequence[Any] | None = None) -> tuple[list[dict[str, Any]], list[int]]:
        """The rows of a plan, children in the order of their first calls, and the node that each stands for. Keys:
        those of a node in a plan's file, with the position as "id", and "placed_at", a partition or None."""

class Plan:
    """Says who is to own what.

    Attributes:
        report: {"partition": {name: partition}, "stages": [{"partition", "time_us", "parameter_bytes", "memory_bytes",
            "out_bytes"}], "predicted_step_us", "bubble", "warning"}; times are None where no node has any. See
            lamina/plan/report.h.
    """

    report: dict[str, Any]

class HookedCall:
    """A call of a module that has hooks: see [Note: call hooks] in lamina/model/call_hooks.h. Either ends it."""

    def end(self, outputs: Sequence[torch.Tensor]) -> None: ...
    def fail(self) -> None: ...

class Cut:
    """A model that is cut: see lamina/model/cut.h.

    Attributes:
        owners, anywhere: per node, its partition, and whether it runs where its argument lies.
        here: this rank's partition.
    """

    owners: list[int]
    anywhere: list[bool]
    here: int
    def __init__(self, tree: ModuleTree, owners: Sequence[int], anywhere: Sequence[int], here: int) -> None: ...
    def owner_of(self, name: str) -> int:
        """The partition of a parameter, buffer or module, or of any other part of a state dict."""
    def owns(self, name: str) -> bool:
        """True where this rank does."""

class ParameterTable:
    """The table of who holds what of the model: see [Note: parameter table] in lamina/model/parameter_table.h."""

    def __init__(
        self, session: Session, cut: Cut, rows: Sequence[tuple[str, torch.Tensor, bool, Slicing | None]]
    ) -> None:
        """A row for each tensor: its name, it, whether it is a buffer, how it is sliced. Parameters come first."""
    def is_here(self, tensor: torch.Tensor) -> bool:
        """True where this rank has elements of a tensor; for one that is not the model's, too."""
    def has_any(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True where one of them is the model's, or the gradient of a parameter of the model's."""
    def reduced_over(self, parameter: torch.Tensor) -> str | None:
        """The group over which its gradients are reduced; None for what is not the model's."""
    @property
    def whole_everywhere(self) -> bool:
        """True where each rank has all of the model."""

class Backwards:
    """The backwards of a job's model, which with `averages` make gradients the mean over a step's samples; see
    lamina/pipeline/backwards.h."""

    def __init__(self, session: Session, averages: bool) -> None: ...
    def add_up(self) -> None:
        """From now on they divide by nothing: somebody else averages the gradients."""
    def scale_by(self, scale: LossScale) -> None:
        """Losses are multiplied by that, while it lives."""
    def watch(self, parameters: Sequence[torch.Tensor], forgets: bool) -> None:
        """With a loss scale, other backwards are noticed by the gradients that they leave in these, as they are now.
        `forgets`: those of others are gone when none of these has one."""
    @property
    def plain(self) -> int:
        """Counts what other backwards have left while losses were scaled."""
    @property
    def plain_forgotten(self) -> int:
        """Counts what of it was there when all gradients were last forgotten."""
    def forget_plain(self) -> None:
        """They are forgotten now."""
    @property
    def count(self) -> int:
        """How many have run on this rank."""
    def run(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], reducer: Reducer | None
    ) -> None:
        """One backward, over all ranks of the pipeline; with several copies of the model the reducer hears of it."""

# Checkpointed activations in the host's memory: lamina/runtime/offload.h.

class KeptActivation:
    def take(self) -> torch.Tensor:
        """The tensor on its device."""

class Offload:
    def __init__(self, horizon: int) -> None: ...
    def keep(self, tensor: torch.Tensor) -> KeptActivation | None:
        """Sends it to the host; None where it lies there."""

# The replicas.

class ShardedGradients: ...

class Functional:
    """An optimizer as a function of memory; see lamina/optim/functional.h."""

    @property
    def hyper(self) -> list[tuple[str, int | None, list[str], float]]:
        """Its hyper-parameters: the key of a group, the place in the tuple that it has there, the words of which one is
        an index, and what holds where nothing is given."""
    @property
    def norm(self) -> bool:
        """True where it needs the norm of all gradients."""
    @property
    def needs(self) -> Literal["elements", "norms", "whole"]:
        """Says what it has to know of a parameter: see [Note: needs] in lamina/fused/declaration.h."""
    @property
    def numbers(self) -> list[str]:
        """The states that are one number for a parameter, by name."""
    def check(self, hyper: Sequence[float]) -> None:
        """UsageError for values that it does not take."""

def functional(name: str) -> Functional:
    """The form of the optimizer of that name."""

def load_functional(path: str) -> str:
    """Adds the optimizer of a shared library, see lamina/fused/plugin.h, and returns its name."""

Address = tuple[int, int, int]  # owner, its job, number

class Updater:
    """The rule of an optimizer, with its states: lamina/parameter_server/optimizer.h."""

def functional_updater(functional: Functional, hyper: Sequence[float], parameters: int) -> Updater:
    """One of the engine's, for so many parameters."""

def python_updater(function: Callable[[list[torch.Tensor | None]], None]) -> Updater:
    """A function of the gradients, which holds the GIL."""

def script_updater(module: torch.jit.ScriptModule) -> Updater:
    """A module of TorchScript with `step(gradients)`, which does not hold the GIL."""

def writable(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor that a LocalOptimizer writes to: it shares the parameter's memory, and counts writes by itself."""

class LocalOptimizer:
    """An optimizer of parameters of this process that are no part of a job. From any thread."""

    def __init__(self, parameters: Sequence[torch.Tensor], updater: Updater) -> None: ...
    def step(self, gradients: Sequence[torch.Tensor | None], hyper: Any = None) -> None:
        """Updates those that have a gradient, with hyper-parameters as its updater takes them. Releases the GIL."""

class RemoteOptimizer:
    """An optimizer of parameters on several ranks: its part on each owner."""

    def __init__(self, parts: Sequence[Address], needs_norm: bool = False) -> None: ...
    parts: list[Address]
    needs_norm: bool
    hyper: Any  # of its steps, as its updaters take them; None: those that it was made with

class RemoteContext:
    """See [Note: contexts] in lamina/parameter_server/protocol.h."""

    origin: int
    number: int
    ended: bool
    def gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The leaves here that have one, and theirs."""

class ParameterServer:
    """This rank's end of what ranks own and others use."""

    contexts: int
    modules: int
    optimizers: int
    def add_optimizer(self, parameters: Sequence[int], updater: Updater) -> int: ...
    def writable(self, parameter: int) -> torch.Tensor: ...
    def begin_context(self) -> RemoteContext: ...
    def end_context(self, context: RemoteContext) -> None: ...

class OptimizerGroup:
    """Parameters of a group, with the states that the optimizer's `state` has of them."""

    def __init__(
        self,
        functional: Functional,
        parameters: list[torch.Tensor],
        states: dict[torch.Tensor, Any],
    ) -> None: ...
    @property
    def each_once(self) -> bool:
        """False where a parameter is listed twice."""
    @property
    def have_own_elements(self) -> bool:
        """False where a parameter is of a tensor subclass with a dispatch of its own."""
    def is_of(self, parameters: list[torch.Tensor], states: dict[torch.Tensor, Any]) -> bool:
        """True where these are its parameters, and this its dict."""

def squared_gradient_norm(
    groups: list[OptimizerGroup], scale: float, gradients: Sequence[torch.Tensor | None] | None = None
) -> float:
    """Sum of the squares of all gradients, which are multiplied by `scale` first.

    Args:
        gradients: those of the only group; each parameter's own where they are not given.
    """

def functions_are_recorded() -> bool:
    """True where a profiler, or another observer of torch's, is told of functions."""

def optimizer_step(
    groups: list[OptimizerGroup],
    hyper: Sequence[Sequence[float]],
    scale: float,
    gradient_norm: float,
    gradients: Sequence[torch.Tensor | None] | None = None,
    around: LocalParameters | None = None,
) -> None:
    """Updates parameters that have gradients, which are multiplied by `scale` first. Releases the GIL; with parts and
    an optimizer that needs norms collective over their holders. From one thread at a time for the same groups.

    Args:
        hyper: of each group, the hyper-parameters.
        gradients: those of the only group; each parameter's own where they are not given.
        around: knows halves that parameters stand in for, which get their values, too.
    """

class LossScale:
    """Multiplies losses; see lamina/optim/loss_scale.h. `LossScale(scale)` stays as it is."""

    @overload
    def __init__(self, scale: float) -> None: ...
    @overload
    def __init__(
        self,
        *,
        init_scale: float = 4294967296,
        scale_factor: float = 2,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None: ...
    @property
    def value(self) -> float: ...
    @property
    def is_dynamic(self) -> bool: ...
    @property
    def is_on(self) -> bool: ...
    def update(self, overflow: bool) -> None: ...
    state: dict[str, float]

class LocalParameters:
    """Knows what stands in the groups of an optimizer for parameters of the model; see
    lamina/distributed_optimizer/local_parameters.h."""

    def set_model(self, table: Callable[[], ParameterTable], sharding: Sharding | None) -> None: ...
    def source(self, local: torch.Tensor) -> torch.Tensor:
        """The parameter or shard that a member of the groups stands in for, or that itself."""
    def is_master(self, local: torch.Tensor) -> bool: ...
    def follow(self) -> None:
        """Gives masters the values of their parameters where those have changed."""
    def share_written(self) -> None:
        """Gives parameters on all ranks what a program has written to their parts; collective over those who hold them
        where there is something."""
    @property
    def in_step(self) -> bool:
        """True while an update is under way."""
    @property
    def divided_over(self) -> str | None:
        """The group of those who hold parts of the same parameters, where anything is divided."""

class UpdateTerms:
    """An update's."""

    @property
    def factor(self) -> float:
        """The number that gradients are still to be multiplied by."""
    @property
    def norm(self) -> float:
        """The norm of all of them then; 0 where nobody has measured it."""
    @property
    def parameters(self) -> LocalParameters | None:
        """None where all members of the groups are parameters."""
    @property
    def has_closure(self) -> bool: ...
    def close(self) -> None:
        """Calls the closure."""

_Given = tuple[torch.Tensor, str]
_Moved = Sequence[tuple[torch.Tensor, torch.Tensor | None]]
_Member = tuple[str, str, torch.Tensor, torch.Tensor | None]

class UserOptimizer(Protocol):
    """An optimizer as the engine sees it; see lamina/distributed_optimizer/user_optimizer.h."""

    def named_parameters(self) -> list[_Given]: ...
    def groups(self) -> list[list[_Given]]: ...
    def members(self) -> list[torch.Tensor]: ...
    def trim(self, groups: Sequence[Sequence[_Given]], moved: _Moved) -> None: ...
    def exchange(self, groups: Sequence[Sequence[torch.Tensor]], moved: _Moved) -> None: ...
    def state_of(self, member: torch.Tensor) -> dict[str, Any] | None: ...
    def set_state(self, member: torch.Tensor, state: dict[str, Any] | None) -> None: ...
    def options(self, counts: bool) -> str: ...
    def needs(self) -> str: ...
    def needs_norm(self) -> bool: ...
    def takes_any_gradient(self) -> bool: ...
    def update(self, terms: UpdateTerms) -> None: ...
    def zero_grad(self, set_to_none: bool) -> None: ...

class Optimizer:
    """Everything around the updates of an optimizer of the job's model; see lamina/distributed_optimizer/optimizer.h.
    `number`: how many optimizers the job had before."""

    def __init__(self, session: Session, scale: LossScale, number: int, clips_by_default: bool) -> None: ...
    @property
    def parameters(self) -> LocalParameters: ...
    @property
    def beside(self) -> list[torch.Tensor]:
        """The parameters that are not the model's."""
    def trim(self, user: UserOptimizer) -> bool:
        """Makes groups this rank's part. True where there are new members that are not the model's, with which it is
        collective over the world."""
    def members(self, user: UserOptimizer) -> list[list[_Member]]:
        """By group, all members as far as this rank knows them: the name, the name it was given with, the parameter,
        and what stands for it here, None where another rank updates it."""
    def are_cut(self, user: UserOptimizer) -> bool:
        """False where a script has put members into groups since they were cut, or groups came."""
    def are_whole(self, user: UserOptimizer) -> bool:
        """True where no member has left, and none is another tensor than the model's."""
    @property
    def holds_others(self) -> bool:
        """True where other tensors than the model's stand here, whether the job goes on or not."""
    def parameter_of(self, local: torch.Tensor) -> torch.Tensor:
        """The parameter of the model that a tensor is, or stands for."""
    def part_of_state(
        self, user: UserOptimizer, local: torch.Tensor, parameter: torch.Tensor, state: dict[str, Any]
    ) -> Any: ...
    def state(
        self, user: UserOptimizer, extent: Literal["part", "here", "whole", "first"]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """States and masters by the names of parameters; see Extent in lamina/distributed_optimizer/states.h."""
    def parts_of(self, user: UserOptimizer, states: dict[str, Any], are_parts: bool) -> list[Any]:
        """For each member here its part of a state."""
    def gathered(
        self, states: dict[str, Any], masters: dict[str, torch.Tensor]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The states that the ranks of one copy of the model have together; collective over these."""
    def misfit(self, user: UserOptimizer, masters: dict[str, torch.Tensor], are_parts: bool) -> str:
        """Says what keeps masters here from having these values, "" if nothing."""

    def take_masters(self, user: UserOptimizer, masters: dict[str, torch.Tensor], are_parts: bool) -> None:
        """Gives masters here these values."""
    def step(
        self,
        user: UserOptimizer,
        backwards: Backwards | None,
        reducer: Reducer | None,
        steps: int,
        closure: Callable[[], None] | None,
    ) -> None:
        """`backwards`, `reducer`, `steps`: of the model, which has made so many."""
    def clip(
        self, user: UserOptimizer, backwards: Backwards | None, reducer: Reducer | None, steps: int, max_norm: float
    ) -> float:
        """The norm of all gradients, which the next step clips; -1 where they overflow."""
    def zero_grad(self, user: UserOptimizer, backwards: Backwards | None, set_to_none: bool) -> None: ...
    def follow(self) -> None:
        """Gives masters the values of their parameters where those have changed."""
    def note_load(self) -> None:
        """A state was loaded into it."""
    @property
    def overflow(self) -> bool:
        """True where gradients did so in the last step, which was left out."""
    @property
    def norm(self) -> float:
        """The norm that the last step measured, without the loss scale and before clipping; 0 where it did not."""

def require_same_options(session: Session, options: str, with_copies: bool) -> None:
    """UsageError, on all, where options differ between ranks that train one model; collective over these."""

def units_by_rules(
    modules: Sequence[tuple[str, bool, bool | None, bool, list[int]]], sizes: Sequence[int], least: float
) -> list[tuple[str, str, list[int]]]:
    """Units as (name, rule, numbers of parameters), of modules as (name, whether it is called, its word, its root's
    function's, numbers of all parameters in it); see lamina/sharding/units.h."""

class Sharding(ShardedGradients):
    """Sharded data parallelism on this rank; see lamina/sharding/sharding.h. Parameters go by their numbers."""

    @property
    def parameters(self) -> list[tuple[str, torch.Tensor]]: ...
    def shard(self, number: int) -> torch.Tensor: ...
    def find(self, parameter: torch.Tensor) -> int | None:
        """The number of a parameter, or of the one whose memory a tensor has."""
    def find_shard(self, shard: torch.Tensor) -> int | None:
        """The number of the parameter whose shard it is."""
    def parameter(self, number: int) -> torch.Tensor: ...
    def hold(self, number: int) -> None:
        """Has the whole value here, until as many `let_go`."""
    def let_go(self, number: int) -> None: ...
    def lend(self, number: int) -> None:
        """Gives a copy of the value that may be written to, until `take_back`."""
    def take_back(self, number: int) -> None: ...
    def zero_grad(self, number: int, set_to_none: bool) -> None:
        """Forgets the shard's gradient, or makes it zero, and what was summed for its next one."""
    def write_back(self, number: int, value: torch.Tensor) -> None:
        """Gives this rank's shard its part of a whole value."""
    @property
    def live(self) -> int:
        """Elements of values that are here."""
    @property
    def most_live(self) -> int: ...
    def before_update(self) -> None:
        """Before shards change; collective over the sharding group, like `after_update`."""
    def after_update(self) -> None: ...
    def measured(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]], norm_type: float
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Parameters and gradients with the norm of all of a gradient, as a tensor, in the place of a shard's;
        collective over the sharding group."""
    def gather(self, number: int, part: torch.Tensor) -> torch.Tensor:
        """The whole of which each rank has such a part, in the parameter's shape; collective over the sharding
        group."""
    def part_of(self, number: int, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole, padded with zeros."""

class Reducer:
    """The gradients and buffers of this rank's part of a model, and those of the same part on the other replicas; see
    lamina/data_parallel/reducer.h, also for the order of the calls.

    `parameters` and `buffers` return those of this rank as they are now.
    """

    def __init__(
        self,
        session: Session,
        passes_per_reduction: int,
        bucket_bytes: int,
        broadcast_buffers: bool,
        overlap: bool,
        gradients_are_views: bool,
        parameters: Callable[[], Sequence[tuple[str, torch.Tensor]]],
        buffers: Callable[[], Sequence[tuple[str, torch.Tensor]]],
        scaled_batch: Callable[[], Sequence[tuple[str, torch.Tensor]]] | None = None,
    ) -> None:
        """`scaled_batch`: parameters beside those of `parameters`; see [Note: two reductions]."""
    def set_hook(self, hook: Callable[[int, bool, torch.Tensor, list[torch.Tensor]], torch.futures.Future]) -> None:
        """The gradients become the tensor of the future that `hook` returns for each bucket: for its index, whether it
        is the last, the gradients of its parameters as one 1-D tensor, and those. UsageError where it is none."""
    @property
    def stuck(self) -> bool:
        """A collective was left that may never end: a group cannot be closed then."""
    def close(self) -> None:
        """The end of the job: lets go of its group. Nothing is reduced any more."""
    def see_batch(self, batch: list[torch.Tensor]) -> None:
        """Before the first pass: tensors that this replica is about to be trained on."""
    def share_batches(self) -> None:
        """The replicas have the same batches on purpose."""
    @property
    def looks_at_batches(self) -> bool:
        """True until the first pass, unless batches are shared."""
    def note_call(self, training: bool) -> int:
        """The model is called outside of steps. Returns the call's number; 0 for one without gradients."""
    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """From now on, until the next time, gradients that come to these, as they are now, are noticed."""
    def let_go(self) -> None:
        """Holds none of the parameters until the next `watch`: all replicas do so between passes."""
    def await_backward(self, call: int) -> None:
        """A backward has reached the output of that call of the model: its end is noticed."""
    def forget_call(self, call: int) -> None:
        """No backward can follow that call."""
    def hold_back(self) -> None:
        """From now on backwards are held back: their gradients stay here until the next pass that averages."""
    def release(self) -> None:
        """Ends one `hold_back`."""
    def complete(self, what: str) -> None:
        """Before somebody looks at gradients: what waits for a later pass is averaged now, collective over the
        replicas. `what` names the caller. UsageError in a backward or a step whose gradients are still to be averaged.
        """
    def before_update(self) -> None:
        """Does so before an update, of which the next pass tells the other replicas."""
    def set_sharded(self, sharded: ShardedGradients) -> None:
        """Has gradients of other parameters reduced by these."""
    @property
    def joining(self) -> bool: ...
    @property
    def accumulates(self) -> bool:
        """There are gradients that the next reduction is to have: passes since the last one."""
    def begin_join(self, by_everyone: bool, throws: bool) -> None: ...
    def fail_join(self, exception: BaseException) -> None: ...
    def end_join(self) -> None: ...

# Checkpoints: lamina/checkpoint, lamina/job_checkpoint.

class Save:
    """A save of all ranks that is under way."""

    @property
    def is_over(self) -> bool: ...
    def wait(self) -> None:
        """Waits for its end, and raises what it ended with, alike on all ranks."""

class Saves:
    """The saves of a job: one at a time."""

    def __init__(self) -> None: ...
    def end(self) -> None:
        """Waits for the one that is under way, and raises what it ended with, unless that was raised already."""
    def check_before_step(self) -> None:
        """Raises, once, what it has failed with: on all ranks before the same step."""
    def drop(self) -> None:
        """Gives up the one that is under way, and its error."""

def require_model(has_model: bool, call: str) -> None:
    """UsageError where there is no model."""

class Recording:
    """Tells the recorder of a session what its hooks do not see: see lamina/job_checkpoint/record_job.h. `job`: a
    CheckpointedJob."""

    def __init__(self, session: Session) -> None: ...
    def begin_step(self, session: Session, job: Any) -> bool:
        """A step function is called. True: the program is to end."""
    def begin_call(self, session: Session, job: Any) -> bool:
        """A module is called. True: the program is to end."""
    def note_cut(self, session: Session, job: Any) -> None:
        """The model is cut, and has its values."""
    def before_update(self, session: Session, job: Any) -> None:
        """An optimizer that is not the job's is about to update."""
    def see_results(self, results: Sequence[Sequence[torch.Tensor]]) -> None:
        """Takes the tensors that a step function has returned for each microbatch."""
    def end_step(self) -> None:
        """A step function has done its work."""
    def end(self, session: Session, job: Any) -> None:
        """The job ends."""

def require_ready(session: Session, job: Any) -> None:
    """UsageError, on all ranks, where there is nothing yet, or not now, to be saved. Collective over the world. `job`:
    here and below a CheckpointedJob."""

class PlainRun:
    """A microbatch of a model that is not cut, recorded in memory: lamina/verification/plain_run.h."""

    def watch(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Records gradients of these parameters, by name."""
    def begin(self, module: int, inputs: Sequence[torch.Tensor]) -> HookedCall:
        """A call of the module of this number."""

class PlainValues:
    """Values of a model that is called plainly: lamina/session/plain_values.h."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, whole."""
    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of modules that live elsewhere, by `module.attribute`."""

class StepCheck:
    """The check of first steps: lamina/session/step_check.h. Tensors are given with how they are sliced."""

    @staticmethod
    def of_job(session: Session) -> StepCheck | None:
        """None where no step is compared."""
    @property
    def is_over(self) -> bool: ...
    @property
    def leads(self) -> bool: ...
    @property
    def sees_calls(self) -> bool: ...
    def look_for_room(self, tensors: Sequence[tuple[str, torch.Tensor, Slicing | None]]) -> None: ...
    def take_first_values(self, tensors: Sequence[tuple[str, torch.Tensor, Slicing | None]]) -> None: ...
    def take_values(
        self,
        tensors: Sequence[tuple[str, torch.Tensor, Slicing | None]],
        sharding: Sharding | None,
        hooked: set[str],
        attributes: dict[str, Any],
    ) -> None: ...
    def run_plainly(
        self,
        model: Any,
        modules: Sequence[str],
        given: Sequence[torch.Tensor],
        parameters: Sequence[tuple[str, torch.Tensor]],
        hooked: set[str],
    ) -> None:
        """`model`: a PlainModel; None where the step calls no model."""
    def leave_out(self, why: str) -> None: ...
    def begin_step(self, parameters: Sequence[tuple[str, torch.Tensor, Slicing | None]]) -> None: ...
    def see_outputs(self, outputs: Sequence[torch.Tensor]) -> None: ...
    def see_backward(self, tensors: Sequence[torch.Tensor]) -> None: ...
    def run_backward(self) -> None: ...
    def end_step(self) -> None:
        """UsageError on all ranks where the step is not the plain model's."""

class Alone:
    """A context of a trace, in which collectives of sliced layers take this rank's part for that of each."""

    def __enter__(self) -> None: ...
    def __exit__(self, *args: Any) -> None: ...

def is_alone() -> bool:
    """True in an `Alone` of this thread."""

def team_size(team: str) -> int: ...

# Plans and cuts of layers: lamina/tensor_parallel/plans.h, layer_cuts.h.
class ModelModule:
    parameters: list[tuple[str, int]]
    in_features: int
    reaches_base: bool
    has_variant: bool
    is_marked: bool
    is_replaced: bool
    plan: list[tuple[str, str]] | None
    transformers_plan: list[tuple[str, str]]
    own_style: str

    def __init__(self, type: str, classes: Sequence[str]) -> None: ...
    def set_heads(self, name: str, count: int) -> None: ...
    def set_own_plan(
        self, styles: Sequence[tuple[str, str]], in_parts: Sequence[tuple[str, str]], is_stack: bool
    ) -> None: ...

class LayerKind:
    OTHER: LayerKind
    LINEAR: LayerKind
    CONV1D: LayerKind
    EMBEDDING: LayerKind

class ParentModule:
    numbers: dict[str, int]

class PlannedLayer:
    name: str
    kind: LayerKind
    layer: int
    member: int
    parent: int
    shape: list[int]
    has_bias: bool
    has_own_forward: bool
    has_options: bool
    padding: int | None
    said_heads: str

    def set_said_heads(self, count: int) -> None: ...

class LayerCut:
    name: str
    style: str
    slices: list[tuple[str, tuple[int, list[tuple[int, int]]]]]
    sizes: list[int]
    part: tuple[int, int, int]
    chosen: list[int] | None
    sections: list[tuple[int, int]]
    by_parent: bool
    padding: int | None
    numbers: list[tuple[str, int | None]]

class ParentCut:
    parent: int
    members: list[tuple[int, tuple[int, int, int] | None]]
    heads: tuple[int, int, int] | None
    own_keys: list[int]
    keys: int
    numbers: dict[str, int]

def plan_layers(
    modules: Sequence[ModelModule], names: Sequence[tuple[str, int]], degree: int, in_parts: bool
) -> tuple[dict[int, ParentModule], list[PlannedLayer], list[PlannedLayer], list[list[str]]]:
    """The modules around layers that are to be sliced, these layers, those that are elsewhere, too, and the names of
    tied parameters. UsageError where a plan names what is not there."""

def cut_layers(
    parents: Mapping[int, ParentModule],
    layers: Sequence[PlannedLayer],
    elsewhere: Sequence[PlannedLayer],
    tied: Sequence[Sequence[str]],
    degree: int,
    member: int,
) -> tuple[list[LayerCut], list[ParentCut]]:
    """The cuts for one of so many members of a team. UsageError where sizes do not allow what the plan asks for."""

class AsInBody:
    """A context, in which modules have streams of random numbers as in the body of a step."""

    def __enter__(self) -> None: ...
    def __exit__(self, *args: Any) -> None: ...

def save_job(
    session: Session,
    job: Any,
    saves: Saves,
    *,
    folder: str,
    tag: str,
    partial: bool,
    keep: int,
    asynchronous: bool,
    allow_objects: bool,
) -> Save:
    """Begins to save a job: lamina/job_checkpoint/save_job.h. Collective over the world."""

def resume_job(
    session: Session,
    job: Any,
    saves: Saves,
    *,
    folder: str,
    tag: str | None,
    partial: bool,
    strict: bool,
    load_optimizer: bool,
    load_sharded_optimizer_state: bool,
    verify: bool,
    allow_objects: bool,
    translate: bool,
    missing_ok: bool,
) -> None:
    """Loads a checkpoint into a job: lamina/job_checkpoint/resume_job.h. Collective over the world."""

def together(session: Session, act: Callable[[], Any]) -> Any:
    """Acts on this rank, as all ranks do; then raises what failed on one of them, the first, on all. Collective over
    the world."""

class Resumption:
    """A checkpoint that waits for the cut of a model."""

    @property
    def partition(self) -> dict[str, int]:
        """The partition of each module, where the job has as many as the saved one; else {}."""
    @property
    def has_optimizers(self) -> bool:
        """False for the model alone."""
    def load(self) -> None:
        """Loads it into a model that is cut; collective over the world."""

class OutputFile:
    """A file of a checkpoint that is being written, as torch.save takes it."""

    def write(self, data: Any) -> int: ...
    def flush(self) -> None: ...

def begin_save_of_files(
    session: Session,
    job: Any,
    folder: str,
    tag: str,
    form: str,
    more: dict[str, Any],
    files: Sequence[tuple[str, int, Callable[[OutputFile], Any]]],
    keep: int,
) -> Save:
    """Begins to save a job as files of another form, of which the manifest tells `more`. Of each that this rank has,
    `files` gives the name, about how many bytes, and a function that writes it in a thread of the save's."""

def open_output(path: str, flags: int) -> int:
    """The descriptor of a file to write, opened with the flags of os.open: a regular file of this user with one name,
    and no link. FileError for anything else that others could have put there."""

# Recordings of what the ranks do in steps, and when: lamina/observe.

def start_timeline(session: Session, path: str) -> None:
    """Records this rank from now on, for a file that world rank 0 is to write; collective over the world. Raises
    UsageError where it is recorded already, and FileError on every rank where the file could not be written."""

def stop_timeline(session: Session) -> None:
    """Ends it and drops what was recorded."""

def records_events(session: Session) -> bool:
    """True while a timeline is recorded."""

def name_turn(name: str) -> str:
    """In a step: what this thread does from now on is recorded under that name. -> the name before."""

def write_timeline(session: Session, path: str) -> str:
    """Ends it; collective over the world. World rank 0 writes what all have recorded to the file and gets a summary;
    the others get ""."""

def take_totals(session: Session) -> dict[str, float]:
    """Sums of this rank's steps since the last call: "step_s", "compute_s", "messages" and "sent_bytes", and the most
    memory that its process had, "memory_bytes". The first call begins to count."""
