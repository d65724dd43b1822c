// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/output_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::base {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw FileError(str("cannot write ", path, ": it is ", why, "; remove it, or name another file"), EPERM);
}

[[noreturn]] void fail(const std::string& path, int code = errno) {
  throw FileError(str("cannot write ", path, ": ", system_error(code)), code);
}

// Returns true if nobody but this user and root may put anything into the file's folder.
bool is_in_own_folder(const std::string& path) {
  const auto folder = std::filesystem::path(path).parent_path();
  struct stat status{};
  if (::stat(folder.empty() ? "." : folder.c_str(), &status) != 0) return false;
  const bool ours = status.st_uid == ::geteuid() || status.st_uid == 0;
  return ours && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// Says whether what this process makes beside `path` belongs to that user, too: a mount may give all files one owner,
// or those of root another.
bool makes_files_of(uid_t owner, const std::string& path) {
  auto name = (std::filesystem::path(path).parent_path() / ".lamina-XXXXXX").string();
  const Fd made(::mkostemp(name.data(), O_CLOEXEC));
  if (!made) return false;
  ::unlink(name.c_str());
  struct stat status{};
  return ::fstat(made.get(), &status) == 0 && status.st_uid == owner;
}

bool takes_all(const std::string& path) {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
}

}  // namespace

Fd open_output(const std::string& path, int flags) {
  const bool any_kind = takes_all(path) && is_in_own_folder(path);
  const int how = any_kind ? O_CLOEXEC : O_CLOEXEC | O_CREAT | O_NOFOLLOW | O_NONBLOCK;
  // A file keeps its content until it was found to be one of ours.
  const int now = any_kind ? flags : flags & ~O_TRUNC;
  int fd = -1;
  do {
    fd = ::open(path.c_str(), now | how, 0666);
  } while (fd < 0 && errno == EINTR);
  Fd file(fd);
  if (!file && errno == ELOOP) refuse(path, "a link");
  if (!file && (errno == ENXIO || errno == ENODEV)) refuse(path, "no regular file");
  if (!file) fail(path);
  if (any_kind) return file;
  struct stat status{};
  if (::fstat(fd, &status) != 0) fail(path);
  if (!S_ISREG(status.st_mode)) refuse(path, "no regular file");
  if (status.st_uid != ::geteuid() && !makes_files_of(status.st_uid, path)) {
    refuse(path, str("a file of another user (", status.st_uid, ")"));
  }
  if (status.st_nlink > 1) refuse(path, str("a file with ", status.st_nlink, " names"));
  if ((flags & O_TRUNC) != 0 && ::ftruncate(fd, 0) != 0) fail(path);
  return file;
}

void require_output(const std::string& path) {
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code failed;
  if (!folder.empty()) std::filesystem::create_directories(folder, failed);
  if (failed) fail(path, failed.value());
  if (std::filesystem::exists(std::filesystem::symlink_status(path, failed))) {
    open_output(path, O_WRONLY);
    return;
  }
  auto name = (folder / ".lamina-XXXXXX").string();
  const Fd made(::mkostemp(name.data(), O_CLOEXEC));
  if (!made) fail(path);
  ::unlink(name.c_str());
}

void write_output(const std::string& path, const std::string& text) {
  const auto file = open_output(path, O_WRONLY | O_TRUNC);
  for (std::size_t done = 0; done < text.size();) {
    const auto count = ::write(file.get(), text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(path);
    done += static_cast<std::size_t>(count);
  }
}

}  // namespace lamina::base
