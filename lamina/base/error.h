// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "lamina/base/ids.h"

// The errors of lamina, by culprit. The first line of a message says whom it concerns, what happened and what to do;
// details follow on further lines. Python sees each class under the same name (`lamina.PeerError`, ...).
namespace lamina::base {

// The stable name of an error that docs/errors.md tells more of than the message can: "step-mismatch". The first line
// of the message ends with it in brackets. An error without one is told whole by its type and its message.
struct Code {
  const char* name = "";
};

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& text, Code code = {}) : std::runtime_error(named(text, code)), code_(code) {}
  const char* code() const { return code_.name; }  // "" for none

 private:
  // Printable ([Note: printable]), and with the code.
  static std::string named(const std::string& text, Code code);
  Code code_;
};

// The configuration is wrong; nothing was started.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// The caller used the library in a way it does not allow.
class UsageError : public Error {
 public:
  using Error::Error;
};

// Ranks that have to make the same calls in the same order did not.
class DesyncError : public UsageError {
 public:
  using UsageError::UsageError;
};

// A rank that is lost.
struct Loss {
  Rank rank;
  std::string cause;    // a clause: "its process ended"
  std::string details;  // what else is known of it, after a comma or semicolon; "" for nothing

  std::string text() const { return "rank " + std::to_string(rank.value) + " is lost: " + cause + details; }
};

// The cause of a loss by Ctrl-C on that rank.
inline constexpr auto kInterrupted = "it was interrupted";

// Another rank is gone: its process ended or its connection broke.
class PeerError : public Error {
 public:
  explicit PeerError(const std::string& text, std::optional<Loss> loss = {}, Code code = {})
      : Error(text, code), loss_(std::move(loss)) {}
  const std::optional<Loss>& loss() const { return loss_; }  // none where it is not known which rank it was

 private:
  std::optional<Loss> loss_;
};

// A live rank did not answer before the deadline.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

// Bytes that are not what the format says.
class FormatError : public Error {
 public:
  using Error::Error;
};

// The file system refused: it names what was to be done, the path, and why.
class FileError : public Error {
 public:
  FileError(const std::string& text, int error_number) : Error(text), error_number_(error_number) {}
  int error_number() const { return error_number_; }  // the system's errno

 private:
  int error_number_;
};

// The step ended because of an error elsewhere; that error is the one to report, never this one.
class CancelledError : public Error {
 public:
  using Error::Error;
};

// A bug of lamina: nothing that a program, its configuration or the system does leads here. It names the source line
// that found it, which is the caller's of the constructor.
class InternalError : public Error {
 public:
  explicit InternalError(const std::string& found, std::source_location where = std::source_location::current())
      : Error("a bug of lamina: " + found + " (" + place(where) + "); report it with the log of all ranks") {}

 private:
  // The path from the repository's root: how the compiler was called is no matter of the reader's.
  static std::string place(std::source_location where) {
    const std::string_view path = where.file_name();
    auto root = path.rfind("/python/bindings/");
    if (root == std::string_view::npos) root = path.rfind("/lamina/");
    return std::string(root == std::string_view::npos ? path : path.substr(root + 1)) + ":" +
           std::to_string(where.line());
  }
};

// Throws InternalError where `holds` is false: `found` says what was found then, "a step that nobody began".
inline void internal_check(bool holds, const char* found,
                           std::source_location where = std::source_location::current()) {
  if (!holds) throw InternalError(found, where);
}

}  // namespace lamina::base
