// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/base/wait.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/messaging/presence.h"
#include "lamina/observe/recorder.h"

namespace c10d {
class Work;
}

namespace lamina::collective {

// A collective that was started. A rank may start several before it waits, and computes meanwhile.
class Work {
 public:
  virtual ~Work() = default;
  // True when wait() would return, or throw, at once.
  virtual bool done() = 0;
  // Returns when the tensors hold the result; of a device, for what this thread gives to the device from then on.
  // Throws base::PeerError when a member is gone, base::TimeoutError, base::DesyncError, base::CancelledError when the
  // step has ended that this thread works in, and what an interrupt throws; the tensors are then lost, and so is the
  // group. Once.
  virtual void wait() = 0;
};
using Started = std::unique_ptr<Work>;

// Parts of one collective's story.
struct CallOptions {
  std::string purpose;  // what an error begins with, and a timeline shows, such as "averaging gradients"
  base::Patience patience;
  bool outlives_wait = false;  // where the wait ends before it, the collective goes on, for others to end it
  std::string about = {};      // behind the purpose: tells it from others of that, on all members alike
  bool keeps_turn = false;     // the thread that waits goes on to compute, before any other does
};

// Parts of the job that waits for collectives need; they outlive them. A program without a job has none.
struct JobLinks {
  messaging::Mailbox* mailbox = nullptr;    // who is lost
  messaging::Presence* presence = nullptr;  // who has come
  observe::Recorder* recorder = nullptr;
  transport::Transport* transport = nullptr;  // for gathers between hosts; nullptr: torch's groups do them
  // Runs a wait of this thread; in a step without what others need meanwhile, but for its turn where it keeps that.
  // Empty: just runs it.
  std::function<void(const std::function<void()>& wait, bool keeps_turn)> around_wait;
  // Throws base::CancelledError in a thread of a step that has ended. Empty: nothing ends early.
  std::function<void()> check_step;
};

// One collective of torch's, as it is awaited.
struct C10dWorkOptions {
  std::string operation;                   // "all_reduce"
  messaging::Presence::Group group;        // that it is counted in
  std::string meaning;                     // a kind, among few, that is counted apart; "": all count as one
  base::Rank self;                         // this rank
  std::vector<base::Rank> awaited;         // whose part this one needs
  std::vector<at::Tensor> tensors;         // kept until it ends
  std::int64_t bytes = 0;                  // that this rank gives or takes
  std::shared_ptr<std::atomic<int>> left;  // counts those that go on though nobody waits for them
};

// Calls `start`, which begins it, and watches it. Throws what Work::wait() throws.
Started start_work(C10dWorkOptions options, const JobLinks& links, CallOptions call_options,
                   const std::function<c10::intrusive_ptr<c10d::Work>()>& start);

// How long a backend is to wait: longer than we do, whose error says what was waited for.
std::chrono::milliseconds backend_timeout(const CallOptions& call_options);

}  // namespace lamina::collective
