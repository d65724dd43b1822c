// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/collective/backend_arguments.h"
#include "lamina/value/dtype.h"

namespace lamina::collective {

// A dense contiguous tensor that stands for another one: itself where it can.
class Flat {
 public:
  explicit Flat(at::Tensor tensor) : tensor_(std::move(tensor)) {
    if (!has_memory(tensor_)) throw base::UsageError("the storage of a tensor was freed before its collective ran");
    flat_ = tensor_.resolve_conj().resolve_neg().contiguous();
  }

  shared_memory::Buffer buffer() const {
    const auto dtype = value::dtype_of(flat_.scalar_type());
    return {static_cast<std::byte*>(flat_.data_ptr()), static_cast<std::size_t>(flat_.numel()), *dtype};
  }
  // After an operation has written to it.
  void put_back() const {
    if (!flat_.is_same(tensor_)) tensor_.copy_(flat_);
  }

 private:
  at::Tensor tensor_, flat_;
};

// A list of them.
class Flats {
 public:
  explicit Flats(const Tensors& tensors) : each_(tensors.begin(), tensors.end()) {
    for (const auto& one : each_) buffers_.push_back(one.buffer());
  }
  const std::vector<shared_memory::Buffer>& buffers() const { return buffers_; }
  void put_back() const {
    for (const auto& one : each_) one.put_back();
  }

 private:
  std::vector<Flat> each_;
  std::vector<shared_memory::Buffer> buffers_;
};

}  // namespace lamina::collective
