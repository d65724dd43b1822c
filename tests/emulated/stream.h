// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "tests/emulated/device.h"

// Streams and events. A stream is a thread that takes tasks in their order; its thread begins with the first task.
// Host threads have a current device, and a current stream of each device.
namespace emulated {

inline constexpr int kStreams = 33;  // of a device: its default stream and a pool

c10::Stream stream_of(int device, c10::StreamId id);
c10::Stream new_stream(int device);  // of the pool, by turns

// The stream as a library of the device's gets it, and the stream that such a handle is of.
void* handle_of(const c10::Stream& stream);
c10::Stream stream_with(void* handle);

int current_device();
void set_device(int device);        // throws if there is none of this number; -1 changes nothing
int device_or_current(int device);  // the current one in the place of -1
c10::Stream current_stream(int device);
c10::Stream exchange_stream(const c10::Stream& stream);

// Runs the task after what the stream has; not if a kernel of the device has failed by then. The task holds no tensors
// of the device, whose memory is kept by its order alone, and nothing of Python's.
void enqueue(const c10::Stream& stream, std::function<void()> task);

bool is_idle(const c10::Stream& stream);

// Waits until all tasks have run, without counting it.
void finish(const c10::Stream& stream);

// Waits as a host thread of a program: counted, and told of failed kernels.
void synchronize(const c10::Stream& stream);
void synchronize_device(int device);

// The process ends: tasks that wait for something leave.
bool is_stopping();

class Event {
 public:
  static std::shared_ptr<Event> make() { return std::make_shared<Event>(); }

  // Each record is a version; waits are for the last one at their call.
  static void record(const std::shared_ptr<Event>& event, const c10::Stream& stream);
  static void block(const std::shared_ptr<Event>& event, const c10::Stream& stream);
  bool query();
  void wait();
  double milliseconds_since(Event& earlier);

 private:
  void wait_for(std::uint64_t version);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t recorded_ = 0, passed_ = 0;
  std::chrono::steady_clock::time_point at_;
};

}  // namespace emulated
