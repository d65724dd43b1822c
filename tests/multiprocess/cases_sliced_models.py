# SPDX-License-Identifier: Apache-2.0
"""Models of transformers that are cut over two ranks, with random weights: they compute what the plain ones do."""

import copy
import os
import re

import pytest
import torch
import transformers
from multiprocess.cases_sliced import sliced, start
from torch import nn

import lamina
from lamina.errors import UsageError

RANK = int(os.environ.get("RANK", 0))
WORDS = 21  # odd
SIZES = dict(vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, pad_token_id=0)
DECODER = SIZES | dict(intermediate_size=40, num_key_value_heads=2, attention_dropout=0.2, head_dim=4)
ENCODER = SIZES | dict(intermediate_size=40, max_position_embeddings=16)
T5 = dict(vocab_size=WORDS, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=2, decoder_start_token_id=0)


def made(name, **sizes):
    family = name.partition("For")[0].partition("LM")[0]
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    plain = getattr(transformers, name)(config).double()
    with torch.no_grad():
        for parameter in plain.parameters():  # biases and norms, too
            parameter.add_(0.05 * torch.randn_like(parameter))
    return plain


def words(seed):
    return torch.randint(1, WORDS, (3, 6), generator=torch.Generator().manual_seed(seed))


def require_same_updates(model, plain, steps=2):
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2, momentum=0.9) for each in (model, plain)]
    for seed in range(steps):
        found = []
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            torch.manual_seed(seed)
            loss = each(input_ids=words(seed), labels=words(seed)).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.detach(), norm))
        torch.testing.assert_close(*found, rtol=2e-6, atol=0)  # transformers computes losses and softmax in floats
    require_equal_states(model.state_dict(), plain.state_dict())


def require_equal_states(state, plain):
    assert list(state) == list(plain)
    for name, value in plain.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)


def require_same_tokens(model, plain):
    with torch.no_grad():
        found, expected = (
            each.generate(words(9)[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
            for each in (model.module.eval(), plain.eval())
        )
    assert torch.equal(found, expected)


def require_as_plain(name, **sizes):
    start()
    plain = made(name, **sizes)
    model = sliced(plain, None)
    require_same_updates(model, plain)
    if model.module.can_generate():
        require_same_tokens(model, plain)
    return model.module


def case_llama_by_its_own_plan():
    module = require_as_plain("LlamaForCausalLM", **DECODER)
    attention = module.model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (12, 24) and attention.k_proj.weight.shape == (4, 24)
    assert module.lm_head.weight.shape == module.model.embed_tokens.weight.shape == (11 - RANK, 24)


def case_one_head_of_keys_for_all_ranks_and_tied_embeddings_of_mistral():
    module = require_as_plain("MistralForCausalLM", **DECODER | dict(num_key_value_heads=1, tie_word_embeddings=True))
    assert module.model.layers[0].self_attn.k_proj.weight.shape == (4, 24)
    assert module.lm_head.weight is module.model.embed_tokens.weight and len(module.lm_head.weight) == 11 - RANK


def case_biases_of_qwen2_and_uneven_groups_of_heads_and_inner_features():
    module = require_as_plain("Qwen2ForCausalLM", **DECODER | dict(num_key_value_heads=3, intermediate_size=37))
    assert module.model.layers[0].self_attn.q_proj.weight.shape == ((16, 8)[RANK], 24)
    assert module.model.layers[0].mlp.down_proj.weight.shape == (24, (19, 18)[RANK])


def case_norms_of_queries_of_qwen3():
    require_as_plain("Qwen3ForCausalLM", **DECODER)


def case_gpt_neox():
    require_as_plain("GPTNeoXForCausalLM", **SIZES, intermediate_size=40, attention_dropout=0.2, hidden_dropout=0.1)


def case_phi3_with_matrices_side_by_side():
    module = require_as_plain("Phi3ForCausalLM", **DECODER)
    assert module.model.layers[0].mlp.gate_up_proj.weight.shape == (40, 24)


def case_latent_attention_of_deepseek_stays_whole():
    heads = dict(num_key_value_heads=6, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=2)  # which no layer has
    for rank in (None, 8):
        module = require_as_plain("DeepseekV2ForCausalLM", **DECODER | heads | experts | dict(q_lora_rank=rank))
        layer = module.model.layers[0]
        assert layer.self_attn.o_proj.weight.shape == (24, 24) and layer.mlp.up_proj.weight.shape == (20, 24)
        lamina.shutdown()


def case_bert():
    require_as_plain("BertForMaskedLM", **ENCODER | dict(num_attention_heads=3, intermediate_size=24))  # as heads have


def case_roberta():
    require_as_plain("RobertaForMaskedLM", **ENCODER)


def case_gptj():
    sizes = dict(vocab_size=WORDS, n_positions=16, n_embd=24, n_layer=2, n_head=6, rotary_dim=2, attn_pdrop=0.2)
    require_as_plain("GPTJForCausalLM", **sizes, bos_token_id=1, eos_token_id=2)


def case_gpt_neo():
    sizes = dict(vocab_size=WORDS, hidden_size=24, num_layers=2, num_heads=6, bos_token_id=1, window_size=3)
    kinds = dict(attention_types=[[["global", "local"], 1]], max_position_embeddings=16)
    require_as_plain("GPTNeoForCausalLM", **sizes, **kinds, attention_dropout=0.2)


def case_opt():
    sizes = dict(ffn_dim=40, max_position_embeddings=16, word_embed_proj_dim=24, attention_dropout=0.2)
    require_as_plain("OPTForCausalLM", **SIZES, **sizes)


def case_t5_with_a_bias_per_head():
    module = require_as_plain("T5ForConditionalGeneration", **T5)
    assert module.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.shape == (32, 1)


def case_checkpointed_blocks():
    start()
    plain = made("LlamaForCausalLM", **DECODER)
    model = sliced(plain, None)
    for each in (model.module, plain):
        each.gradient_checkpointing_enable()
    require_same_updates(model, plain)


def require_same_when_compiled(name, blocks, **sizes):
    start()
    plain = made(name, **sizes)
    model = sliced(plain, None)
    for block in model.module.get_submodule(blocks):
        block.compile(fullgraph=True, backend="aot_eager")
    require_same_updates(model, plain)


def case_compiled_blocks_of_qwen3_have_no_break():
    require_same_when_compiled("Qwen3ForCausalLM", "model.layers", **DECODER)


def case_compiled_blocks_of_gpt_neox_have_no_break():
    require_same_when_compiled("GPTNeoXForCausalLM", "gpt_neox.layers", **SIZES, attention_dropout=0.2)


class Low(nn.Module):
    """A correction of low rank, as peft's."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.2)})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base.out_features, bias=False)})

    def forward(self, x):
        whole = self.base_layer(x)
        return whole + 2 * self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))


class Wrapped(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


def case_corrections_of_low_rank_are_sliced_with_their_base():
    start()
    # A rank has as many inner features as there are others.
    plain = made("LlamaForCausalLM", **DECODER | dict(num_key_value_heads=1, intermediate_size=48))
    for layer in plain.model.layers:
        for module, names in (layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down")):
            for name in names:
                setattr(module, f"{name}_proj", Low(getattr(module, f"{name}_proj")).double())
    model = sliced(plain, None)
    mlp = model.module.model.layers[0].mlp
    assert mlp.down_proj.lora_A["default"].weight.shape == mlp.up_proj.lora_B["default"].weight.T.shape == (3, 24)
    require_same_updates(model, plain)
    lamina.shutdown()
    start()
    plain.model.layers[0].mlp.up_proj = Wrapped(plain.model.layers[0].mlp.up_proj.base_layer)
    with pytest.raises(UsageError, match=r"layers.0.mlp.up_proj is a Wrapped, and a plan slices torch's Linear"):
        sliced(plain, None)


class Mixed(nn.Module):
    """Styles of plans on layers of a script's own, with dropout of what lies in parts."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=15)
        self.places = nn.Embedding(6, 8)
        self.up, self.dropout, self.down = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)
        self.gated, self.out = nn.Linear(8, 16), nn.Linear(8, 8)
        self.wide, self.narrow = nn.Linear(8, 13), nn.Linear(13, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids, labels):
        x = self.words(input_ids) + self.places(torch.arange(6))
        x = x + self.dropout(self.down(self.dropout(self.up(x))))
        gate, value = self.gated(x).chunk(2, -1)
        x = x + self.out(gate.sigmoid() * value)
        x = self.head(x + self.narrow(self.wide(x).softmax(-1)))
        loss = nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


MIXED = {
    "words": "embedding_rowwise",
    "places": "embedding_colwise",
    "up": "colwise",
    "down": "rowwise",
    "gated": "packed_colwise",
    "out": "rowwise",
    "wide": "colwise_gather_output",
    "narrow": "rowwise_split_input",
    "head": "colwise_rep",
}


def case_all_styles_of_plans():
    start()
    torch.manual_seed(0)
    plain = Mixed().double()
    model = sliced(plain, MIXED)
    require_same_updates(model, plain)
    assert (model.module.words.padding_idx, len(model.module.words.weight)) == ((None, 11), (4, 10))[RANK]


def case_plans_that_do_not_fit_a_model_of_transformers():
    start()
    tied = made("Qwen2ForCausalLM", **DECODER | dict(tie_word_embeddings=True))
    plain = made("LlamaForCausalLM", **DECODER | dict(num_key_value_heads=1))
    for model, plan, text in [
        (tied, {"lm_head": "colwise_rep"}, "and the plan does not cut it alike in both: name both"),
        (plain, {"model.layers.*.mlp.up_proj": "sequence_paralel"}, 'has the style "sequence_paralel"'),
        (plain, {"model.norm": "colwise"}, "model.norm is a LlamaRMSNorm, and a plan slices"),
        (made("LlamaForCausalLM", **DECODER | dict(num_attention_heads=1, num_key_value_heads=1)), None, "has 1 heads"),
    ]:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UsageError, match=re.escape(text)):
            sliced(model, plan)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def require_own_batches(name, regions, **sizes):
    """Each rank has a batch of its own, of another length, and dropout of its own."""
    lamina.init(tensor_parallel_degree=2, ddp=True, timeout_s=60)
    plain = made(name, **sizes)
    model = sliced(plain, None)
    assert [each for each, module in model.module.named_modules() if "_lamina_turns" in module.__dict__] == regions
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2, momentum=0.9) for each in (model, plain)]
    for seed in range(2):
        batches = [words(2 * seed + rank)[:, : 6 - rank].contiguous() for rank in range(2)]
        losses = []
        for each, ranks in ((model, [RANK]), (plain, [0, 1])):
            for rank in ranks:
                torch.manual_seed(2 * seed + rank)
                losses.append(each(input_ids=batches[rank], labels=batches[rank]).loss / len(ranks))
                losses[-1].backward()
        torch.testing.assert_close(losses[0], 2 * losses[1 + RANK], rtol=2e-6, atol=0)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    require_equal_states(model.state_dict(), plain.state_dict())
    if model.module.can_generate():
        require_same_tokens(model, plain)


def case_own_batches_of_llama():
    parts = [f"model.layers.{n}.{part}" for n in range(2) for part in ("self_attn", "mlp")]
    require_own_batches("LlamaForCausalLM", ["model.embed_tokens", *parts, "lm_head"], **DECODER)


def case_own_batches_of_gpt2():
    sizes = dict(vocab_size=WORDS, n_positions=8, n_embd=16, n_head=4, n_layer=2, bos_token_id=0, eos_token_id=0)
    parts = [f"transformer.h.{n}.{part}" for n in range(2) for part in ("attn", "mlp")]
    require_own_batches("GPT2LMHeadModel", parts, **sizes)


def case_own_batches_of_bert():
    require_own_batches("BertForMaskedLM", [f"bert.encoder.layer.{n}" for n in range(2)], **ENCODER)


def case_own_batches_of_t5_whose_bias_goes_from_block_to_block():
    require_own_batches("T5ForConditionalGeneration", ["encoder", "decoder"], **T5)
