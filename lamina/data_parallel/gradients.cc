// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/gradients.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <map>

#include "lamina/data_parallel/agreement.h"

namespace lamina::data_parallel {
namespace {

// Parameters of one type on one device whose gradients travel as one tensor.
class Bucket {
 public:
  void add(const at::Tensor& parameter) {
    parameters_.push_back(parameter);
    bytes_ += static_cast<std::int64_t>(parameter.nbytes());
  }
  std::int64_t bytes() const { return bytes_; }

  void average(collective::ProcessGroup& replicas) {
    if (parameters_.empty()) return;
    auto joined = join();
    // Divided before it is summed: a sum of half precision may be too large. Collectives know no complex numbers.
    auto real = joined.is_complex() ? at::view_as_real(joined) : joined;
    real.div_(replicas.size());
    replicas.sum(real);
    split(joined);
    *this = {};
  }

 private:
  at::Tensor join() const {
    std::vector<at::Tensor> pieces;
    for (const auto& parameter : parameters_) {
      const auto& gradient = parameter.grad();
      pieces.push_back(gradient.defined() ? gradient.to(parameter.scalar_type()).reshape({-1})
                                          : at::zeros({parameter.numel()}, parameter.options()));
    }
    return at::cat(pieces);
  }

  void split(const at::Tensor& joined) const {
    std::int64_t begin = 0;
    for (auto parameter : parameters_) {
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

  std::vector<at::Tensor> parameters_;
  std::int64_t bytes_ = 0;
};

void make_dense(const NamedTensor& parameter) {
  auto& gradient = at::Tensor(parameter.tensor).mutable_grad();
  if (gradient.defined() && gradient.layout() != at::kStrided) gradient = gradient.to_dense();
}

}  // namespace

void average_gradients(std::span<const NamedTensor> parameters, collective::ProcessGroup& replicas,
                       std::int64_t bucket_bytes) {
  const c10::AutoGradMode no_grad(false);
  std::vector<bool> present;
  for (const auto& parameter : parameters) present.push_back(parameter.tensor.grad().defined());
  present = any_replica(parameters, present, replicas);
  std::map<std::pair<std::string, at::ScalarType>, Bucket> buckets;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!present[i]) continue;
    make_dense(parameters[i]);
    const auto& tensor = parameters[i].tensor;
    auto& bucket = buckets[{tensor.device().str(), tensor.scalar_type()}];
    bucket.add(tensor);
    if (bucket.bytes() >= bucket_bytes) bucket.average(replicas);
  }
  for (auto& [kind, bucket] : buckets) bucket.average(replicas);
}

}  // namespace lamina::data_parallel
