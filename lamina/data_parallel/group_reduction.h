// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/collective/group.h"
#include "lamina/data_parallel/buckets.h"
#include "lamina/data_parallel/early_buckets.h"
#include "lamina/data_parallel/named_tensor.h"

namespace lamina::data_parallel {

// The gradients of which one group of ranks takes the mean, in buckets of their own. For one thread, but for note().
class GroupReduction {
 public:
  using Tensors = std::function<std::vector<NamedTensor>()>;
  using Group = std::function<collective::Group&(const base::Patience&)>;
  // The parameters of this rank, as they are now, in one order on all ranks of the group.
  struct Over {
    Tensors parameters;
    Group group;
  };
  struct How {
    std::int64_t bucket_bytes = 0;
    Gradients gradients = Gradients::kCopied;
    std::optional<at::ScalarType> travels = {};  // see Mean
    bool in_one_order = false;                   // see Reducer::Parts
  };

  GroupReduction(How how, Over over)
      : over_(std::move(over)),
        travels_(how.travels),
        in_one_order_(how.in_one_order),
        buckets_(how.bucket_bytes, how.gradients),
        early_(how.bucket_bytes, how.gradients) {}

  std::vector<NamedTensor> parameters() const { return over_.parameters(); }

  // See [Note: overlap]. Nothing starts early where the group cannot be left, and gradients come in several orders.
  void arm(const base::Patience& patience);
  void note(const at::Tensor& parameter) { early_.note(parameter); }
  void start_rest() { early_.start_rest(); }
  void forget() { early_.forget(); }

  // Collective over the group: gradients of these become what `hook` makes of them, their sum divided by `divisor`
  // without one, or by the number of members, and buffers what they are on member `root`. `plans`: the next pass may
  // start as much early.
  struct Options {
    std::optional<int> divisor = {};
    int root = 0;
    const Reduce* hook = nullptr;
    bool plans = false;
    base::Patience patience;
  };
  void reduce(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
              const Options& options);

  // Collective over the group: the parameters and buffers of member `root` become everybody's.
  void take_over(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers, int root,
                 const base::Patience& patience);

  // See [Note: leaving]. How many collectives this rank had begun there before the pass.
  std::int64_t begun() const { return begun_; }
  void note_begun();
  void catch_up(std::int64_t number);
  void abandon();
  bool may_be_left() const { return apart_ != nullptr; }
  // Lets go of the group.
  void close();

 private:
  bool may_complete() const;
  collective::Group& group(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                           const base::Patience& patience);

  const Over over_;
  const std::optional<at::ScalarType> travels_;
  const bool in_one_order_;
  Buckets buckets_;
  EarlyBuckets early_;
  std::unique_ptr<collective::Group> apart_;  // where the backend has such a group: made for the first reduction
  bool grouped_ = false;                      // it was looked for
  std::int64_t begun_ = 0;
};

}  // namespace lamina::data_parallel
