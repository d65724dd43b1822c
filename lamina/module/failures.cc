// SPDX-License-Identifier: Apache-2.0
#include <cxxabi.h>

#include <cstdlib>
#include <memory>

#include "lamina/module/modules.h"
#include "lamina/value/encoding.h"

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

value::Failure Failures::describe_to_send(std::exception_ptr error, base::Rank rank) {
  value::Failure failure;
  try {
    failure = describe(error, rank);
  } catch (...) {
    failure = Failures::describe(error, rank);
  }
  try {
    value::encode(failure.object);
  } catch (...) {
    failure.object = {};
  }
  return failure;
}

}  // namespace lamina::module
