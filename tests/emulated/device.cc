// SPDX-License-Identifier: Apache-2.0
#include "tests/emulated/device.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <mutex>

#include "tests/emulated/emulated.h"
#include "tests/emulated/memory.h"
#include "tests/emulated/settings.h"

namespace emulated {
namespace {

char* reserve(int protection) {
  void* at = ::mmap(nullptr, kSpace, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "emulated: no address space of ", kSpace >> 30, " GiB (ulimit -v?)");
  return static_cast<char*>(at);
}

struct State {
  char* device = reserve(PROT_NONE);
  char* twin = reserve(PROT_READ | PROT_WRITE);
  std::array<std::atomic<bool>, kMostDevices> touched{}, failed{};
  std::atomic<bool> forked = false;
  std::atomic<std::uint64_t> enqueued = 0, waits = 0;
  std::mutex mutex;  // of the rest
  std::array<std::string, kMostDevices> errors;
  std::map<std::string, std::uint64_t> drains;
};

State& state() {
  static auto& made = *new State;  // never destroyed: streams run until the process has ended
  return made;
}

}  // namespace

char* device_range() { return state().device; }

char* twin(const void* address) { return state().twin + (static_cast<const char*>(address) - state().device); }

void fail(int device, const std::string& what) {
  std::lock_guard lock(state().mutex);
  if (!state().failed[device].exchange(true)) {
    state().errors[device] = what;
  }
}

bool is_failed(int device) { return state().failed[device]; }

void check(int device) {
  TORCH_CHECK(!is_forked(), "emulated: this process is a fork of one that used the devices; start it anew (spawn)");
  if (!is_failed(device)) {
    return;
  }
  std::lock_guard lock(state().mutex);
  throw c10::AcceleratorError(
      {__func__, __FILE__, __LINE__}, 1,
      c10::str("emulated error: a kernel failed on device ", device,
               ". Kernels run later than they are called, so it need not be this call's: ", state().errors[device]));
}

void touch(int device) {
  static const bool told_of_forks = [] {
    ::pthread_atfork(nullptr, nullptr, [] { state().forked = true; });
    return true;
  }();
  state().touched[device] = told_of_forks;
}

bool is_touched(int device) { return state().touched[device]; }

bool is_forked() { return state().forked; }

void count_enqueued() { ++state().enqueued; }

void count_drained(const std::string& operation) {
  std::lock_guard lock(state().mutex);
  ++state().drains[operation];
}

void count_wait() { ++state().waits; }

Counts counts() {
  Counts all;
  all.enqueued = state().enqueued;
  all.waits = state().waits;
  for (int device = 0; device < settings().devices; ++device) {
    const auto [now, peak] = allocated_bytes(device);
    all.bytes.push_back(now);
    all.peak_bytes.push_back(peak);
    if (is_touched(device)) {
      all.contexts.push_back(device);
    }
  }
  std::lock_guard lock(state().mutex);
  all.drains = state().drains;
  for (const auto& [name, count] : all.drains) {
    all.drained += count;
  }
  return all;
}

void reset_counts() {
  for (int device = 0; device < settings().devices; ++device) {
    reset_peak_bytes(device);
  }
  std::lock_guard lock(state().mutex);
  state().enqueued = state().waits = 0;
  state().drains.clear();
}

}  // namespace emulated
