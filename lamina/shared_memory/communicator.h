// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lamina/layout/dtype.h"
#include "lamina/shared_memory/arena.h"
#include "lamina/shared_memory/exchange.h"
#include "lamina/shared_memory/reach.h"
#include "lamina/shared_memory/reduce.h"

namespace lamina::shared_memory {

// Elements of one type in memory of this process.
struct Buffer {
  std::byte* data = nullptr;
  std::size_t count = 0;
  layout::DType dtype = layout::DType::kFloat32;

  std::size_t element_bytes() const { return static_cast<std::size_t>(layout::traits(dtype).size_bytes); }
  std::byte* at(std::size_t element) const { return data + element * element_bytes(); }
};

// One buffer per member, all of one type.
using Buffers = std::span<const Buffer>;

// Buffers of a buffer, one after the other: of so many elements each, or equal ones.
std::vector<Buffer> parts_of(const Buffer& all, std::span<const std::size_t> counts);
std::vector<Buffer> equal_parts(const Buffer& all, int members);

// A buffer of each member that together are another one's parts.
struct Divided {
  Buffer mine;
  std::vector<Buffer> all;
};

// The collectives of neighbours. Every member calls the same ones in the same order; sends and receives are apart from
// them, and in order between each two members and for each direction. One thread at a time makes collectives, one sends
// to each member, and one receives from each.
//
// [Note: in place] A member's segment ends with an arena. Collectives read large buffers that lie in it where they are:
// they are not staged. (All but scatters and all_to_all; one member's buffers may lie there and another's not.) For
// each buffer all first say where theirs lie, and where it is read late, they meet once more: nobody leaves the
// operation, and may change or free a buffer, while others read it. Who gives up leaves at once; what others then read
// may be anything, but their operation is given up too. Nobody writes to another one's buffer. All-reduces read buffers
// of ordinary memory in place, too, where the members may, and where that is the faster: see Reach.
//
// Each of `all` is as large as `mine`, which may be this member's part itself. Sums are made in the order of the
// members, so that all have the same bits. All throw what Exchange::run() throws; a buffer that is written to is then
// undetermined, except after base::DesyncError.
class Communicator {
 public:
  // Collective over the neighbours. Throws what Neighbours::share() throws.
  Communicator(Neighbours neighbours, base::Deadline deadline, Reading reading = Reading::kWhereFaster);

  int rank() const { return neighbours_.rank(); }
  int size() const { return neighbours_.size(); }

  // Operations that are one behind the other: all collectives, sends to a member, receives from one.
  Exchange& together() { return *together_; }
  Exchange& to(int member) { return *to_.at(member); }
  Exchange& from(int member) { return *from_.at(member); }

  // Memory of this member's arena, for any thread; it may outlive the communicator. nullptr: see Arena::allocate().
  std::shared_ptr<std::byte> allocate(std::size_t bytes) { return arena_->allocate(bytes); }

  // Several buffers in one operation.
  void all_reduce(std::span<const Buffer> buffers, Reduction reduction, const Check& check);
  void all_gather(std::span<const Divided> buffers, const Check& check);
  void reduce_scatter(std::span<const Divided> buffers, Reduction reduction, const Check& check);

  void all_reduce(Buffer buffer, Reduction reduction, const Check& check);
  void reduce(Buffer buffer, Reduction reduction, int root, const Check& check);  // changes it on `root` alone
  void broadcast(Buffer buffer, int root, const Check& check);
  void all_gather(Buffers all, Buffer mine, const Check& check);
  void reduce_scatter(Buffer mine, Buffers all, Reduction reduction, const Check& check);
  void gather(Buffers all, Buffer mine, int root, const Check& check);   // `all`: on `root` alone
  void scatter(Buffer mine, Buffers all, int root, const Check& check);  // the same
  // Buffers of sizes of their own: sent[i] goes to member i, whose received[rank()] is as large.
  void all_to_all(Buffers received, Buffers sent, const Check& check);
  void barrier(const Check& check);

  // Beside all others; a thread that is in none of them may call it. See Neighbours::share().
  std::vector<Segment> share(std::size_t bytes, base::Deadline deadline) const {
    return neighbours_.share(bytes, deadline);
  }

  void send(Buffer buffer, int to, int tag, const Check& check);
  void receive(Buffer buffer, int from, int tag, const Check& check);
  // True where that member sends something that has not been received. While nobody receives from it.
  bool offers(int member) const { return from_.at(member)->awaited(); }
  bool lost(int member) const { return neighbours_.lost(member); }

 private:
  std::unique_ptr<Exchange> lane(int from, int to) const;
  void pass(Exchange& lane, Buffer buffer, int tag, bool sends, const Check& check);
  static constexpr int kEverybody = -1;  // as root
  void sum_in_turns(const Buffer& buffer, Reduction reduction, const Reach::Places& places);
  void sum_where_they_lie(const Buffer& buffer, Reduction reduction, const Reach::Places& places);
  void sum_parts(Buffer buffer, Reduction reduction, int root, const std::vector<const std::byte*>& mapped);
  void gather_parts(Buffers all, Buffer mine, int root);
  void meet_at_least_once();
  void sum_to_owners(Buffer mine, Buffers all, Reduction reduction);
  std::size_t agree_on_counts(Buffers received, Buffers sent);
  std::vector<std::byte*> locate(Buffers read, Buffers written);
  void stage(const Buffer& buffer, std::size_t begin, std::size_t count, std::size_t offset = 0);

  const Neighbours neighbours_;
  std::vector<Segment> segments_;   // by member; but its own, which the arena has
  std::vector<std::byte*> memory_;  // of each member's segment
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<Exchange> together_;
  std::unique_ptr<Reach> reach_;
  std::vector<std::unique_ptr<Exchange>> to_, from_;  // by member
};

}  // namespace lamina::shared_memory
