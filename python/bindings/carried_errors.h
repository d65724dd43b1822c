// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "lamina/base/error.h"
#include "python/bindings/hooks.h"

namespace lamina::python {

// An exception of Python's on its way through the engine, which tells other ranks of it as of an error of its own.
class Carried {
 public:
  explicit Carried(py::error_already_set error) : error_(std::make_shared<py::error_already_set>(std::move(error))) {}
  virtual ~Carried() = default;
  [[noreturn]] void rethrow() const { throw py::error_already_set(*error_); }

 private:
  std::shared_ptr<py::error_already_set> error_;
};

template <class Error>
class CarriedAs : public Error, public Carried {
 public:
  template <class... Rest>
  CarriedAs(py::error_already_set error, const std::string& text, Rest... rest)
      : Error(text, rest...), Carried(std::move(error)) {}
};

// Calls what the engine asks of Python: an exception becomes one that the engine knows, but for those that end a
// program.
template <class Call>
auto carrying(const Call& call) {
  const py::gil_scoped_acquire acquire;
  try {
    return call();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    const auto text = py::str(error.value()).cast<std::string>();
    const auto is = [&](const char* name) { return error.matches(hooks().errors.attr(name)); };
    if (is("FormatError")) throw CarriedAs<base::FormatError>(std::move(error), text);
    if (is("FileError")) {
      const py::object number = py::getattr(error.value(), "errno", py::none());
      const int known = number.is_none() ? 0 : number.cast<int>();
      throw CarriedAs<base::FileError>(std::move(error), text, known);
    }
    throw CarriedAs<base::UsageError>(std::move(error), text);
  }
}

// Calls the engine, without the GIL, and lets Python's exceptions out as they were.
template <class Call>
auto uncarried(const Call& call) {
  const py::gil_scoped_release release;
  try {
    return call();
  } catch (const Carried& carried) {
    carried.rethrow();
  }
}

}  // namespace lamina::python
