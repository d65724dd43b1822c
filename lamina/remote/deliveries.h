// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <variant>

#include "lamina/base/wait.h"
#include "lamina/remote/protocol.h"
#include "lamina/value/failure.h"

namespace lamina::remote {

// A value that was delivered under a name, or what came instead.
using Arrival = std::variant<at::Tensor, value::Failure>;

// The tensor; throws value::RemoteFailure for a failure.
at::Tensor tensor_of(const Arrival& arrival);

// Values that other ranks deliver to this one in a step: see [Note: deliveries]. Each name arrives once and is taken
// once, in any order of the two.
class Deliveries {
 public:
  using Reader = std::function<void(Arrival)>;

  // `reader` gets what arrives as `name`: now, or later on the transport's thread. It must not throw, block or compute.
  void expect(const base::CallId& name, Reader reader);

  // Waits for `name`; `arrives` is called as a reader is, before the thread that waits has woken. Throws
  // base::CancelledError when the step ended, base::TimeoutError.
  Arrival wait(const base::CallId& name, const base::Patience& patience, const std::function<std::string()>& what,
               std::function<void()> arrives = nullptr);
  // Takes it when it is there already.
  std::optional<Arrival> poll(const base::CallId& name);

  void arrive(const base::CallId& name, Arrival arrival);  // from any thread
  void arrive(Values values);

  void cancel();  // from any thread: every wait ends with base::CancelledError
  void close();   // the step is over: forgets all

 private:
  struct Waiter {
    std::condition_variable arrived;
    std::function<void()> arrives;
    std::optional<Arrival> arrival;
  };

  std::optional<Arrival> extract(const base::CallId& name);  // from arrived_, under the lock

  std::mutex mutex_;
  std::map<base::CallId, Arrival> arrived_;
  std::map<base::CallId, Reader> readers_;
  std::map<base::CallId, std::shared_ptr<Waiter>> waiters_;
  bool cancelled_ = false;
};

}  // namespace lamina::remote
