// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/backward_here.h"

#include <c10/core/AutogradState.h>

namespace lamina::runtime {
namespace {

c10::AutogradState& state() { return c10::AutogradState::get_tls_state(); }

}  // namespace

BackwardHere::BackwardHere() : before_(state().get_multithreading_enabled()) {
  state().set_multithreading_enabled(false);
}

BackwardHere::~BackwardHere() { state().set_multithreading_enabled(before_); }

}  // namespace lamina::runtime
