// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/frontend/models.h"

// Models with layers that are cut over ranks. Each takes words (batch, kPositions) and returns a loss.
namespace lamina::frontend::test {

constexpr std::int64_t kWords = 21, kFeatures = 12, kPositions = 6;

// A net of layers of these classes, torch's or lamina's, with the same values from the same seed.
template <class Embedding, class Up, class Down, class Head>
struct MixerImpl : torch::nn::Module {
  Child<Embedding> embedding;
  Child<Up> up;
  Child<Down> down;
  Child<Head> head;
  MixerImpl(Embedding words, Up first, Down second, Head third) {
    embedding = register_module("embedding", words);
    up = register_module("up", first);
    down = register_module("down", second);
    head = register_module("head", third);
  }
  Tensor forward(const Tensor& words) {
    const auto x = embedding(words);
    return torch::nn::functional::cross_entropy(head(x + down(torch::tanh(up(x)))).flatten(0, 1), words.flatten());
  }
};

inline auto sliced_mixer() {
  using Model = MixerImpl<nn::DistributedEmbedding, nn::SlicedLinear, nn::SlicedLinear, nn::DistributedLinear>;
  nn::DistributedEmbedding embedding(kWords, kFeatures);
  nn::SlicedLinear up(kFeatures, 7, nn::Style::kColwise), down(7, kFeatures, nn::Style::kRowwise);
  return torch::nn::ModuleHolder<Model>(embedding, up, down, nn::DistributedLinear(kFeatures, kWords));
}

inline auto plain_mixer() {
  using torch::nn::Linear;
  using Model = MixerImpl<torch::nn::Embedding, Linear, Linear, Linear>;
  torch::nn::Embedding embedding(
      torch::nn::EmbeddingOptions(kWords, kFeatures)._weight(torch::empty({kWords, kFeatures})));
  torch::nn::init::normal_(embedding->weight, 0, 0.02);
  Linear up(kFeatures, 7), down(7, kFeatures);
  return torch::nn::ModuleHolder<Model>(embedding, up, down, Linear(kFeatures, kWords));
}

// The plain one, cut by a plan.
inline auto planned_mixer() {
  auto mixer = plain_mixer();
  set_tensor_parallelism(
      *mixer,
      {{"embedding", "embedding_colwise"}, {"up", "colwise"}, {"down", "rowwise"}, {"head", "rowwise_split_input"}});
  return mixer;
}

// Blocks whose layers are plain members.
struct PlainBlockImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr};
  double p;
  explicit PlainBlockImpl(double dropout) : p(dropout) {
    up = register_module("up", torch::nn::Linear(kFeatures, 7));
    down = register_module("down", torch::nn::Linear(7, kFeatures));
  }
  Tensor forward(const Tensor& x) { return x + down(torch::dropout(torch::tanh(up(x)), p, is_training())); }
};
TORCH_MODULE(PlainBlock);

struct BlocksImpl : torch::nn::Module {
  torch::nn::Embedding words{nullptr};
  ChildList<PlainBlock> blocks;
  torch::nn::Linear head{nullptr};
  explicit BlocksImpl(double dropout = 0)
      : blocks(PlainBlock(dropout), PlainBlock(dropout), PlainBlock(dropout), PlainBlock(dropout)) {
    words = register_module("words", torch::nn::Embedding(kWords, kFeatures));
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(kFeatures, kWords));
  }
  Tensor forward(const Tensor& given) {
    auto x = words(given);
    for (auto& block : *blocks) x = block(x);
    return torch::nn::functional::cross_entropy(head(x).flatten(0, 1), given.flatten());
  }
};
TORCH_MODULE(Blocks);

inline Blocks planned_blocks(double dropout) {
  Blocks net(dropout);
  set_tensor_parallelism(*net, {{"words", "embedding_rowwise"},
                                {"blocks.*.up", "colwise"},
                                {"blocks.*.down", "rowwise"},
                                {"head", "colwise_gather_output"}});
  return net;
}

struct LanguageModelImpl : torch::nn::Module {
  Child<nn::DistributedTransformerLMHead> model;
  explicit LanguageModelImpl(const nn::TransformerOptions& options) {
    model = register_module("model", nn::DistributedTransformerLMHead(options));
  }
  Tensor forward(const Tensor& words) {
    const auto mask = words.remainder(7).eq(6);  // words that nobody sees
    return model->loss(model(words, mask.logical_and(torch::arange(words.size(1)).gt(0))), words);
  }
};
TORCH_MODULE(LanguageModel);

inline nn::TransformerOptions gpt(double dropout) {
  return {.hidden_size = kFeatures,
          .hidden_dropout_prob = dropout,
          .initializer_range = 0.3,
          .pre_layernorm = true,
          .post_layernorm = false,
          .num_attention_heads = 3,
          .attention_head_size = 4,
          .attention_dropout_prob = dropout,
          .causal_mask_size = kPositions,
          .intermediate_size = 10,
          .activation = "gelu_new",
          .num_layers = 3,
          .vocab_size = kWords,
          .num_positions = kPositions};
}

// Options for all that the other one has not.
inline nn::TransformerOptions odd() {
  auto options = gpt(0);
  options.window_size = 4;
  options.use_alibi = options.parallel_attn_output = true;
  options.qkv_bias = options.tie_lm_head = false;
  options.lm_head_bias = true;
  options.rotary_dim = 2;
  options.num_positions = 0;
  return options;
}

inline nn::TransformerOptions bert() {
  auto options = gpt(0);
  options.pre_layernorm = false;
  options.post_layernorm = options.use_normal_initialization = true;
  options.causal_mask_size = {};
  return options;
}

// A decoder that sees another sequence, which an embedding that is cut over its features makes.
struct TranslatorImpl : torch::nn::Module {
  Child<nn::DistributedEmbedding> other;
  Child<nn::DistributedTransformerLMHead> model;
  TranslatorImpl() {
    auto options = gpt(0);
    options.add_cross_attention = true;
    other = register_module("other", nn::DistributedEmbedding(kWords, kFeatures));
    model = register_module("model", nn::DistributedTransformerLMHead(options));
  }
  Tensor forward(const Tensor& words) {
    const auto seen = other(words.flip(1).slice(1, 0, 4));
    return model->loss(model(words, Tensor(), Tensor(), Tensor(), seen, Tensor()), words);
  }
};
TORCH_MODULE(Translator);

inline auto adamw(std::vector<at::Tensor> parameters) {
  return torch::optim::AdamW(std::move(parameters), torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(1e-4));
}

// Makes one in float64, with the same parameters each time.
template <class Make>
auto build(const Make& make) {
  torch::manual_seed(11);
  auto model = make();
  model->to(torch::kDouble);
  return model;
}

}  // namespace lamina::frontend::test
