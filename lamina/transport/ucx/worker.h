// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ucp/api/ucp.h>

#include <chrono>
#include <string>

#include "lamina/transport/ucx/plugin.h"

namespace lamina::transport::ucx {

// Throws base::Error "UCX cannot <what>: <why>" unless `status` is UCS_OK.
void check(ucs_status_t status, const char* what);

// A UCX context with one worker. Every call must be made by one thread at a time, except signal() and event_fd().
class Worker {
 public:
  explicit Worker(const Reach& reach);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::string address(bool near) const;  // see LocalEndpoint
  int event_fd() const { return event_fd_; }
  ucp_worker_h get() const { return worker_; }

  // True where it sends and receives memory of that type.
  bool knows(ucs_memory_type_t type) const;
  // True where a transport can reach that memory of a device.
  bool registers(void* address, std::size_t size, ucs_memory_type_t type) const;

  // Makes an endpoint that never reports errors: the only kind that uses shared memory.
  ucs_status_t connect(const std::string& address, ucp_ep_h& endpoint);

  // True when something happened.
  bool progress() { return ucp_worker_progress(worker_) != 0; }
  // True when the next event will make event_fd() readable; false when there is something to do first.
  bool arm();
  // True when event_fd() is readable, or becomes so within `patience`.
  bool announced(std::chrono::milliseconds patience = {}) const;
  // Makes event_fd() readable.
  void signal() { ucp_worker_signal(worker_); }

  // Gives everything up without a word to the peers: UCX objects of a broken job must not be flushed or destroyed.
  void leak() { leaked_ = true; }

 private:
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  bool leaked_ = false;
};

}  // namespace lamina::transport::ucx
