# SPDX-License-Identifier: Apache-2.0
"""Modules that become others when their model is wrapped, whole on two copies and cut over two ranks."""

import copy
import os
import random
from typing import ClassVar

import pytest
import torch
from soak import some
from torch import nn
from torch.nn import functional

import lamina
import lamina.hugging_face
from lamina.errors import UsageError
from lamina.nn import Row

RANK = int(os.environ.get("RANK", 0))
DEGREES = (1, 2)


def start(degree, **keys):
    lamina.shutdown()
    lamina.init(tensor_parallel_degree=degree, ddp=True, prescaled_batch=True, timeout_s=60, **keys)


class Inner(lamina.nn.DistributedModule):
    slicing_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self, width, inner, power=1):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.power = power

    def forward(self, inputs):
        x, factor = inputs
        return (self.down(functional.gelu(self.up(x)) ** self.power) * factor,)


def init_hook(width, *, inner=6):
    return (width,), {"inner": inner, "power": 2}


def forward_hook(x, factor=1.0):
    return ((x, factor),), {}


@lamina.tp_register(
    Inner,
    init_hook,
    forward_hook,
    lambda made: made[0],
    correspondence=(Row("both", ("up.bias", "down.bias")), Row("up", "up.weight", True), Row("down", "down.weight")),
)
class Plain(nn.Module):
    def __init__(self, width, *, inner=6):
        super().__init__()
        self.both = nn.Parameter(torch.randn(2 * width))
        self.up, self.down = (nn.Parameter(torch.randn(width, inner)) for _ in range(2))

    def forward(self, x, factor=1.0):
        first, second = self.both.chunk(2)
        return (functional.gelu(x @ self.up + first) @ self.down.t() + second) * factor


@lamina.tp_register(Inner)
class Fresh(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.layer = nn.Linear(width, inner)

    def forward(self, inputs):
        return self.layer(inputs[0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Plain(6) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x, factor=0.5)
        return self.head(x).square().mean()


def made():
    torch.manual_seed(0)
    return Model().double()


def batch(seed):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def case_registered_modules_become_others_with_their_values():
    for degree in DEGREES:
        start(degree)
        plain = made()
        model = copy.deepcopy(plain)
        lamina.set_tensor_parallelism(model, power=1, fused_softmax=True)  # the first in the place of the hook's
        before = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = model.head.weight
        state = torch.get_rng_state()
        model = lamina.distribute(model)
        assert torch.equal(state, torch.get_rng_state())
        block = model.module.blocks[1]
        assert isinstance(block, Inner) and block.up.weight.shape == (6 // degree, 6)
        assert model.module.head.weight is kept
        with pytest.raises(UsageError, match=r"has parameters that blocks.0 \(Plain\) had before it became another"):
            before.step()
        with pytest.raises(UsageError, match="make the optimizer after that"):
            lamina.DistributedOptimizer(before)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        for seed in range(2):
            losses = []
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                losses.append(each(batch(seed)))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(*losses, rtol=1e-10, atol=0)
        require_translated(model, plain)


def require_translated(model, plain):
    """Its state is the plain model's, in other names, and either is loaded."""
    state, names = model.state_dict(), dict(plain.state_dict())
    assert "blocks.0.up.weight" in state and "blocks.0.both" not in state
    (there, _), (second, _) = lamina.state.module_manager.translate_functions
    theirs = second(there(state))
    assert lamina.hugging_face.to_hugging_face(state).keys() == theirs.keys()
    assert lamina.hugging_face.from_hugging_face(theirs).keys() == state.keys()
    assert theirs.keys() == names.keys()
    for name, value in names.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-10, atol=1e-12)
    model.load_state_dict(names)
    model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"blocks.0.up.weight"):
        model.load_state_dict({**names, "_smp_is_partial": False})


def case_modules_without_a_correspondence_begin_with_values_of_their_own():
    values = []
    for degree in DEGREES:
        start(degree)
        torch.manual_seed(1)
        with lamina.model_creation(tensor_parallelism=True, dtype=torch.double, inner=5):
            model = nn.Sequential(Fresh(4, 3))
        torch.manual_seed(2 + RANK)
        model = lamina.distribute(model)
        assert isinstance(model.module[0], Inner)
        values.append(model.state_dict())
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())
    assert values[0]["0.up.weight"].shape == (5, 4)


def case_what_cannot_become_another_stays_what_it_is():
    start(1)
    model = made()
    model.other = model.blocks[1].both  # a second place of its parameter
    lamina.set_tensor_parallelism(model.blocks)
    with lamina.tensor_parallelism(), lamina.tensor_parallelism(False):
        model.blocks.append(Plain(6))
    model.blocks.append(Plain(6))
    lamina.set_tensor_parallelism(model.blocks[3])
    model.blocks[3].register_forward_hook(lambda *_: None)
    first = model.blocks[0]
    model = lamina.distribute(model.double()).module
    assert [type(each).__name__ for each in model.blocks] == ["Inner", "Plain", "Plain", "Plain"]
    with pytest.raises(UsageError, match=r"blocks.0 \(Plain\) was called, and became another module"):
        first(batch(0))
    assert lamina.state.module_manager.translate_functions
    lamina.shutdown()
    assert not lamina.state.module_manager.translate_functions


class Low(nn.Linear):
    pass


class Linears(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.low = nn.Linear(6, 4), nn.Linear(4, 6), Low(6, 6)
        with lamina.tensor_parallelism(False):
            self.third = nn.Linear(6, 6)
        self.theirs = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)

    def forward(self, x):
        return self.theirs(self.low(self.third(self.second(self.first(x)).relu()))[:, None]).mean()


def case_linears_are_cut_wherever_they_are_where_modules_are_replaced():
    start(2)
    torch.manual_seed(0)
    with lamina.tensor_parallelism(replace=True):
        plain = Linears().double()
    model = lamina.distribute(copy.deepcopy(plain))
    sliced = {name for name, each in model.named_parameters() if model.is_distributed_parameter(each)}
    assert sliced == {"first.weight", "second.weight"}
    for each in (model, plain):
        each(batch(0)).backward()
    for name, value in plain.named_parameters():
        if name not in sliced:
            torch.testing.assert_close(dict(model.named_parameters())[name].grad, value.grad)
    with torch.no_grad():  # by torch's fast path
        torch.testing.assert_close(model.eval()(batch(1)), plain.eval()(batch(1)))
    for mode in ("memory", "speed"):
        start(2, optimize=mode)
        stack = lamina.nn.DistributedTransformer(1, 2, 3, 6, 8).double()
        other = nn.Linear(6, 8).double()
        other.weight = stack.seq_layers[0].output.dense1.weight  # a tie that is not cut alike
        with pytest.raises(UsageError, match="are one parameter, and the plan does not cut it alike"):
            lamina.distribute(nn.ModuleList([stack, other]))


WORDS = 13  # odd


def words(seed, samples=3):
    return torch.randint(0, WORDS, (samples, 5), generator=torch.Generator().manual_seed(seed))


def given(seed, is_crossed):
    mask = (torch.arange(5) > 3).long().expand(3, -1) * torch.tensor([[0], [1], [1]])
    others = (torch.sin(torch.arange(3 * 4 * 12.0, dtype=torch.double)).view(3, 4, 12), None) if is_crossed else ()
    return words(seed), mask, words(seed + 50) % 2, None, *others, words(seed)


def require_same_language_model(plain, is_crossed=False, is_compiled=False):
    model = lamina.distribute(copy.deepcopy(plain))
    for layer in model.module.transformer.seq_layers if is_compiled else ():
        layer.compile(fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2, momentum=0.9) for each in (model, plain)]
    for seed in range(2):
        found = []
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            torch.manual_seed(seed)
            loss, scores = each(given(seed, is_crossed))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.detach(), norm, scores.detach() if each is model else scores.detach().transpose(0, 1)))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-9, atol=1e-11)
    return model.module


def case_a_causal_language_model_with_alibi_and_uneven_heads():
    start(2, optimize="speed")
    torch.manual_seed(0)
    plain = lamina.nn.DistributedTransformerLMHead(
        2, 3, 4, 12, 17, WORDS, 6, 0.2, 0.1, "gelu_new", 1e-6, 0, 6, False, True, 0.1, True, True, False, use_alibi=True
    )
    module = require_same_language_model(plain.double(), is_compiled=True)
    layer = module.transformer.seq_layers[0]
    assert module.lm_head.weight is module.word_embedding.weight and len(module.lm_head.weight) == (7, 6)[RANK]
    assert layer.attention.query.weight.shape == ((8, 4)[RANK], 12)
    assert layer.output.dense2.weight.shape == (12, (9, 8)[RANK])


def case_attention_to_other_states_norms_after_each_part_and_types_of_tokens():
    start(2)
    torch.manual_seed(0)
    plain = lamina.nn.DistributedTransformerLMHead(
        1, 2, 12, 12, 16, WORDS, 6, 0.2, 0.1, num_token_types=2, add_cross_attention=True, window_size=2
    )
    assert {"attention", "cross_attention", "output"} == set(dict(plain.transformer.seq_layers[0].named_children()))
    require_same_language_model(plain.double(), is_crossed=True)


def case_activations_between_layers_lie_in_parts_of_positions():
    start(2, optimize="memory")
    torch.manual_seed(0)
    plain = lamina.nn.DistributedTransformerLMHead(
        2, 3, 4, 12, 12, WORDS, 6, 0.2, 0.1, "relu", 1e-6, 0, 6, False, True, 0.1, True, True, False
    ).double()
    module = require_same_language_model(plain)
    found = []
    hooks = [
        part.register_forward_hook(lambda part, given, output: found.append(output))
        for part in module.transformer.modules()
        if isinstance(part, nn.Dropout | nn.LayerNorm)
    ]
    one = torch.tensor([[3], [4]])
    for words_given, own in ((words(7), (3, 2)[RANK]), (one, (1, 0)[RANK])):  # fewer positions than ranks, too
        scores = [each.eval()((words_given, None, None, None, None)) for each in (module, plain)]
        torch.testing.assert_close(scores[0].transpose(0, 1), scores[1], rtol=1e-9, atol=1e-11)
        assert len(found) == 8 and all(each.shape[1] == own for each in found)
        found.clear()
    for hook in hooks:
        hook.remove()
    for mode in ("memory", "speed"):
        start(2, optimize=mode)
        plain = lamina.nn.DistributedTransformer(1, 2, 4, 8, 12)
        model = lamina.distribute(copy.deepcopy(plain)).module
        kinds: list[list[torch.dtype]] = []
        for each in (model, plain):
            kinds.append([])
            for part in (each.seq_layers[0].attention.dense, each.seq_layers[0].output.dense2):
                part.register_forward_hook(lambda part, given, output, own=kinds[-1]: own.append(output.dtype))
            with torch.autocast("cpu", torch.bfloat16):
                each(torch.ones(1, 3, 8)).sum().backward()
        assert kinds[0] == kinds[1] == [torch.bfloat16] * 2


def drawn(seed):
    """A language model, and a batch of words, masks and labels for it."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    heads, size = draw.choice([2, 3, 4, 5]), draw.choice([2, 4])
    hidden, words = draw.choice([heads * size, size, 6]), draw.choice([5, 8, 11])
    is_first = draw.random() < 0.5
    is_parallel, is_crossed = is_first and draw.random() < 0.4, draw.random() < 0.4
    options = dict(
        num_token_types=draw.choice([0, 2]),
        causal_mask_size=draw.choice([None, 8]),
        add_cross_attention=is_crossed and not is_parallel,
        add_lm_head=draw.random() < 0.8,
        pre_layernorm=is_first,
        post_layernorm=not is_first or (not is_parallel and draw.random() < 0.3),
        tie_lm_head=draw.random() < 0.6,
        lm_head_bias=draw.random() < 0.5,
        use_alibi=draw.random() < 0.3,
        window_size=draw.choice([None, 1, 2]),
        rotary_dim=draw.choice([None, 2]),
        dense_bias=draw.random() < 0.5,
        parallel_attn_output=is_parallel,
    )
    sizes = (draw.choice([1, 2]), heads, size, hidden, draw.choice([5, 10, heads * size]), words, 8)
    plain = lamina.nn.DistributedTransformerLMHead(*sizes, 0.2, 0.3, **options, initializer_range=0.5).double()
    samples, places = draw.choice([1, 3]), draw.randint(2, 6)
    batch = torch.randint(0, words, (samples, places))
    hidden_places = (torch.arange(places) >= torch.randint(1, places + 1, (samples, 1))).long()
    others = (torch.randn(samples, 4, hidden).double(), None) if options["add_cross_attention"] else ()
    labels = batch if plain.lm_head is not None else None
    return plain, (batch, draw.choice([None, hidden_places]), draw.choice([None, batch % 2]), None, *others, labels)


def case_language_models_that_are_drawn_at_random():
    for seed in some(range(100), 8):
        start(2, optimize=("memory", "speed")[seed % 2])
        plain, given = drawn(seed)
        model = lamina.distribute(copy.deepcopy(plain))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
        for step in range(2):
            found = []
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                torch.manual_seed(step)
                output = each(given)
                loss = output[0] if isinstance(output, tuple) else output.square().mean()
                loss.backward()
                found.append((loss.detach(), nn.utils.clip_grad_norm_(each.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10, msg=lambda text, seed=seed: f"{seed}: {text}")
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-8, atol=1e-10)


SIZES = dict(vocab_size=WORDS, n_positions=8, n_embd=12, n_head=3, n_layer=2, attn_pdrop=0.2, embd_pdrop=0.15)


def of_transformers(name, **sizes):
    import transformers

    family = name.partition("For")[0].partition("LM")[0]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**sizes)).double()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms, too
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def trained(model, plain, degree):
    """Trains both alike."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2, momentum=0.9) for each in (model, plain)]
    mask = (torch.arange(5) < torch.tensor([[5], [4], [3]])).long()
    for seed in range(2):
        found = []
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            torch.manual_seed(seed)
            labels = words(seed).masked_fill(mask == 0, -100)
            given = each(input_ids=words(seed), attention_mask=mask, labels=labels)
            given["loss"].backward()
            norm = nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scores = given.logits.transpose(0, 1) if each is model and degree > 1 else given.logits
            found.append((given.loss.detach(), norm, scores[mask == 1].detach()))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6, check_dtype=False)  # theirs are floats


def require_states_go_round(model, plain, there, back):
    state = model.state_dict()
    theirs = there(state, max_seq_len=8)
    assert theirs.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)
    plain.load_state_dict(theirs)
    again = back(plain.state_dict())
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(theirs)  # translated
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def case_gpt2_becomes_the_originals_class():
    from transformers import AutoModelForCausalLM

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.nn.huggingface import gpt2

    for degree in DEGREES:
        start(degree)
        plain = of_transformers("GPT2LMHeadModel", **SIZES)
        with smp.model_creation(tensor_parallelism=True, dtype=torch.double, fused_softmax=True):
            model = AutoModelForCausalLM.from_config(plain.config)
        model.load_state_dict(plain.state_dict())
        model = smp.DistributedModel(model)
        layer = model.get_module().transformer.seq_layers[1]
        assert layer.attention.query.weight.shape == ((12, 12) if degree == 1 else ((8, 4)[RANK], 12))
        smp.set_activation_checkpointing(model.get_module().transformer.seq_layers, pack_args_as_tuple=True)
        trained(model, plain, degree)
        there = gpt2.translate_state_dict_to_hf_gpt2
        require_states_go_round(model, plain, there, gpt2.translate_hf_state_dict_to_smdistributed)
        with pytest.raises(UsageError, match="output_hidden_states is not available for a GPT2LMHeadModel"):
            model(input_ids=words(0), output_hidden_states=True)


def case_delayed_parameters_become_others_that_wait_for_their_values():
    from transformers import GPT2Config, GPT2LMHeadModel

    from lamina.deferred_init import delayed

    config = GPT2Config(**SIZES | dict(n_embd=192, n_layer=1))  # large ones are delayed
    for degree in DEGREES:
        start(degree)
        torch.manual_seed(0)
        plain = GPT2LMHeadModel(config)
        torch.manual_seed(0)
        with lamina.delay_param_initialization(), lamina.tensor_parallelism(replace=True):
            model = GPT2LMHeadModel(config)
        weight = model.transformer.h[0].attn.c_attn.weight
        assert delayed.is_delayed(weight)
        model = lamina.distribute(model)
        assert delayed.is_delayed(weight)  # its values were never made of it
        theirs = lamina.hugging_face.to_hugging_face(model.state_dict())
        assert all(torch.equal(value, theirs[name]) for name, value in plain.state_dict().items())


def case_layers_are_placed_as_those_were_that_they_stand_for():
    start(1, partitions=2, auto_partition=False, default_partition=0)
    plain = of_transformers("GPT2LMHeadModel", **SIZES | dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))
    model = copy.deepcopy(plain)
    lamina.set_partition(model.transformer.h[1], 1)
    lamina.set_tensor_parallelism(model, replace=True)
    model = lamina.distribute(model)

    @lamina.step
    def train(batch):
        loss = model(input_ids=batch, labels=batch).loss
        model.backward(loss)
        return loss

    loss = train(words(0)).reduce_mean()
    torch.testing.assert_close(loss, plain(input_ids=words(0), labels=words(0)).loss, check_dtype=False)
    own = {name.partition("seq_layers.")[2][:1] for name, _ in model.local_named_parameters()}
    assert own == ({"", "0"}, {"1"})[RANK]


def case_gpt2_that_a_script_has_changed():
    start(2)
    plain = of_transformers("GPT2LMHeadModel", **SIZES, add_cross_attention=True, tie_word_embeddings=False)
    for name, part in plain.named_modules():
        part.p = 0.25 if name.endswith("resid_dropout") or name.endswith("mlp.dropout") else getattr(part, "p", None)
    model = copy.deepcopy(plain)
    lamina.set_tensor_parallelism(model, replace=True)
    model = lamina.distribute(model)
    assert model.module.lm_head.weight is not model.module.word_embedding.weight
    trained(model, plain, 2)
    others = torch.randn(3, 4, 12, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    hidden = (torch.arange(4) < torch.tensor([[4], [2], [3]])).long()
    given = dict(input_ids=words(5), labels=words(5), encoder_hidden_states=others, encoder_attention_mask=hidden)
    found, expected = (each.eval()(**given).loss for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, check_dtype=False)
    start(2)
    model = of_transformers("GPT2LMHeadModel", **SIZES)
    model.transformer.h[0].mlp.dropout.p = 0.5
    model.transformer.h[1].mlp = Wrapped(model.transformer.h[1].mlp)
    lamina.set_tensor_parallelism(model, replace=True)
    names = [type(each).__name__ for each in lamina.distribute(model).module.transformer.h]
    assert names == ["GPT2Block", "GPT2Block"]
    start(2)
    model = of_transformers("GPT2LMHeadModel", **SIZES)
    model.gradient_checkpointing_enable()
    lamina.set_tensor_parallelism(model, replace=True)
    assert type(lamina.distribute(model).module).__name__ == "GPT2LMHeadModel"


class Wrapped(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x)


def case_blocks_of_gpt2_by_hooks_and_a_model_with_another_head():
    from transformers import GPT2Config, GPT2ForSequenceClassification
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    from smdistributed.modelparallel.torch.nn.huggingface import gpt2

    for is_by_hooks in (True, False):
        start(2)
        plain = of_transformers("GPT2LMHeadModel", **SIZES, scale_attn_by_inverse_layer_idx=is_by_hooks)
        model = copy.deepcopy(plain)
        if is_by_hooks:
            hooks = gpt2.get_hf_gpt2_transformer_layer_hooks()
            lamina.tp_register_with_module(GPT2Block, lamina.nn.DistributedTransformerLayer, *hooks)
            model = copy.deepcopy(of_transformers("GPT2LMHeadModel", **plain.config.to_dict()))
        lamina.set_tensor_parallelism(model.transformer.h, replace=not is_by_hooks)
        model = lamina.distribute(model)
        delattr(GPT2Block, "_lamina_registration") if is_by_hooks else None
        block = model.module.transformer.h[0]
        assert isinstance(block, lamina.nn.DistributedTransformerLayer)
        trained(model, plain, 1)
        theirs = gpt2.translate_layer_state_dict_to_hf_gpt2_block(plain.transformer.h[0].state_dict())
        assert theirs.keys() == plain.transformer.h[0].state_dict().keys()
    start(2)
    plain = GPT2ForSequenceClassification(GPT2Config(**SIZES, pad_token_id=0)).double().eval()
    model = copy.deepcopy(plain)
    lamina.set_tensor_parallelism(model, replace=True)
    model = lamina.distribute(model)
    assert isinstance(model.module.transformer, lamina.nn.DistributedTransformerLMHead)
    found, expected = (each(input_ids=words(1), labels=torch.tensor([0, 1, 1])).loss for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def require_replaced(name, family, find, **sizes):
    import importlib

    translating = importlib.import_module(f"smdistributed.modelparallel.torch.nn.huggingface.{family}")
    for degree in DEGREES:
        start(degree)
        plain = of_transformers(name, **sizes)
        model = copy.deepcopy(plain)
        lamina.set_tensor_parallelism(model, replace=True)
        model = lamina.distribute(model)
        assert isinstance(find(model.module).seq_layers[0], lamina.nn.DistributedTransformerLayer)
        trained(model, plain, degree if find(model.module) is getattr(model.module, "transformer", None) else 1)
        there = getattr(translating, f"translate_state_dict_to_hf_{family}")
        back = getattr(translating, f"translate_hf_state_dict_to_smdistributed_{family}")
        require_states_go_round(model, plain, there, back)


def case_gpt_neo_with_windows():
    kinds = dict(attention_types=[[["global", "local"], 1]], window_size=2, max_position_embeddings=8)
    sizes = dict(vocab_size=WORDS, hidden_size=12, num_layers=2, num_heads=3, attention_dropout=0.2)
    require_replaced("GPTNeoForCausalLM", "gptneo", lambda module: module.transformer, **sizes, **kinds)


def case_gptj_with_positions_that_turn_and_a_head_of_its_own():
    sizes = dict(vocab_size=WORDS, n_positions=8, n_embd=12, n_layer=2, n_head=3, rotary_dim=2, attn_pdrop=0.2)
    require_replaced("GPTJForCausalLM", "gptj", lambda module: module.transformer, **sizes, resid_pdrop=0.1)


ENCODER = dict(vocab_size=WORDS, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17)


def case_bert_whose_encoder_becomes_a_transformer():
    sizes = ENCODER | dict(max_position_embeddings=8, pad_token_id=0)
    require_replaced("BertForMaskedLM", "bert", lambda module: module.bert.encoder, **sizes)


def case_roberta_as_a_decoder():
    sizes = ENCODER | dict(max_position_embeddings=10, pad_token_id=0, is_decoder=True, use_cache=False)
    require_replaced("RobertaForCausalLM", "roberta", lambda module: module.roberta.encoder, **sizes)


class WithFlash(lamina.nn.DistributedModule):
    slicing_plan: ClassVar = {"query": "colwise", "key": "colwise", "value": "colwise", "dense": "rowwise"}

    def __init__(self):
        super().__init__()
        self.num_heads = 3
        self.query, self.key, self.value, self.dense = (nn.Linear(12, 12) for _ in range(4))
        self.attend = lamina.nn.FlashAttentionLayer(attention_dropout_prob=0.2, use_alibi=True)

    def forward(self, x):
        heads = [layer(x).unflatten(-1, (-1, 4)) for layer in (self.query, self.key, self.value)]
        return self.dense(self.attend(torch.stack(heads, 2), causal=True).transpose(1, 2).flatten(2))


def case_attention_alone_has_the_slopes_and_the_dropout_of_its_heads():
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(3), dtype=torch.double)
    found = {}
    for degree in DEGREES:
        start(degree)
        torch.manual_seed(0)
        model = lamina.distribute(WithFlash().double())
        torch.manual_seed(1)
        loss = model(x).square().mean()
        model.backward(loss)
        norm = model.clip_grad_norm_(1.0)
        model.eval()
        found[degree] = torch.stack([loss.detach(), torch.as_tensor(norm), model(x).square().mean().detach()])
    torch.testing.assert_close(found[1], found[2])
