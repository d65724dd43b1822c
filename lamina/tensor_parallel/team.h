// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/collective/group.h"
#include "lamina/collective/same_order.h"
#include "lamina/device/capabilities.h"
#include "lamina/tensor_parallel/same_batch.h"
#include "lamina/value/failure.h"

namespace lamina::tensor_parallel {

// A dimension of a tensor that is cut over the members of a team, and how many positions each of them has of it; empty:
// all the same.
struct Cut {
  std::int64_t dim = 0;
  std::vector<std::int64_t> sizes;
};

// [Note: teams] The ranks that compute with slices of the same layers: a TP_GROUP. They run the same modules on the
// same samples, and where a layer needs what the others have, all of them call the same collective. Each says to the
// next one what it begins, with type and shape, and hears that of the one before. Members that part get an error with
// both, and none waits, or gets numbers of another tensor. A member whose step fails gives up, so that the others stop
// in what they wait for: see [Note: collectives given up].
//
// With partitions a step has several threads, which take turns: see [Note: turns of a team]. A collective keeps the
// turn of its thread.
//
// In a trace one rank is alone: a sum is what it gives, what others would give is a copy of that.
//
// All functions throw base::UsageError for a tensor that the cut does not fit, what collective::Work::wait() and
// SameOrder throw, and value::RemoteFailure where another member has given up. One thread at a time.
class Team {
 public:
  // `mailbox` outlives it, `group` too. `failures`: nullptr for those of C++.
  Team(collective::Group& group, messaging::Mailbox& mailbox, base::Patience patience,
       std::shared_ptr<value::Failures> failures = nullptr, collective::SameOrder::Turn turn = {});

  // The first member of so many that are not there, for a plan: its functions are called while it is Alone.
  explicit Team(int size) : size_(size) {}

  int size() const { return size_; }
  int rank() const { return rank_; }

  // The sum of what all members give.
  at::Tensor all_reduce(const at::Tensor& given);
  // All members' parts, side by side.
  at::Tensor all_gather(const at::Tensor& part, const Cut& cut);
  // This member's part of the sum.
  at::Tensor reduce_scatter(const at::Tensor& given, const Cut& cut);
  // This member's part of what all have alike.
  at::Tensor scatter(const at::Tensor& whole, const Cut& cut) const;
  // From all of `from` and this member's part of `to` comes its part of `from` and all of `to`.
  at::Tensor all_to_all(const at::Tensor& given, const Cut& from, const Cut& to);

  // [Note: given alike] Members compute with one batch, in the same modes: else what they have whole parts, and no
  // shape tells. So hashes of these go along with the next collective, at no message of their own: a difference is
  // found before anything is computed together. A call of the model begins, in this member's turn:
  void note_given(const CallHashes& given);

  // Has all members act, which all do: collective at its end. Where one fails, all have failed: the others throw
  // value::RemoteFailure, those that wait for it in a collective at once.
  void together(const std::function<void()>& act);

  // Throws value::RemoteFailure where another member's step has failed and this one's has not. Returns at once; from
  // any thread.
  void require_nobody_failed();
  // This member's step has failed. Returns at once.
  void give_up(const std::exception_ptr& error);

 private:
  // An operation as all members know it.
  struct Meaning {
    std::string what;
    at::ScalarType dtype = at::kFloat;
    at::DeviceType device = devices::kHost;
    std::vector<Cut> cuts;            // each with the sizes of all members
    std::vector<std::int64_t> shape;  // of the whole
  };
  struct Begun {
    at::Tensor result;
    collective::Started work;
  };
  // The cut with the sizes of all members, of a tensor of which a member gives its part, or all. Throws
  // base::UsageError where it does not fit.
  Cut checked(const Cut& cut, at::IntArrayRef given, bool is_part) const;

  // The meaning of an operation on a tensor that is whole, or a part of one cut.
  static Meaning meaning(const char* what, const at::Tensor& given, std::vector<Cut> cuts,
                         const Cut* part_of = nullptr);
  static collective::SameOrder::Operation to_operation(const Meaning& meaning);
  Meaning to_meaning(const collective::SameOrder::Operation& operation) const;
  std::string in_words(const collective::SameOrder::Operation& operation) const;

  std::vector<std::int64_t> take_given();
  void compare_given(base::Rank self, const collective::SameOrder::Operation& own, base::Rank other,
                     const collective::SameOrder::Operation& others);
  Begun start(std::int64_t number, const Meaning& meaning, const at::Tensor& given);
  at::Tensor run(const Meaning& meaning, at::Tensor given);

  const int size_;
  const int rank_ = 0;
  collective::Group* const group_ = nullptr;
  messaging::Mailbox* const mailbox_ = nullptr;
  const base::Patience patience_ = {};
  const std::shared_ptr<value::Failures> failures_;
  std::mutex mutex_;
  std::optional<CallHashes> given_;  // that no collective has taken along
  std::optional<collective::SameOrder> order_;
};

// Teams by the name under which operators find theirs; a name is a constant of a compiled graph. One process has one
// team, or several where it runs several jobs.
std::string team_name(base::Rank member);
void note_team(const std::string& name, std::shared_ptr<Team> team);
void forget_team(const std::string& name);
// Throws base::UsageError where there is none.
std::shared_ptr<Team> find_team(const std::string& name);

// While one is alive, what this thread computes is a trace's: see [Note: teams].
class Alone {
 public:
  Alone();
  ~Alone();
  Alone(const Alone&) = delete;
  static bool here();

 private:
  const bool before_;
};

}  // namespace lamina::tensor_parallel
