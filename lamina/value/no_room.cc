// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/no_room.h"

#include <memory>
#include <string>
#include <utility>

#include "lamina/value/reference_tensor.h"

namespace lamina::value {
namespace {

class NoRoom : public Source {
 public:
  explicit NoRoom(std::string why) : why_(std::move(why)) {}
  at::Tensor take() override { throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, why_); }

 private:
  const std::string why_;
};

}  // namespace

at::Tensor no_room(std::int64_t size_bytes, at::Device device, const c10::OutOfMemoryError& error) {
  return make_reference({.sizes = {size_bytes}, .strides = {1}, .dtype = at::kByte, .device = device},
                        std::make_shared<NoRoom>(error.msg()), Strides::kAsSpecified);
}

}  // namespace lamina::value
