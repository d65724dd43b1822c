// SPDX-License-Identifier: Apache-2.0
#include "tests/emulated/stream.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <random>
#include <thread>

#include "tests/emulated/settings.h"

namespace emulated {
namespace {

using namespace std::chrono_literals;

// [Note: the end of a process] Threads of streams may run kernels while torch's globals are destroyed. So they are told
// to leave before that, and waited for, but not for ever.
constexpr auto kLongestEnd = 10s;

struct Threads {
  std::mutex mutex;
  std::condition_variable left;
  int running = 0;
  std::atomic<bool> stopping = false;
};

Threads& threads() {
  static auto& made = *new Threads;
  return made;
}

struct Task {
  std::function<void()> run;
  bool always;  // events pass on a failed device, too
};

class Queue {
 public:
  explicit Queue(int device, c10::StreamId id)
      : device_(device), random_(settings().seed * 1000003 + device * kStreams + id) {
    std::lock_guard lock(threads().mutex);
    ++threads().running;
    std::thread([this] { run(); }).detach();
  }

  void push(Task task) {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    filled_.notify_one();
  }

  bool is_idle() {
    std::lock_guard lock(mutex_);
    return tasks_.empty();
  }

  void wake() {
    std::lock_guard lock(mutex_);
    filled_.notify_one();
  }

 private:
  void run() {
    while (const Task* task = next()) {
      work_on(*task);
      std::lock_guard lock(mutex_);
      tasks_.pop_front();
    }
    std::lock_guard lock(threads().mutex);
    --threads().running;
    threads().left.notify_all();
  }

  // The first task, which stays in the queue while it runs; null when the process ends. What is left then is leaked.
  const Task* next() {
    std::unique_lock lock(mutex_);
    filled_.wait(lock, [this] { return !tasks_.empty() || is_stopping(); });
    return is_stopping() ? nullptr : &tasks_.front();
  }

  void work_on(const Task& task) {
    if (settings().delay_us > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % (settings().delay_us + 1)));
    }
    if (!task.always && is_failed(device_)) {
      return;
    }
    try {
      task.run();
    } catch (const c10::Error& error) {
      fail(device_, error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(device_, error.what());
    }
  }

  const int device_;
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Task> tasks_;  // pushing leaves references valid
};

struct Queues {
  std::mutex mutex;
  std::array<std::array<Queue*, kStreams>, kMostDevices> all{};
};

Queues& queues() {
  static auto& made = *new Queues;
  return made;
}

void stop() {
  if (is_forked()) {
    return;
  }
  threads().stopping = true;
  {
    std::lock_guard lock(queues().mutex);
    for (auto& of_device : queues().all) {
      for (auto* queue : of_device) {
        if (queue != nullptr) {
          queue->wake();
        }
      }
    }
  }
  std::unique_lock lock(threads().mutex);
  threads().left.wait_for(lock, kLongestEnd, [] { return threads().running == 0; });
}

Queue* find(const c10::Stream& stream) {
  std::lock_guard lock(queues().mutex);
  return queues().all[stream.device_index()][stream.id()];
}

Queue& queue(const c10::Stream& stream) {
  static const bool stops_at_exit = std::atexit(stop) == 0;  // before torch's globals, which are older, are destroyed
  TORCH_CHECK(stops_at_exit, "emulated: atexit has no room");
  touch(stream.device_index());
  std::lock_guard lock(queues().mutex);
  auto*& found = queues().all[stream.device_index()][stream.id()];
  if (found == nullptr) {
    found = new Queue(stream.device_index(), stream.id());
  }
  return *found;
}

void push(const c10::Stream& stream, std::function<void()> run, bool always) {
  if (!is_forked() && !is_stopping()) {
    queue(stream).push({std::move(run), always});
  }
}

thread_local int device_of_thread = 0;
thread_local std::array<c10::StreamId, kMostDevices> streams_of_thread{};

}  // namespace

c10::Stream stream_of(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(device)), id);
}

void* handle_of(const c10::Stream& stream) {
  return reinterpret_cast<void*>((std::uintptr_t(stream.device_index()) + 1) * kStreams + std::uintptr_t(stream.id()));
}

c10::Stream stream_with(void* handle) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  return stream_of(static_cast<int>(number / kStreams) - 1, static_cast<c10::StreamId>(number % kStreams));
}

c10::Stream new_stream(int device) {
  static std::array<std::atomic<unsigned>, kMostDevices> taken{};
  return stream_of(device, 1 + taken[device]++ % (kStreams - 1));
}

int current_device() { return device_of_thread; }

void set_device(int device) {
  TORCH_CHECK(device < settings().devices, "emulated: there is no device ", device, ", the last is ",
              settings().devices - 1);
  device_of_thread = device_or_current(device);
}

int device_or_current(int device) { return device < 0 ? device_of_thread : device; }

c10::Stream current_stream(int device) {
  device = device_or_current(device);
  return stream_of(device, streams_of_thread.at(device));
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  const auto before = current_stream(stream.device_index());
  streams_of_thread.at(stream.device_index()) = stream.id();
  return before;
}

void enqueue(const c10::Stream& stream, std::function<void()> task) { push(stream, std::move(task), false); }

bool is_idle(const c10::Stream& stream) {
  auto* found = find(stream);
  return found == nullptr || found->is_idle();
}

void finish(const c10::Stream& stream) {
  if (is_idle(stream)) {
    return;
  }
  const auto end = Event::make();
  Event::record(end, stream);
  end->wait();
}

void synchronize(const c10::Stream& stream) {
  count_wait();
  check(stream.device_index());
  finish(stream);
  check(stream.device_index());
}

void synchronize_device(int device) {
  count_wait();
  touch(device);
  check(device);
  for (int id = 0; id < kStreams; ++id) {
    finish(stream_of(device, id));
  }
  check(device);
}

bool is_stopping() { return threads().stopping; }

void Event::record(const std::shared_ptr<Event>& event, const c10::Stream& stream) {
  std::uint64_t version;
  {
    std::lock_guard lock(event->mutex_);
    version = ++event->recorded_;
  }
  const auto pass = [event, version] {
    std::lock_guard lock(event->mutex_);
    event->passed_ = std::max(event->passed_, version);
    event->at_ = std::chrono::steady_clock::now();
    event->changed_.notify_all();
  };
  push(stream, pass, true);
}

void Event::block(const std::shared_ptr<Event>& event, const c10::Stream& stream) {
  if (settings().ignores_waits) {
    return;
  }
  std::unique_lock lock(event->mutex_);
  const auto version = event->recorded_;
  lock.unlock();
  push(stream, [event, version] { event->wait_for(version); }, true);
}

bool Event::query() {
  std::lock_guard lock(mutex_);
  return passed_ >= recorded_;
}

void Event::wait() {
  std::unique_lock lock(mutex_);
  const auto version = recorded_;
  lock.unlock();
  wait_for(version);
}

void Event::wait_for(std::uint64_t version) {
  std::unique_lock lock(mutex_);
  while (passed_ < version && !is_stopping()) {
    changed_.wait_for(lock, 100ms);  // nobody tells each event that the process ends
  }
}

double Event::milliseconds_since(Event& earlier) {
  if (&earlier == this) {
    return 0;
  }
  std::scoped_lock lock(mutex_, earlier.mutex_);
  return std::chrono::duration<double, std::milli>(at_ - earlier.at_).count();
}

}  // namespace emulated
