// SPDX-License-Identifier: Apache-2.0
// Partial checkpoints in the form of smdistributed.modelparallel. What their files hold stands in docs/checkpoints.md.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "lamina/archive/piece_reader.h"
#include "lamina/archive/store.h"
#include "lamina/base/error.h"
#include "lamina/base/module_names.h"
#include "lamina/base/str.h"
#include "lamina/foreign/optimizer_states.h"
#include "lamina/foreign/plain_values.h"
#include "lamina/foreign/smp_files.h"
#include "lamina/foreign/smp_states.h"
#include "lamina/foreign/tensor_parts.h"
#include "lamina/foreign/torch_file.h"

namespace lamina::foreign {

using archive::DataFile;
using archive::element_bytes;
using archive::FileSystem;
using archive::Kind;
using archive::kManifestName;
using archive::Manifest;
using archive::Path;
using archive::SavedTensor;
using archive::Share;

namespace {

using nlohmann::json;

constexpr std::string_view kStates = "state.";
constexpr const char* kScale[] = {"last_overflow", "overflows_left", "scale", "steps"};
constexpr auto kUserContent = "user_content.pt";
constexpr std::string_view kMarks[] = {"_smp_is_partial", "_lamina_saved_by", "_lamina_parts"};

bool is_mark(std::string_view name) {
  return std::ranges::any_of(kMarks, [&](auto mark) { return base::is_in_module(name, mark); });
}

class SmpFolder {
 public:
  SmpFolder(FileSystem& files, const Path& folder, std::optional<Share> verify)
      : files_(files), folder_(folder), verify_(verify) {
    found_.folder = folder;
    found_.about["form"] = "smp";
  }

  ForeignCheckpoint read() {
    read_manifest();
    const auto models = rank_files(kModels), optimizers = rank_files(kOptimizers), precisions = rank_files(kPrecisions);
    require_alike(folder_, models, optimizers, precisions);
    for (const auto& file : models) read_model(file);
    read_content();
    model_.name_buffers(content_.plain("buffer_names"));
    for (const auto& file : optimizers) read_optimizer(file);
    for (const auto& file : precisions) read_precision(file);
    cut_flat_groups(optimizers.size());
    states_.finish(found_, outside_);
    if (!optimizers.empty()) add_groups();
    return std::move(found_);
  }

 private:
  // Takes of the manifest that lamina writes beside the files what they do not say.
  void read_manifest() {
    if (!has(kManifestName)) return;
    own_ = read_checkpoint(files_, folder_);
    found_.id = own_->id;
    found_.number = own_->number;
    for (const auto* key : {"layout", "partition"}) {
      if (const auto said = own_->about.find(key); said != own_->about.end()) found_.about[key] = *said;
    }
    if (const auto said = own_->about.find("slices"); said != own_->about.end()) {
      model_.read_slicings(*said, own_->about.at("layout").at("tp").get<int>());
    }
  }

  bool has(const std::string& name) {
    return std::ranges::any_of(files_.list(folder_), [&](const auto& entry) { return entry.name == name; });
  }

  std::vector<SmpFile> rank_files(std::string_view prefix) {
    std::vector<std::string> names;
    if (own_) {
      for (const auto& file : own_->files) names.push_back(file.name);
    } else {
      for (const auto& entry : files_.list(folder_)) names.push_back(entry.name);
    }
    auto files = files_with(names, prefix);
    require_each(folder_, prefix, files);
    return files;
  }

  // Reads a file, whose tensors are in the list of files from now on.
  ForeignCheckpoint read_file(const std::string& name, Names names = Names::kOfTensors) {
    auto share = verify_;
    if (share && own_) *share = {1, 1};  // of its tensors none: their checksums are compared as they are read
    auto file = read_torch_file(files_, folder_ / name, {.names = names, .gather = true, .verify = share});
    for (auto& tensor : file.tensors) {
      for (auto& piece : tensor.pieces) piece.file = found_.files.size();
    }
    found_.files.push_back(file.files.front());
    if (own_) {
      const auto known = std::ranges::find(own_->files, name, &DataFile::name);
      if (known != own_->files.end()) found_.files.back() = *known;
    }
    return file;
  }

  // The user's, of any classes: one that is not plain is left, and what cannot be read says nothing of flat groups.
  void read_content() {
    if (!has(kUserContent) || files_.open(folder_ / kUserContent)->size() == 0) return;
    std::string why;
    try {
      content_ = read_file(kUserContent, Names::kAny);
      if (content_.plain_root) {
        found_.about["user_content"] = *content_.plain_root;
        return;
      }
    } catch (const base::FormatError& error) {
      why = base::str(" (", error.what(), ")");
    }
    found_.left.push_back({"user_content" + why, std::nullopt});
  }

  void read_model(const SmpFile& file) {
    constexpr std::string_view kModule = "module.";
    if (file.slice() > 0 && !model_.has_slices()) {
      throw base::UsageError(base::str((folder_ / file.name).string(),
                                       ": it has slices of tensors (tensor parallelism), which are not put together "
                                       "here: take what was saved with partial=False"));
    }
    auto model = read_file(file.name);
    const auto in_module = [&](const std::string& name) { return name.starts_with(kModule); };
    const bool is_state_dict =
        model.plain(kMarks[0]) != nullptr || !std::ranges::all_of(model.tensors, [&](const auto& each) {
          return in_module(each.name) && std::ranges::all_of(each.also, in_module);
        });
    const auto own_name = [&](std::string name) { return is_state_dict ? name : name.substr(kModule.size()); };
    for (auto& tensor : model.tensors) {
      tensor.name = own_name(tensor.name);
      for (auto& name : tensor.also) name = own_name(name);
      model_.add(std::move(tensor), file.slice());
    }
    for (auto& value : model.left) {
      if (!is_state_dict && value.name.starts_with(kModule)) value.name = own_name(value.name);
      if (const auto module = module_of_extra(value.name)) {
        if (!value.plain) {
          throw base::FormatError(base::str((folder_ / file.name).string(), ": ", value.name, " is no plain data"));
        }
        found_.about["extra_state"][*module] = *value.plain;
      } else if (!is_mark(value.name)) {
        found_.left.push_back(std::move(value));
      }
    }
  }

  // "state.h.0.weight.exp_avg" is the state exp_avg of h.0.weight: the longest name of a parameter counts.
  std::optional<std::pair<std::string, std::string>> state_name(const std::string& name) const {
    if (!name.starts_with(kStates)) return std::nullopt;
    for (auto dot = name.rfind('.'); dot > kStates.size(); dot = name.rfind('.', dot - 1)) {
      const auto parameter = std::string_view(name).substr(kStates.size(), dot - kStates.size());
      if (model_.find(parameter) != nullptr || outside_.contains(parameter))
        return std::pair(std::string(parameter), name.substr(dot + 1));
    }
    return std::nullopt;
  }

  void read_optimizer(const SmpFile& file) {
    auto optimizer = read_file(file.name);
    const auto* groups = optimizer.plain("param_groups");
    has_names_ = has_names_ && (groups == nullptr || take_groups(*groups));
    for (auto& tensor : by_name(optimizer.tensors)) {
      constexpr std::string_view kFlat = "fp32_flat_groups.";
      if (auto of = state_name(tensor.name)) {
        tensor.kind = Kind::kState;
        std::tie(tensor.name, tensor.state) = *of;
        states_.add(std::move(tensor), file.slice());
      } else if (tensor.name.starts_with(kFlat)) {
        flat_[tensor.name.substr(kFlat.size())].push_back(std::move(tensor));
      } else {
        leave(file, tensor.name);
      }
    }
    for (auto& value : optimizer.left) read_value(file, value);
  }

  void read_value(const SmpFile& file, ForeignValue& value) {
    if (value.name == "param_groups" && has_names_ && value.plain) return;
    if (value.name == "_lamina_rng_step" && value.plain) {
      found_.about["seeded_steps"] = *value.plain;
      return;
    }
    if (value.name == "partition_count" && value.plain && value.plain->is_number_integer()) {
      partition_count_ = value.plain->get<std::int64_t>();
      return;
    }
    if (const auto of = state_name(value.name); of && value.plain) {
      if (auto tensor = number_state(*value.plain)) {
        std::tie(tensor->name, tensor->state) = std::pair(of->first, base::str(of->second, kNumberState));
        states_.add(*std::move(tensor), file.slice());
        return;
      }
    }
    // Empty groups of flat tensors, and dicts without entries, say nothing.
    if (is_mark(value.name) || value.name == "fp32_flat_groups" || value.name == "state") return;
    leave(file, value.name);
  }

  void leave(const SmpFile& file, const std::string& name) {
    found_.left.push_back({base::str(file.name, ": ", name), std::nullopt});
    if (name.starts_with(kStates)) strays_.insert(name.substr(kStates.size()));
  }

  // The options of groups whose parameters go by name; partitions have groups of their own parameters.
  bool take_groups(const json& groups) {
    auto taken = json::array();
    for (const auto& group : groups) {
      taken.push_back(as_object(group));
      const auto params = taken.back().find("params");
      if (params == taken.back().end() || !params->is_array()) return false;
      if (!std::ranges::all_of(*params, [&](const auto& name) { return name.is_string(); })) return false;
      for (const auto& name : *params) {
        if (model_.find(name.get<std::string>()) == nullptr) outside_.insert(name.get<std::string>());
      }
    }
    if (groups_.is_null()) {
      groups_ = std::move(taken);
      return true;
    }
    if (groups_.size() != taken.size()) throw base::FormatError("its optimizer's files have not as many groups each");
    for (std::size_t i = 0; i < taken.size(); ++i) {
      auto& params = groups_[i]["params"];
      std::set<json> known(params.begin(), params.end());
      for (auto& name : taken[i]["params"]) {
        if (known.insert(name).second) params.push_back(std::move(name));
      }
    }
    return true;
  }

  void read_precision(const SmpFile& file) {
    constexpr std::string_view kMasters = "masters.", kScaleOf = "loss_scale.";
    auto precision = read_file(file.name);
    for (auto& tensor : by_name(precision.tensors)) {
      if (tensor.name.starts_with(kMasters) && model_.find(tensor.name.substr(kMasters.size())) != nullptr) {
        tensor.kind = Kind::kMaster;
        tensor.name.erase(0, kMasters.size());
        states_.add(std::move(tensor), file.slice());
      } else {
        found_.left.push_back({base::str(file.name, ": ", tensor.name), std::nullopt});
      }
    }
    for (const auto& value : precision.left) {
      if (value.name.starts_with(kScaleOf) && value.plain) {
        found_.about["loss_scale"][value.name.substr(kScaleOf.size())] = *value.plain;
      } else {
        found_.left.push_back({base::str(file.name, ": ", value.name), std::nullopt});
      }
    }
  }

  // Each parameter's elements in float32: its shards of ceil(n / d) elements lie one behind the other in the flat
  // tensor of its group, of which each of d files has a part. They are its master, or where the model's file has not
  // all of a parameter the parameter itself.
  void cut_flat_groups(std::size_t optimizer_files) {
    const auto* shapes = content_.plain("param_shapes");
    if (flat_.empty()) return;
    if (shapes == nullptr) {
      found_.left.push_back({"fp32_flat_groups, since no param_shapes say what they hold", std::nullopt});
      return;
    }
    if (partition_count_ != static_cast<std::int64_t>(optimizer_files)) {
      throw base::FormatError(
          base::str(folder_.string(), ": it has ", optimizer_files, " of ", partition_count_, " files optimizer_*.pt"));
    }
    const auto refuse = [&](const auto& group) {
      throw base::FormatError(base::str(folder_.string(), ": group ", group,
                                        " of fp32_flat_groups has not the elements that param_shapes says"));
    };
    auto named = json::array();
    std::set<std::string> cut;
    for (std::size_t group = 0; group < shapes->size(); ++group) {
      const auto flat = flat_.find(base::str(group));
      auto params = json::array();
      std::int64_t at = 0;
      for (const auto& [name, size] : pairs_of(shapes->at(group))) {
        if (flat == flat_.end() || std::ssize(flat->second) != partition_count_) refuse(group);
        const auto shape = size.at("tuple").template get<layout::Shape>();
        const auto count = layout::numel(shape), each = (count + partition_count_ - 1) / partition_count_;
        std::vector<SavedTensor> parts = flat->second;
        for (auto& part : parts) {
          if (part.shape.size() != 1 || at > part.shape[0] - each) refuse(group);
          if (part.pieces.empty()) refuse(group);
          part.pieces[0].begin += static_cast<std::uint64_t>(at) * element_bytes(part.dtype);
          part.shape = {each};
        }
        at += each;
        add_flat(name, joined(parts, shape));
        params.push_back(name);
        cut.insert(name);
      }
      named.push_back({{"params", std::move(params)}});
    }
    if (groups_.is_null()) groups_ = std::move(named);
    model_.leave_placeholders(cut);
  }

  void add_flat(const std::string& name, SavedTensor tensor) {
    auto master = model_.add_flat(name, std::move(tensor));
    if (!master || states_.has_master(master->name)) return;
    master->kind = Kind::kMaster;
    states_.add(*std::move(master), 0);
  }

  void add_groups() {
    const auto has_options = [](const json& group) { return group.size() > 1; };
    if (!has_names_ || groups_.is_null() || !std::ranges::all_of(groups_, has_options)) {
      found_.about["no_optimizer"] =
          base::str(folder_.string(),
                    " does not say which states of its optimizer are of which parameter: they go by "
                    "numbers, or are of a class of their own");
    } else if (own_ && !strays_.empty()) {
      found_.about["no_optimizer"] =
          base::str(folder_.string(), " has a state of its optimizer that is no tensor or number of a parameter, ",
                    *strays_.begin(), ", which this form does not keep: save such an optimizer in lamina's own");
    }
    const auto* const scale = &found_.about["loss_scale"];
    const bool is_ours = std::ranges::all_of(kScale, [&](const auto* key) { return scale->contains(key); });
    if (!is_ours) found_.about.erase("loss_scale");
    if (!groups_.is_null()) {
      found_.about["optimizers"] = json::array({{{"groups", groups_}, {"rest", json::object()}}});
    }
  }

  FileSystem& files_;
  const Path folder_;
  const std::optional<Share> verify_;
  std::optional<Manifest> own_;  // beside the files, where lamina wrote them
  ForeignCheckpoint found_, content_;
  SmpModel model_{found_};
  SmpStates states_{model_};
  std::map<std::string, std::vector<SavedTensor>> flat_;  // by the group's number
  std::int64_t partition_count_ = 0;
  std::set<std::string, std::less<>> outside_;  // parameters of the optimizer that the model has not
  std::set<std::string> strays_;                // states of the optimizer that are no tensors or numbers of parameters
  json groups_;
  bool has_names_ = true;  // in the groups of all files
};

}  // namespace

ForeignCheckpoint read_smp_checkpoint(FileSystem& files, const Path& folder, std::optional<Share> verify) {
  try {
    return SmpFolder(files, folder, verify).read();
  } catch (const json::exception&) {
    throw base::FormatError(base::str(folder.string(), ": param_shapes or param_groups are none"));
  } catch (const base::ConfigError& error) {
    throw base::FormatError(base::str(folder.string(), ": param_shapes: ", error.what()));
  }
}

}  // namespace lamina::foreign
