// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "lamina/device/capabilities.h"

// [Note: reference tensors] A reference stands for a tensor whose value is, or is still being made, somewhere else. It
// is an ordinary at::Tensor to both faces: its shape, strides, dtype, device and requires_grad are read without
// waiting. An operation that needs the value, its storage, printing or pickling makes the reference become its value in
// place: the same TensorImpl takes the value's storage, and identity, history and hooks stay. From then on it is a
// plain tensor and costs what one costs. Only detach() and the engine's addition of two gradients leave it pending.
namespace lamina::value {

// Facts known of a tensor before its value.
struct TensorSpec {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  at::ScalarType dtype = at::kFloat;
  at::Device device = devices::kHost;
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

TensorSpec spec_of(const at::Tensor& tensor);  // waits for nothing

// Counts the writes to a tensor; 0 for undefined tensors, and for inference tensors, whose writes nobody counts.
std::uint32_t version_of(const at::Tensor& tensor);

// The source of a reference's value. One source may stand behind several references: they become aliases.
class Source {
 public:
  virtual ~Source() = default;
  // Gives the value, a dense tensor in memory that nobody else writes to. Waits for it in the calling thread, which may
  // hold Python's GIL, without grad, inference, autocast or dispatch modes. Two threads may call it at once. The same
  // tensor each time. Throws what came instead of the value, each time.
  virtual at::Tensor take() = 0;

 private:
  friend class ReferenceImpl;
  c10::VariableVersion version_{0};  // counts the writes to the value, through whichever reference
};

// A reference to a value that looks like `spec`. A gradient's strides are those that arrive; any other value that
// differs from its spec makes the use of the reference an error (base::UsageError); the stride of a dimension of one is
// no difference. Without history; requires no grad.
enum class Strides : std::uint8_t { kAsSpecified, kAsTheyArrive };
at::Tensor make_reference(const TensorSpec& spec, std::shared_ptr<Source> source, Strides strides);

bool is_pending(const at::Tensor& tensor);                    // a reference that has not become its value
std::shared_ptr<Source> source_of(const at::Tensor& tensor);  // nullptr when it is not pending
void materialise(const at::Tensor& tensor);                   // makes it become its value; nothing for other tensors

// Code of the user meets what a source throws inside an operation, where a face may know only its own exceptions: it
// can set how such an error is thrown there. Does not return.
using Rethrow = void (*)(std::exception_ptr error);
void set_rethrow(Rethrow rethrow);
void for_user(const std::function<void()>& work);  // runs `work`, whose errors are thrown so

// The source of a sum of gradients of which one at least was a reference. Its value adds the parts in their order. A
// part that is written to before that makes the sum an error (base::UsageError): it would be the sum of something else.
class Sum : public Source {
 public:
  explicit Sum(std::vector<at::Tensor> parts);
  at::Tensor take() override;
  const std::vector<at::Tensor>& parts() const { return parts_; }  // references that strides arrive with, or values

 private:
  const std::vector<at::Tensor> parts_;
  std::vector<std::uint32_t> versions_;  // of the parts when the sum was made
  std::mutex mutex_;
  at::Tensor value_;  // once taken, under the mutex
};

}  // namespace lamina::value
