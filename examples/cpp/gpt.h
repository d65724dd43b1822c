// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include "lamina/lamina.h"

// A small GPT over bytes. What makes it one that lamina can spread over ranks: members that it calls, and that may live
// elsewhere, are declared as lamina::Child, lists of them as lamina::ChildList.
//
// Shapes in names: B sequences, L bytes of context, D width, H heads, V vocabulary.
namespace example {

struct AttentionImpl : torch::nn::Module {
  std::int64_t heads;
  torch::nn::Linear qkv{nullptr}, out{nullptr};  // plain: they live where the attention does

  AttentionImpl(std::int64_t width, std::int64_t heads) : heads(heads) {
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
  }

  torch::Tensor forward(const torch::Tensor& x_BLD) {
    const auto B = x_BLD.size(0), L = x_BLD.size(1), D = x_BLD.size(2);
    const auto parts = qkv(x_BLD).view({B, L, 3, heads, D / heads}).permute({2, 0, 3, 1, 4});
    const auto y_BHLE = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    return out(y_BHLE.transpose(1, 2).reshape({B, L, D}));
  }
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  lamina::Child<torch::nn::LayerNorm> norm_1, norm_2;
  lamina::Child<Attention> attention;
  lamina::Child<lamina::Sequential> mlp;

  BlockImpl(std::int64_t width, std::int64_t heads) {
    norm_1 = register_module("norm_1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    attention = register_module("attention", Attention(width, heads));
    norm_2 = register_module("norm_2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    mlp = register_module("mlp", lamina::Sequential(torch::nn::Linear(width, 4 * width), torch::nn::GELU(),
                                                    torch::nn::Linear(4 * width, width)));
  }

  torch::Tensor forward(torch::Tensor x_BLD) {
    x_BLD = x_BLD + attention(norm_1(x_BLD));
    return x_BLD + mlp(norm_2(x_BLD));
  }
};
TORCH_MODULE(Block);

// x_BL, bytes as int64 -> logits_BLV of the next byte. The head is the embedding.
struct GPTImpl : torch::nn::Module {
  lamina::Child<torch::nn::Embedding> embedding, positions;
  lamina::ChildList<Block> blocks;
  lamina::Child<torch::nn::LayerNorm> norm;

  GPTImpl(std::int64_t vocabulary, std::int64_t width, int layers, std::int64_t heads, std::int64_t context) {
    embedding = register_module("embedding", torch::nn::Embedding(vocabulary, width));
    positions = register_module("positions", torch::nn::Embedding(context, width));
    register_module("blocks", blocks);
    for (int i = 0; i < layers; ++i) blocks->push_back(Block(width, heads));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    torch::NoGradGuard no_grad;
    embedding->weight.mul_(0.02);
    positions->weight.mul_(0.02);
  }

  torch::Tensor forward(const torch::Tensor& x_BL) {
    auto x_BLD = embedding(x_BL) + positions(torch::arange(x_BL.size(1)));
    for (auto& block : *blocks) x_BLD = block(x_BLD);
    return torch::linear(norm(x_BLD), embedding->weight);
  }
};
TORCH_MODULE(GPT);

}  // namespace example
