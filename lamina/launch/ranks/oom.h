// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace lamina::launch {

// Tells if the kernel has killed processes because memory ran out: of our control group (version 2 or 1) where it
// tells, else of the machine.
class OomCounter {
 public:
  OomCounter();
  explicit OomCounter(std::string file);  // one with a line "oom_kill N"

  bool increased() const;  // since this object was made

 private:
  std::optional<long> count() const;
  std::string file_;
  std::optional<long> before_;
};

}  // namespace lamina::launch
