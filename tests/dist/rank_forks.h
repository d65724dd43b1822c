// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gmock/gmock.h>
#include <sys/types.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/reserved_port.h"

namespace lamina::dist::testing {

using Variables = std::map<std::string, std::string>;

// The ranks of one job as processes forked from this one, which must have no threads, with torchrun's variables of one
// machine. A rank fails when an expectation in it fails or it throws. All are dead when this object ends.
class RankForks {
 public:
  explicit RankForks(int size);
  ~RankForks();

  Variables variables(int rank) const;
  // Starts one; `variables` replace those of a rank.
  void start(int rank, const std::function<void()>& body, const Variables& variables);
  void start(int rank, const std::function<void()>& body) { start(rank, body, variables(rank)); }

  // Expects all that were started to end well within a minute, but those in `killed`, which a signal ended.
  void expect_success(const std::vector<int>& killed = {});

 private:
  const int size_;
  const lamina::test::ReservedPort port_;
  std::map<int, pid_t> running_;
};

// Runs `body` in ranks of a world of that size, which have called initialize_dist.
void in_world(int size, const std::function<void()>& body);
// Runs it in a process that nobody launched.
void alone(const std::function<void()>& body);

// Expects that `call` throws a Thrown that says `words`.
template <class Thrown>
void expect_error(const std::function<void()>& call, const std::string& words) {
  try {
    call();
    ADD_FAILURE() << "no error that says " << words;
  } catch (const Thrown& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(words));
  }
}

}  // namespace lamina::dist::testing
