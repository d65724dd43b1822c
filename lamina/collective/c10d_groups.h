// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "lamina/collective/backend.h"
#include "lamina/environment/world.h"

namespace c10d {
class ProcessGroup;
}

namespace lamina::collective {

// torch's process groups in a process without Python, for tensors of the CPU and of the rank's device.
class C10dGroups {
 public:
  // make_backend, or make_gloo.
  using MakeBackend = c10::intrusive_ptr<c10d::Backend> (*)(const BackendOptions& options);

  // Meets at the job's store, c10d's at MASTER_ADDR:MASTER_PORT: the launcher's where it has one, else rank 0's. `name`
  // keeps these groups apart from others that met there. Throws base::TimeoutError, base::Error.
  C10dGroups(const environment::World& world, std::string name, std::chrono::milliseconds timeout,
             std::function<void()> check_interrupt, MakeBackend make_backend);
  ~C10dGroups();

  // The group of `members`, this rank among them, each of which makes it; they give the same `label`.
  // `check_members`, where it is not empty, throws when one of them is lost. Throws base::TimeoutError,
  // base::PeerError.
  c10::intrusive_ptr<c10d::ProcessGroup> make(const std::string& label, std::span<const base::Rank> members,
                                              std::function<void()> check_members = {});

 private:
  const environment::World world_;
  const std::string name_;
  const std::chrono::milliseconds timeout_;
  const std::function<void()> check_interrupt_;
  const MakeBackend make_backend_;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace lamina::collective
