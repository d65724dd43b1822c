// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/default_dtype.h"

#include <c10/core/DefaultDtype.h>

#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/process_state.h"

namespace lamina::runtime {

DefaultDtype::DefaultDtype(at::ScalarType dtype) : before_(c10::get_default_dtype_as_scalartype()) {
  set_default_dtype(dtype);
}

DefaultDtype::~DefaultDtype() {
  if (ExecutionContext::has_process_state()) set_default_dtype(before_);
}

}  // namespace lamina::runtime
