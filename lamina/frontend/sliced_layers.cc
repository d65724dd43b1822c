// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/sliced_layers.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/nn/init.h>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/layers/operators.h"
#include "lamina/tensor_parallel/dropout.h"
#include "lamina/tensor_parallel/forwards.h"
#include "lamina/tensor_parallel/operators.h"
#include "lamina/tensor_parallel/slices.h"

namespace lamina::nn {

namespace tp = tensor_parallel;

SlicedLinearImpl::SlicedLinearImpl(std::int64_t in_features, std::int64_t out_features, Style style, bool bias,
                                   std::int64_t unit)
    : torch::nn::LinearImpl(torch::nn::LinearOptions(in_features, out_features).bias(bias)),
      style_(style),
      unit_(unit) {}

at::Tensor SlicedLinearImpl::forward(const at::Tensor& input) {
  if (!member()) return at::linear(input, weight, bias);
  return tp::linear(cut_, member()->team, input, weight, bias);
}

at::Tensor SlicedLinearImpl::to_positions(const at::Tensor& part, std::int64_t positions) {
  const auto& team = member()->team;
  const auto sum = tp::reduce_scatter(at::linear(part, tp::own(weight)), member()->cut(positions), team);
  return bias.defined() ? sum + tp::copy(bias, team).to(sum.scalar_type()) : sum;
}

void SlicedLinearImpl::tie(const at::Tensor& shared) {
  parameters_.erase("weight");
  weight = shared;
}

std::vector<frontend::Sliced::Cut> SlicedLinearImpl::cuts() const {
  if (cuts_inputs()) return {{"weight", 1, unit_}};
  return {{"weight", 0, unit_}, {"bias", 0, unit_}};
}

void SlicedLinearImpl::begin(const frontend::Member& member) {
  constexpr const char* kNames[] = {"colwise", "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"};
  Sliced::begin(member);
  cut_.style = kNames[static_cast<int>(style_)];
  cut_.by_parent = style_ == Style::kColwiseOfReady;
  cut_.sizes =
      tp::sizes_of(tp::shares_of(cuts_inputs() ? options.in_features() : options.out_features(), unit_, member.degree));
}

SlicedEmbeddingImpl::SlicedEmbeddingImpl(std::int64_t num_embeddings, std::int64_t embedding_dim)
    : torch::nn::EmbeddingImpl(num_embeddings, embedding_dim) {}

at::Tensor SlicedEmbeddingImpl::forward(const at::Tensor& words) {
  return member() ? tp::embedding(cut_, member()->team, words, weight) : at::embedding(weight, words);
}

void SlicedEmbeddingImpl::begin(const frontend::Member& member) {
  Sliced::begin(member);
  cut_.style = "embedding_rowwise";
  cut_.part.all = options.num_embeddings();
  cut_.part.first = tp::shares_of(cut_.part.all, 1, member.degree)[static_cast<std::size_t>(member.index)].begin;
}

namespace {

// With a weight that nothing was drawn for.
torch::nn::EmbeddingOptions with_weight(torch::nn::EmbeddingOptions options) {
  if (options._weight().defined()) return options;
  return options._weight(at::empty({options.num_embeddings(), options.embedding_dim()}));
}

}  // namespace

DistributedEmbeddingImpl::DistributedEmbeddingImpl(const torch::nn::EmbeddingOptions& given, double initializer_range)
    : torch::nn::EmbeddingImpl(with_weight(given)) {
  if (given._weight().defined()) return;
  torch::nn::init::normal_(weight, 0, initializer_range);
  const at::NoGradGuard no_grad;
  if (const auto& padding = options.padding_idx()) weight[*padding].fill_(0);
}

at::Tensor DistributedEmbeddingImpl::forward(const at::Tensor& words) {
  if (!member()) return torch::nn::EmbeddingImpl::forward(words);
  return tp::embedding(cut_, member()->team, words, weight);
}

std::vector<frontend::Sliced::Cut> DistributedEmbeddingImpl::cuts() const {
  if (options.max_norm() || options.scale_grad_by_freq() || options.sparse()) {
    throw base::UsageError("a DistributedEmbedding that is sliced has no max_norm, scale_grad_by_freq or sparse",
                           base::Code{"tp-layer"});
  }
  return {{"weight", 1}};
}

void DistributedEmbeddingImpl::begin(const frontend::Member& member) {
  Sliced::begin(member);
  cut_.style = "embedding_colwise";
  cut_.sizes = tp::sizes_of(tp::shares_of(options.embedding_dim(), 1, member.degree));
  cut_.padding = options.padding_idx();
}

DistributedLayerNormImpl::DistributedLayerNormImpl(std::int64_t features, double eps, bool elementwise_affine)
    : torch::nn::LayerNormImpl(
          torch::nn::LayerNormOptions({features}).eps(eps).elementwise_affine(elementwise_affine)) {}

at::Tensor DistributedLayerNormImpl::forward(const at::Tensor& input, bool is_part) {
  const auto ready = [&](const at::Tensor& parameter) -> std::optional<at::Tensor> {
    if (!parameter.defined()) return std::nullopt;
    return is_part ? tp::copy(parameter, member()->team) : parameter;
  };
  const auto& shape = options.normalized_shape();
  return layers::mixed_layer_norm(input, c10::fromIntArrayRefSlow(shape), ready(weight), ready(bias), options.eps());
}

at::Tensor DistributedDropoutImpl::forward(const at::Tensor& input, std::int64_t positions) {
  if (positions == 0 || !is_training() || options.p() == 0) return torch::nn::DropoutImpl::forward(input);
  return tp::dropout_of_part(input, options.p(), 1, member()->positions(positions), positions);
}

}  // namespace lamina::nn
