// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/gradients.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <map>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/data_parallel/agreement.h"

namespace lamina::data_parallel {
namespace {

at::Tensor joined(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> pieces;
  for (const auto& parameter : parameters) {
    const auto& gradient = parameter.grad();
    pieces.push_back(gradient.defined() ? gradient.to(parameter.scalar_type()).reshape({-1})
                                        : at::zeros({parameter.numel()}, parameter.options()));
  }
  return at::cat(pieces);
}

void split(const at::Tensor& joined, const std::vector<at::Tensor>& parameters) {
  std::int64_t begin = 0;
  for (auto parameter : parameters) {
    const auto piece = joined.narrow(0, begin, parameter.numel()).view(parameter.sizes());
    begin += parameter.numel();
    auto& gradient = parameter.mutable_grad();
    if (gradient.defined()) {
      gradient.copy_(piece);
    } else {
      gradient = piece.clone();
    }
  }
}

void make_dense(const NamedTensor& parameter) {
  auto& gradient = at::Tensor(parameter.tensor).mutable_grad();
  if (gradient.defined() && gradient.layout() != at::kStrided) gradient = gradient.to_dense();
}

}  // namespace

Reduce mean_over(collective::ProcessGroup& replicas, int divisor) {
  return [&replicas, divisor](const GradientBucket& bucket) {
    // Divided before it is summed: a sum of half precision may be too large. Collectives know no complex numbers.
    auto real = bucket.gradients.is_complex() ? at::view_as_real(bucket.gradients) : bucket.gradients;
    real.div_(divisor);
    replicas.sum(real);
    return bucket.gradients;
  };
}

void reduce_gradients(std::span<const NamedTensor> parameters, collective::ProcessGroup& replicas,
                      std::int64_t bucket_bytes, const Reduce& reduce) {
  const c10::AutoGradMode no_grad(false);
  std::vector<bool> present;
  for (const auto& parameter : parameters) present.push_back(parameter.tensor.grad().defined());
  present = any_replica(parameters, present, replicas);
  std::vector<std::vector<at::Tensor>> full;
  std::map<std::pair<std::string, at::ScalarType>, std::pair<std::vector<at::Tensor>, std::size_t>> filling;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!present[i]) continue;
    make_dense(parameters[i]);
    const auto& tensor = parameters[i].tensor;
    auto& [members, bytes] = filling[{tensor.device().str(), tensor.scalar_type()}];
    members.push_back(tensor);
    bytes += tensor.nbytes();
    if (static_cast<std::int64_t>(bytes) < bucket_bytes) continue;
    full.push_back(std::exchange(members, {}));
    bytes = 0;
  }
  for (auto& [kind, bucket] : filling) {
    if (!bucket.first.empty()) full.push_back(std::move(bucket.first));
  }
  for (std::size_t i = 0; i < full.size(); ++i) {
    GradientBucket bucket{static_cast<std::int64_t>(i), i + 1 == full.size(), std::move(full[i]), {}};
    bucket.gradients = joined(bucket.parameters);
    const auto reduced = reduce(bucket);
    if (reduced.sizes() != bucket.gradients.sizes() || reduced.scalar_type() != bucket.gradients.scalar_type()) {
      throw base::UsageError("a communication hook must return a tensor of the bucket's size and type");
    }
    split(reduced, bucket.parameters);
  }
}

}  // namespace lamina::data_parallel
