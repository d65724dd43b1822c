// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/modes.h"

#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "lamina/base/error.h"
#include "lamina/runtime/autocast.h"
#include "lamina/runtime/backward_here.h"
#include "lamina/runtime/default_dtype.h"

namespace lamina::runtime {
namespace {

at::ScalarType to_default_dtype(char byte) {
  const auto dtype = static_cast<at::ScalarType>(byte);
  if (byte < 0 || dtype >= at::ScalarType::NumOptions || !at::isFloatingType(dtype)) {
    throw base::FormatError("a call's default dtype is none");
  }
  return dtype;
}

}  // namespace

std::string capture_modes() {
  const std::string modes = {static_cast<char>(at::GradMode::is_enabled()),
                             static_cast<char>(c10::InferenceMode::is_enabled()),
                             static_cast<char>(c10::get_default_dtype_as_scalartype())};
  return modes + capture_autocast();
}

void run_with_modes(std::string_view modes, const std::function<void()>& work) {
  if (modes.size() < 3) throw base::FormatError("a call's modes are malformed");
  c10::InferenceMode inference(modes[1] != 0);
  const BackwardHere backward_here;  // which the line before lets go of
  at::AutoGradMode grad(modes[0] != 0);
  const DefaultDtype dtype(to_default_dtype(modes[2]));
  run_with_autocast(modes.substr(3), work);
}

}  // namespace lamina::runtime
