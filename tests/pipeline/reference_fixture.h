// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <stdexcept>

#include "lamina/value/reference_tensor.h"
#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::pipeline {

inline at::Tensor tensor_in(const value::Value& tree) { return tree.as<at::Tensor>(); }

inline at::Tensor leaf(double number, std::int64_t size = 3) {
  return at::full({size}, number, at::kDouble).set_requires_grad(true);
}

// A gate that threads wait at between shut() and open().
class Gate {
 public:
  void shut() {
    std::lock_guard guard(mutex_);
    open_ = false;
  }
  void open() {
    std::lock_guard guard(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    if (!opened_.wait_for(lock, std::chrono::seconds(20), [&] { return open_; })) {
      throw std::runtime_error("nobody opened the gate");
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = true;
};

// A pipeline whose modules are functions of a tensor, called from the step's body.
class Model : public Pipeline {
 public:
  using Pipeline::Pipeline;
  using Function = std::function<at::Tensor(const at::Tensor&)>;

  base::ModuleId add_function(const std::string& name, int owner, const Function& function) {
    return add(name, owner, [function](Job&) {
      return [function](value::Value x) { return value::Value(function(tensor_in(x))); };
    });
  }
  base::ModuleId add_scaling(const std::string& name, int owner, const at::Tensor& weight) {
    return add_function(name, owner, [weight](const at::Tensor& x) { return x * weight; });
  }

  at::Tensor call(base::ModuleId id, const at::Tensor& x) { return tensor_in(job(0).call(id, x)); }
  void backward(const at::Tensor& loss) { job(0).backward({loss}, {}, 1); }

  // A step whose body returns nothing; no rank may fail.
  void run(int microbatches, const std::function<void(base::Microbatch)>& body) {
    for (const auto& outcome : attempt(microbatches, body)) ASSERT_EQ(message_of(outcome.error), "");
  }
  std::vector<Outcome> attempt(int microbatches, const std::function<void(base::Microbatch)>& body) {
    return step(microbatches, [&](base::Microbatch microbatch) {
      body(microbatch);
      return value::Value();
    });
  }
};

}  // namespace lamina::pipeline
