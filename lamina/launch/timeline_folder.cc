// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/timeline_folder.h"

#include <stdlib.h>

#include <filesystem>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/observe/summary.h"
#include "lamina/observe/timeline_part.h"

namespace lamina::launch {
namespace {

// Resolves the links of its folder: the folder of the parts has to be on the same file system. A link in the file's own
// place is followed by nobody, for others may have put it there.
std::string resolved(const std::string& file) {
  std::error_code failed;
  if (file.empty()) return file;
  const auto path = std::filesystem::absolute(file).lexically_normal();
  const auto folder = std::filesystem::weakly_canonical(path.parent_path(), failed);
  return (failed ? path : folder / path.filename()).string();
}

}  // namespace

TimelineFolder::TimelineFolder(const std::string& file) : file_(resolved(file)), folder_(file_ + ".XXXXXX") {
  const auto fail = [&](const std::string& why) {
    throw base::ConfigError(base::str("--timeline ", file, " cannot be written: ", why));
  };
  std::error_code ignored, failed;
  if (file.empty()) fail("a file name is missing");
  if (std::filesystem::is_symlink(file_, ignored)) fail("it is a link; remove it, or name another file");
  if (std::filesystem::is_directory(file_, ignored)) fail("it is a folder");
  if (std::filesystem::exists(file_, ignored) && !std::filesystem::is_regular_file(file_, ignored)) {
    fail("it is a pipe or a device");
  }
  std::filesystem::create_directories(std::filesystem::path(file_).parent_path(), failed);
  if (failed) fail(base::str("its folder cannot be made: ", failed.message()));
  if (::mkdtemp(folder_.data()) == nullptr) fail(base::system_error());
}

TimelineFolder::~TimelineFolder() {
  std::error_code ignored;
  if (!keep_) std::filesystem::remove_all(folder_, ignored);
}

std::string TimelineFolder::variable() const { return base::str(observe::kPartsVariable, "=", folder_); }

std::string TimelineFolder::finish() {
  observe::Timeline timeline = observe::read_parts(folder_);
  if (timeline.ranks.empty()) return "";
  // Beside the parts first: what was at its place stays until the new one is whole.
  const std::string whole = folder_ + "/whole";
  try {
    observe::write_file(timeline, whole);
    std::filesystem::rename(whole, file_);
  } catch (const std::exception& error) {
    std::error_code ignored;
    std::filesystem::remove(whole, ignored);
    keep_ = true;
    throw base::Error(base::str(error.what(), "; its parts are kept: `lamina trace -o FILE ", folder_, "` reads them"));
  }
  return observe::describe(observe::summarise(timeline));
}

}  // namespace lamina::launch
