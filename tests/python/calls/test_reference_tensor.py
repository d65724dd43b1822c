# SPDX-License-Identifier: Apache-2.0
"""A reference answers every call as a plain tensor does; only what needs its value waits for it.

Each case runs once with a reference and once with a plain tensor of the same value.
"""

import copy
import io
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from python.calls.references import pending, pending_reference, plain, same

from lamina import _lamina
from lamina._lamina import is_pending, materialise

VALUE = torch.arange(6.0).view(2, 3)
SCALAR = torch.tensor(2.5)
INDEX = torch.tensor([1, 0, 1])
IMAGE = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)


def saved_and_loaded(tensor):
    file = io.BytesIO()
    torch.save({"a": tensor}, file)
    file.seek(0)
    return torch.load(file)


def registered(tensor):
    module = torch.nn.Module()
    module.register_buffer("b", tensor)
    return [name for name, _ in module.named_buffers()]


def with_attribute(tensor):
    module = torch.nn.Linear(1, 1)
    module.kept = tensor
    return module


def hidden(tensor):
    tensor.hidden = 3
    return tensor.hidden


def unpacked(tensor):
    first, second = tensor
    return first, second


METADATA = {
    "shape": lambda r: r.shape,
    "size": lambda r: (r.size(), r.size(-1)),
    "stride": lambda r: r.stride(),
    "dtype": lambda r: r.dtype,
    "device": lambda r: r.device,
    "layout": lambda r: r.layout,
    "dim": lambda r: (r.dim(), r.ndim),
    "numel": lambda r: (r.numel(), r.nelement()),
    "bytes": lambda r: (r.nbytes, r.element_size(), r.itemsize),
    "storage_offset": lambda r: r.storage_offset(),
    "len": len,
    "requires_grad": lambda r: r.requires_grad,
    "requires_grad_": lambda r: r.requires_grad_().requires_grad,
    "grad": lambda r: (r.grad, r.grad_fn, r.is_leaf, r.retains_grad, r.output_nr),
    "is_contiguous": lambda r: r.is_contiguous(),
    "is_channels_last": lambda r: r.is_contiguous(memory_format=torch.channels_last),
    "kind": lambda r: (r.is_cuda, r.is_sparse, r.is_meta, r.is_quantized, r.is_nested, r.is_inference()),
    "number": lambda r: (r.is_floating_point(), r.is_complex(), r.is_conj(), r.is_neg()),
    "type": lambda r: (type(r), isinstance(r, torch.Tensor), isinstance(r, torch.nn.Parameter), torch.is_tensor(r)),
    "type()": lambda r: r.type(),
    "version": lambda r: r._version,
    "view": lambda r: (r._is_view(), r._base),
    "hash": lambda r: (hash(r) == hash(r), {r: 1}[r], r is r, r in {r}),
    "weakref": lambda r: weakref.ref(r)() is r,
    "attribute": hidden,
    "buffer": registered,
    "module": lambda r: torch.nn.Identity()(r) is r,
    "tree": lambda r: torch.utils._pytree.tree_flatten({"a": [r]})[0][0] is r,
    "broadcast_shapes": lambda r: torch.broadcast_shapes(r.shape, (2, 1, 1)),
    "can_cast": lambda r: torch.can_cast(r.dtype, torch.float64),
    "detach": lambda r: r.detach().shape,
    "parameter": lambda r: torch.nn.Parameter(r).requires_grad,
    "hook": lambda r: r.requires_grad_().register_hook(lambda gradient: None).id >= 0,
}

READS = {
    "repr": (repr, VALUE),
    "str": (str, VALUE),
    "bool": (bool, SCALAR),
    "float": (float, SCALAR),
    "int": (int, SCALAR),
    "complex": (complex, SCALAR),
    "item": (lambda r: r.item(), SCALAR),
    "as an index": (lambda r: list(range(9))[r], torch.tensor(2)),
    "as a slice": (lambda r: torch.arange(5)[:r], torch.tensor(2)),
    "tolist": (lambda r: r.tolist(), VALUE),
    "data_ptr": (lambda r: r.data_ptr() != 0, VALUE),
    "untyped_storage": (lambda r: r.untyped_storage().nbytes(), VALUE),
    "storage": (lambda r: list(r.storage()), VALUE),
    "is_shared": (lambda r: r.is_shared(), VALUE),
    "is_pinned": (lambda r: r.is_pinned(), VALUE),
    "dlpack": (torch.from_dlpack, VALUE),
    "__dlpack__": (lambda r: torch.utils.dlpack.from_dlpack(r.__dlpack__()), VALUE),
    "pickle": (lambda r: pickle.loads(pickle.dumps(r)), VALUE),
    "torch.save": (saved_and_loaded, VALUE),
    "deepcopy": (copy.deepcopy, VALUE),
    "deepcopy of a module": (lambda r: copy.deepcopy(torch.nn.ModuleList([with_attribute(r)]))[0].kept, VALUE),
    "copy": (copy.copy, VALUE),
    "data": (lambda r: r.data, VALUE),
    "clone": (lambda r: r.clone(), IMAGE),
    "contiguous": (lambda r: r.contiguous(), IMAGE),
    "to": (lambda r: r.to(torch.bfloat16), VALUE),
    "to the same": (lambda r: r.to(torch.float32) is r, VALUE),
    "cpu": (lambda r: r.cpu() is r, VALUE),
    "to meta": (lambda r: r.to("meta").shape, VALUE),
    "empty_like": (lambda r: torch.empty_like(r).stride(), IMAGE),
    "new_zeros": (lambda r: r.new_zeros(2), VALUE),
    "view": (lambda r: r.view(-1), VALUE),
    "transposed": (lambda r: r.T, VALUE),
    "slice": (lambda r: r[:1, ::2], VALUE),
    "element": (lambda r: r[0, 1], VALUE),
    "iteration": (list, VALUE),
    "unpacking": (unpacked, VALUE),
    "unbind": (lambda r: r.unbind(), VALUE),
    "==": (lambda r: r == r, VALUE),
    ">": (lambda r: r > 1, VALUE),
    "in": (lambda r: 5 in r, VALUE),
    "stack": (lambda r: torch.stack([r, r]), VALUE),
    "cat": (lambda r: torch.cat((r, torch.ones(1, 3))), VALUE),
    "foreach": (lambda r: torch._foreach_add([r, r], 1), VALUE),
    "linear": (lambda r: F.linear(r, torch.ones(4, 3), torch.ones(4)), VALUE),
    "linear's bias": (lambda r: F.linear(torch.ones(2, 6), torch.ones(6, 6), r.view(-1)), VALUE),
    "conv2d": (lambda r: F.conv2d(r, torch.ones(1, 3, 1, 1)), IMAGE),
    "einsum": (lambda r: torch.einsum("ij,kj->ik", r, r), VALUE),
    "where": (lambda r: torch.where(r > 2, r, -r), VALUE),
    "where's condition": (lambda r: torch.where(r, 1.0, 2.0), VALUE > 2),
    "indexed": (lambda r: r[:, [0, 2]], VALUE),
    "index of another": (lambda r: torch.arange(6.0).view(2, 3)[r], INDEX),
    "embedding": (lambda r: F.embedding(r, torch.eye(3)), INDEX),
    "scatter": (lambda r: torch.zeros(3).scatter(0, r, 1.0), INDEX),
    "equal": (lambda r: torch.equal(r, VALUE), VALUE),
    "allclose": (lambda r: torch.allclose(VALUE, r), VALUE),
    "assert_close": (lambda r: torch.testing.assert_close(r, VALUE), VALUE),
    "result_type": (lambda r: torch.result_type(r, 1), VALUE),
    "out of Tensor": (torch.Tensor, VALUE),
    "as_tensor": (lambda r: torch.as_tensor(r) is r, VALUE),
    "from an array of them": (lambda r: torch.tensor([r, r]), SCALAR),
    "set_": (lambda r: torch.zeros(2, 3).set_(r), VALUE),
    "sparse": (lambda r: r.to_sparse().to_dense(), VALUE),
    "nested": (lambda r: torch.nested.as_nested_tensor([r, r]).to_padded_tensor(0.0), VALUE),
    "vector of parameters": (lambda r: torch.nn.utils.parameters_to_vector([r, r]), VALUE),
    "max": (lambda r: tuple(r.max(dim=1)), VALUE),
    "swap_tensors": (lambda r: torch.utils.swap_tensors(r, torch.ones(2)) or r, VALUE),
}


# torch reads these through detach(): the alias becomes the value, and the reference is none the wiser.
READS_OF_AN_ALIAS = {
    "format": (lambda r: f"{r:.2f}", SCALAR),
    "numpy": (lambda r: r.numpy().copy(), VALUE),
    "__array__": (lambda r: np.asarray(r).copy(), VALUE),
    "numpy function": (lambda r: np.add(r, 1), VALUE),
    "numpy's memory": (lambda r: (r.numpy().fill(7), r.clone())[1], VALUE),
}


def outcome(use, tensor):
    try:
        return use(tensor)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("value", [VALUE, IMAGE], ids=["matrix", "image"])
def test_metadata_is_that_of_the_value_and_waits_for_nothing(name, value):
    reference = pending(value)
    assert same(outcome(METADATA[name], reference), outcome(METADATA[name], plain(value)))
    assert is_pending(reference)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", READS)
def test_reading_gives_the_value(name):
    use, value = READS[name]
    reference = pending(value)
    assert same(outcome(use, reference), outcome(use, plain(value)))
    assert not is_pending(reference)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", READS_OF_AN_ALIAS)
def test_reading_an_alias_gives_the_value(name):
    use, value = READS_OF_AN_ALIAS[name]
    assert same(outcome(use, pending(value)), outcome(use, plain(value)))


@pytest.mark.parametrize("name", ["data_ptr", "tolist", "item", "repr", "pickle", "linear", "slice"])
def test_what_its_source_raises_is_raised_each_time(name):
    use, value = READS[name]

    def take():
        raise ZeroDivisionError("on rank 1")

    reference = pending_reference(value, take)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="on rank 1"):
            use(reference)
        assert is_pending(reference) and reference.shape == value.shape


@pytest.mark.parametrize("use", [lambda r: r + 1, lambda r: r.tolist(), lambda r: r.numpy()])
def test_waiting_for_a_value_lets_other_threads_run(use):
    arrived = threading.Event()
    reference = pending_reference(VALUE, lambda: arrived.wait() and VALUE)
    threading.Thread(target=arrived.set).start()
    use(reference)
    assert arrived.is_set()


def test_two_threads_read_one_reference_at_once():
    both = threading.Barrier(2)
    source = {"value": VALUE.clone()}

    def take():
        both.wait(30)
        return source["value"]

    reference, sums = pending_reference(VALUE, take), []
    readers = [threading.Thread(target=lambda: sums.append(sum(map(sum, reference.tolist())))) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert sums == [15.0, 15.0]


def test_materialise_is_once_and_for_all():
    taken = []
    reference = pending_reference(VALUE, lambda: taken.append(1) or VALUE.clone())
    reference.hidden = 1
    for _ in range(2):
        materialise(reference)
        assert not is_pending(reference) and reference.hidden == 1
    assert taken == [1]
    materialise(VALUE)
    assert not is_pending(VALUE)


def test_a_reference_travels_by_value():
    reference = pending(VALUE)
    assert torch.equal(_lamina.encode_roundtrip({"a": [reference]})["a"][0], VALUE)
    assert not is_pending(reference)
