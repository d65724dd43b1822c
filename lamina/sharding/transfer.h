// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/collective/group.h"
#include "lamina/collective/same_order.h"
#include "lamina/device/capabilities.h"
#include "lamina/layout/region.h"
#include "lamina/value/failure.h"

namespace lamina::sharding {

// [Note: shards] The members of a sharding group share out the elements of a parameter: flattened, each has a
// layout::Share of them, padded with zeros. For a computation the whole value comes,
// and goes again; gradients are summed over the members, and each keeps the sum of its own shard.
struct Spec {
  std::int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
  at::Device device = devices::kHost;
  std::optional<at::ScalarType> travels = {};  // in which gradients do: see [Note: types that travel]; none: their own

  at::ScalarType gradient_type() const { return travels.value_or(dtype); }
  at::ScalarType sum_type() const { return travels ? c10::promoteTypes(dtype, at::kFloat) : dtype; }
  layout::Share share(int members, int member) const { return layout::share_of(numel, members, member); }
  std::int64_t shard_numel(int members) const { return share(members, 0).size; }
  std::size_t gradient_bytes() const { return static_cast<std::size_t>(numel) * c10::elementSize(gradient_type()); }
};

// Bytes of gradients that a member gives the others at a time, and of those that wait for it, at most, but always one
// parameter's.
constexpr std::size_t kMostBytesUnderWay = std::size_t{32} << 20;

// How members of a sharding group hand each other values and gradients of parameters, which go by their numbers.
// Thread-safe but for reduce(), which one thread calls at a time.
class Transfer {
 public:
  virtual ~Transfer() = default;

  // This member's shard: one dimension of its share's size, the same tensor each time.
  virtual at::Tensor shard(std::size_t parameter) = 0;
  // The whole values of these, which come together: each valid while its result lives, and while no member changes its
  // shard.
  virtual std::vector<c10::DataPtr> values(std::span<const std::size_t> parameters) = 0;
  // A hint: values() of these is likely to be called soon.
  virtual void expect(std::span<const std::size_t> /*parameters*/) {}
  // Before shards change: what was expected is not wanted any more.
  virtual void expect_nothing() {}
  // The whole value in memory of its own: one dimension of numel elements.
  virtual at::Tensor copy(std::size_t parameter) = 0;

  // A gradient of this member's, in pass `pass`. It has the parameter's size, and the type in which those travel; it is
  // nobody else's.
  virtual void give(std::size_t parameter, at::Tensor gradient, std::int64_t pass) = 0;
  // Collective: the gradients that all members have given in this pass are summed. Throws what waits for members throw.
  virtual void reduce(std::int64_t pass, const base::Patience& patience) = 0;
  // The sum of this member's shard since it was last taken; undefined where no member gave any.
  virtual at::Tensor take_sum(std::size_t parameter) = 0;
  // A pass has failed, of this: drops what was given, and all sums. Returns at once; each member does so.
  virtual void abandon(const value::Failure& failure) = 0;
  // The end of a step that is no pass, by this failure or none, collective where calls have one order: it has failed
  // for all then, and throws value::RemoteFailure where it has for another member.
  virtual void end_together(const std::optional<value::Failure>& /*failure*/) {}
  // Throws value::RemoteFailure where the others have given up a pass that this member has not, and wait for nothing of
  // it. Returns at once.
  virtual void require_nobody_failed() {}
  // Before any other collective of the group. Throws what waits for members throw.
  virtual void catch_up() {}
};

// Over collectives of the group, for which every member calls values(), expect(), expect_nothing(), copy() and give()
// in one order, and reduces what it has given; `order` sees to that, where there is one. `bucket_elements`: how many
// elements of gradients travel at a time, at most.
std::unique_ptr<Transfer> make_collective_transfer(const std::vector<Spec>& parameters, std::int64_t bucket_elements,
                                                   collective::Group& group, const base::Patience& patience,
                                                   std::unique_ptr<collective::SameOrder> order);

// Words for what members of a sharding group begin, of parameters with these names.
collective::SameOrder::Words words_of(std::vector<std::string> names);

// Over memory that the members have in common; nullptr where the group has none, on all members. Collective.
// `gradients_at_once`: how many elements of this member's gradients may lie there, but always one parameter's.
// `mailbox` outlives it, and knows who is lost, as memory does not tell; nullptr: nobody is.
std::unique_ptr<Transfer> make_shared_transfer(const std::vector<Spec>& parameters, std::int64_t gradients_at_once,
                                               collective::Group& group, const collective::CallOptions& options,
                                               messaging::Mailbox* mailbox = nullptr);

}  // namespace lamina::sharding
