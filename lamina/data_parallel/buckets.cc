// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/buckets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "lamina/base/error.h"

namespace lamina::data_parallel {
namespace {

// Calls `use` with each parameter and its part of `joined`, in its shape.
template <class Use>
void each_part(const at::Tensor& joined, const std::vector<at::Tensor>& parameters, const Use& use) {
  std::int64_t begin = 0;
  for (const auto& parameter : parameters) {
    use(parameter, joined.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
    begin += parameter.numel();
  }
}

void gather(const std::vector<at::Tensor>& parameters, const at::Tensor& bucket) {
  each_part(bucket, parameters, [](const at::Tensor& parameter, const at::Tensor& part) {
    if (const auto& gradient = parameter.grad(); gradient.defined()) {
      part.copy_(gradient);
    } else {
      part.zero_();
    }
  });
}

void scatter(const at::Tensor& reduced, const std::vector<at::Tensor>& parameters) {
  each_part(reduced, parameters, [](at::Tensor parameter, const at::Tensor& part) {
    if (auto& gradient = parameter.mutable_grad(); gradient.defined()) {
      gradient.copy_(part);
    } else {
      gradient = part.clone();
    }
  });
}

void make_dense(at::Tensor parameter) {
  auto& gradient = parameter.mutable_grad();
  if (gradient.defined() && gradient.layout() != at::kStrided) gradient = gradient.to_dense();
}

}  // namespace

Reduce mean_over(collective::Group& replicas, int divisor, collective::Terms terms) {
  return [&replicas, divisor, terms = std::move(terms)](const GradientBucket& bucket) {
    // Divided before it is summed: a sum of half precision may be too large. Collectives know no complex numbers.
    auto real = bucket.gradients.is_complex() ? at::view_as_real(bucket.gradients) : bucket.gradients;
    real.div_(divisor);
    replicas.all_reduce(real, collective::Reduction::kSum, terms)->wait();
    return bucket.gradients;
  };
}

void Buckets::reduce(std::span<const NamedTensor> parameters, const std::vector<bool>& present, const Reduce& reduce) {
  const c10::AutoGradMode no_grad(false);
  auto all = arrange(parameters, present);
  for (std::size_t i = 0; i < all.size(); ++i) {
    GradientBucket bucket{static_cast<std::int64_t>(i), i + 1 == all.size(), std::move(all[i]), {}};
    for (const auto& parameter : bucket.parameters) make_dense(parameter);
    bucket.gradients = memory(bucket.parameters);
    gather(bucket.parameters, bucket.gradients);
    const auto reduced = reduce(bucket);
    if (reduced.sizes() != bucket.gradients.sizes() || reduced.scalar_type() != bucket.gradients.scalar_type()) {
      throw base::UsageError("a communication hook must return a tensor of the bucket's size and type",
                             base::Code{"replica-hook"});
    }
    scatter(reduced, bucket.parameters);
  }
}

std::vector<std::vector<at::Tensor>> Buckets::arrange(std::span<const NamedTensor> parameters,
                                                      const std::vector<bool>& present) const {
  std::vector<std::vector<at::Tensor>> full;
  std::map<Kind, std::pair<std::vector<at::Tensor>, std::size_t>> filling;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!present[i]) continue;
    const auto& tensor = parameters[i].tensor;
    auto& [members, bytes] = filling[{tensor.device().str(), tensor.scalar_type()}];
    members.push_back(tensor);
    bytes += tensor.nbytes();
    if (static_cast<std::int64_t>(bytes) < bucket_bytes_) continue;
    full.push_back(std::exchange(members, {}));
    bytes = 0;
  }
  for (auto& [kind, bucket] : filling) {
    if (!bucket.first.empty()) full.push_back(std::move(bucket.first));
  }
  return full;
}

// For the bucket of these, as large as they are.
at::Tensor Buckets::memory(const std::vector<at::Tensor>& parameters) {
  std::int64_t count = 0;
  for (const auto& parameter : parameters) count += parameter.numel();
  const auto& first = parameters.front();
  auto& memory = memory_[{first.device().str(), first.scalar_type()}];
  // A hook may have kept the bucket before: that memory is its own.
  const bool kept = memory.defined() && (memory.use_count() > 1 || memory.storage().use_count() > 1);
  if (!memory.defined() || kept || memory.numel() < count) {
    const c10::InferenceMode outlives_it(false);
    memory = at::empty({count}, first.options());
  }
  return memory.narrow(0, 0, count);
}

}  // namespace lamina::data_parallel
