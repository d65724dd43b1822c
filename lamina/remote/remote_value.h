// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/remote/call_profile.h"
#include "lamina/remote/protocol.h"
#include "lamina/value/reference_tensor.h"

namespace lamina::remote {

// A call that this rank issued, as its outputs and its graph remember it.
struct IssuedCall {
  base::CallId id;
  base::Rank owner;
  base::ModuleId module;
  std::string name;  // of the module
  bool backward = false;
  std::shared_ptr<CallProfile> profile;
  int ordinal = 0;  // among the calls of the same kind in its context

  std::string what() const;  // "forward of h.5 on rank 1 (step 3, microbatch 2)"
};

// Parts of earlier calls that other ranks may forget; told to them with the next request. Thread-safe.
class Releases {
 public:
  void add(base::Rank owner, const Release& release);
  std::vector<Release> take(base::Rank owner);

 private:
  std::mutex mutex_;
  std::map<base::Rank, std::vector<Release>> waiting_;
};

// Its end releases a call's outputs, or its graph.
class Lease {
 public:
  Lease(std::shared_ptr<Releases> releases, base::Rank owner, const base::CallId& call, bool graph)
      : releases_(std::move(releases)), owner_(owner), release_{call, graph} {}
  ~Lease() {
    if (!spent_) releases_->add(owner_, release_);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  void spend() { spent_ = true; }  // the owner has forgotten it by itself

 private:
  const std::shared_ptr<Releases> releases_;
  const base::Rank owner_;
  const Release release_;
  bool spent_ = false;
};

// How remote values get here: what they need of the calls that handed them out.
class Fetcher {
 public:
  virtual base::Rank rank() const = 0;
  // A name for what is delivered of a call.
  virtual base::CallId new_delivery(const IssuedCall& call) = 0;
  // Asks the call's owner for a delivery that its request did not prepare.
  virtual void ask(const IssuedCall& call, const Delivery& delivery) = 0;
  // Waits for what is delivered as `name`. Throws what came instead, in this thread, whose context then knows of it.
  virtual at::Tensor receive(const base::CallId& name, const IssuedCall& call) = 0;
  // Says that a read ends this thread's turn, also where the value is there.
  virtual bool ends_turns() const = 0;
  // Runs a wait of this thread with the compute slot, and what the face must not hold, given up. `ready` is for whoever
  // brings what it waits for; see ExecutionContext::take_place().
  using Wait = std::function<void(const std::function<void()>& ready)>;
  virtual void give_way(const IssuedCall& awaited, const Wait& wait) = 0;
  virtual const base::Patience& patience() const = 0;

 protected:
  ~Fetcher() = default;
};

// An output of a call that lies on the call's owner, or where that rank redirects to.
class RemoteValue : public value::Source {
 public:
  // `prepared` are the deliveries of this output that the request asked for: to be claimed here by their readers.
  RemoteValue(Fetcher& calls, std::weak_ptr<const bool> alive, std::shared_ptr<const IssuedCall> call,
              std::shared_ptr<const Lease> lease, std::int64_t output, std::vector<Delivery> prepared);
  // Deliveries that nobody claimed are not prepared next time.
  ~RemoteValue() override;

  // Has the value sent here, unless it is on its way, and waits for it, giving the compute slot up.
  at::Tensor take() override;

  // The name under which rank `reader` gets the value.
  base::CallId route_to(base::Rank reader);
  // Has the value sent to the reader that another call named.
  void redirect(Delivery delivery);
  const base::CallId& call() const { return call_->id; }
  // Says that the value is here, and was so when this turn began.
  bool taken() const { return taken_; }

 private:
  void wait_for_taker(std::unique_lock<std::mutex>& lock);
  void fetch(std::unique_lock<std::mutex>& lock);
  base::CallId route(base::Rank reader);  // under the lock
  void require_alive() const;

  Fetcher& calls_;
  const std::weak_ptr<const bool> alive_;
  const std::shared_ptr<const IssuedCall> call_;
  const std::shared_ptr<const Lease> lease_;
  const std::int64_t output_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Delivery> prepared_;
  bool taking_ = false;              // a thread waits for it
  std::atomic<bool> taken_ = false;  // a thread that computes has had it
  at::Tensor value_;
  std::exception_ptr error_;
};

// The remote value that `tensor` is a pending reference to; nullptr for any other tensor.
std::shared_ptr<RemoteValue> remote_value_of(const at::Tensor& tensor);

}  // namespace lamina::remote
