// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "lamina/remote/protocol.h"

namespace lamina::remote {

// [Note: bursts] An answer that says only that a call has ended waits for that of the next call of its microbatch from
// the same rank, where that one is ready to run. They go together, and wake that rank once. Nobody computes with them;
// the end of a microbatch waits for them, which comes after all of its calls.
class Bursts {
 public:
  void ready(const base::CallId& request);  // it will run, and be answered
  // The answers to send now, in the order of their calls' ends. `says_more`: `answer` cannot wait.
  std::vector<Answer> due(Answer&& answer, bool says_more);

 private:
  using Course = std::pair<base::Microbatch, base::Rank>;  // a microbatch's requests from one rank
  struct Burst {
    int ready = 0;  // and not answered
    std::vector<Answer> answers;
  };
  static Course course_of(const base::CallId& request);

  std::mutex mutex_;
  std::map<Course, Burst> bursts_;
};

}  // namespace lamina::remote
