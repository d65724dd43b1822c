// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>

namespace lamina::parameter_server {

// A parameter that its owner lets others update.
//
// [Note: updates beside calls] An update of one trainer may come between forward and backward of another one, which
// then goes on with the new values: that is what asynchronous training is. So an update writes to the parameter's
// memory by way of `alias`, which counts writes by itself: autograd would else refuse that other backward.
struct Parameter {
  explicit Parameter(at::Tensor parameter);

  const at::Tensor tensor;
  std::mutex mutex;  // held by whoever updates it

  // A tensor for optimizers to write to. Under the mutex.
  const at::Tensor& writable();

 private:
  at::Tensor alias_;
};

// Every tensor is one parameter, in however many modules it stands. May be used from several threads.
class Parameters {
 public:
  std::shared_ptr<Parameter> of(const at::Tensor& tensor);

 private:
  std::mutex mutex_;
  std::map<const void*, std::weak_ptr<Parameter>> known_;
};

}  // namespace lamina::parameter_server
