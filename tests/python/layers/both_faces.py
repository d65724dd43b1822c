# SPDX-License-Identifier: Apache-2.0
"""The Python side of test_both_faces.py: the loss and the gradients of each case, as a line `case<TAB>bits`, or the
error that refuses it. The C++ side is tests/frontend/layers.cc.

    python both_faces.py cases.txt                     whole
    lamina run -n 2 both_faces.py cases.txt            cut over two ranks
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

import lamina
from lamina import _lamina

SIZES = {
    "num_layers": 2,
    "num_attention_heads": 3,
    "attention_head_size": 4,
    "hidden_size": 12,
    "intermediate_size": 10,
    "vocab_size": 21,
    "num_positions": 16,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
DTYPES = {"@bfloat16": torch.bfloat16, "@double": torch.double}


class Model(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.model = lamina.nn.DistributedTransformerLMHead(**options)

    def forward(self, words, mask, types, others, labels):
        return self.model((words, mask, types, None, *others, labels))[0]


def value(text):
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def bits(tensor):
    found = 14695981039346656037
    for byte in tensor.detach().reshape(-1).view(torch.uint8).tolist():
        found = ((found ^ byte) * 1099511628211) % 2**64
    return f"{found:016x}"


def bits_of(loss, parameters):
    found = sorted((name, parameter) for name, parameter in parameters if parameter.grad is not None)
    return " ".join([bits(loss), *(f"{name} {bits(parameter.grad)}" for name, parameter in found)])


def result(options, given, ranks):
    torch.manual_seed(99)
    words, types = torch.randint(0, 21, (4, 7)), torch.randint(0, 3, (4, 7))
    others, hidden = torch.randn(4, 5, 12), torch.rand(4, 7)
    labels = words.masked_fill(hidden < 0.3, -100)
    dtype = next((DTYPES[each] for each in given if each in DTYPES), torch.float32)
    seen = (others.to(dtype), None) if "@others" in given else (None, None) if "add_cross_attention" in options else ()
    inputs = (hidden > 0.8 if "@mask" in given else None, types if "@types" in given else None, seen, labels)
    model = Model(SIZES | options).to(dtype)
    for seed, (_, parameter) in enumerate(sorted(model.named_parameters()), 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    torch.manual_seed(5)
    if ranks == 1:
        loss = model(words, *inputs)
        loss.backward()
        return bits_of(loss, model.named_parameters())
    lamina.init(tensor_parallel_degree=ranks, ddp=True, prescaled_batch=True, timeout_s=60)
    model = lamina.DistributedModel(model)
    torch.manual_seed(5)
    loss = model(words, *inputs)
    model.backward(loss)
    with _lamina.Unguarded():  # slices are meant
        return bits_of(loss, model.local_named_parameters())


def main(cases):
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for line in Path(cases).read_text().splitlines():
        if line.startswith("#"):
            continue
        name, _, rest = line.partition(": ")
        pairs = [word.partition("=") for word in rest.split()]
        options = {key: value(text) for key, between, text in pairs if between}
        try:
            text = result(options, {key for key, between, _ in pairs if not between}, ranks)
        except lamina.Error as error:
            text = f"refused: {error}".partition("\n")[0]
        if rank == 0:
            print(f"{name}\t{text}")
        lamina.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
