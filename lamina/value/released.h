// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace lamina::value {

// [Note: released tensors] A parameter or buffer that another rank owns keeps its object, shape, dtype, device and
// requires_grad, but has no storage. Its key set holds the wrapper key, whose kernels refuse it: reading metadata is
// always allowed, any operation on the value is base::UsageError with the text it was released with.

// The fate of the memory of a value that is let go and that other tensors may lie in, too: views of it, say.
enum class Memory {
  kFreed,  // these say `why` when they are read
  kKept,   // until the last of them is gone
};

// Lets the value of `tensor` go; `why` is what a use of it says, and begins with where it is and a semicolon. It takes
// the place of an earlier text. The gradient is dropped, too. With `like` the tensor is from then on as if it had been
// that one, of another dtype or device.
void release(at::Tensor& tensor, const std::string& why, const at::Tensor& like = {}, Memory memory = Memory::kKept);

bool is_released(const at::Tensor& tensor);
std::string where_released(const at::Tensor& tensor);  // the beginning of `why`; "" for a tensor that has its value

// Gives a released tensor a value again: from then on it is an ordinary tensor that shares the memory of `value`.
// Throws base::UsageError if it is not released, or of another shape or dtype.
void restore(at::Tensor& tensor, const at::Tensor& value);

// Throws if `tensor` is released and `operation` ("aten::mul") needs its value.
void require_value(const at::Tensor& tensor, const std::string& operation);

}  // namespace lamina::value
