// SPDX-License-Identifier: Apache-2.0
#include "tests/schedule/team_program.h"

#include <utility>

namespace lamina::schedule {

Program TeamProgram::make() {
  const int body = add(0, 0, false, -1);
  make_forward(body, 0);
  const auto forward = program_[body].acts;
  act(body, Act::What::kBackward);
  make_backward(body, forward);
  return std::move(program_);
}

int TeamProgram::add(int partition, int module, bool backward, int caller) {
  program_.push_back({.partition = partition, .module = module, .backward = backward, .caller = caller});
  return static_cast<int>(program_.size()) - 1;
}

void TeamProgram::call(int work, std::vector<int> inputs) {
  auto& called = program_[work];
  const auto [latest, first] =
      latest_.try_emplace({called.caller, called.partition, called.module, called.backward}, work);
  if (!first) called.after.push_back(std::exchange(latest->second, work));
  called.inputs = std::move(inputs);
  act(called.caller, Act::What::kCall, work);
}

void TeamProgram::make_forward(int work, int depth) {
  std::vector<int> unread;
  const auto take_any = [&] {
    const auto place = unread.begin() + any(static_cast<int>(unread.size()));
    const int taken = *place;
    unread.erase(place);
    return taken;
  };
  for (int left = depth == 0 ? 3 + any(4) : any(4); left > 0; --left) {
    const int drawn = any(4);
    if (drawn == 0 || partitions_ == 1) {
      act(work, Act::What::kCollective);
    } else if (drawn == 1 && !unread.empty()) {
      act(work, Act::What::kRead, take_any());
    } else if (depth < kDeep && !is_large()) {
      const int elsewhere = (program_[work].partition + 1 + any(partitions_ - 1)) % partitions_;
      const int called = add(elsewhere, any(2), false, work);
      make_forward(called, depth + 1);
      call(called, !unread.empty() && any(2) == 0 ? std::vector{take_any()} : std::vector<int>());
      unread.push_back(called);
    }
  }
  if (any(2) == 0) act(work, Act::What::kCollective);
  while (!unread.empty()) act(work, Act::What::kRead, take_any());
}

// A forward once more, by `caller`.
TeamProgram::Acts TeamProgram::make_again(int caller, const Acts& acts) {
  const auto begin = program_[caller].acts.size();
  std::map<int, int> again;
  for (const auto& [what, of] : acts) {
    if (what == Act::What::kCall) {
      const Work first = program_[of];
      std::vector<int> inputs;
      for (const int input : first.inputs) inputs.push_back(again.at(input));
      const int fresh = again[of] = add(first.partition, first.module, first.backward, caller);
      make_again(fresh, first.acts);
      call(fresh, std::move(inputs));
    } else {
      act(caller, what, what == Act::What::kRead ? again.at(of) : 0);
    }
  }
  const auto& all = program_[caller].acts;
  return {all.begin() + static_cast<std::ptrdiff_t>(begin), all.end()};
}

void TeamProgram::call_backward(int caller, int forward, std::vector<int> inputs) {
  const Work called = program_[forward];
  const int work = backward_of_[forward] = add(called.partition, called.module, true, caller);
  program_[work].after.push_back(forward);
  const bool checkpointed = any(4) == 0 && !is_large();
  make_backward(work, checkpointed ? make_again(work, called.acts) : called.acts);
  call(work, std::move(inputs));
}

// Gradients go back the way that values came: what was read is called, what was called is read.
void TeamProgram::make_backward(int work, const Acts& forward) {
  std::map<int, bool> was_read;
  for (auto each = forward.rbegin(); each != forward.rend(); ++each) {
    const auto [what, of] = *each;
    if (what == Act::What::kCollective) {
      act(work, what);
    } else if (what == Act::What::kRead) {
      call_backward(work, of, {});
      const bool at_once = was_read[of] = any(2) == 0 && program_[of].inputs.empty();
      if (at_once) act(work, Act::What::kRead, backward_of_.at(of));
    } else if (what == Act::What::kCall) {
      const auto inputs = program_[of].inputs;
      for (const int input : inputs) call_backward(work, input, {backward_of_.at(of)});
      if (inputs.empty() && !was_read[of]) act(work, Act::What::kRead, backward_of_.at(of));
    }
  }
}

}  // namespace lamina::schedule
