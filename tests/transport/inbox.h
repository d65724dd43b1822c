// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/transport/transport.h"

namespace lamina::transport {

// Events that one rank was told, in order.
class Inbox {
 public:
  Transport::Events events() {
    return {[this](Message message) {
              add(std::to_string(message.call.origin.value) + ":" + message.fields, message.body);
            },
            [this](base::Rank rank, const std::string& why) { add("lost " + std::to_string(rank.value), why); }};
  }
  // The first `count` events.
  std::vector<std::string> wait(std::size_t count) {
    std::unique_lock lock(mutex_);
    const base::Patience patience{std::chrono::seconds(30), nullptr};
    base::wait_until(lock, changed_, patience, [&] { return texts_.size() >= count; }, [] { return "events"; });
    return {texts_.begin(), texts_.begin() + static_cast<std::ptrdiff_t>(count)};
  }
  value::Value body(std::size_t index) {
    std::lock_guard guard(mutex_);
    return bodies_.at(index);
  }
  std::size_t size() {
    std::lock_guard guard(mutex_);
    return texts_.size();
  }

 private:
  void add(std::string text, value::Value body) {
    {
      std::lock_guard guard(mutex_);
      texts_.push_back(std::move(text));
      bodies_.push_back(std::move(body));
    }
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_;
  std::vector<value::Value> bodies_;
};

inline void send(Transport& from, int to, const std::string& text, value::Value body = {}) {
  Message message;
  message.kind = "text";
  message.call.origin = from.rank();
  message.fields = text;
  message.body = std::move(body);
  from.send(base::Rank(to), message);
}

}  // namespace lamina::transport
