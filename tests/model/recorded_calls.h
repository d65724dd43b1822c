// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "lamina/base/str.h"
#include "lamina/model/call_hooks.h"

namespace lamina::model {

// A hook that notes what it hears: "a(" and ")a" around a forward, "a[" and "]a" around a backward; "~" before what
// came over a request.
class RecordedCalls : public CallHook {
 public:
  void before_forward(const ModuleCall& call) override { note(call, call.name + "("); }
  void after_forward(const ModuleCall& call) override { note(call, ")" + call.name); }
  void before_backward(const ModuleCall& call) override { note(call, call.name + "["); }
  void after_backward(const ModuleCall& call) override { note(call, "]" + call.name); }

  // All since the last time, in one line.
  std::string take() {
    std::lock_guard guard(mutex_);
    std::string line;
    for (const auto& word : std::exchange(words_, {})) line += (line.empty() ? "" : " ") + word;
    return line;
  }

 private:
  void note(const ModuleCall& call, const std::string& word) {
    std::lock_guard guard(mutex_);
    words_.push_back((call.remote ? "~" : "") + word);
  }

  std::mutex mutex_;
  std::vector<std::string> words_;
};

}  // namespace lamina::model
