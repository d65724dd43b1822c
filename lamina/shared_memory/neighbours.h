// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/fd.h"
#include "lamina/base/fork_guard.h"
#include "lamina/shared_memory/segment.h"

namespace lamina::shared_memory {

// A store of words that all members of a group reach before they are connected; nobody else may read it.
class Board {
 public:
  virtual ~Board() = default;
  virtual void put(const std::string& key, const std::string& word) = 0;
  // Waits until it is there, and calls `check`, which may throw, at least every second. Throws base::TimeoutError.
  virtual std::string get(const std::string& key, const std::function<void()>& check) = 0;
};

// The members of a group, connected by a socket each, over which they pass descriptors; the kernel closes it the moment
// a member's process ends. They are processes of one user on one host, whose memory they can share.
class Neighbours {
 public:
  // Meets the others, who do the same. `names`: of each member, as messages have it. Where some are elsewhere, or
  // cannot be reached, none are neighbours, and every member learns why: see why_not(). Throws what `board` throws, and
  // base::PeerError, on all members, when one has ended meanwhile.
  Neighbours(Board& board, int rank, std::vector<std::string> names, base::Deadline deadline);
  ~Neighbours();
  Neighbours(Neighbours&&) = default;
  Neighbours& operator=(Neighbours&&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(sockets_.size()); }
  const std::string& name(int member) const { return names_[member]; }
  const std::string& why_not() const { return why_not_; }  // "" where they are neighbours

  // Collective: a segment of each member, one's own among them. Throws, on all members, base::Error where one of them
  // cannot have it, base::PeerError, base::TimeoutError.
  std::vector<Segment> share(std::size_t bytes, base::Deadline deadline) const;

  // True once the process of that member has ended.
  bool lost(int member) const;

 private:
  // A member, as it shows itself to the others.
  struct Card {
    std::string address, token;
  };

  std::string meet(Board& board, base::Deadline deadline);
  std::string connect(Board& board, const std::vector<Card>& cards, const base::Fd& listening, base::Deadline deadline);
  void connect_to_lower(const std::vector<Card>& cards, base::Deadline deadline);
  void accept_higher(const std::vector<Card>& cards, const base::Fd& listening, base::Deadline deadline);
  std::string vote_of(Board& board, int member) const;

  int rank_;
  std::vector<std::string> names_;
  std::vector<base::Fd> sockets_;  // by member; none for oneself
  std::string why_not_;
  base::MadeHere process_;
};

}  // namespace lamina::shared_memory
