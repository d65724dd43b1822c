// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/remote/protocol.h"
#include "lamina/remote/remote_value.h"

namespace lamina::remote {

// A call whose end this rank waits for. Guarded by the mutex of OutstandingCalls.
struct PendingCall {
  std::shared_ptr<IssuedCall> call;
  std::vector<std::int64_t> given;  // the numbers of the calls of the same context whose results it was given
  std::condition_variable changed;
  std::function<void()> ready;  // of the thread that waits for the answer
  std::optional<value::Value> answer;
  std::optional<value::Failure> failure;
  bool done = false;
};

// The calls of one step that this rank has made of other ranks' modules.
class OutstandingCalls {
 public:
  using Pending = std::shared_ptr<PendingCall>;

  // A name that nothing else of this rank has. Numbers of calls are alike on all members of a team, see [Note: turns of
  // a team]; what is delivered is asked for as often as it happens to be needed.
  base::CallId new_call(base::Rank rank, base::Step step, base::Microbatch microbatch);
  base::CallId new_delivery(base::Rank rank, base::Step step, base::Microbatch microbatch);

  void add(const Pending& pending);
  // From the transport's thread. An answer that says that a call is done ends it.
  void answer(Answer&& answer);

  // Waits until the call is answered; `ready` is called before this thread wakes. Returns its failure, if it has
  // failed: after an answer one may come at any time. Throws base::CancelledError and base::TimeoutError.
  std::optional<value::Failure> wait_answer(PendingCall& pending, const base::Patience& patience,
                                            const std::function<void()>& ready);
  // Waits until nothing runs any more that the call has set off. Throws the first two; a failure is left in `pending`.
  void wait_done(PendingCall& pending, const base::Patience& patience);
  // Says that each of these has ended, and well.
  bool all_done(const std::vector<Pending>& calls);

  std::vector<base::Rank> awaited();  // ranks whose answers this one waits for
  // A clause: what this rank waits for from `rank`; "" for nothing.
  std::string asked_of(base::Rank rank);

  // The leaves whose gradients code of this rank has asked for in `microbatch`, by autograd.grad.
  void ask_for(base::Microbatch microbatch, const Tensors& leaves);
  Tensors asked(base::Microbatch microbatch);

  // True for the first to say that a wait of this step is long: all its microbatches wait alike.
  bool says_first() { return !said_.exchange(true); }

  void cancel();  // from any thread: every wait ends with base::CancelledError
  void close();   // the step is over: forgets all

 private:
  std::mutex mutex_;
  std::map<base::CallId, Pending> pending_;  // until they are done
  std::map<base::Microbatch, std::int64_t> call_counts_, delivery_counts_;
  std::map<base::Microbatch, Tensors> asked_;
  bool cancelled_ = false;
  std::atomic<bool> said_ = false;
};

}  // namespace lamina::remote
