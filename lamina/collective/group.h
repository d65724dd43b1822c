// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "lamina/collective/work.h"
#include "lamina/shared_memory/segment.h"

namespace c10d {
class ProcessGroup;
}

namespace lamina::collective {

enum class Reduction { kSum, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor };

// How many rows (of dimension 0) each member gets in an all_to_all, and gives; empty: as many as every other.
struct Rows {
  std::vector<std::int64_t> received, sent;
};

// Ranks that compute on tensors together: torch's group, whose backend goes by the tensors' device, with our waits and
// errors. Every member starts the same collectives in the same order, with dense contiguous tensors of one type. `all`
// holds as many equal parts as there are members, one after the other, and `mine` is as large as one. Members are
// indices into the group. The tensors are left alone until wait() has returned; several collectives may be under way.
//
// All throw base::UsageError, before anything is started, for tensors or members that do not fit, and what Work::wait()
// throws.
class Group {
 public:
  virtual ~Group() = default;

  virtual const std::vector<base::Rank>& members() const = 0;
  int size() const { return static_cast<int>(members().size()); }
  virtual int rank() const = 0;  // the index of this one

  virtual Started all_reduce(at::Tensor tensor, Reduction reduction, CallOptions call_options) = 0;
  // As all_reduce on member `root`; on the others the tensor is then undetermined.
  virtual Started reduce(at::Tensor tensor, Reduction reduction, int root, CallOptions call_options) = 0;
  virtual Started broadcast(at::Tensor tensor, int root, CallOptions call_options) = 0;

  // `all` becomes what `mine` is on each member.
  virtual Started all_gather(at::Tensor all, at::Tensor mine, CallOptions call_options) = 0;
  // `mine` becomes this member's part of what all_reduce would make of `all`. It may be of float32 where `all` is of 16
  // bits, whose sum then is one of float32.
  virtual Started reduce_scatter(at::Tensor mine, at::Tensor all, Reduction reduction, CallOptions call_options) = 0;
  // Member i gets part i of `sent`, and its part comes to part i of `received`.
  virtual Started all_to_all(at::Tensor received, at::Tensor sent, CallOptions call_options, Rows rows = {}) = 0;

  // As all_gather on member `root`, the only one that has an `all`.
  virtual Started gather(at::Tensor all, at::Tensor mine, int root, CallOptions call_options) = 0;
  // `mine` becomes this member's part of `all` on member `root`, the only one that has it.
  virtual Started scatter(at::Tensor mine, at::Tensor all, int root, CallOptions call_options) = 0;

  virtual Started send(at::Tensor tensor, int to, CallOptions call_options) = 0;
  virtual Started receive(at::Tensor tensor, int from, CallOptions call_options) = 0;

  // Ends when every member has started it.
  virtual Started barrier(CallOptions call_options) = 0;

  // [Note: leaving] Members may begin collectives before they know that all will: one that does not has the others
  // abandon() theirs. Then they say to each other, by other means, how many each has begun, and those that have begun
  // less resume_at() the largest. For that they have a group apart, with which nobody else counts.
  //
  // A group of the same members that may be left; collective over them. None where the backend has no such thing.
  virtual std::unique_ptr<Group> apart(const std::string& /*name*/) { return nullptr; }
  // How many collectives this member has begun; none are under way.
  virtual std::int64_t begun() const { return 0; }
  // Ends this member's collectives that have not ended. Returns how many it has begun.
  virtual std::int64_t abandon() { return 0; }
  virtual void resume_at(std::int64_t /*number*/) {}

  // True where the backend can have memory in common, on all members.
  virtual bool shares_memory() const { return false; }
  // Collective: memory of `bytes` that all members have in common, all zero, its pages taken as they are touched; none
  // where the backend has no such thing.
  virtual std::optional<shared_memory::Segment> share(std::size_t /*bytes*/, const CallOptions& /*call_options*/) {
    return {};
  }

  // True once a wait has ended before its collective, and no loss of a member is to end that: the end of the group
  // would wait for it.
  virtual bool stuck() const { return false; }
};

// A group of the job: its name, as messages and timelines have it, and its world ranks.
struct Membership {
  std::string name;
  std::vector<base::Rank> members;
  base::Rank self;
};
std::unique_ptr<Group> wrap(c10::intrusive_ptr<c10d::ProcessGroup> group, Membership membership, JobLinks links);

}  // namespace lamina::collective
