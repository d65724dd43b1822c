// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/nccl_communicator.h"

#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::collective::nccl {
namespace {

constexpr auto kLook = std::chrono::microseconds(50);  // how often what is under way is looked at
constexpr auto kMaking = "making a communicator";

}  // namespace

Communicator::Communicator(const Library& library, const UniqueId& id, int rank, int size, base::Deadline made_by,
                           const std::function<void()>& check)
    : library_(library) {
  const std::lock_guard lock(mutex_);
  CommConfig config;
  try {
    require(kMaking, library_.comm_init_rank_config(&comm_, size, id, rank, &config));
    await(kMaking, [&] {
      check();
      if (made_by.expired())
        throw base::TimeoutError(base::str(library_.title(), ": not all members have come in time"));
    });
  } catch (...) {
    if (comm_ != nullptr) library_.comm_abort(comm_);
    throw;
  }
}

Communicator::~Communicator() { abort(); }

void Communicator::run(const char* what, const std::function<Result(Comm* comm)>& call) {
  const std::lock_guard lock(mutex_);
  await(what, nullptr);
  require(what, call(comm_));
  await(what, nullptr);
}

void Communicator::check() {
  const std::lock_guard lock(mutex_);
  await("a collective before", nullptr);
}

void Communicator::abort() {
  aborted_ = true;  // whoever has the mutex leaves
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) library_.comm_abort(comm_);
  comm_ = nullptr;
}

void Communicator::await(const char* what, const std::function<void()>& check) {
  while (true) {
    if (aborted_) throw base::CancelledError(base::str(what, ": the group over ", library_.title(), " was aborted"));
    auto state = Result::kSuccess;
    require(what, library_.comm_get_async_error(comm_, &state));
    require(what, state);
    if (state != Result::kInProgress) return;
    if (check) check();
    std::this_thread::sleep_for(kLook);
  }
}

void Communicator::require(const char* what, Result result) const {
  if (result == Result::kSuccess || result == Result::kInProgress) return;
  const char* const last = library_.get_last_error(comm_);
  const auto text = base::str(what, ": ", library_.title(), ": ", library_.get_error_string(result),
                              last == nullptr || *last == '\0' ? "" : "; ", last == nullptr ? "" : last);
  if (result == Result::kInvalidArgument || result == Result::kInvalidUsage) throw base::UsageError(text);
  throw base::Error(text);
}

}  // namespace lamina::collective::nccl
