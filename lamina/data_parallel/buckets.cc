// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/buckets.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "lamina/base/error.h"
#include "lamina/collective/travel.h"
#include "lamina/value/guarded.h"

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

void make_dense(at::Tensor parameter) {
  auto& gradient = parameter.mutable_grad();
  if (gradient.defined() && gradient.layout() != at::kStrided) gradient = gradient.to_dense();
}

}  // namespace

std::int64_t elements(const std::vector<at::Tensor>& parameters) {
  std::int64_t count = 0;
  for (const auto& parameter : parameters) count += parameter.numel();
  return count;
}

at::Tensor memory_for(const std::vector<at::Tensor>& parameters) {
  const c10::InferenceMode outlives_it(false);
  return at::empty({elements(parameters)}, parameters.front().options().requires_grad(false));
}

void gather(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& parameters,
            const at::Tensor& bucket, int divisor) {
  const auto by = c10::scalar_to_tensor(divisor);
  std::size_t i = 0;
  each_part(bucket, parameters, [&](const at::Tensor& /*parameter*/, at::Tensor part) {
    if (const auto& gradient = gradients[i++]; !gradient.defined() || gradient._is_zerotensor()) {
      part.zero_();
    } else if (divisor == 1) {
      part.copy_(gradient);
    } else {
      at::div_out(part, gradient, by);
    }
  });
}

void scatter(const at::Tensor& bucket, const std::vector<at::Tensor>& parameters, Gradients how,
             const std::function<bool(const at::Tensor& parameter)>& wanted) {
  each_part(bucket, parameters, [&](at::Tensor parameter, const at::Tensor& part) {
    if (!wanted(parameter)) return;
    auto& gradient = parameter.mutable_grad();
    const bool was_guarded = value::is_slice(gradient);
    if (how == Gradients::kViews) {
      gradient = part.detach();
    } else if (gradient.defined() && !gradient._is_zerotensor()) {  // zeros without memory cannot be written to
      gradient.copy_(part);
    } else {
      gradient = part.clone();
    }
    if (was_guarded) value::guard_gradient(gradient, parameter);
  });
}

// Divided before it is summed: a sum of half precision may be too large. Collectives know no complex numbers.
collective::Started begin_mean(const at::Tensor& bucket, const Mean& mean) {
  auto& [replicas, divisor, options, asked] = mean;
  if (const auto type = collective::travelling(bucket.scalar_type(), asked)) {
    return collective::all_reduce_as(*type, bucket, divisor, *replicas, options);
  }
  auto real = bucket.is_complex() ? at::view_as_real(bucket) : bucket;
  real.div_(divisor);
  return replicas->all_reduce(real, collective::Reduction::kSum, options);
}

// One pass copies and divides, where begin_mean() of the bucket would make two.
collective::Started begin_mean(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& parameters,
                               const at::Tensor& bucket, const Mean& mean) {
  if (bucket.is_complex() || collective::travelling(bucket.scalar_type(), mean.travels)) {
    gather(gradients, parameters, bucket);
    return begin_mean(bucket, mean);
  }
  gather(gradients, parameters, bucket, mean.divisor);
  return mean.replicas->all_reduce(bucket, collective::Reduction::kSum, mean.options);
}

Reduce mean_over(Mean mean) {
  return [mean = std::move(mean)](const GradientBucket& bucket) {
    begin_mean(bucket.gradients, mean)->wait();
    return bucket.gradients;
  };
}

std::vector<std::vector<at::Tensor>> arrange(std::span<const at::Tensor> parameters, std::int64_t bucket_bytes) {
  std::vector<std::vector<at::Tensor>> full;
  std::map<std::pair<std::string, at::ScalarType>, std::pair<std::vector<at::Tensor>, std::size_t>> filling;
  for (const auto& tensor : parameters) {
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
  return full;
}

void Buckets::reduce(std::span<const NamedTensor> parameters, const std::vector<bool>& present, const Reduce& reduce) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> having;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (present[i]) having.push_back(parameters[i].tensor);
  }
  auto all = arrange(having, bucket_bytes_);
  for (std::size_t i = 0; i < all.size(); ++i) {
    GradientBucket bucket{static_cast<std::int64_t>(i), i + 1 == all.size(), std::move(all[i]), {}};
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : bucket.parameters) {
      make_dense(parameter);
      gradients.push_back(parameter.grad());
    }
    bucket.gradients = memory(bucket.parameters);
    gather(gradients, bucket.parameters, bucket.gradients);
    const auto reduced = reduce(bucket);
    if (reduced.sizes() != bucket.gradients.sizes() || reduced.scalar_type() != bucket.gradients.scalar_type()) {
      throw base::UsageError("a communication hook must return a tensor of the bucket's size and type",
                             base::Code{"replica-hook"});
    }
    scatter(reduced, bucket.parameters, how_, [](const at::Tensor&) { return true; });
  }
}

// For the bucket of these, as large as they are.
at::Tensor Buckets::memory(const std::vector<at::Tensor>& parameters) {
  const auto count = elements(parameters);
  const auto& first = parameters.front();
  auto& memory = memory_[{first.device().str(), first.scalar_type()}];
  // A hook may have kept the bucket before: that memory is its own.
  const bool kept = memory.defined() && (memory.use_count() > 1 || memory.storage().use_count() > 1);
  if (!memory.defined() || kept || memory.numel() < count) memory = memory_for(parameters);
  return memory.narrow(0, 0, count);
}

}  // namespace lamina::data_parallel
