// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/fresh_folder.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"

namespace lamina::archive {
namespace {

Path without_slash(Path path) { return path.has_filename() ? path : path.parent_path(); }
Path folder_of(const Path& path) { return path.has_parent_path() ? path.parent_path() : Path("."); }
Path with_ending(Path path, const char* ending) { return path += ending; }

// Endings that no file of the user's has: what has them is removed.
constexpr auto *kUnfinished = ".lamina-merge.tmp", *kLock = ".lamina-merge.lock";

}  // namespace

FreshFolder::FreshFolder(FileSystem& files, Path place)
    : files_(files), place_(without_slash(std::move(place))), path_(with_ending(place_, kUnfinished)) {
  files_.make_folder(folder_of(place_));
  std::string holder;
  lock_ = files_.try_lock(with_ending(place_, kLock), "another process", &holder);
  if (!lock_) throw base::UsageError(base::str(place_.string(), " is being written by another process: wait for it"));
  const auto there = files_.list(folder_of(place_));
  if (std::ranges::any_of(there, [&](const auto& each) { return each.name == place_.filename(); })) {
    throw base::UsageError(base::str(place_.string(), " is there already: remove it, or take another name"));
  }
  files_.remove(path_);
  files_.make_new_folder(path_);
}

FreshFolder::~FreshFolder() {
  if (written_) return;
  try {
    files_.remove(path_);
  } catch (const base::FileError& error) {
    base::log_warning(base::str(error.what(), ": it stays until the next one is written there"));
  }
}

void FreshFolder::commit() {
  files_.sync_folder(path_);
  files_.rename(path_, place_);
  written_ = true;
  files_.sync_folder(folder_of(place_));
}

}  // namespace lamina::archive
