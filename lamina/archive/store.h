// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/archive/file_system.h"
#include "lamina/archive/manifest.h"

namespace lamina::archive {

// [Note: commit] A folder of checkpoints, each a folder of its own:
//
//   TAG_partial/           of a save of parts; TAG/ of a whole model: manifest.json and data files: whole, or it would
//                          not be there
//   TAG_partial.tmp-ID/    being written; its save renames it, or exchanges it with the one of the same tag, when all
//                          is on the disk. What a save leaves that died, the next one of that tag removes
//   TAG_partial.old-ID/    the one it replaced, until it is removed. Where the system cannot exchange folders, both are
//                          renamed in turn, and between that this one is the checkpoint
//   TAG_partial.lock       who saves there; the claim ends with the process
//   newest                 the name of the folder that was saved last
//   newest.lock            who commits: one after the other, so that numbers are in that order and all different
//   TAG_partial.newest     that file, before it takes its name
//
// The other names of a whole model, beside TAG/, begin with TAG_full. The folder may be the user's own, and files of
// other programs there, such as a uv.lock, are not to be taken for leftovers.
//
// So after the end of any process, and of the machine's power, at any instant, each tag is exactly what one save wrote.
// Nothing that was a checkpoint is removed before what replaced it is on the disk. Readers claim nothing, so that they
// may read what they must not write; the files of a checkpoint that is replaced while it is read are found damaged.

// A checkpoint that is whole by its manifest and the sizes of its files; what these hold is checked as it is read.
struct Found {
  std::string tag;
  Path folder;
  Manifest manifest;
};

// Reads the manifest in the folder of a checkpoint. Throws base::FormatError, or base::FileError, which name the file,
// where one is missing, has another size or is a link.
Manifest read_checkpoint(FileSystem& files, const Path& folder);

class Store;

// A checkpoint that is being written, by the one who commits it. Without a commit nothing of it stays.
class Save {
 public:
  Save(Save&&) noexcept;
  ~Save();

  const std::string& id() const { return id_; }
  const Path& folder() const { return folder_; }  // where data files go, which writers sync

  // Makes it the checkpoint of its tag, and the newest: for good, when this returns. Takes `manifest` but for its id
  // and number. base::FormatError where a file that it tells of is not there, or has another size.
  void commit(Manifest manifest);

 private:
  friend class Store;
  Save(Store& store, std::string name, std::string id, std::string who, std::unique_ptr<FileSystem::Lock> lock);

  Store* store_;
  std::string name_, id_, who_;
  Path folder_;
  std::unique_ptr<FileSystem::Lock> lock_;
};

// The checkpoints in a folder. See [Note: commit].
class Store {
 public:
  // The two kinds of checkpoints have names that differ, and know nothing of each other: parts of all that a job has,
  // and whole models.
  enum class Form { kPartial, kFull };

  Store(FileSystem& files, Path folder, Form form = Form::kPartial);

  // Claims a tag, and removes what dead saves have left. `id` is no other save's; `who` is said to others that want the
  // same tag: base::UsageError with it. So is a tag or an id that is no part of a folder's name, and a whole model's
  // tag that something else in the folder has as its name.
  Save begin(const std::string& tag, const std::string& id, const std::string& who);

  // The checkpoint of a tag. Throws base::UsageError where there is none, naming those that there are, and
  // base::FormatError where it is damaged, naming a good one.
  Found find(const std::string& tag);
  // The newest one; where that is damaged, the latest that is not, after `tells` was told why. None where the folder
  // has none. base::FormatError where all are damaged.
  std::optional<Found> newest(const std::function<void(const std::string&)>& tells);

  // The tag of the latest one that is whole of those saved before that of a tag; "" where there is none.
  std::string before(const std::string& tag);

  struct Listed {
    std::string tag;
    std::int64_t number = 0;  // 0 where it is damaged
    std::string damage;       // "" for none
  };
  std::vector<Listed> list();  // the latest first, then those that are damaged

  // Removes all but the latest `keep`, which are at least 1, of those that are whole, and returns their tags; never
  // `reading`, the one that newest() would give, and those that are being saved.
  std::vector<std::string> prune(std::size_t keep, const std::string& reading = "");

 private:
  friend class Save;

  Path place_of(const std::string& name);  // where a checkpoint lies: see `.old-` above; "" where there is none
  Manifest read_place(const std::string& name, Path* place);
  std::unique_ptr<FileSystem::Lock> await_turn(const std::string& who);  // to commit
  std::int64_t next_number();
  std::string newest_name();  // of either kind
  void remove_leftovers(const std::string& name, const std::string& who);
  void require_ours(const std::string& name);

  std::string name_of(const std::string& tag) const;
  std::string tag_of(std::string_view name) const;
  // Returns what belongs to a checkpoint and lies beside it: "a_partial.lock" of "a_partial", "a_full.lock" of "a".
  Path beside(const std::string& name, std::string_view mark, std::string_view id = "") const;
  // The checkpoint that it belongs to: "a_partial" of "a_partial.tmp-1"; "" of what belongs to none.
  std::string owner_of(const std::string& entry, std::string_view mark) const;
  bool is_name(const std::string& name) const;

  FileSystem& files_;
  const Path folder_;
  const std::string_view suffix_;  // of names
};

// The checkpoint that a user means by a path, which is its own folder or that of several: of these the one of the tag,
// or the newest where the tag is "". Throws base::UsageError where there is none.
Found find_checkpoint(FileSystem& files, const Path& path, const std::string& tag,
                      const std::function<void(const std::string&)>& tells);

}  // namespace lamina::archive
