// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/store.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <set>
#include <thread>
#include <utility>

#include "lamina/base/address.h"
#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/printable.h"
#include "lamina/base/str.h"
#include "lamina/base/wait.h"
#include "lamina/faces/sayings.h"

namespace lamina::archive {
namespace {

using base::FormatError;
using base::UsageError;

constexpr std::string_view kSuffix = "_partial", kFullSuffix = "_full", kUnfinished = ".tmp-", kReplaced = ".old-",
                           kLock = ".lock", kNaming = ".newest";
constexpr auto kNewest = "newest";

void check_part(const std::string& part, std::size_t most, const char* what) {
  const bool fine = !part.empty() && part.size() <= most && part.front() != '.' &&
                    part.find('/') == std::string::npos && part.find('\0') == std::string::npos &&
                    part.find(kUnfinished) == std::string::npos && part.find(kReplaced) == std::string::npos &&
                    !part.ends_with(kLock) && !part.ends_with(kNaming) && part != kNewest;
  if (!fine) {
    throw UsageError(base::str("\"", base::printable_line(part), "\" is no ", what,
                               ": it becomes part of the name of a folder, so it has 1 to ", most,
                               " bytes, no /, begins with no dot, and is no name of a folder's own files (", kNewest,
                               ", ", kLock, ")"));
  }
}

// Refuses a tag that a terminal would not show as it is: see [Note: printable].
void check_printable(const std::string& tag) {
  const auto shown = base::printable_line(tag);
  if (shown == tag) return;
  throw UsageError(faces::said("no-tag", base::str('"', shown, '"')));
}

// Files are opened by C strings, which end at a NUL. What is an address of a store would be a folder here, in silence.
void check_folder(const Path& folder) {
  if (const auto scheme = base::scheme_of(folder.native()); !scheme.empty()) {
    throw UsageError(
        base::str("\"", base::printable_line(folder.native()), "\" is an address (", scheme,
                  "://), and checkpoints are in folders that all ranks see: mount the store, or copy them"),
        base::Code{"checkpoint-remote"});
  }
  if (folder.native().find('\0') == std::string::npos) return;
  throw UsageError(base::str("\"", base::printable_line(folder.native()), "\" is no name of a folder: it has a NUL"));
}

std::string named(const std::vector<Store::Listed>& all) {
  std::string names;
  for (const auto& each : all) {
    if (each.damage.empty()) names += base::str(names.empty() ? "" : ", ", each.tag);
  }
  return names.empty() ? "none here is whole" : "here are " + names;
}

}  // namespace

Manifest read_checkpoint(FileSystem& files, const Path& folder) {
  const auto path = folder / kManifestName;
  Manifest manifest;
  try {
    manifest = read_manifest(read_all(files, path, kMostManifestBytes));
  } catch (const FormatError& error) {
    throw FormatError(base::str(path.string(), ": ", error.what()));
  }
  for (const auto& entry : files.list(folder)) {
    if (entry.link) throw FormatError(base::str((folder / entry.name).string(), ": a link, where files were written"));
  }
  for (const auto& file : manifest.files) {
    const auto size = files.open(folder / file.name)->size();
    if (size == file.bytes) continue;
    throw FormatError(
        base::str((folder / file.name).string(), ": ", size, " bytes, where ", file.bytes, " were written"));
  }
  return manifest;
}

Save::Save(Store& store, std::string name, std::string id, std::string who, std::unique_ptr<FileSystem::Lock> lock)
    : store_(&store),
      name_(std::move(name)),
      id_(std::move(id)),
      who_(std::move(who)),
      folder_(store.beside(name_, kUnfinished, id_)),
      lock_(std::move(lock)) {}

Save::Save(Save&& other) noexcept
    : store_(std::exchange(other.store_, nullptr)),
      name_(std::move(other.name_)),
      id_(std::move(other.id_)),
      who_(std::move(other.who_)),
      folder_(std::move(other.folder_)),
      lock_(std::move(other.lock_)) {}

Save::~Save() {
  if (store_ == nullptr) return;
  try {
    store_->files_.remove(folder_);
    store_->files_.remove(store_->beside(name_, kNaming));
  } catch (const base::FileError& error) {
    base::log_warning(base::str(error.what(), ": it stays until the next save"));
  }
}

void Save::commit(Manifest manifest) {
  auto& files = store_->files_;
  const auto turn = store_->await_turn(who_);
  manifest.id = id_;
  manifest.number = store_->next_number();
  const auto text = write_manifest(manifest);
  for (const auto& each : manifest.files) {
    const auto size = files.open(folder_ / each.name)->size();
    if (size == each.bytes) continue;
    throw FormatError(
        base::str((folder_ / each.name).string(), ": ", size, " bytes, where its writer says ", each.bytes));
  }
  write_new(files, folder_ / kManifestName, text);
  files.sync_folder(folder_);

  // Written before anything takes its place, so that a full disk is met here.
  const auto naming = store_->beside(name_, kNaming);
  write_new(files, naming, name_);
  const auto& root = store_->folder_;
  const auto place = root / name_;
  const bool replaces = std::ranges::any_of(files.list(root), [&](const auto& each) { return each.name == name_; });
  auto rest = folder_;  // of the one that was there
  if (!replaces) {
    files.rename(folder_, place);
  } else if (!files.exchange(folder_, place)) {
    rest = store_->beside(name_, kReplaced, id_);
    files.rename(place, rest);
    files.rename(folder_, place);
  }
  store_ = nullptr;  // from here on that folder is not to be removed: it may hold what a power cut would bring back
  files.sync_folder(root);
  files.rename(naming, root / kNewest);
  files.sync_folder(root);
  if (replaces) files.remove(rest);
}

Store::Store(FileSystem& files, Path folder, Form form)
    : files_(files), folder_(std::move(folder)), suffix_(form == Form::kPartial ? kSuffix : "") {
  check_folder(folder_);
}

std::string Store::name_of(const std::string& tag) const {
  check_part(tag, 180, "tag");
  if (suffix_.empty() && tag.ends_with(kSuffix)) {
    throw UsageError(base::str("\"", tag, "\" is no tag of a whole model: ", kSuffix, " ends the names of others"));
  }
  return base::str(tag, suffix_);
}

std::string Store::tag_of(std::string_view name) const {
  return std::string(name.substr(0, name.size() - suffix_.size()));
}

bool Store::is_name(const std::string& name) const {
  if (!suffix_.empty()) return name.size() > suffix_.size() && name.ends_with(suffix_);
  return !name.empty() && !name.ends_with(kSuffix);
}

Path Store::beside(const std::string& name, std::string_view mark, std::string_view id) const {
  return folder_ / base::str(name, suffix_.empty() ? kFullSuffix : "", mark, id);
}

std::string Store::owner_of(const std::string& entry, std::string_view mark) const {
  const auto at = entry.rfind(mark);
  auto owner = at == std::string::npos ? "" : entry.substr(0, at);
  if (suffix_.empty()) {
    if (!owner.ends_with(kFullSuffix)) return "";
    owner.resize(owner.size() - kFullSuffix.size());
  }
  return is_name(owner) ? owner : "";
}

Save Store::begin(const std::string& tag, const std::string& id, const std::string& who) {
  const auto name = name_of(tag);
  check_printable(tag);
  check_part(id, 40, "id of a save");
  files_.make_folder(folder_);
  std::string holder;
  auto lock = files_.try_lock(beside(name, kLock), who, &holder);
  if (!lock) {
    throw UsageError(base::str((folder_ / name).string(), " is being saved",
                               holder.empty() ? "" : " by " + base::printable_line(holder),
                               ": wait for it, or take another tag"));
  }
  remove_leftovers(name, who);
  require_ours(name);
  Save save(*this, name, id, who, std::move(lock));
  files_.make_new_folder(save.folder());
  return save;
}

// Saves remove what they replace: of a whole model's name, which anything may have, only what has a manifest of ours.
void Store::require_ours(const std::string& name) {
  if (!suffix_.empty()) return;
  const auto place = place_of(name);
  if (place.empty()) return;
  try {
    read_manifest(read_all(files_, place / kManifestName, kMostManifestBytes));
  } catch (const base::Error&) {
    throw UsageError(
        base::str(place.string(),
                  " is there already and is no checkpoint, which alone a save replaces: remove it, or take "
                  "another tag"));
  }
}

// Leaves those of tags that others save now; the lock of `name` is ours.
void Store::remove_leftovers(const std::string& name, const std::string& who) {
  files_.sync_folder(folder_);  // what of a dead save's commit was done is done for good before its traces go
  for (const auto& entry : files_.list(folder_)) {
    for (const auto mark : {kUnfinished, kReplaced, kNaming, kLock}) {
      const auto owner = owner_of(entry.name, mark);
      if (owner.empty()) continue;
      std::string holder;
      std::unique_ptr<FileSystem::Lock> lock;  // which goes with the file that it is
      if (owner != name) {
        try {
          lock = files_.try_lock(beside(owner, kLock), who, &holder);
        } catch (const base::FileError&) {
          continue;  // of another user, whose leftovers are not ours to remove
        }
        if (!lock) continue;
      }
      if (mark == kReplaced && place_of(owner) == folder_ / entry.name) {
        files_.rename(folder_ / entry.name, folder_ / owner);
        files_.sync_folder(folder_);
      } else if (mark != kLock) {
        files_.remove(folder_ / entry.name);
      }
    }
  }
}

Path Store::place_of(const std::string& name) {
  Path replaced;
  for (const auto& entry : files_.list(folder_)) {
    if (entry.name == name) return folder_ / name;
    if (owner_of(entry.name, kReplaced) == name) replaced = folder_ / entry.name;
  }
  return replaced;
}

// A save may replace it meanwhile, so what is found damaged is read again.
Manifest Store::read_place(const std::string& name, Path* place) {
  constexpr int kAttempts = 3;
  for (int attempt = 1;; ++attempt) {
    *place = place_of(name);
    if (place->empty()) throw FormatError(base::str((folder_ / name).string(), ": it is not there any more"));
    try {
      return read_checkpoint(files_, *place);
    } catch (const base::Error&) {
      if (attempt == kAttempts) throw;
    }
  }
}

Found Store::find(const std::string& tag) {
  const auto name = name_of(tag);
  if (place_of(name).empty()) {
    throw UsageError(base::str("no checkpoint ", tag, " in ", folder_.string(), ": ", named(list())));
  }
  try {
    Found found{.tag = tag};
    found.manifest = read_place(name, &found.folder);
    return found;
  } catch (const base::Error& error) {
    throw FormatError(base::str(error.what(), "; ", named(list())));
  }
}

std::vector<Store::Listed> Store::list() {
  std::set<std::string> names;
  for (const auto& entry : files_.list(folder_)) {
    if (!entry.folder) continue;
    const bool unfinished = entry.name.find(kUnfinished) != std::string::npos;
    const auto replaced = owner_of(entry.name, kReplaced);
    if (!replaced.empty()) names.insert(replaced);
    if (!replaced.empty() || unfinished || !is_name(entry.name)) continue;
    // A whole model's folder has no name of its own kind.
    const auto has_manifest = [&] {
      return std::ranges::any_of(files_.list(folder_ / entry.name),
                                 [](const auto& each) { return each.name == kManifestName; });
    };
    if (!suffix_.empty() || has_manifest()) names.insert(entry.name);
  }
  std::vector<Listed> all;
  for (const auto& name : names) {
    Listed one{.tag = tag_of(name), .number = 0, .damage = ""};
    try {
      Path place;
      one.number = read_place(name, &place).number;
    } catch (const base::Error& error) {
      one.damage = error.what();
    }
    all.push_back(std::move(one));
  }
  std::ranges::stable_sort(all, std::greater(),
                           [](const Listed& each) { return std::pair(each.damage.empty(), each.number); });
  return all;
}

std::string Store::newest_name() {
  auto name = read_all(files_, folder_ / kNewest, 4096);
  if (name.ends_with('\n')) name.pop_back();
  if (name.empty() || name.find('/') != std::string::npos) {
    throw FormatError((folder_ / kNewest).string() + ": names no checkpoint");
  }
  return name;
}

std::optional<Found> Store::newest(const std::function<void(const std::string&)>& tells) {
  std::string problem;
  try {
    const auto name = newest_name();
    if (is_name(name)) return find(tag_of(name));
  } catch (const base::Error& error) {
    problem = error.what();
  }
  const auto all = list();
  if (all.empty()) return std::nullopt;
  if (!all.front().damage.empty()) {
    throw FormatError(base::str("no checkpoint in ", folder_.string(), " is whole: ", all.front().damage));
  }
  if (!problem.empty()) tells(base::str(problem, ": the latest one that is whole is taken, ", all.front().tag));
  return find(all.front().tag);
}

std::string Store::before(const std::string& tag) {
  const auto all = list();
  const auto found = std::ranges::find(all, tag, &Listed::tag);
  if (found == all.end()) return "";
  const auto next = std::next(found);
  return next == all.end() || !next->damage.empty() ? "" : next->tag;
}

// Commits take moments: they sync a manifest and folders, and remove what was replaced.
std::unique_ptr<FileSystem::Lock> Store::await_turn(const std::string& who) {
  constexpr std::chrono::seconds kMost(10);
  constexpr std::chrono::milliseconds kPause(5);
  const auto until = base::Deadline::after(kMost);
  const auto path = folder_ / base::str(kNewest, kLock);
  while (true) {
    std::string holder;
    if (auto lock = files_.try_lock(path, who, &holder)) return lock;
    if (until.expired()) {
      throw UsageError(base::str(path.string(), ": another save into this folder", holder.empty() ? "" : ", by ",
                                 base::printable_line(holder), ", is about to end since ", kMost.count(),
                                 " s: look whether it is stopped, or take another folder"));
    }
    std::this_thread::sleep_for(kPause);
  }
}

std::int64_t Store::next_number() {
  const auto all = list();
  return all.empty() ? 1 : all.front().number + 1;
}

std::vector<std::string> Store::prune(std::size_t keep, const std::string& reading) {
  if (keep == 0) throw UsageError("at least 1 checkpoint is kept");
  const auto latest = newest([](const std::string&) {});
  std::vector<std::string> removed;
  std::size_t whole = 0;
  for (const auto& each : list()) {
    if (!each.damage.empty() || ++whole <= keep || each.tag == reading || each.tag == latest->tag) continue;
    const auto name = name_of(each.tag);
    std::string holder;
    const auto lock = files_.try_lock(beside(name, kLock), "a prune", &holder);
    if (!lock || place_of(name).empty()) continue;
    Path place;
    if (read_place(name, &place).number != each.number) continue;  // another process has saved it anew
    // At once, so that no part of it is left for one.
    const auto rest = beside(name, kUnfinished, "pruned");
    files_.remove(rest);
    files_.rename(place, rest);
    files_.sync_folder(folder_);
    files_.remove(rest);
    removed.push_back(each.tag);
  }
  return removed;
}

Found find_checkpoint(FileSystem& files, const Path& path, const std::string& tag,
                      const std::function<void(const std::string&)>& tells) {
  const auto folder = path.has_filename() ? path : path.parent_path();
  const auto entries = files.list(folder);
  if (std::ranges::any_of(entries, [](const auto& each) { return each.name == kManifestName; })) {
    if (!tag.empty()) {
      throw UsageError(base::str(folder.string(), " is one checkpoint, of which no tag is to be chosen: leave \"", tag,
                                 "\" out, or name the folder that it is in"));
    }
    const auto name = folder.filename().string();
    const auto tag_size = name.ends_with(kSuffix) ? name.size() - kSuffix.size() : name.size();
    return {name.substr(0, tag_size), folder, read_checkpoint(files, folder)};
  }
  Store store(files, folder);
  if (!tag.empty()) return store.find(tag);
  if (auto newest = store.newest(tells)) return *std::move(newest);
  throw UsageError(base::str(folder.string(), ": no checkpoint, and no folder of checkpoints"));
}

}  // namespace lamina::archive
