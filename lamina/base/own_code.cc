// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/own_code.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <deque>
#include <filesystem>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::base {
namespace {

namespace fs = std::filesystem;

constexpr int kMostLinks = 40;  // as Linux follows

// Returns the owner of the library or command that this is in: he could have put any code there.
uid_t owner_of_this() {
  Dl_info info{};
  struct stat status{};
  const bool known = ::dladdr(reinterpret_cast<const void*>(&require_own_code), &info) != 0 &&
                     info.dli_fname != nullptr && ::stat(info.dli_fname, &status) == 0;
  return known ? status.st_uid : ::geteuid();
}

class Checked {
 public:
  Checked(std::string variable, Writers writers) : variable_(std::move(variable)), writers_(writers) {}

  // Returns false where there is nothing.
  bool look_at(const fs::path& at, bool is_last, bool& is_link) const {
    struct stat status{};
    if (::lstat(at.c_str(), &status) != 0) return false;
    is_link = S_ISLNK(status.st_mode);
    const auto owner = status.st_uid;
    if (writers_ == Writers::kGroup && owner != 0 && owner != ::geteuid() && owner != owner_)
      refuse(at, str("belongs to user ", owner));
    if (is_link || (!is_last && (status.st_mode & S_ISVTX) != 0)) return true;
    if ((status.st_mode & S_IWOTH) != 0) refuse(at, "can be written to by all users");
    if (writers_ == Writers::kGroup && (status.st_mode & S_IWGRP) != 0) refuse(at, "can be written to by a group");
    return true;
  }

 private:
  [[noreturn]] void refuse(const fs::path& at, const std::string& why) const {
    throw ConfigError(str(variable_, " names code that others may have put there: ", at.string(), " ", why,
                          "; take that away (`chmod go-w`), or name a copy in a folder that is yours alone"),
                      Code{"start-others-code"});
  }

  const std::string variable_;
  const Writers writers_;
  const uid_t owner_ = owner_of_this();
};

std::deque<fs::path> parts_of(const fs::path& path) { return {path.begin(), path.end()}; }

}  // namespace

void require_own_code(const std::string& path, const std::string& variable, Writers writers) {
  const Checked checked(variable, writers);
  auto left = parts_of(fs::absolute(path));
  fs::path at;
  for (int links = 0; !left.empty() && links < kMostLinks;) {
    const fs::path part = left.front();
    left.pop_front();
    if (part.empty() || part == ".") continue;
    if (part == "..") {
      at = at.parent_path();
      continue;
    }
    bool is_link = false;
    if (!checked.look_at(at / part, left.empty(), is_link)) return;
    if (!is_link) {
      at /= part;
      continue;
    }
    std::error_code ignored;
    auto target = parts_of(fs::read_symlink(at / part, ignored));
    if (!target.empty() && target.front() == "/") at.clear();
    left.insert(left.begin(), target.begin(), target.end());
    ++links;
  }
}

}  // namespace lamina::base
