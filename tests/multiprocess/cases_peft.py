# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft over four ranks: partitions, slices, copies and shards."""

import peft
import pytest
import torch
import transformers

import lamina
from lamina.errors import UsageError

SLICES = {"tensor_parallel_degree": 2, "prescaled_batch": True}
LAYOUTS = (
    {"partitions": 2, **SLICES},
    {"partitions": 2},
    SLICES,
    {"sharded_data_parallel_degree": 2},
)
ROWS, MICROBATCHES = 8, 2
transformers.logging.set_verbosity_error()


def llama(**options):
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | heads | options, use_cache=False))


def gpt2():
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, use_cache=False))


def bert():
    no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"vocab_size": 40, "hidden_size": 18, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.BertConfig(**sizes, num_attention_heads=3, max_position_embeddings=16, **no_dropout)
    return transformers.BertForSequenceClassification(config)


def adapted(make, config):
    """A model in doubles whose adapters have values."""
    torch.manual_seed(0)
    model = peft.get_peft_model(make(), config).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.double) * 0.05)
    return model


def batch(make, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, 40, (ROWS, 6), generator=generator)
    return words, words % 2 if make is not bert else words[:, 0] % 2


def sgd(model):
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1, momentum=0.9)


def require_plain_updates(make, config, layout, adapt=adapted):
    lamina.shutdown()
    lamina.init(microbatches=MICROBATCHES, ddp=True, timeout_s=60, **layout)
    plain, model = adapt(make, config), adapt(make, config)
    if "tensor_parallel_degree" in layout:
        lamina.set_tensor_parallelism(model)
    model = lamina.distribute(model)
    optimizer, plains = lamina.DistributedOptimizer(sgd(model)), sgd(plain)

    @lamina.step
    def train(words, labels):
        loss = model(input_ids=words, labels=labels).loss
        model.backward(loss)
        return loss

    copies, copy = (lamina.rdp_size(), lamina.rdp_rank()) if "tensor_parallel_degree" in layout else (None, None)
    copies, copy = (lamina.dp_size(), lamina.dp_rank()) if copies is None else (copies, copy)
    for seed in range(2):
        words, labels = batch(make, seed)
        loss = train(words.chunk(copies)[copy], labels.chunk(copies)[copy]).reduce_mean()
        wanted = []
        for number in range(copies):
            parts = zip(words.chunk(copies)[number].chunk(2), labels.chunk(copies)[number].chunk(2), strict=True)
            losses = [plain(input_ids=part, labels=its).loss for part, its in parts]
            (sum(losses) / (MICROBATCHES * copies)).backward()
            wanted.append(torch.stack(losses).mean().detach())
        torch.testing.assert_close(loss, wanted[copy], rtol=1e-6, atol=0)  # transformers computes it in float32
        for each in (optimizer, plains):
            each.step()
            each.zero_grad()
    state, wanted = model.state_dict(), plain.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: name + text)


def require_in_all_layouts(make, config, adapt=adapted):
    for layout in LAYOUTS:
        require_plain_updates(make, config, layout, adapt)


def merged(make, config):
    """A model with one adapter in its weights, and two beside them."""
    model = adapted(make, config)
    model.add_adapter("other", config)
    model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".other." in name:
                torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(2))
    model.base_model.set_adapter("other")
    model.merge_adapter(["other"])
    model.base_model.set_adapter(["default"])
    return model.train()


def case_lora_of_conv1d_and_an_embedding_with_modules_to_save():
    config = peft.LoraConfig(r=3, target_modules=["c_attn", "c_proj", "wte"], modules_to_save=["wpe"])
    require_in_all_layouts(gpt2, config)


def case_lora_of_linears_beside_a_merged_one():
    names = ["q_proj", "v_proj", "down_proj"]
    require_in_all_layouts(llama, peft.LoraConfig(r=3, target_modules=names), merged)


def case_an_embedding_that_is_trained_beside_lora():
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    require_plain_updates(llama, config, LAYOUTS[0])
    tokens = peft.LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices=[1, 5])
    require_plain_updates(llama, tokens, LAYOUTS[0])


def case_lora_of_heads_that_ranks_share_unevenly():
    require_in_all_layouts(bert, peft.LoraConfig(r=3, target_modules=["query", "dense"]))


def case_dora():
    require_in_all_layouts(llama, peft.LoraConfig(r=3, use_dora=True, target_modules=["k_proj", "o_proj", "up_proj"]))


def case_dora_with_fewer_heads_of_keys_than_ranks():
    one_of_keys = lambda: llama(num_key_value_heads=1)  # noqa: E731
    config = peft.LoraConfig(r=3, use_dora=True, target_modules=["k_proj", "v_proj"])
    require_plain_updates(one_of_keys, config, LAYOUTS[0])


def case_ia3():
    config = peft.IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"])
    require_in_all_layouts(gpt2, config)


def case_adalora():
    config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["query", "output.dense"])
    require_in_all_layouts(bert, config)


def case_prefixes():
    require_in_all_layouts(llama, peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def case_prompts():
    require_in_all_layouts(gpt2, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def case_prompts_of_an_encoder():
    config = peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM")
    require_plain_updates(llama, config, LAYOUTS[0])


def case_adapters_that_make_weights():
    for config in (
        peft.LoHaConfig(r=3, target_modules=["q_proj", "down_proj"]),
        peft.LoKrConfig(r=3, target_modules=["q_proj", "down_proj"]),
        peft.VeraConfig(r=3, target_modules=["q_proj", "v_proj"]),
        peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj", "down_proj"]),
    ):
        require_plain_updates(llama, config, LAYOUTS[0])


def case_a_prefix_for_a_batch_of_each_ranks_own_is_refused():
    lamina.init(tensor_parallel_degree=2, ddp=True, timeout_s=60)
    model = adapted(llama, peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    lamina.set_tensor_parallelism(model)
    model = lamina.distribute(model)
    words, labels = batch(llama, 0)
    with pytest.raises(UsageError, match=r"prescaled_batch: true.*\[tp-outside\]"):
        model(input_ids=words, labels=labels)
