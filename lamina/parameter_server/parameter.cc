// SPDX-License-Identifier: Apache-2.0
#include "lamina/parameter_server/parameter.h"

#include "lamina/base/error.h"

namespace lamina::parameter_server {

Parameter::Parameter(at::Tensor parameter) : tensor(std::move(parameter)), alias_(tensor.variable_data()) {}

const at::Tensor& Parameter::writable() {
  // A module that was moved or converted has other memory.
  const bool moved = alias_.storage().unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl();
  if (moved) alias_.set_data(tensor.variable_data());
  return alias_;
}

std::shared_ptr<Parameter> Parameters::of(const at::Tensor& tensor) {
  const std::lock_guard guard(mutex_);
  auto& known = known_[tensor.unsafeGetTensorImpl()];
  auto parameter = known.lock();
  if (parameter == nullptr) known = parameter = std::make_shared<Parameter>(tensor);
  return parameter;
}

}  // namespace lamina::parameter_server
