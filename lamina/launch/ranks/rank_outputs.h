// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/launch/options/preparation.h"
#include "lamina/launch/ranks/rank_log.h"

namespace lamina::launch {

// The outputs of the ranks of this machine. The first rank writes where we do. Each other one writes to the files of
// --stdout and --stderr, or, where they are not given, to a file without a name.
class RankOutputs {
 public:
  // Makes the files. Throws ConfigError.
  explicit RankOutputs(const Preparation& job);

  // Descriptors of one rank; both may be the same, and the first rank has none.
  RankLog* out(int local_rank) const { return places_[local_rank].out; }
  RankLog* err(int local_rank) const { return places_[local_rank].err; }

  void begin_here();

  // Returns what to show of a rank that failed: its errors, or its output if there are none.
  std::string tail(base::Rank rank, int lines) const;
  bool has(base::Rank rank) const;
  base::Rank first() const { return base::Rank(base_rank_); }

  // Words for the user when a file cannot take what a rank writes; once.
  std::optional<std::string> trouble();

  // Gives the files without names, those that hold something, names in a new folder. Returns it, or nothing when there
  // was nothing to keep; and what went wrong.
  struct Kept {
    std::string folder;
    std::string trouble;
  };
  Kept keep() const;

 private:
  struct Place {
    RankLog* out = nullptr;
    RankLog* err = nullptr;
  };
  RankLog* add(RankLog log);

  int base_rank_;
  std::deque<RankLog> logs_;
  std::vector<Place> places_;  // by local rank
  bool told_ = false;          // of trouble
};

}  // namespace lamina::launch
