# SPDX-License-Identifier: Apache-2.0
"""Cases of `verify_steps` where layers are cut over two ranks."""

import pytest
import torch
from multiprocess import cases_sliced_models as models
from multiprocess.cases_sliced import PLAN, RANK, Words, words
from torch import nn

import lamina
from lamina.errors import UsageError

ALL = PLAN | {"embedding": "embedding_rowwise", "head": "colwise_gather_output"}
GPT2 = dict(vocab_size=21, n_positions=16, n_embd=24, n_layer=2, n_head=6, bos_token_id=1, eos_token_id=2)


class Answers(nn.Module):
    """A language model of lamina's own layers, whose scores lie otherwise where it is cut."""

    def __init__(self):
        super().__init__()
        self.words = lamina.nn.DistributedTransformerLMHead(2, 2, 4, 8, 12, 21, 7, causal_mask_size=7)

    def forward(self, words):
        loss, scores = self.words((words, None, None, None, words))
        return loss + scores.square().mean()


class Language(nn.Module):
    """A model of transformers, for words alone."""

    def __init__(self, name, **sizes):
        super().__init__()
        self.inner = models.made(name, **sizes)

    def forward(self, words):
        return self.inner(input_ids=words, labels=words).loss


@lamina.step
def train(model, words):
    loss = model(words)
    model.backward(loss)
    return loss


def trained(make, spoil=lambda root: None, steps=3, **keys):
    """Trains, with a fault on the second rank from step 1 on; returns losses and the state."""
    keys = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "timeout_s": 60} | keys
    lamina.init(keys)
    torch.manual_seed(0)
    model = make()
    lamina.set_tensor_parallelism(model, plan=ALL if make is Words else None)
    model = lamina.distribute(model)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for number in range(steps):
        if number == 1 and RANK == 1:
            spoil(model.module)
        losses.append(
            train(model, words(number if keys["prescaled_batch"] else 10 * RANK + number)).reduce_mean().item()
        )
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def ended(*args, **keys):
    """Returns what `trained` does, without a job."""
    result = trained(*args, **keys)
    lamina.shutdown()
    return result


def refused(words, make, spoil, **keys):
    with pytest.raises(UsageError, match=rf"(?s)not that of the plain model.*step 1.*{words}.*\[step-differs\]"):
        trained(make, spoil, verify_steps=2, **keys)
    lamina.shutdown()


def scale(name):
    return lambda root: root.get_submodule(name).register_forward_hook(lambda module, given, found: 1.01 * found)


def scale_gradient(name):
    return lambda root: root.get_parameter(name).register_hook(lambda gradient: 1.01 * gradient)


def require_equal_to_unchecked(make, **keys):
    losses, state = ended(make, **keys)
    checked = ended(make, verify_steps=2, **keys)
    assert checked[0] == losses
    for name, value in state.items():
        torch.testing.assert_close(checked[1][name], value, rtol=0, atol=0)


def case_steps_of_slices_are_those_of_the_plain_model():
    require_equal_to_unchecked(Words, microbatches=2)
    require_equal_to_unchecked(Words, prescaled_batch=False)
    for optimize in ("speed", "memory"):
        require_equal_to_unchecked(Answers, optimize=optimize)


def case_steps_of_models_of_transformers_are_theirs():
    ended(lambda: Language("LlamaForCausalLM", **models.DECODER), verify_steps=2)
    ended(lambda: Language("LlamaForCausalLM", **models.DECODER | dict(num_key_value_heads=1)), verify_steps=2)
    ended(lambda: Language("GPT2LMHeadModel", **GPT2), verify_steps=2)
    ended(lambda: Language("BertForMaskedLM", **models.ENCODER), verify_steps=2)


def case_a_fault_in_a_slice_is_named():
    refused("output of blocks.1.attention.query differs", Words, scale("blocks.1.attention.query"), microbatches=2)
    refused("gradient of blocks.1.down.weight differs", Words, scale_gradient("blocks.1.down.weight"))
    name = "words.transformer.seq_layers.1.output.dense1"
    refused(f"output of {name} differs", Answers, scale(name), optimize="memory")


def case_a_fault_in_a_slice_for_batches_of_all_ranks_is_named_with_its_region():
    refused(
        "output of blocks.1 on rank 0 differs",
        Words,
        scale("blocks.1.attention.query"),
        prescaled_batch=False,
    )
