// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/failure.h"

#include <cxxabi.h>

#include <cstdlib>
#include <memory>

#include "lamina/base/str.h"
#include "lamina/value/encoding.h"

namespace lamina::value {
namespace {

std::string type_name(const std::exception& error) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(typeid(error).name(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? name.get() : typeid(error).name();
}

}  // namespace

Value to_value(const Failure& failure) {
  return Tuple{{failure.type, failure.message, failure.traceback, failure.rank.value, failure.object}};
}

Failure to_failure(const Value& value) {
  const auto& items = value.as<Tuple>().items;
  if (items.size() != 5) throw base::FormatError("a failure without five parts");
  return {items[0].as<std::string>(), items[1].as<std::string>(), items[2].as<std::string>(),
          base::Rank(items[3].as<std::int64_t>()), items[4]};
}

RemoteFailure::RemoteFailure(Failure failure)
    : base::Error(base::str(failure.type, " on rank ", failure.rank, ": ", failure.message,
                            failure.traceback.empty() ? "" : "\n", failure.traceback)),
      failure_(std::move(failure)) {}

Failure Failures::describe(std::exception_ptr error, base::Rank rank) {
  try {
    std::rethrow_exception(error);
  } catch (const RemoteFailure& remote) {
    return remote.failure();
  } catch (const std::exception& local) {
    return {type_name(local), local.what(), "", rank, {}};
  } catch (...) {
    return {"unknown", "an exception that is no std::exception", "", rank, {}};
  }
}

Failure Failures::describe_to_send(std::exception_ptr error, base::Rank rank) {
  Failure failure;
  try {
    failure = describe(error, rank);
  } catch (...) {
    failure = Failures::describe(error, rank);
  }
  try {
    encode(failure.object);
  } catch (...) {
    failure.object = {};
  }
  return failure;
}

}  // namespace lamina::value
