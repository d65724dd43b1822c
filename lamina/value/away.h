// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

namespace lamina::value {

// [Note: values that are away] The value of a tensor may go and come back. The tensor keeps its object, its StorageImpl
// and its version, and so do views of it, such as the transposed weight that a graph has saved: all have their memory
// again when it comes. While it is away the key set holds the wrapper key, whose kernels ask the Home to bring the
// value before an operation reads it. Views, and code that reads memory without an operation, throw why it is away.
class Home {
 public:
  virtual ~Home() = default;
  // Has the value of a tensor come back, for `operation` ("aten::mul"). Throws where it cannot.
  virtual void bring(const at::Tensor& tensor, const std::string& operation) = 0;
};

// Values that are away are this one's from now on, until it is gone; one per process.
void set_home(std::weak_ptr<Home> home);

// Frees the memory of a tensor that has its storage for itself; `why` is what a use of it says.
void send_away(const at::Tensor& tensor, const std::string& why);
// Gives it memory again, as large as before.
void bring_back(const at::Tensor& tensor, c10::DataPtr memory);
bool is_away(const at::Tensor& tensor);

// Names the memory of a tensor, also while the value is away; nullptr where it has none.
c10::StorageImpl* memory_of(const at::Tensor& tensor);

// The memory of a tensor, which lives as long as the result.
c10::DataPtr memory_that_keeps(at::Tensor tensor);

// Has the value of `tensor` brought where it is away and `operation` needs it.
void bring(const at::Tensor& tensor, const std::string& operation);

}  // namespace lamina::value
