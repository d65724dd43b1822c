// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>

#include "lamina/value/reference_tensor.h"

// Sources of values for tests. They count how often they were asked.
namespace lamina::value {

// Makes its value when it is first asked. Throws what `make` throws.
class Made : public Source {
 public:
  explicit Made(std::function<at::Tensor()> make) : make_(std::move(make)) {}
  explicit Made(at::Tensor value) : value_(std::move(value)), made_(true) {}

  at::Tensor take() override {
    const std::scoped_lock lock(mutex_);
    ++takes_;
    if (!made_) value_ = make_();
    made_ = true;
    return value_;
  }
  int takes() const { return takes_; }

 private:
  std::mutex mutex_;
  std::function<at::Tensor()> make_;
  at::Tensor value_;
  bool made_ = false;
  int takes_ = 0;
};

// Keeps whoever asks waiting until it is given its value.
class Awaited : public Source {
 public:
  at::Tensor take() override {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return value_.defined(); });
    return value_;
  }
  void deliver(at::Tensor value) {
    const std::scoped_lock lock(mutex_);
    value_ = std::move(value);
    changed_.notify_all();
  }
  void await_readers(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ == count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  at::Tensor value_;
  int waiting_ = 0;
};

inline at::Tensor reference(const at::Tensor& value, Strides strides = Strides::kAsSpecified) {
  return make_reference(spec_of(value), std::make_shared<Made>(value), strides);
}

}  // namespace lamina::value
