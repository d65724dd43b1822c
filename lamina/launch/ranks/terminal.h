// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "lamina/base/deadline.h"
#include "lamina/launch/ranks/watch.h"

namespace lamina::launch {

// Lines on their way to a descriptor. Nothing here blocks: somebody who has stopped reading must not keep a failed job
// alive.
class OutputQueue {
 public:
  explicit OutputQueue(int fd) : fd_(fd) {}

  void add(std::string_view text) { waiting_ += text; }
  bool waiting() const { return !waiting_.empty(); }
  bool full() const;  // whoever can wait should, before more is added

  void watch(Watch& watch);
  void flush(const base::Deadline& deadline);  // as far as somebody reads before
  int error() const { return error_; }         // the errno that kept something from being written last; 0: none

 private:
  void drain();

  int fd_;
  std::string waiting_;
  int error_ = 0;
};

// Our stdout and stderr. Where they are the same, one queue keeps their lines apart.
class Terminal {
 public:
  Terminal();

  OutputQueue& out() { return out_; }
  OutputQueue& err() { return same_ ? out_ : err_; }

  int error() const { return out_.error() != 0 ? out_.error() : err_.error(); }
  bool waiting() const { return out_.waiting() || err_.waiting(); }
  bool full() const { return out_.full() || err_.full(); }
  void watch(Watch& watch);
  void flush(const base::Deadline& deadline);

 private:
  bool same_;
  OutputQueue out_, err_;
};

}  // namespace lamina::launch
