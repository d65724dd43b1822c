// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/watch.h"

#include <algorithm>
#include <chrono>

namespace lamina::launch {

void Watch::add(int fd, short events, std::function<void()> ready) {
  descriptors_.push_back({.fd = fd, .events = events, .revents = 0});
  ready_.push_back(std::move(ready));
}

void Watch::until(const std::optional<base::Deadline>& deadline) {
  if (deadline && (!deadline_ || deadline->at() < deadline_->at())) deadline_ = deadline;
}

void Watch::wait() {
  using std::chrono::milliseconds;
  int limit_ms = -1;
  if (deadline_) {
    const auto left = std::chrono::ceil<milliseconds>(deadline_->at() - base::Deadline::Clock::now());
    limit_ms = static_cast<int>(std::clamp(left, milliseconds{0}, milliseconds{1000000000}).count());
  }
  if (::poll(descriptors_.data(), descriptors_.size(), limit_ms) <= 0) return;
  for (std::size_t i = 0; i < descriptors_.size(); ++i) {
    if (descriptors_[i].revents != 0) ready_[i]();
  }
}

}  // namespace lamina::launch
