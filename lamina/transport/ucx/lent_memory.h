// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ucs/memory/memory_type.h>

#include <optional>
#include <string>
#include <string_view>

#include "lamina/device/lending.h"

namespace lamina::transport::ucx {

class Worker;

// The memory of this rank's device as UCX takes it, where it does.
class LentMemory {
 public:
  // The kind of memory that another rank lends is told with its address, in so many bytes; "" is none.
  static constexpr std::size_t kWordSize = 16;
  static std::string_view kind(std::string_view word);

  LentMemory() = default;  // none
  // None, with a warning, where UCX knows no memory of that kind.
  LentMemory(std::optional<devices::Lending> lends, const Worker& worker);

  std::string_view kind() const { return lends_ ? std::string_view(lends_->memory) : std::string_view(); }
  std::string word() const;
  ucs_memory_type_t type() const { return type_; }
  void* address(const at::Tensor& bytes) const { return lends_->address(bytes.const_data_ptr()); }

 private:
  std::optional<devices::Lending> lends_;
  ucs_memory_type_t type_ = UCS_MEMORY_TYPE_HOST;
};

}  // namespace lamina::transport::ucx
