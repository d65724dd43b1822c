// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/frontend/slices.h"
#include "lamina/tensor_parallel/layer_cuts.h"

// [Note: layers of slices] Layers that are cut over the ranks of a TP_GROUP when their model is wrapped. All sizes are
// those of the whole. With one rank they are torch's own, with the same numbers. They are Python's of the same names.
namespace lamina::nn {

// A cut of a layer, and what it takes and gives. A part is this rank's, of features that the ranks share.
enum class Style {
  kColwise,              // some of the outputs: takes the whole, gives a part
  kColwiseOfReady,       // the same, of an input that tp_copy() was called for already
  kColwiseGatherOutput,  // some of the outputs: takes and gives the whole
  kRowwise,              // some of the inputs: takes a part, gives the whole, to which the bias is added once
  kRowwiseSplitInput,    // some of the inputs: takes and gives the whole
};

// torch's Linear, cut in a style, in units of so many features that are never torn.
class SlicedLinearImpl : public torch::nn::LinearImpl, public frontend::Sliced {
 public:
  SlicedLinearImpl(std::int64_t in_features, std::int64_t out_features, Style style, bool bias = true,
                   std::int64_t unit = 1);
  at::Tensor forward(const at::Tensor& input);

  // Gives this rank's part of so many positions of the whole, where its style is kRowwise.
  at::Tensor to_positions(const at::Tensor& part, std::int64_t positions);

  // Its weight is another module's from now on.
  void tie(const at::Tensor& shared);

  std::vector<Cut> cuts() const override;
  void begin(const frontend::Member& member) override;

 private:
  bool cuts_inputs() const { return style_ == Style::kRowwise || style_ == Style::kRowwiseSplitInput; }

  const Style style_;
  const std::int64_t unit_;
  tensor_parallel::LayerCut cut_;
};
TORCH_MODULE(SlicedLinear);

// torch's Embedding, whose words are cut. It takes and gives whole tensors.
class SlicedEmbeddingImpl : public torch::nn::EmbeddingImpl, public frontend::Sliced {
 public:
  SlicedEmbeddingImpl(std::int64_t num_embeddings, std::int64_t embedding_dim);
  at::Tensor forward(const at::Tensor& words);

  std::vector<Cut> cuts() const override { return {{"weight", 0}}; }
  void begin(const frontend::Member& member) override;

 private:
  tensor_parallel::LayerCut cut_;
};
TORCH_MODULE(SlicedEmbedding);

// torch's Linear, whose inputs are cut.
class DistributedLinearImpl : public SlicedLinearImpl {
 public:
  DistributedLinearImpl(std::int64_t in_features, std::int64_t out_features, bool bias = true)
      : SlicedLinearImpl(in_features, out_features, Style::kRowwiseSplitInput, bias) {}
};
TORCH_MODULE(DistributedLinear);

// torch's Embedding, whose features are cut. It gives all of them. Values begin with this standard deviation. Throws
// base::UsageError, where it is cut, with max_norm, scale_grad_by_freq and sparse.
class DistributedEmbeddingImpl : public torch::nn::EmbeddingImpl, public frontend::Sliced {
 public:
  explicit DistributedEmbeddingImpl(const torch::nn::EmbeddingOptions& options, double initializer_range = 0.02);
  DistributedEmbeddingImpl(std::int64_t num_embeddings, std::int64_t embedding_dim)
      : DistributedEmbeddingImpl(torch::nn::EmbeddingOptions(num_embeddings, embedding_dim)) {}
  at::Tensor forward(const at::Tensor& words);

  std::vector<Cut> cuts() const override;
  void begin(const frontend::Member& member) override;

 private:
  tensor_parallel::LayerCut cut_;
};
TORCH_MODULE(DistributedEmbedding);

// torch's LayerNorm over the last dimension, whose parameters may be of another floating-point type than its input. It
// computes in the type that both fit into; the result has the input's. All ranks have it whole; `is_part`: the input is
// a part of what there is, on each rank another.
class DistributedLayerNormImpl : public torch::nn::LayerNormImpl, public frontend::Sliced {
 public:
  explicit DistributedLayerNormImpl(std::int64_t features, double eps = 1e-5, bool elementwise_affine = true);
  at::Tensor forward(const at::Tensor& input, bool is_part = false);
};
TORCH_MODULE(DistributedLayerNorm);

// torch's Dropout, of this rank's part of so many positions where there are some: see [Note: dropout of slices].
class DistributedDropoutImpl : public torch::nn::DropoutImpl, public frontend::Sliced {
 public:
  using torch::nn::DropoutImpl::DropoutImpl;
  at::Tensor forward(const at::Tensor& input, std::int64_t positions = 0);
};
TORCH_MODULE(DistributedDropout);

}  // namespace lamina::nn
