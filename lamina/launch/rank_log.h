// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/base/fd.h"

namespace lamina::launch {

// What one rank writes, stdout and stderr in the order written, in a file of $TMPDIR (else /tmp). The file has no name,
// so nothing is left of it however the launcher ends; while the job runs it can be read as /proc/<rank's pid>/fd/1.
class RankLog {
 public:
  RankLog();  // throws ConfigError if the folder cannot be written

  int fd() const { return file_.get(); }

  // The last `lines` lines, each ended by a newline; less where they are longer than 64 KiB together.
  std::string tail(int lines) const;

 private:
  base::Fd file_;
};

}  // namespace lamina::launch
