// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/rank_log.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "lamina/base/error.h"
#include "lamina/base/output_file.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::launch {
namespace {

constexpr std::size_t kCopied = 1 << 20;  // bytes at a time

std::string temporary_folder() {
  const char* variable = ::getenv("TMPDIR");
  return variable && *variable ? variable : "/tmp";
}

base::Fd open_unnamed(const std::string& folder) {
  base::Fd file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file || (errno != EOPNOTSUPP && errno != EISDIR)) return file;
  // A file system without O_TMPFILE.
  std::string path = folder + "/lamina-run-XXXXXX";
  file = base::Fd(::mkostemp(path.data(), O_CLOEXEC));
  if (file) ::unlink(path.c_str());
  return file;
}

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

}  // namespace

RankLog::RankLog(std::int64_t limit) : place_(temporary_folder()), limit_(limit) {
  file_ = open_unnamed(place_);
  if (file_) return;
  const char* remedy = errno == EMFILE || errno == ENFILE ? "" : " (set TMPDIR to a folder that can be written)";
  throw base::ConfigError(base::str("cannot keep the ranks' output in ", place_, ": ", base::system_error(), remedy));
}

RankLog::RankLog(const std::string& path) : place_(path) {
  const auto fail = [&](const std::string& why) {
    throw base::ConfigError(base::str("cannot write ", path, ": ", why));
  };
  std::error_code failed;
  const auto folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, failed);
  if (failed) fail(base::str("its folder cannot be made: ", failed.message()));
  // A pipe that nobody reads would stop all ranks, and keeps nothing to show.
  struct stat state{};
  if (::stat(path.c_str(), &state) == 0 && (S_ISFIFO(state.st_mode) || S_ISSOCK(state.st_mode))) {
    fail("it is a pipe or a socket, not a file");
  }
  try {
    file_ = base::open_output(path, O_WRONLY | O_APPEND);
  } catch (const base::FileError& error) {
    throw base::ConfigError(error.what());
  }
}

void RankLog::write(std::string_view text) {
  recent_ += text;
  if (recent_.size() > 2 * kRemembered) recent_.erase(0, recent_.size() - kRemembered);
  written_ += static_cast<std::int64_t>(text.size());
  // A file without a name ends where it first lacks something: keep_as() knows then what is missing.
  if (named() || trouble_.empty()) store(text);
}

void RankLog::store(std::string_view text) {
  while (!text.empty()) {
    ssize_t count = 0;
    if (named()) {
      count = ::write(file_.get(), text.data(), text.size());
    } else {
      const auto at = stored_ % limit_;
      count = ::pwrite(file_.get(), text.data(), std::min<std::size_t>(text.size(), limit_ - at), at);
    }
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      trouble_ = base::system_error();
      return;
    }
    stored_ += count;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
}

std::string RankLog::tail(int lines) const {
  const auto wanted = std::min({written_ - begin_, kRemembered, static_cast<std::int64_t>(recent_.size())});
  std::string text = recent_.substr(recent_.size() - wanted);
  if (!text.empty() && text.back() != '\n') text += '\n';

  auto begin = text.size();
  for (int line = 0; line < lines && begin > 0; ++line) {
    const auto newline = begin < 2 ? std::string::npos : text.rfind('\n', begin - 2);
    begin = newline == std::string::npos ? 0 : newline + 1;
  }
  return text.substr(begin);
}

// The bytes that the file lacks at its end.
std::string RankLog::rest() const {
  if (stored_ == written_) return "";
  const auto remembered = std::min(written_ - stored_, static_cast<std::int64_t>(recent_.size()));
  const auto missing = written_ - stored_ - remembered;
  const std::string gap = missing > 0 ? base::str("\n[", missing, " bytes are missing: ", trouble_, "]\n") : "";
  return gap + recent_.substr(recent_.size() - remembered);
}

std::string RankLog::copy_to(const base::Fd& file) const {
  std::int64_t at = std::max<std::int64_t>(0, stored_ - limit_);
  if (at > 0 && !write_all(file.get(), base::str("[the first ", at, " bytes are not kept]\n"))) {
    return base::system_error();
  }
  std::string piece;
  while (at < stored_) {
    piece.resize(std::min({static_cast<std::int64_t>(kCopied), stored_ - at, limit_ - at % limit_}));
    const ssize_t count = ::pread(file_.get(), piece.data(), piece.size(), at % limit_);
    if (count <= 0) return base::system_error();
    piece.resize(static_cast<std::size_t>(count));
    if (!write_all(file.get(), piece)) return base::system_error();
    at += count;
  }
  return write_all(file.get(), rest()) ? "" : base::system_error();
}

std::string RankLog::keep_as(const std::string& path) const {
  const std::string name = base::str("/proc/self/fd/", file_.get());
  if (stored_ <= limit_ && ::linkat(AT_FDCWD, name.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) {
    ::lseek(file_.get(), stored_, SEEK_SET);
    return write_all(file_.get(), rest()) ? "" : base::system_error();
  }
  const base::Fd copy(::open(path.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600));
  return copy ? copy_to(copy) : base::system_error();
}

}  // namespace lamina::launch
