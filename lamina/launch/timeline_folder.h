// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace lamina::launch {

// Where the ranks of this machine leave what they recorded, beside the file that is to hold it all. Gone with this.
class TimelineFolder {
 public:
  // Throws base::ConfigError when nothing can be written beside `file`.
  explicit TimelineFolder(std::string file);
  ~TimelineFolder();
  TimelineFolder(const TimelineFolder&) = delete;

  std::string variable() const;  // NAME=VALUE, for the ranks

  // When all ranks have ended: writes the file and returns its summary; "" when no rank left anything. Throws
  // base::Error.
  std::string finish() const;

 private:
  const std::string file_;
  std::string folder_;
};

}  // namespace lamina::launch
