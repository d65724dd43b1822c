// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <string>

#include "lamina/base/fd.h"

namespace lamina::launch {

// The file that one rank writes to.
class RankLog {
 public:
  // A file of $TMPDIR (else /tmp) without a name, so that nothing is left of it however the launcher ends; while the
  // job runs it can be read as /proc/<rank's pid>/fd/1. Throws ConfigError if the folder cannot be written.
  RankLog();

  // The named file, made with the folders it is in; what is there already is kept. Throws ConfigError.
  explicit RankLog(const std::string& path);

  int fd() const { return file_.get(); }
  bool named() const { return named_; }
  off_t size() const;  // of what was written since the beginning
  bool empty() const;  // nothing was ever written
  void begin_here();   // what is there now is of an earlier time

  // The last `lines` lines written since the beginning, each ended by a newline; less where they are longer than 64 KiB
  // together.
  std::string tail(int lines) const;

  // Gives a file without a name one; where that cannot be, a copy. False if neither can.
  bool keep_as(const std::string& path) const;

 private:
  base::Fd file_;
  bool named_ = false;
  off_t begin_ = 0;  // what was there before
};

}  // namespace lamina::launch
