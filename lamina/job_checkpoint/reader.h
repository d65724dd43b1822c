// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lamina/archive/piece_reader.h"
#include "lamina/archive/store.h"
#include "lamina/checkpoint/save.h"
#include "lamina/job_checkpoint/about.h"
#include "lamina/job_checkpoint/parts.h"
#include "lamina/job_checkpoint/save_list.h"

namespace lamina::job_checkpoint {

// A checkpoint to be loaded: its folder, and the id of its save, which a whole model of others has none of.
struct FoundCheckpoint {
  std::filesystem::path folder;
  std::string id;
  std::string tag;
};

// Finds the one of a tag in a folder of checkpoints, or the newest of that form; a whole model may be one of others,
// and lie in the folder itself. None where there is none. Throws as archive::Store does.
std::optional<FoundCheckpoint> find_checkpoint(const std::filesystem::path& folder,
                                               const std::optional<std::string>& tag, archive::Store::Form form,
                                               const std::function<void(const std::string&)>& tells);

// A tensor of a model's state, with all its names.
using NamesOf = std::pair<std::vector<std::string>, at::Tensor>;

// A checkpoint that is read into a job: what this rank wants of it is listed first, and then read at once.
class Reader {
 public:
  // Throws base::FormatError, or base::FileError, where the folder is no whole checkpoint. Compares this rank's share
  // of files that have their checksums in themselves.
  Reader(const std::filesystem::path& place, bool verify, const archive::Share& share);
  // Reads out of memory, where `source` finds what the manifest lists: its tensors, without content.
  Reader(archive::Manifest manifest, std::shared_ptr<archive::PieceSource> source);
  Reader(const Reader&) = delete;

  const archive::Manifest& manifest() const { return manifest_; }
  const archive::Path& folder() const { return folder_; }
  // Throws as read_about() does.
  About about(const AboutWanted& wanted) const;
  // nullptr where there is none. A parameter may have been a buffer, and the other way round.
  const archive::SavedTensor* find(const std::string& name, archive::Kind kind, int optimizer = 0,
                                   const std::string& state = "") const;
  // The first of a tensor's names under which its value is there; nullptr for none.
  const std::string* saved_name(const std::vector<std::string>& names) const;

  // Compares a model with it. Throws base::UsageError for another shape, a dtype of another kind and, where it is
  // `strict`, other names. Returns what is left out else: a line, or "". `whole_shape`: see JobAccess.
  using ShapeOf = std::function<std::vector<std::int64_t>(const at::Tensor&)>;
  std::string check_model(const std::vector<NamesOf>& model, const ShapeOf& whole_shape, bool strict) const;
  // Says where a parameter of this dtype has its value from: the master of an optimizer, where there is one, and the
  // parameter that was saved has another dtype, which would have rounded it first.
  std::pair<archive::Kind, int> best_source(const std::string& name, at::ScalarType dtype) const;

  // Compares this rank's share of all files with their checksums: all ranks together read each byte once. For a
  // checkpoint of which nobody knows yet what goes where.
  void check_share(const checkpoint::Peers& peers) const;

  // List what this rank is to have. Throw base::UsageError where the whole has another shape.
  //
  // A parameter's or buffer's elements, which fill_model() puts into `into`, as this rank holds it. base::UsageError
  // where that cannot be filled.
  void want_row(const Parts& parts, const std::string& name, archive::Kind from, int optimizer, const at::Tensor& into);
  // A master's, which fill_optimizers() puts into `into`: those of a master, or of the parameter where none was saved.
  // Nothing where neither was.
  void want_master(const Parts& parts, const StateName& of, const at::Tensor& into);
  // A state's: in memory that read() fills, or in `held`, the tensor that is its now, undefined for none, which
  // fill_optimizers() fills where it is alike.
  at::Tensor want_state(const Parts& parts, const LocalParameters& locals, const StateName& of, const at::Tensor& local,
                        const at::Tensor& held);
  // Content that is read at once; undefined where there is none.
  at::Tensor content(const std::string& name) const;
  // Gives what SaveList::add_tree() has put there, at once; None where there is nothing.
  value::Value tree(const std::string& name) const;
  // The model's tensors, under all their names, at once.
  std::map<std::string, at::Tensor> whole_model() const;

  // [Note: two reads]
  // Nothing of the job may change before every rank has found that its files are as they were written. Memory for a
  // second copy of everything would take longer to get than to read the files twice, the second time out of the
  // system's cache. So read() compares all that was asked for with its checksums, and fills only memory that is new.
  // When all ranks have read, they read again and fill the memory that the job has. The second reading is compared,
  // too: where a file has changed between the two, or the disk has failed, the error says that the job now has a
  // mixture of both states.
  //
  // They throw as archive::PieceReader does, base::PeerError where a rank is lost meanwhile, and what an interrupt
  // of the peers' waits throws.
  void read(const checkpoint::Peers& peers);
  void fill_model(const checkpoint::Peers& peers);
  void fill_optimizers(const checkpoint::Peers& peers);

 private:
  // Elements of a saved tensor, and what they go into: contiguous memory of the host of its dtype, or a tensor of the
  // job, of any dtype and device.
  struct Place {
    const archive::SavedTensor* tensor = nullptr;
    layout::Region region;
    at::Tensor into;
  };
  using Key = std::tuple<std::string, archive::Kind, int, std::string>;

  // Says what is wanted of a tensor, without memory for it.
  Place wanted(const std::string& name, archive::Kind kind, int optimizer, const std::string& state,
               layout::Region region) const;
  at::Tensor all_of(const archive::SavedTensor& tensor) const;
  static at::Tensor memory_for(const Place& place);
  static bool is_like(const at::Tensor& tensor, const Place& place);
  void check_places(const std::vector<Place>& places, const archive::PieceReader::WentOn& went_on) const;
  void read_places(const std::vector<Place>& places, const archive::PieceReader::WentOn& went_on) const;
  void list_tensors();
  archive::PieceReader& files() const;
  void fill(std::vector<Place> places, const checkpoint::Peers& peers) const;

  const archive::Path folder_;
  const archive::Manifest manifest_;
  const std::shared_ptr<archive::PieceReader> files_;  // nullptr where no files are read
  const std::shared_ptr<archive::PieceSource> source_;
  std::map<Key, const archive::SavedTensor*> by_key_;
  std::vector<Place> wanted_;              // into new memory
  std::vector<Place> model_, optimizers_;  // into tensors of the job
};

}  // namespace lamina::job_checkpoint
