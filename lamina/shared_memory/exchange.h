// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lamina/base/fork_guard.h"
#include "lamina/shared_memory/neighbours.h"

// [Note: exchanges] Members of a group work through the same operations, in the same order, each in chunks. For a chunk
// a member *stages* what others need of it in its own segment, *posts* that, *awaits* the others' posts, and takes what
// it needs from their segments. A chunk may have several phases, each with a post. Two chunks of each of two operations
// have staging memory of their own, so that a member that is ahead seldom waits for those that still read.
//
// A position is the number of an operation and of a phase in it, and only grows. A member that has given an operation
// up says so; the others leave it as well, when they come to it, and all meet again in the next one. Whoever gives up
// waits for nobody, so it may be many operations ahead: what it has given up is kept until all have passed it.
namespace lamina::shared_memory {

// An operation as its members have to agree on it.
struct Operation {
  std::string what;          // as messages have it: "all_reduce of 4096 float32, sum"
  std::uint64_t digest = 0;  // of all that has to be equal
};

// Ends a wait for a neighbour, of that name. Called about every 50 ms; what it throws, the wait throws.
using Check = std::function<void(const std::string& awaited)>;

// One member's side of the shared state of some neighbours. For one thread at a time.
class Exchange {
 public:
  // Bytes that each member gives to an exchange in chunks of this size.
  static std::size_t area_bytes(std::size_t chunk_bytes);
  // `areas`: of each member in its segment, which are zero before the first one begins. They and `neighbours` outlive
  // it.
  Exchange(const Neighbours& neighbours, std::vector<int> members, std::vector<std::byte*> areas,
           std::size_t chunk_bytes);
  ~Exchange();  // says that this member makes no more operations; nothing in a child of fork()
  Exchange(const Exchange&) = delete;

  // Indices into the members.
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  std::size_t chunk_bytes() const { return chunk_bytes_; }

  // Runs an operation: `work` stages, posts and takes. All members have begun it, with equal digests, before work()
  // goes on after its first meet(). Throws base::DesyncError, on all members, where they differ. After a member has
  // closed the group, or its process has ended, every operation throws base::PeerError. base::CancelledError comes when
  // another member has given this operation up. An error of `check` gives it up for all. In a child of fork() it is
  // base::UsageError, and nothing happens to the parent's group.
  void run(const Operation& operation, const Check& check, const std::function<void()>& work);

  // Says what the next run() is for, on all members alike: part of its operation.
  void set_purpose(std::string purpose) { purpose_ = std::move(purpose); }

  // How many operations this member has begun.
  std::uint64_t begun() const { return operation_; }
  // True where all other members have begun the next operation, or given it up.
  bool awaited() const;
  // Gives the next operation up without having begun it, at once, so that the members stay in step.
  void leave_out(const std::string& what, const std::string& why);
  // Leaves operations out: those that other members have begun and given up without this one. All then agree on the
  // next.
  void skip_to(std::uint64_t operation);

  // In work(). The staging memory of a member, of the chunk that this one works on: chunk_bytes().
  std::byte* staging(int member) const;
  // Ends a phase: what this member has staged may be read, and what all others have staged is there.
  void meet();
  bool met() const { return phase_ > 0; }  // since the operation began
  // Goes on to the next chunk; waits until what was staged two chunks ago has been read by all.
  void next_chunk();
  // Ends the operation by base::DesyncError: for what every member finds, and refuses alike.
  [[noreturn]] void refuse(const std::string& why);
  // Ends it after something of a member's has failed. Where the member is lost or has given up, that is why, as soon as
  // it is known; where it has done neither for 2 s, it ends by base::Error with `why`.
  [[noreturn]] void explain(int member, const std::string& why);

 private:
  struct Control;
  using Word = std::atomic<std::uint64_t> Control::*;
  static constexpr int kPhaseBits = 24;
  static std::uint64_t position(std::uint64_t operation, std::uint64_t phase) {
    return operation << kPhaseBits | phase;
  }

  Control& control(int member) const;
  const std::string& name(int member) const;
  void begin();
  void compare();
  void finish();
  void give_up(const std::string& why);
  std::uint64_t passed_by_all() const;
  void publish(Word word, std::uint64_t position);
  void await(Word word, std::uint64_t position);
  void await(int member, Word word, std::uint64_t position);
  void require_nobody_gave_up();
  void require_nobody_lost(Word word, std::uint64_t position);

  const Neighbours& neighbours_;
  const std::vector<int> members_;
  const std::vector<std::byte*> areas_;
  const std::size_t chunk_bytes_;
  const bool crowded_;  // more members than processors
  const base::MadeHere process_;
  int rank_ = 0;
  std::uint64_t operation_ = 0, phase_ = 0, chunk_ = 0;  // that this member is in
  std::uint64_t before_ = 0;                             // the phase in which the chunk before this one ended
  const Operation* current_ = nullptr;
  const Check* check_ = nullptr;
  std::string purpose_;
  bool differs_ = false;  // this operation, from another member's
  std::string given_up_;  // why another member has given it up
  std::string broken_;    // why nothing works any more
};

}  // namespace lamina::shared_memory
