// SPDX-License-Identifier: Apache-2.0
// Partial checkpoints in the form of smdistributed.modelparallel. What their files hold stands in docs/checkpoints.md.
#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "lamina/archive/piece_reader.h"
#include "lamina/archive/store.h"
#include "lamina/base/error.h"
#include "lamina/base/module_names.h"
#include "lamina/base/str.h"
#include "lamina/foreign/optimizer_states.h"
#include "lamina/foreign/torch_file.h"
#include "lamina/layout/parameter_layout.h"

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

constexpr std::string_view kFileSuffix = ".pt", kModels = "model_", kOptimizers = "optimizer_",
                           kPrecisions = "fp16_states_", kState = "state.";
constexpr std::int64_t kMostNumber = std::int64_t{1} << 40;
constexpr const char* kScale[] = {"last_overflow", "overflows_left", "scale", "steps"};
constexpr auto kUserContent = "user_content.pt";
constexpr std::string_view kMarks[] = {"_smp_is_partial", "_lamina_saved_by", "_lamina_parts"};

bool is_mark(std::string_view name) {
  return std::ranges::any_of(kMarks, [&](auto mark) { return base::is_in_module(name, mark); });
}

// The module whose extra state has that name in a state dict, "" for the root; none for a name of something else.
std::optional<std::string> module_of_extra(const std::string& name) {
  constexpr std::string_view kExtra = "_extra_state";
  if (name == kExtra) return "";
  if (!name.ends_with(base::str(".", kExtra))) return std::nullopt;
  return name.substr(0, name.size() - kExtra.size() - 1);
}

// A file of a rank: "optimizer_0_0_1.pt" has the numbers 0, 0, 1.
struct RankFile {
  std::vector<std::int64_t> numbers;
  std::string name;
  auto operator<=>(const RankFile&) const = default;
};

std::optional<RankFile> rank_file(const std::string& name, std::string_view prefix) {
  if (!name.starts_with(prefix) || !name.ends_with(kFileSuffix)) return std::nullopt;
  RankFile file{.name = name};
  const auto* at = name.data() + prefix.size();
  const auto* const end = name.data() + name.size() - kFileSuffix.size();
  while (at <= end) {
    std::int64_t number = 0;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number < 0 || number > kMostNumber || (next != end && *next != '_'))
      return std::nullopt;
    file.numbers.push_back(number);
    at = next + 1;
  }
  return file;
}

// Files of a prefix, among things that have names.
template <class Named>
std::vector<RankFile> files_with(const std::vector<Named>& all, std::string_view prefix) {
  std::vector<RankFile> found;
  for (const auto& each : all) {
    if (auto file = rank_file(each.name, prefix)) found.push_back(*std::move(file));
  }
  std::ranges::sort(found);
  return found;
}

// Each rank has written its files, whose numbers are its places along some axes: throws base::FormatError where one of
// these has no file.
void require_each(const Path& folder, std::string_view prefix, const std::vector<RankFile>& files) {
  std::vector<std::int64_t> sizes;
  for (const auto& file : files) {
    sizes.resize(std::max(sizes.size(), file.numbers.size()));
    for (std::size_t i = 0; i < file.numbers.size(); ++i) sizes[i] = std::max(sizes[i], file.numbers[i] + 1);
  }
  std::vector<std::int64_t> numbers(sizes.size());
  bool more = !files.empty();
  for (auto file = files.begin(); more; ++file) {
    if (file == files.end() || file->numbers != numbers) {
      std::string name(prefix);
      for (std::size_t i = 0; i < numbers.size(); ++i) name += base::str(i == 0 ? "" : "_", numbers[i]);
      throw base::FormatError(base::str((folder / name).string(), kFileSuffix, ": the checkpoint has no such file"));
    }
    more = false;
    for (auto i = numbers.size(); i-- > 0 && !more;) {
      more = ++numbers[i] < sizes[i];
      if (!more) numbers[i] = 0;
    }
  }
}

// A dict as pairs, in its order.
std::vector<std::pair<std::string, json>> pairs_of(const json& dict) {
  std::vector<std::pair<std::string, json>> pairs;
  const auto refuse = [] { throw base::FormatError("a dict with keys that are no names"); };
  if (!dict.is_object()) refuse();
  if (dict.size() != 1 || !dict.contains("dict")) {
    for (const auto& [key, value] : dict.items()) pairs.emplace_back(key, value);
    return pairs;
  }
  for (const auto& pair : dict["dict"]) {
    if (!pair.at(0).is_string()) refuse();
    pairs.emplace_back(pair.at(0).get<std::string>(), pair.at(1));
  }
  return pairs;
}

json as_object(const json& dict) {
  auto object = json::object();
  for (auto& [key, value] : pairs_of(dict)) object[key] = std::move(value);
  return object;
}

// Parts of one tensor that ranks have of it in one dimension, one behind the other; the last ones may be padded.
SavedTensor joined(const std::vector<SavedTensor>& parts, const layout::Shape& shape) {
  auto whole = parts.front();
  whole.shape = shape;
  whole.pieces.clear();
  auto region = layout::whole(shape);
  const auto count = region.end;
  for (const auto& part : parts) {
    if (part.dtype != whole.dtype) throw base::FormatError(whole.name + ": its parts have different dtypes");
    if (part.pieces.empty()) throw base::FormatError(whole.name + ": its parts do not lie row by row");
    region.size = std::min(part.shape.at(0), count - region.begin);
    if (region.size <= 0) break;
    region.end = region.begin + region.size;
    whole.pieces.push_back({part.pieces[0].file, part.pieces[0].begin, region});
    region.begin = region.end;
  }
  return whole;
}

// Adds what a file has of a slice, or the ranks' parts of it, one behind the other: false where these are not its
// elements. Ranks may have all of it each.
bool add_slice(SavedTensor& whole, const layout::Slicing& slicing, int slice, std::span<const SavedTensor> parts) {
  layout::ParameterLayout layout{.name = whole.name, .shape = whole.shape, .slicing = slicing};
  layout.dtype = parts.front().dtype;
  auto region = layout::held(layout, slice, 0);
  auto shape = whole.shape;
  shape[static_cast<std::size_t>(slicing.dim)] = region.extent;
  const auto count = region.end;
  if (parts.front().shape == shape) parts = parts.first(1);
  std::int64_t all = 0;
  for (const auto& part : parts) {
    if (part.pieces.empty() || part.dtype != whole.dtype) return false;
    if (part.shape != shape && (part.shape.size() != 1 || parts.size() == 1)) return false;
    region.begin = all;
    all += layout::numel(part.shape);
    region.end = std::min(all, count);
    region.size = std::max<std::int64_t>(region.end - region.begin, 0);
    if (region.size > 0) whole.pieces.push_back({part.pieces[0].file, part.pieces[0].begin, region});
  }
  return all >= count && all - count < std::ssize(parts);
}

// A tensor for each name: states of several parameters may be one.
std::vector<SavedTensor> by_name(const ForeignCheckpoint& file) {
  std::vector<SavedTensor> tensors;
  for (auto tensor : file.tensors) {
    const auto others = std::exchange(tensor.also, {});
    tensors.push_back(tensor);
    for (const auto& name : others) {
      tensor.name = name;
      tensors.push_back(tensor);
    }
  }
  return tensors;
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
    require_alike(models, optimizers, precisions);
    for (const auto& file : models) read_model(file);
    read_content();
    name_buffers();
    for (const auto& file : optimizers) read_optimizer(file);
    for (const auto& file : precisions) read_precision(file);
    cut_flat_groups(optimizers.size());
    add_states_of_slices();
    add_states();
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
    if (const auto said = own_->about.find("slices"); said != own_->about.end()) read_slicings(*said);
  }

  // Reads {name: [dimension, [[extent, unit], ...]]}.
  void read_slicings(const json& said) {
    for (const auto& [name, cut] : pairs_of(said)) {
      auto& slicing = slicings_[name];
      slicing.dim = cut.at(0).get<int>();
      for (const auto& section : cut.at(1)) slicing.sections.push_back({section.at(0), section.at(1)});
      slicing.degree = own_->about.at("layout").at("tp").get<int>();
    }
  }

  // How the tensor is cut that has one of these names; nullptr where it is whole.
  const layout::Slicing* slicing_of(const SavedTensor& tensor) const {
    auto found = slicings_.find(tensor.name);
    for (const auto& name : tensor.also) found = found == slicings_.end() ? slicings_.find(name) : found;
    return found == slicings_.end() ? nullptr : &found->second;
  }
  static int slice_of(const RankFile& file) { return file.numbers.size() > 1 ? static_cast<int>(file.numbers[1]) : 0; }

  bool has(const std::string& name) {
    return std::ranges::any_of(files_.list(folder_), [&](const auto& entry) { return entry.name == name; });
  }

  std::vector<RankFile> rank_files(std::string_view prefix) {
    auto files = own_ ? files_with(own_->files, prefix) : files_with(files_.list(folder_), prefix);
    require_each(folder_, prefix, files);
    return files;
  }

  void require_alike(const std::vector<RankFile>& models, const std::vector<RankFile>& optimizers,
                     const std::vector<RankFile>& precisions) {
    if (models.empty()) throw base::FormatError(base::str(folder_.string(), ": it has no model_*.pt"));
    const auto partitions = [](const auto& files) { return files.back().numbers.front() + 1; };
    if (!optimizers.empty() && partitions(models) != partitions(optimizers)) {
      throw base::FormatError(base::str(folder_.string(), ": it has the models of ", partitions(models),
                                        " partitions and the optimizers of ", partitions(optimizers),
                                        ": the file of a rank is missing"));
    }
    if (!precisions.empty() && precisions.size() != optimizers.size()) {
      throw base::FormatError(base::str(folder_.string(), ": it has ", optimizers.size(), " files optimizer_*.pt and ",
                                        precisions.size(), " fp16_states_*.pt: the file of a rank is missing"));
    }
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

  void read_model(const RankFile& file) {
    constexpr std::string_view kModule = "module.";
    if (slice_of(file) > 0 && slicings_.empty()) {
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
      const auto* slicing = slicing_of(tensor);
      slicing == nullptr ? add_model_or_extra(std::move(tensor)) : add_of_slice(tensor, *slicing, slice_of(file));
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

  // Adds a tensor under the names that parameters and buffers have, and as content for modules whose extra state it is.
  void add_model_or_extra(SavedTensor tensor) {
    auto names = std::move(tensor.also);
    names.insert(names.begin(), tensor.name);
    std::erase_if(names, [&](const auto& name) {
      const auto module = module_of_extra(name);
      if (!module) return false;
      auto content = tensor;
      content.kind = Kind::kContent;
      content.name = base::str("content/", contents_);
      content.also.clear();
      found_.about["extra_state"][*module] = {{"tensor", contents_++}};
      found_.tensors.push_back(std::move(content));
      return true;
    });
    if (names.empty()) return;
    tensor.name = names.front();
    tensor.also.assign(names.begin() + 1, names.end());
    add_of_model(std::move(tensor));
  }

  void add_of_slice(const SavedTensor& tensor, const layout::Slicing& slicing, int slice) {
    const auto known = names_.find(tensor.name);
    auto* whole = known == names_.end() ? nullptr : &found_.tensors[known->second];
    if (whole == nullptr) {
      auto first = tensor;
      first.pieces.clear();
      auto& extent = first.shape.at(static_cast<std::size_t>(slicing.dim)) = 0;
      for (const auto& section : slicing.sections) extent += section.extent;
      add_of_model(std::move(first));
      whole = &found_.tensors.back();
    }
    if (!add_slice(*whole, slicing, slice, {&tensor, 1})) refuse_slice(tensor, slice);
  }

  [[noreturn]] void refuse_slice(const SavedTensor& tensor, int slice) const {
    throw base::FormatError(base::str(folder_.string(), ": ", describe(tensor), " has not the elements of slice ",
                                      slice, ": the file of a rank is missing, or another job's"));
  }

  // Files of several partitions may have one tensor, under other names where it is tied.
  void add_of_model(SavedTensor tensor) {
    auto names = std::move(tensor.also);
    names.insert(names.begin(), tensor.name);
    const auto known = std::ranges::find_if(names, [&](const auto& name) { return names_.contains(name); });
    if (known == names.end()) {
      tensor.also.assign(names.begin() + 1, names.end());
      for (const auto& name : names) names_.emplace(name, found_.tensors.size());
      found_.tensors.push_back(std::move(tensor));
      return;
    }
    const auto place = names_.find(*known)->second;
    auto& same = found_.tensors[place];
    if (same.shape != tensor.shape || same.dtype != tensor.dtype) {
      throw base::FormatError(base::str(folder_.string(), ": ", *known, " has another shape or dtype in ",
                                        file_of(tensor), " than in ", file_of(same)));
    }
    for (const auto& name : names) {
      if (names_.emplace(name, place).second) same.also.push_back(name);
    }
  }

  std::string file_of(const SavedTensor& tensor) const {
    return tensor.pieces.empty() ? "a file" : found_.files[tensor.pieces[0].file].name;
  }

  void name_buffers() {
    const auto* names = content_.plain("buffer_names");
    if (names == nullptr || !names->is_array()) return;
    const std::set<json> buffers(names->begin(), names->end());
    for (auto& tensor : found_.tensors) {
      if (buffers.contains(tensor.name)) tensor.kind = Kind::kBuffer;
    }
  }

  // "state.h.0.weight.exp_avg" is the state exp_avg of h.0.weight: the longest name of a parameter counts.
  std::optional<std::pair<std::string, std::string>> state_name(const std::string& name) const {
    if (!name.starts_with(kState)) return std::nullopt;
    for (auto dot = name.rfind('.'); dot > kState.size(); dot = name.rfind('.', dot - 1)) {
      const auto parameter = std::string_view(name).substr(kState.size(), dot - kState.size());
      if (names_.contains(parameter) || outside_.contains(parameter))
        return std::pair(std::string(parameter), name.substr(dot + 1));
    }
    return std::nullopt;
  }

  void read_optimizer(const RankFile& file) {
    auto optimizer = read_file(file.name);
    const auto* groups = optimizer.plain("param_groups");
    has_names_ = has_names_ && (groups == nullptr || take_groups(*groups));
    for (auto& tensor : by_name(optimizer)) {
      constexpr std::string_view kFlat = "fp32_flat_groups.";
      if (auto of = state_name(tensor.name)) {
        tensor.kind = Kind::kState;
        std::tie(tensor.name, tensor.state) = *of;
        add_part(file, std::move(tensor));
      } else if (tensor.name.starts_with(kFlat)) {
        flat_[tensor.name.substr(kFlat.size())].push_back(std::move(tensor));
      } else {
        leave(file, tensor.name);
      }
    }
    for (auto& value : optimizer.left) read_value(file, value);
  }

  // Parts of slices are kept apart; of what is not sliced each rank of a slice has the same.
  void add_part(const RankFile& file, SavedTensor tensor) {
    const std::pair name(tensor.name, tensor.state);
    const auto known = names_.find(tensor.name);
    const bool is_sliced = known != names_.end() && slicing_of(found_.tensors[known->second]) != nullptr;
    if (is_sliced) {
      slices_[name][slice_of(file)].push_back(std::move(tensor));
    } else if (slicings_.empty() || slice_of(file) == 0) {
      parts_[name].push_back(std::move(tensor));
    }
  }

  // States and masters of sliced parameters: cut as these are, or whole on one rank.
  void add_states_of_slices() {
    for (auto& [name, by_slice] : slices_) {
      const auto parameter = found_.tensors[names_.find(name.first)->second];
      const auto& slicing = *slicing_of(parameter);
      auto whole = by_slice.begin()->second.front();
      const auto first = whole;
      whole.name = parameter.name;
      whole.shape = parameter.shape;
      whole.pieces.clear();
      bool fits = std::ssize(by_slice) == slicing.degree;
      for (const auto& [slice, parts] : by_slice) fits = fits && add_slice(whole, slicing, slice, parts);
      const bool is_like = !first.shape.empty() && first.shape.size() == parameter.shape.size();
      if (!fits && (name.second.empty() || (is_like && by_slice.size() > 1))) refuse_slice(first, 0);
      auto& added = found_.tensors.emplace_back(fits ? whole : first);
      added.name = parameter.name;
    }
  }

  void read_value(const RankFile& file, ForeignValue& value) {
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
        add_part(file, *std::move(tensor));
        return;
      }
    }
    // Empty groups of flat tensors, and dicts without entries, say nothing.
    if (is_mark(value.name) || value.name == "fp32_flat_groups" || value.name == "state") return;
    leave(file, value.name);
  }

  void leave(const RankFile& file, const std::string& name) {
    found_.left.push_back({base::str(file.name, ": ", name), std::nullopt});
    if (name.starts_with(kState)) strays_.insert(name.substr(kState.size()));
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
        if (!names_.contains(name.get<std::string>())) outside_.insert(name.get<std::string>());
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

  void read_precision(const RankFile& file) {
    constexpr std::string_view kMasters = "masters.", kScaleOf = "loss_scale.";
    auto precision = read_file(file.name);
    for (auto& tensor : by_name(precision)) {
      if (tensor.name.starts_with(kMasters) && names_.contains(tensor.name.substr(kMasters.size()))) {
        tensor.kind = Kind::kMaster;
        tensor.name.erase(0, kMasters.size());
        add_part(file, std::move(tensor));
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
      }
      named.push_back({{"params", std::move(params)}});
    }
    if (groups_.is_null()) groups_ = std::move(named);
    leave_placeholders(*shapes);
  }

  // The model's file has something without elements for parameters that are sharded. Parameters in no group are tied
  // ones, or frozen.
  void leave_placeholders(const json& shapes) {
    std::set<std::string> cut;
    for (const auto& group : shapes) {
      for (const auto& [name, _] : pairs_of(group)) cut.insert(name);
    }
    std::erase_if(found_.tensors, [&](const auto& tensor) {
      const bool left =
          tensor.kind == Kind::kParameter && tensor.shape == layout::Shape{0} && !cut.contains(tensor.name);
      if (left) found_.left.push_back({tensor.name, std::nullopt});
      return left;
    });
    names_.clear();
    for (std::size_t place = 0; place < found_.tensors.size(); ++place) {
      names_.emplace(found_.tensors[place].name, place);
      for (const auto& name : found_.tensors[place].also) names_.emplace(name, place);
    }
  }

  void add_flat(const std::string& name, SavedTensor tensor) {
    tensor.name = name;
    const auto [known, fresh] = names_.try_emplace(name, found_.tensors.size());
    if (fresh) {
      found_.tensors.push_back(std::move(tensor));
      return;
    }
    auto* const here = &found_.tensors[known->second];
    if (here->shape != tensor.shape) {
      tensor.name = here->name;
      tensor.also = std::move(here->also);
      *here = std::move(tensor);
    } else if (here->dtype != tensor.dtype && !parts_.contains({here->name, ""})) {
      tensor.kind = Kind::kMaster;
      tensor.name = here->name;
      parts_[{tensor.name, ""}].push_back(std::move(tensor));
    }
  }

  // States and masters, of which ranks may have parts.
  void add_states() {
    for (auto& [name, parts] : parts_) {
      const auto known = names_.find(name.first);
      if (known == names_.end() && outside_.contains(name.first) &&
          !name.second.empty()) {  // which each rank has whole
        found_.tensors.push_back(std::move(parts.front()));
        continue;
      }
      if (known == names_.end()) {  // of a parameter that is left
        found_.left.push_back({base::str(name.first, ".", name.second.empty() ? "master" : name.second), std::nullopt});
        continue;
      }
      const auto& parameter = found_.tensors[known->second];
      const auto shape = parameter.shape;
      std::int64_t all = 0;
      for (const auto& part : parts) all += part.shape.size() == 1 ? part.shape[0] : 0;
      const auto count = layout::numel(shape);
      const bool is_master = name.second.empty();
      const bool in_parts = parts.front().shape != shape && (parts.size() > 1 || is_master) &&
                            std::ranges::all_of(parts, [](const auto& part) { return part.shape.size() == 1; });
      if (in_parts && (all < count || all - count >= std::ssize(parts))) {
        throw base::FormatError(base::str(folder_.string(), ": the ranks' parts of ",
                                          is_master ? "master" : name.second, " of ", name.first, " have ", all,
                                          " elements, and it has ", count,
                                          ": the optimizer's file of a rank is missing, or another job's"));
      }
      auto tensor = in_parts ? joined(parts, shape) : std::move(parts.front());
      tensor.name = parameter.name;
      found_.tensors.push_back(std::move(tensor));
    }
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
  std::map<std::string, std::size_t, std::less<>> names_;                          // of the model's tensors
  std::map<std::pair<std::string, std::string>, std::vector<SavedTensor>> parts_;  // by parameter and state
  std::map<std::string, layout::Slicing> slicings_;  // of the model's tensors, in what lamina wrote
  std::map<std::pair<std::string, std::string>, std::map<int, std::vector<SavedTensor>>> slices_;  // of these
  std::map<std::string, std::vector<SavedTensor>> flat_;  // by the group's number
  std::int64_t partition_count_ = 0;
  std::set<std::string, std::less<>> outside_;  // parameters of the optimizer that the model has not
  std::set<std::string> strays_;                // states of the optimizer that are no tensors or numbers of parameters
  std::uint64_t contents_ = 0;                  // tensors that are no parameters or buffers
  json groups_;
  bool has_names_ = true;  // in the groups of all files
};

}  // namespace

bool is_smp_checkpoint(FileSystem& files, const Path& folder) {
  return !files_with(files.list(folder), kModels).empty();
}

// A folder of checkpoints may have files of the user's with such names: it is no checkpoint itself.
std::optional<Path> find_smp_checkpoint(FileSystem& files, const Path& folder, const std::optional<std::string>& tag) {
  constexpr std::uint64_t kMostNameBytes = 4096;
  constexpr auto kNewest = "newest", kSuffix = "_partial";
  const auto listed = [&](const Path& place) {
    try {
      return files.list(place);
    } catch (const base::FileError&) {
      return std::vector<FileSystem::Entry>();  // it is no folder
    }
  };
  const auto has = [&](const auto& is_meant) { return std::ranges::any_of(listed(folder), is_meant); };
  const auto newest = [&]() -> std::string {
    try {
      auto name = read_all(files, folder / kNewest, kMostNameBytes);
      while (!name.empty() && std::isspace(static_cast<unsigned char>(name.back())) != 0) name.pop_back();
      return Path(name).filename().string();
    } catch (const base::Error&) {
      return "";  // it names none
    }
  };
  const auto found = [&](const Path& place) {
    return files_with(listed(place), kModels).empty() ? std::nullopt : std::optional(place);
  };
  if (tag) {
    const auto name = *tag + kSuffix;
    return found(folder / (has([&](const auto& entry) { return entry.name == name; }) ? name : *tag));
  }
  const auto named = newest();
  auto place = named.empty() ? std::nullopt : found(folder / named);
  const auto is_checkpoint = [](const auto& entry) { return entry.folder && entry.name.ends_with(kSuffix); };
  return place || has(is_checkpoint) ? place : found(folder);
}

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
