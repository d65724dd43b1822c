// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "lamina/optim/functional.h"

namespace lamina::optim {

// Functional forms of optimizer classes, by the class's name. Has lamina's own from the beginning; one that a program
// registers takes the place of ours. May be used from several threads.
class Registry {
 public:
  Registry();

  void add(const std::string& name, std::shared_ptr<const Functional> functional);
  // Loads one from a shared library (fused/plugin.h) and adds it under its own name or, where another one has that,
  // under that with the library's path. Returns the name. Throws UsageError.
  std::string load(const std::string& path);
  // Null where there is none.
  std::shared_ptr<const Functional> find(const std::string& name) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const Functional>> functionals_;
  std::map<const void*, std::string> loaded_;  // names of those from libraries, by their tables
};

// The process's own, which programs add to.
Registry& shared_registry();

}  // namespace lamina::optim
