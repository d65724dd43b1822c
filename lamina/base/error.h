// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "lamina/base/ids.h"

// What can go wrong, by culprit. The first line of a message says who, what, with whom and what to do; details follow
// on further lines. Python sees each class under the same name (`lamina.PeerError`, ...).
namespace lamina::base {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
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
  explicit PeerError(const std::string& text, std::optional<Loss> loss = {}) : Error(text), loss_(std::move(loss)) {}
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

// The step ended because of an error elsewhere; that error is the one to report, never this one.
class CancelledError : public Error {
 public:
  using Error::Error;
};

}  // namespace lamina::base
