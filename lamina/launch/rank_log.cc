// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/rank_log.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::launch {
namespace {

constexpr off_t kLongestTail = 65536;

base::Fd open_unnamed(const std::string& folder) {
  base::Fd file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_APPEND | O_CLOEXEC, 0600));
  if (file || (errno != EOPNOTSUPP && errno != EISDIR)) return file;
  // A file system without O_TMPFILE.
  std::string path = folder + "/lamina-run-XXXXXX";
  file = base::Fd(::mkostemp(path.data(), O_APPEND | O_CLOEXEC));
  if (file) ::unlink(path.c_str());
  return file;
}

}  // namespace

RankLog::RankLog() {
  const char* variable = ::getenv("TMPDIR");
  const std::string folder = variable && *variable ? variable : "/tmp";
  file_ = open_unnamed(folder);
  if (!file_) {
    throw base::ConfigError(base::str("cannot keep the ranks' output in ", folder, ": ", base::system_error(),
                                      " (set TMPDIR to a folder that can be written)"));
  }
}

RankLog::RankLog(const std::string& path) : named_(true) {
  std::error_code ignored;
  const auto folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  file_ = base::Fd(::open(path.c_str(), O_CREAT | O_RDWR | O_APPEND | O_CLOEXEC, 0666));
  if (!file_) throw base::ConfigError(base::str("cannot write ", path, ": ", base::system_error()));
  begin_here();
}

bool RankLog::empty() const { return begin_ == 0 && size() == 0; }

void RankLog::begin_here() { begin_ += size(); }

off_t RankLog::size() const {
  struct stat state{};
  return ::fstat(fd(), &state) == 0 ? state.st_size - begin_ : 0;
}

bool RankLog::keep_as(const std::string& path) const {
  const std::string file = base::str("/proc/self/fd/", fd());
  if (::linkat(AT_FDCWD, file.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) return true;
  std::error_code failed;
  return std::filesystem::copy_file(file, path, failed);
}

std::string RankLog::tail(int lines) const {
  const off_t written = size();
  const off_t wanted = std::clamp<off_t>(written, 0, kLongestTail);
  std::string text(wanted, '\0');
  const ssize_t got = ::pread(fd(), text.data(), text.size(), begin_ + written - wanted);
  text.resize(std::max<ssize_t>(got, 0));
  if (!text.empty() && text.back() != '\n') text += '\n';

  auto begin = text.size();
  for (int line = 0; line < lines && begin > 0; ++line) {
    const auto newline = begin < 2 ? std::string::npos : text.rfind('\n', begin - 2);
    begin = newline == std::string::npos ? 0 : newline + 1;
  }
  return text.substr(begin);
}

}  // namespace lamina::launch
