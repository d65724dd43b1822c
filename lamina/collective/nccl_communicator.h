// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

#include "lamina/base/deadline.h"
#include "lamina/collective/nccl_library.h"

namespace lamina::collective::nccl {

// NCCL's communicator of a group, on the device that is current where it is made. It never blocks: what NCCL does
// beside a call is looked at until it has ended, or somebody aborts it. From any thread.
class Communicator {
 public:
  // Collective over the group; all have the same id. Throws what check() does, base::TimeoutError, and as run().
  Communicator(const Library& library, const UniqueId& id, int rank, int size, base::Deadline made_by,
               const std::function<void()>& check);
  ~Communicator();
  Communicator(const Communicator&) = delete;

  // Makes a call that enqueues. Throws base::UsageError where NCCL refuses it, base::Error where it has failed, or did
  // before, both with NCCL's words; base::CancelledError once it is aborted.
  void run(const char* what, const std::function<Result(Comm* comm)>& call);

  // Ends what is under way, kernels that wait for a member included. Nothing can be run afterwards.
  void abort();
  // Throws as run().
  void check();

 private:
  // Looks until nothing of a call is under way.
  void await(const char* what, const std::function<void()>& check);
  void require(const char* what, Result result) const;

  const Library& library_;
  std::atomic<bool> aborted_ = false;
  std::mutex mutex_;
  Comm* comm_ = nullptr;  // under it
};

}  // namespace lamina::collective::nccl
