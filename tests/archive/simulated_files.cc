// SPDX-License-Identifier: Apache-2.0
#include "tests/archive/simulated_files.h"

#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "lamina/archive/file_failure.h"

namespace lamina::archive::testing {

class SimulatedFiles::SimulatedOutput : public FileSystem::Output {
 public:
  SimulatedOutput(SimulatedFiles& files, Path path, std::shared_ptr<Node> node)
      : files_(files), path_(std::move(path)), node_(std::move(node)) {}

  void write(std::span<const std::byte> bytes) override {
    const auto take = [&](std::size_t count) {
      node_->bytes.insert(node_->bytes.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
    };
    try {
      files_.operation("writing", path_, bytes.size());
    } catch (...) {
      if (files_.operations_ == files_.kill_at_ + 1 || files_.code_ == ENOSPC) take(bytes.size() / 2);
      throw;
    }
    take(bytes.size());
  }
  void sync() override {
    files_.operation("syncing", path_);
    node_->synced = node_->bytes.size();
  }

 private:
  SimulatedFiles& files_;
  const Path path_;
  const std::shared_ptr<Node> node_;
};

class SimulatedFiles::SimulatedInput : public FileSystem::Input {
 public:
  SimulatedInput(SimulatedFiles& files, Path path, std::shared_ptr<Node> node)
      : files_(files), path_(std::move(path)), node_(std::move(node)) {}

  std::uint64_t size() const override { return node_->bytes.size(); }
  void read(std::uint64_t offset, std::span<std::byte> to) const override {
    files_.operation("reading", path_);
    if (offset > size() || to.size() > size() - offset) throw base::FormatError(path_.string() + ": ends too early");
    if (!to.empty()) std::memcpy(to.data(), node_->bytes.data() + offset, to.size());
  }

 private:
  SimulatedFiles& files_;
  const Path path_;
  const std::shared_ptr<Node> node_;
};

class SimulatedFiles::SimulatedLock : public FileSystem::Lock {
 public:
  SimulatedLock(SimulatedFiles& files, Path path) : files_(files), path_(std::move(path)), process_(files.process_) {}
  ~SimulatedLock() override {
    if (files_.dead_ || files_.process_ != process_) return;
    files_.locks_.erase(path_);
    const auto folder = files_.find(path_.parent_path());
    if (folder) files_.change(folder, [&](Entries& entries) { entries.erase(path_.filename()); });
  }

 private:
  SimulatedFiles& files_;
  const Path path_;
  const std::uint64_t process_;
};

SimulatedFiles::SimulatedFiles(bool exchanges) : exchanges_(exchanges) {}

void SimulatedFiles::kill_at(std::uint64_t number) {
  operations_ = 0;
  kill_at_ = number;
}

void SimulatedFiles::fail_at(std::uint64_t number, int code) {
  operations_ = 0;
  fail_at_ = number;
  code_ = code;
}

void SimulatedFiles::restart() {
  locks_.clear();
  ++process_;
  operations_ = 0;
  kill_at_ = fail_at_ = ~0ULL;
  code_ = 0;
  dead_ = false;
}

void SimulatedFiles::cut_power(std::uint64_t random) {
  std::mt19937_64 engine(random);
  lose(*root_, engine);
  restart();
}

void SimulatedFiles::lose(Node& node, std::mt19937_64& random) {
  if (!node.since.empty()) {
    const bool all = random() % 2 == 0;  // as it was synced, or some operations later
    node.entries = node.since[all ? 0 : random() % node.since.size()];
  }
  node.since.clear();
  node.bytes.resize(node.synced + random() % (node.bytes.size() - node.synced + 1));
  node.synced = node.bytes.size();
  for (const auto& [name, entry] : node.entries) lose(*entry, random);
}

void SimulatedFiles::operation(const char* doing, const Path& path, std::uint64_t bytes) {
  if (dead_) throw Killed();
  if (interferes_) {
    const auto with = std::exchange(interferes_, nullptr);  // what it does is no operation of ours
    with(operations_);
    interferes_ = with;
  }
  const auto number = operations_++;
  if (number == kill_at_) {
    dead_ = true;
    throw Killed();
  }
  const std::string_view what(doing);
  const bool reads = what == "listing" || what == "opening" || what == "reading";
  const bool full = code_ == ENOSPC || code_ == EDQUOT;
  if (code_ == EIO ? number == fail_at_ : number >= fail_at_ && !reads && !(full && what == "removing")) {
    throw file_failure(doing, path, code_, bytes, 0);
  }
}

std::shared_ptr<SimulatedFiles::Node> SimulatedFiles::find(const Path& path) const {
  auto node = root_;
  for (const auto& name : path.relative_path()) {
    const auto found = node->entries.find(name.string());
    if (found == node->entries.end()) return nullptr;
    node = found->second;
  }
  return node;
}

std::shared_ptr<SimulatedFiles::Node> SimulatedFiles::parent_of(const char* doing, const Path& path) const {
  auto node = find(path.parent_path());
  if (!node || !node->folder) throw file_failure(doing, path, ENOENT);
  return node;
}

void SimulatedFiles::change(const std::shared_ptr<Node>& folder, const std::function<void(Entries&)>& how) {
  if (folder->since.empty()) folder->since.push_back(folder->entries);
  how(folder->entries);
  folder->since.push_back(folder->entries);
}

std::unique_ptr<FileSystem::Output> SimulatedFiles::create(const Path& path) {
  operation("creating", path);
  const auto folder = parent_of("creating", path);
  if (folder->entries.contains(path.filename())) throw file_failure("creating", path, EEXIST);
  auto node = std::make_shared<Node>();
  change(folder, [&](Entries& entries) { entries[path.filename()] = node; });
  return std::make_unique<SimulatedOutput>(*this, path, std::move(node));
}

std::unique_ptr<FileSystem::Input> SimulatedFiles::open(const Path& path) {
  operation("opening", path);
  auto node = find(path);
  if (!node) throw file_failure("opening", path, ENOENT);
  if (node->folder) throw base::FormatError(path.string() + ": no regular file");
  return std::make_unique<SimulatedInput>(*this, path, std::move(node));
}

void SimulatedFiles::make_folder(const Path& path) {
  operation("making the folder", path);
  Path at("/");
  for (const auto& name : path.relative_path()) {
    const auto folder = find(at);
    at /= name;
    if (find(at)) continue;
    folder->entries[name] = std::make_shared<Node>(Node{.folder = true});  // for good: what else was not synced, too
    folder->since.clear();
  }
}

void SimulatedFiles::make_new_folder(const Path& path) {
  if (find(path)) throw file_failure("making the folder", path, EEXIST);
  make_folder(path);
}

void SimulatedFiles::rename(const Path& from, const Path& to) {
  operation("renaming to", to);
  const auto node = find(from);
  if (!node) throw file_failure("renaming", from, ENOENT);
  if (const auto there = find(to); there && there->folder) throw file_failure("renaming to", to, EEXIST);
  if (from.parent_path() != to.parent_path()) throw file_failure("renaming to", to, EXDEV);  // no test needs it
  change(parent_of("renaming to", to), [&](Entries& entries) {
    entries.erase(from.filename());
    entries[to.filename()] = node;
  });
}

bool SimulatedFiles::exchange(const Path& one, const Path& other) {
  if (!exchanges_) return false;
  operation("exchanging", other);
  if (!find(one) || !find(other)) throw file_failure("exchanging", other, ENOENT);
  if (one.parent_path() != other.parent_path()) throw file_failure("exchanging", other, EXDEV);
  change(parent_of("exchanging", other),
         [&](Entries& entries) { std::swap(entries[one.filename()], entries[other.filename()]); });
  return true;
}

void SimulatedFiles::sync_folder(const Path& path) {
  operation("syncing", path);
  const auto node = find(path);
  if (!node || !node->folder) throw file_failure("syncing", path, ENOENT);
  node->since.clear();
}

std::vector<FileSystem::Entry> SimulatedFiles::list(const Path& folder) {
  operation("listing", folder);
  std::vector<Entry> entries;
  if (const auto node = find(folder)) {
    for (const auto& [name, entry] : node->entries) entries.push_back({name, entry->folder});
  }
  return entries;
}

void SimulatedFiles::remove_tree(const Path& path, const std::shared_ptr<Node>& node) {
  const auto entries = node->entries;
  for (const auto& [name, entry] : entries) remove_tree(path / name, entry);
  operation("removing", path);
  change(parent_of("removing", path), [&](Entries& all) { all.erase(path.filename()); });
}

void SimulatedFiles::remove(const Path& path) {
  if (dead_) return;  // in a destructor
  if (const auto node = find(path)) remove_tree(path, node);
}

std::unique_ptr<FileSystem::Lock> SimulatedFiles::try_lock(const Path& path, const std::string& words,
                                                           std::string* holder) {
  operation("locking", path);
  if (const auto held = locks_.find(path); held != locks_.end()) {
    *holder = held->second;
    return nullptr;
  }
  locks_[path] = words;
  change(parent_of("locking", path), [&](Entries& entries) { entries[path.filename()] = std::make_shared<Node>(); });
  return std::make_unique<SimulatedLock>(*this, path);
}

}  // namespace lamina::archive::testing
