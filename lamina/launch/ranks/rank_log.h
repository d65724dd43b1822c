// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lamina/base/fd.h"

namespace lamina::launch {

// Output of one rank: its last part in memory, which nothing can take away, and all of it in a file as far as
// the disk and the limit go.
class RankLog {
 public:
  static constexpr std::int64_t kRemembered = 65536;  // bytes, at least

  // Into a file of $TMPDIR (else /tmp) without a name, so that nothing is left of it however the launcher ends. It
  // holds the last `limit` bytes. Throws ConfigError if there can be no such file.
  explicit RankLog(std::int64_t limit);

  // Into the named file, made with the folders it is in; what is there already is kept. Throws ConfigError.
  explicit RankLog(const std::string& path);

  void write(std::string_view text);  // what the file cannot take is its trouble(), and nothing else

  bool named() const { return limit_ == 0; }
  bool empty() const { return written_ == 0; }
  const std::string& place() const { return place_; }      // the file, or the folder of one without a name
  const std::string& trouble() const { return trouble_; }  // why the file lacks something; "" while it does not

  void begin_here() { begin_ = written_; }  // what came until now is of an earlier time

  // The last `lines` lines since the beginning, each ended by a newline; less where they are longer than kRemembered.
  std::string tail(int lines) const;

  // Gives a file without a name one, and adds what only the memory has; where that cannot be, a copy. Lines in brackets
  // say what is missing. Returns what went wrong, or "".
  std::string keep_as(const std::string& path) const;

 private:
  void store(std::string_view text);
  std::string copy_to(const base::Fd& file) const;
  std::string rest() const;

  base::Fd file_;
  std::string place_;
  std::int64_t limit_ = 0;    // of the file, in which the newest overwrites the oldest; 0: none
  std::int64_t written_ = 0;  // bytes, by the rank
  std::int64_t stored_ = 0;   // of them, the first ones, that the file has been given
  std::int64_t begin_ = 0;
  std::string recent_;  // the last of them
  std::string trouble_;
};

}  // namespace lamina::launch
