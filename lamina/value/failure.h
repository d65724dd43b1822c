// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>

#include "lamina/base/error.h"
#include "lamina/value/value.h"

namespace lamina::value {

// An error as a value, so that it crosses ranks: what it was, what it said, where it came from, and, when a face knows
// more (the exception object itself), that as an opaque value.
struct Failure {
  std::string type;
  std::string message;
  std::string traceback;
  base::Rank rank;  // where it was raised
  Value object;
};

Value to_value(const Failure& failure);
Failure to_failure(const Value& value);  // throws base::FormatError

// A failure of another rank, thrown again here. Its message is the failure's, then the other rank's traceback.
class RemoteFailure : public base::Error {
 public:
  explicit RemoteFailure(Failure failure);
  const Failure& failure() const { return failure_; }

 private:
  Failure failure_;
};

// How exceptions become values that travel. A face overrides it for its own kinds.
class Failures {
 public:
  virtual ~Failures() = default;
  // A failure that came from another rank stays the one it was.
  virtual Failure describe(std::exception_ptr error, base::Rank rank);

  // Returns what describe() gives, less what of it cannot travel; when that throws, what C++ knows of the error.
  Failure describe_to_send(std::exception_ptr error, base::Rank rank);
};

}  // namespace lamina::value
