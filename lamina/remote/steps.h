// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/remote/step_scope.h"
#include "lamina/transport/message.h"

namespace lamina::remote {

// [Note: step identity] Every rank of a pipeline enters the same steps. The leading rank announces each step as it
// enters it, and waits for nobody. A rank that follows does nothing in a step before its announcement is there, nor
// where that names another function than the one it has entered. Then it refuses the step, and says so to the leading
// rank, whose step that ends. Where the leading rank had no need of it and has left the step, its next one ends with
// that error.

// The steps that this rank enters, one after the other, and the messages of other ranks about them. A message for a
// step that this rank has yet to enter waits for it; one for a step that is over is dropped.
class Steps {
 public:
  explicit Steps(base::Rank rank) : rank_(rank) {}

  // Enters the next step, which `make` gives its object. On a rank that follows, nothing that others set off happens in
  // it before it is announced. Where the job has failed for good, it has failed before it begins. Throws
  // base::UsageError inside a step.
  using Make = std::function<std::shared_ptr<StepScope>(base::Step)>;
  std::shared_ptr<StepScope> begin(const Make& make, const base::Call& entered, bool leads);
  // Leaves it: nothing happens in it any more.
  void end();

  std::shared_ptr<StepScope> open();                 // nullptr between steps
  std::shared_ptr<StepScope> find(base::Step step);  // the same, where it is this one
  base::Step latest();                               // the one that is open, or was the last; -1 before the first
  std::optional<base::Step> begun();                 // the one that is open and was announced
  base::Call entered();                              // what begin() was told last

  // From the transport's thread: hands a message to `handle` in its step, now or when that has begun here, in the order
  // in which they come.
  using Handle = std::function<void(StepScope&, transport::Message&&)>;
  void deliver(transport::Message&& message, Handle handle);

  // On a rank that follows: what the leading rank has entered as `step`.
  struct Announced {
    base::Rank leader;
    base::Call call;
    std::int64_t first_split = 0;  // see StepScope
  };
  void announce(base::Step step, Announced announced);
  // On the leading rank: another one has refused `step`, as the text says.
  void refuse(base::Step step, const std::string& why);
  // Why this rank refuses the step that is open; "" when it does not.
  std::string refusal();

  // The end that the leading rank announced, or an error that another rank ended the step with; and of the open step,
  // once.
  void receive_end(transport::Message&& end);
  std::optional<transport::Message> take_end();

  // The ranks were found to wait for each other ([Note: mutual waits]). retract(): the step that is open, which nobody
  // has announced, was none: its number is the next one's. skip(): this rank does not come to `step` any more.
  void retract();
  bool retracted();
  void skip(base::Step step);

  void fail_for_good(std::exception_ptr error);  // this step and every later one
  bool failed_for_good();
  // Waits until no thread works on any step, one that was left with threads at work included.
  void wait_idle(const base::Patience& patience);

 private:
  // Messages of a step that has not begun here.
  struct Coming {
    std::optional<Announced> announced;
    std::deque<std::pair<Handle, transport::Message>> messages;
    std::optional<transport::Message> end;
  };

  void compare();  // what was announced with what was entered, under the lock
  void catch_up(std::unique_lock<std::mutex>& lock);

  const base::Rank rank_;
  std::mutex mutex_;
  base::Step current_{-1};
  std::shared_ptr<StepScope> open_;
  base::Call entered_;
  bool begun_ = false;      // announced, by this rank or to it
  bool caught_up_ = false;  // with what came before it had begun
  bool catching_up_ = false;
  bool retracted_ = false;
  std::string refusal_;
  std::exception_ptr for_good_;
  std::exception_ptr late_;  // of an earlier step, for the next one
  std::map<base::Step, Coming> coming_;
  std::vector<std::weak_ptr<StepScope>> left_;  // that may have threads at work
};

}  // namespace lamina::remote
