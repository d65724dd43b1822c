# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine has: the sources of Python's standard library, as bytes."""

import re
import sysconfig
from pathlib import Path

import torch

VOCABULARY = 256

# Not prose of a programmer: tests, installed packages, tables written by a generator.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


def standard_library(validation_every: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of the library's *.py files: (training, validation), each a 1-d uint8 tensor.

    Split by file, every `validation_every`-th in order of name to validation, so no file is in both.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(file.as_posix() for file in files if not _LEFT_OUT.intersection(file.parts))
    training: list[bytes] = []
    validation: list[bytes] = []
    for index, name in enumerate(names):
        part = validation if index % validation_every == validation_every - 1 else training
        part.append((root / name).read_bytes())
    if not validation:
        raise FileNotFoundError(f"{root} holds {len(names)} source files of the standard library; the text needs more")
    return _bytes_of(training), _bytes_of(validation)


def _bytes_of(texts: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


def prompts(text: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Beginnings of `count` definitions spread over a text: int64 [count, length]."""
    starts = [match.start() + 1 for match in re.finditer(rb"\n(?:class|def) ", bytes(text[:-length].tolist()))]
    chosen = torch.tensor([starts[index * len(starts) // count] for index in range(count)])
    return text[chosen[:, None] + torch.arange(length)].long()


def windows(text: torch.Tensor, count: int, context: int) -> torch.Tensor:
    """Pieces of a text at even distances, each with the byte that follows it: int64 [count, context + 1]."""
    starts = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()
    return text[starts[:, None] + torch.arange(context + 1)].long()


class Batches:
    """Random windows of a text, the same ones in every run with the same seed."""

    def __init__(self, text: torch.Tensor, *, sequences: int, context: int, seed: int):
        self._text, self._shape = text, (sequences, context)
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, y), int64 [sequences, context]: bytes, and the byte that follows each of them."""
        sequences, context = self._shape
        starts = torch.randint(len(self._text) - context, (sequences, 1), generator=self._generator)
        windows = self._text[starts + torch.arange(context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def unigram_and_bigram(training: torch.Tensor, validation: torch.Tensor) -> tuple[float, float]:
    """Cross-entropy on `validation`, in nats per byte, of two models counted on `training`, one added to each count."""
    counts = torch.bincount(training.long(), minlength=VOCABULARY).double() + 1
    unigram = -(counts / counts.sum()).log()[validation.long()].mean().item()

    def pairs(text: torch.Tensor) -> torch.Tensor:
        return text[:-1].long() * VOCABULARY + text[1:].long()

    counts = torch.bincount(pairs(training), minlength=VOCABULARY**2).double().view(VOCABULARY, VOCABULARY) + 1
    bigram = -(counts / counts.sum(1, keepdim=True)).log().flatten()[pairs(validation)].mean().item()
    return unigram, bigram
