// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>

#include "lamina/base/error.h"

namespace lamina::dist {

// Throws again what torch's collective `what` threw, as base::TimeoutError or base::PeerError where it tells of a
// connection.
[[noreturn]] void throw_typed(const std::string& what, const std::exception& error);

template <class Call>
auto typed(const std::string& what, const Call& call) {
  try {
    return call();
  } catch (const base::Error&) {
    throw;
  } catch (const std::exception& error) {
    throw_typed(what, error);
  }
}

}  // namespace lamina::dist
