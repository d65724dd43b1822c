// SPDX-License-Identifier: Apache-2.0
#include <cxxabi.h>

#include <cstdlib>
#include <memory>

#include "lamina/module/modules.h"

namespace lamina::module {
namespace {

std::string type_name(const std::exception& error) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(typeid(error).name(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? name.get() : typeid(error).name();
}

}  // namespace

value::Failure Failures::describe(std::exception_ptr error, base::Rank rank) {
  try {
    std::rethrow_exception(error);
  } catch (const value::RemoteFailure& remote) {
    return remote.failure();
  } catch (const std::exception& local) {
    return {type_name(local), local.what(), "", rank, {}};
  } catch (...) {
    return {"unknown", "an exception that is no std::exception", "", rank, {}};
  }
}

}  // namespace lamina::module
