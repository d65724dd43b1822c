// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lamina/collective/group.h"
#include "lamina/data_parallel/named_tensor.h"

namespace lamina::data_parallel {

// Gradients of one type on one device, which travel as one tensor.
struct GradientBucket {
  std::int64_t index = 0;
  bool last = false;  // of this reduction
  std::vector<at::Tensor> parameters;
  at::Tensor gradients;  // 1-D: one after the other; zero where there is none
};

// Parameters by the bucket of about `bucket_bytes` in which their gradients travel, in the order of the parameters.
std::vector<std::vector<at::Tensor>> arrange(std::span<const at::Tensor> parameters, std::int64_t bucket_bytes);
std::int64_t elements(const std::vector<at::Tensor>& parameters);  // of all of them
// Memory for the gradients of these, with any values.
at::Tensor memory_for(const std::vector<at::Tensor>& parameters);
// Copies the gradients of parameters, one after the other, to a bucket's memory, divided; zero where one is undefined.
void gather(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& parameters,
            const at::Tensor& bucket, int divisor = 1);
// The other way; a parameter without a gradient gets one. `wanted`: which of them. Gradients are copied to where
// autograd has put them, or become views of the bucket's memory, which is theirs from then on.
enum class Gradients : std::uint8_t { kCopied, kViews };
void scatter(const at::Tensor& bucket, const std::vector<at::Tensor>& parameters, Gradients how,
             const std::function<bool(const at::Tensor& parameter)>& wanted);
// The mean over replicas: their sum, divided by `divisor`.
struct Mean {
  collective::Group* replicas;
  int divisor;
  collective::CallOptions options;
  std::optional<at::ScalarType> travels = {};  // in which gradients do: see [Note: types that travel]; none: their own
};
// Begins that of a bucket, in its place; or of gradients of parameters, which are gathered there.
collective::Started begin_mean(const at::Tensor& bucket, const Mean& mean);
collective::Started begin_mean(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& parameters,
                               const at::Tensor& bucket, const Mean& mean);

// Makes what takes the place of a bucket's gradients, of their size and type.
using Reduce = std::function<at::Tensor(const GradientBucket&)>;

Reduce mean_over(Mean mean);

// [Note: buckets] Gradients travel in buckets of about `bucket_bytes`, in the order of the parameters, which is one on
// all replicas. Each is copied once into its bucket's memory and once back. A gradient is the user's: a program may
// keep it, set it to None or give it any strides, so it lies where autograd has put it. The memory stays from one
// reduction to the next, and buckets of one type on one device take turns in it: it is as large as the largest of them.
// Where gradients become views of their bucket there is no copy back, and each bucket has memory of its own.
class Buckets {
 public:
  explicit Buckets(std::int64_t bucket_bytes, Gradients how = Gradients::kCopied)
      : bucket_bytes_(bucket_bytes), how_(how) {}

  // Collective over the replicas, which have agreed on the parameters and on those that have gradients, `present`: the
  // gradient of each of these becomes what `reduce` makes of it. One that this replica lacks counts as zero; the others
  // stay undefined. Sparse gradients become dense.
  //
  // Throws base::UsageError where a result has another size or type than its bucket, and what `reduce` throws: some
  // gradients are then reduced and some are not.
  void reduce(std::span<const NamedTensor> parameters, const std::vector<bool>& present, const Reduce& reduce);

 private:
  using Kind = std::pair<std::string, at::ScalarType>;  // device and type
  at::Tensor memory(const std::vector<at::Tensor>& parameters);

  const std::int64_t bucket_bytes_;
  const Gradients how_;
  std::map<Kind, at::Tensor> memory_;
};

}  // namespace lamina::data_parallel
