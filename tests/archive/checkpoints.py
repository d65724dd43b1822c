# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints by their published form alone (docs/checkpoints.md), with other libraries than lamina's."""

import json
import struct
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file

BLOCK = 1 << 20


def checksum(data):
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def entries(path):
    """The header of a safetensors file: places count from the beginning of the file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def listed(path):
    data = path.read_bytes()
    checksums = "".join(checksum(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    return {"name": path.name, "bytes": len(data), "checksums": checksums}


def write_manifest(folder, body):
    rest = json.dumps({"format": "lamina checkpoint", "version": 1, **body})[1:]
    (folder / "manifest.json").write_text(f'{{"checksum": "{checksum(rest.encode())}",\n{rest}\n')


def shard(tensor, writer, writers):
    each = -(-tensor.numel() // writers)
    begin = min(writer * each, tensor.numel())
    return begin, min(begin + each, tensor.numel())


def save(path, tag, tensors, writers=1, number=1, about=None, extra=None, changes=None):
    """Saves tensors, each cut into as many shards as there are writers. Returns the folder of the checkpoint."""
    folder = Path(path) / f"{tag}_partial"
    folder.mkdir(parents=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    rows = {
        name: {"name": name, "kind": "parameter", "dtype": str(tensor.dtype).removeprefix("torch."),
               "shape": list(tensor.shape), "pieces": []}
        for name, tensor in tensors.items()
    }  # fmt: skip
    files = []
    for writer in range(writers):
        file = folder / f"model-{writer + 1:05}.safetensors"
        parts = {}
        for name, tensor in tensors.items():
            begin, end = shard(tensor, writer, writers)
            parts[name] = tensor if writers == 1 else tensor.reshape(-1)[begin:end].clone()
        save_file(parts, file)
        for name, begin in entries(file).items():
            piece = {"file": writer, "begin": begin}
            if writers > 1:
                extent = tensors[name].shape[0]
                piece |= {"dim": 0, "extent": extent, "stripes": [[0, 0, extent]]}
                piece["elements"] = list(shard(tensors[name], writer, writers))
            rows[name]["pieces"].append(piece)
        files.append(listed(file))
    for name, text in (extra or {}).items():
        (folder / name).write_text(text)
        files.append(listed(folder / name))
    body = {"id": tag, "number": number, "about": about or {}, "files": files, "tensors": list(rows.values())}
    write_manifest(folder, body | (changes or {}))
    (folder.parent / "newest").write_text(folder.name + "\n")
    return folder


def model(seed=0):
    """Some tensors of several dtypes, with more than one block of elements."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "h.0.weight": torch.randn(700, 500, generator=generator),
        "h.0.bias": torch.randn(500, generator=generator),
        "h.1.weight": torch.randn(33, 7, generator=generator).to(torch.bfloat16),
        "h.1.mask": torch.arange(12).reshape(3, 4),
    }
