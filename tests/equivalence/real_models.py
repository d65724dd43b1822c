# SPDX-License-Identifier: Apache-2.0
"""Models that nobody here wrote, small and randomly initialised, cut automatically and compared with themselves whole.

Their configuration is the default but for their size, and for dropout, whose numbers the plain model cannot repeat:
caches of keys and values are on, in training and in evaluation.
"""

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import transformers
from torch import nn

import lamina

TOLERANCE = 1e-4
ROWS, LENGTH, PROMPT, VOCABULARY = 4, 10, 6, 61


@dataclass(frozen=True)
class RealModel:
    name: str
    build: Callable[[], nn.Module]
    images: bool = False
    generates: bool = True


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=32,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    )


def bert():
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    )


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
        )
    )


def bart():
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
            dropout=0.0,
            bos_token_id=0,
            eos_token_id=1,
            forced_eos_token_id=1,
            pad_token_id=2,
            decoder_start_token_id=1,
        )
    )


MODELS = [
    RealModel("gpt2", gpt2),
    RealModel("bert", bert, generates=False),
    RealModel("t5", t5),
    RealModel("llama", llama),
    RealModel("vit", vit, images=True, generates=False),
    RealModel("bart", bart),
]


def batch_of(model: RealModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    if model.images:
        pixels = torch.randn(ROWS, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(2, (ROWS,), generator=generator)}
    tokens = torch.randint(3, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    return {"input_ids": tokens[0], "labels": tokens[1]}


def built(model: RealModel) -> nn.Module:
    torch.manual_seed(7)
    return model.build()


# Returns what is compared, of the plain model and of lamina's, by the same functions.


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def hidden_states(output) -> torch.Tensor:
    """After each layer: of the last tower, where there are two."""
    states = output.hidden_states if "hidden_states" in output else output.decoder_hidden_states
    return torch.stack(states, dim=1)


def evaluated(model: nn.Module, whole: nn.Module, batch: dict[str, torch.Tensor], generates: bool) -> dict:
    """Hidden states, logits, those after a prompt in the cache, and the tokens that the model goes on with."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    collected = {"hidden_states": hidden_states(model(**batch, output_hidden_states=True))}
    if not generates:
        return collected | {"logits": model(**inputs).logits}
    tokens = inputs["input_ids"]
    encoder = {"input_ids": tokens} if whole.config.is_encoder_decoder else {}
    name = "decoder_input_ids" if encoder else "input_ids"
    prompt = model(**encoder | {name: tokens[:, :PROMPT]})
    rest = model(**encoder | {name: tokens[:, PROMPT:], "past_key_values": prompt.past_key_values})
    return collected | {
        "prompt": prompt.logits,
        "logits": rest.logits,
        "length": rest.past_key_values.get_seq_length(),
        "generated": whole.generate(tokens[:, :PROMPT], max_new_tokens=4, min_new_tokens=4, do_sample=False),
    }


def differences(what: str, ours: torch.Tensor, theirs: torch.Tensor, largest: float = 0.0) -> Iterator[str]:
    error = (ours - theirs).abs().max().item()
    bound = TOLERANCE * max(theirs.abs().max().item(), 1e-3 * largest)
    if ours.shape != theirs.shape or not error <= bound:
        yield f"{what}: off by {error:.3g}, allowed {bound:.3g}"


def check(case: RealModel) -> list[str]:
    """The differences between the model whole and cut, on this rank."""
    partitions = int(os.environ["WORLD_SIZE"])
    lamina.init(partitions=partitions, microbatches=2, timeout_s=60)
    try:
        return list(_check(case, partitions))
    finally:
        lamina.shutdown()


def _check(case: RealModel, partitions: int) -> Iterator[str]:
    plain, batch = built(case), batch_of(case)
    model = lamina.distribute(built(case))
    whole = model.get_module()

    @lamina.step
    def train(batch):
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    @lamina.step
    def evaluate(batch):
        with torch.no_grad():
            return evaluated(model, whole, batch, case.generates)

    plain.train()
    model.train()
    halves = [dict(zip(batch, parts, strict=True)) for parts in zip(*(v.chunk(2) for v in batch.values()), strict=True)]
    theirs = torch.stack([loss_of(plain, half) for half in halves]).mean()
    theirs.backward()
    yield from differences("loss", train(batch).reduce_mean(), theirs.detach())
    report = model.partition_report()
    if report["notes"] or set(report["partition"].values()) != set(range(partitions)):
        yield f"cut as {report}"
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    largest = max(gradient.abs().max().item() for gradient in gradients.values() if gradient is not None)
    for name, parameter in model.local_named_parameters():
        if (parameter.grad is None) != (gradients[name] is None):
            yield f"gradient of {name}: None on one side"
        elif parameter.grad is not None:
            yield from differences(f"gradient of {name}", parameter.grad, gradients[name], largest)

    plain.eval()
    model.eval()
    with torch.no_grad():
        expected = [evaluated(plain, plain, half, case.generates) for half in halves]
    for name, value in evaluate(batch).items():
        if name == "length":
            if value != [each[name] for each in expected]:
                yield f"{name}: {value}"
        else:
            yield from differences(name, value.concat().float(), torch.cat([each[name] for each in expected]).float())

    yield from _travels(plain, model)


def _travels(plain: nn.Module, model: nn.Module) -> Iterator[str]:
    """The whole state goes into the plain model, and back."""
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.mul_(2)
    doubled = model.state_dict()
    other = copy.deepcopy(plain)
    yield from (f"not loaded: {line}" for lines in other.load_state_dict(doubled) for line in lines)
    for name, value in other.state_dict().items():
        if not torch.equal(value, doubled[name]):
            yield f"{name} did not go into the plain model"
    model.load_state_dict(plain.state_dict())
    for name, value in model.state_dict().items():
        if not torch.equal(value, plain.state_dict()[name]):
            yield f"{name} did not come back"
