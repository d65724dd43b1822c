// SPDX-License-Identifier: Apache-2.0
// Threads: ready() runs in the one that makes a request ready, due() in the worker that has run it. Locks: mutex_,
// under which nothing else is taken. See docs/thread-model.md.
#include "lamina/remote/bursts.h"

#include <utility>

namespace lamina::remote {

Bursts::Course Bursts::course_of(const base::CallId& request) { return {request.microbatch, request.origin}; }

void Bursts::ready(const base::CallId& request) {
  std::lock_guard guard(mutex_);
  ++bursts_[course_of(request)].ready;
}

std::vector<Answer> Bursts::due(Answer&& answer, bool says_more) {
  std::lock_guard guard(mutex_);
  const auto course = course_of(answer.call);
  Burst& burst = bursts_.at(course);
  burst.answers.push_back(std::move(answer));
  const bool last = --burst.ready == 0;
  std::vector<Answer> due;
  if (last || says_more) due.swap(burst.answers);
  if (last) bursts_.erase(course);
  return due;
}

}  // namespace lamina::remote
