// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "lamina/collective/group.h"
#include "lamina/data_parallel/agreement.h"
#include "lamina/data_parallel/buckets.h"

// [Note: overlap] The reduction of a bucket starts inside the backward, as soon as its parameters have got as many
// gradients as in the pass before: calls are dynamic, so nobody knows the last one. Buckets start in one order on all
// replicas, from the last parameters to the first, as gradients come; what has not started by the end of the pass
// starts there. A gradient that has changed since its bucket started, because more of it came or somebody wrote to it,
// is then reduced again, whole. So the results are those of a reduction at the end, to the bit. Until the pass ends
// each gradient stays as it is on this replica.
//
// A member whose pass has failed leaves collectives of the host ([Note: leaving]). It cannot leave those of a device:
// it starts what the others have started or will start, with zeros, so that all of it ends.
namespace lamina::data_parallel {

class EarlyBuckets {
 public:
  explicit EarlyBuckets(std::int64_t bucket_bytes, Gradients how = Gradients::kCopied)
      : bucket_bytes_(bucket_bytes), how_(how) {}

  // Before a pass that ends with a reduction: from now on complete buckets start. Its replicas outlive the pass.
  void arm(Mean mean);
  // A gradient has come to this parameter. From any thread.
  void note(const at::Tensor& parameter);

  // At the end of a pass: starts the rest. Then state() tells of each parameter's gradient, until the next arm().
  void start_rest();
  Gradient state(const at::Tensor& parameter) const;
  // Waits for all buckets, and writes the results that are `wanted`. Throws what Work::wait() throws.
  void finish(const std::function<bool(const at::Tensor& parameter)>& wanted);

  // Decides what the next pass starts early: the gradients of these, in this order on all replicas.
  void plan(std::span<const at::Tensor> parameters);
  // The pass has failed, and nobody can leave what others have started: starts the rest of the plan, with zeros, and
  // waits for all of it. Throws what Work::wait() throws.
  void complete();
  // The collectives under way were abandoned, or completed. Nothing starts early until the next plan().
  void forget();

 private:
  struct Bucket {
    std::vector<at::Tensor> parameters;
    std::size_t incomplete = 0;  // of them
    at::Tensor memory;
    collective::Started work;  // once it has started
  };
  // A parameter of the plan.
  struct Planned {
    std::size_t bucket = 0;
    int expected = 0;  // gradients
    at::Tensor sent;   // the gradient that its bucket started with; it may have been none
    std::uint32_t version = 0;
  };

  void drop_plan();
  void start_complete();
  void start(Bucket& bucket);

  const std::int64_t bucket_bytes_;
  const Gradients how_;
  mutable std::mutex mutex_;
  std::optional<Mean> mean_;  // while armed
  std::vector<Bucket> buckets_;
  std::size_t started_ = 0;  // of them
  std::unordered_map<const at::TensorImpl*, Planned> planned_;
  std::unordered_map<const at::TensorImpl*, int> come_;  // gradients in this pass
};

}  // namespace lamina::data_parallel
