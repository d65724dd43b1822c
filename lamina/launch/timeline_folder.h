// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace lamina::launch {

// Where the ranks of this machine leave what they recorded, beside the file that is to hold it all. Gone with this,
// unless that file could not be written.
class TimelineFolder {
 public:
  // Throws base::ConfigError when nothing can be written beside `file`.
  explicit TimelineFolder(const std::string& file);
  ~TimelineFolder();
  TimelineFolder(const TimelineFolder&) = delete;

  std::string variable() const;  // NAME=VALUE, for the ranks

  // When all ranks have ended: writes the file and returns its summary; "" when no rank left anything. Throws
  // base::Error, and keeps the parts then.
  std::string finish();

 private:
  const std::string file_;
  std::string folder_;
  bool keep_ = false;
};

}  // namespace lamina::launch
