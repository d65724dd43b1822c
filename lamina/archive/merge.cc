// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/merge.h"

#include <algorithm>
#include <iomanip>
#include <set>
#include <sstream>

#include "lamina/archive/extra_files.h"
#include "lamina/archive/floats.h"
#include "lamina/archive/fresh_folder.h"
#include "lamina/archive/piece_reader.h"
#include "lamina/archive/safetensors.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::archive {
namespace {

using base::UsageError;

// A tensor of the model, as it is written.
struct Output {
  const SavedTensor* tensor = nullptr;
  std::string name;
  layout::DType dtype = layout::DType::kFloat32;

  std::uint64_t bytes() const {
    return static_cast<std::uint64_t>(layout::numel(tensor->shape)) * element_bytes(dtype);
  }
};

std::vector<Output> outputs_of(const Found& from, const MergeOptions& options) {
  std::vector<Output> outputs;
  std::set<std::string> names;
  for (const auto& tensor : from.manifest.tensors) {
    if (tensor.kind != Kind::kParameter && tensor.kind != Kind::kBuffer) continue;
    Output output{&tensor, translated(tensor.name, from.manifest.about), tensor.dtype};
    if (options.dtype && is_floating(tensor.dtype)) output.dtype = *options.dtype;
    if (!names.insert(output.name).second) {
      throw UsageError(base::str("two tensors of ", from.folder.string(), " would be called ", output.name));
    }
    outputs.push_back(std::move(output));
  }
  if (outputs.empty()) {
    throw UsageError(base::str(from.folder.string(), " has no parameters: ",
                               from.manifest.about.contains("form") ? "it holds files of torch.save; make a checkpoint "
                                                                      "of it first, by `lamina checkpoint convert`"
                                                                    : "there is no model in it"));
  }
  return outputs;
}

// In their order, as many to a file as have room; in a file larger elements first, which keeps all of them aligned.
std::vector<std::vector<Output>> model_files(std::vector<Output> outputs, std::uint64_t most) {
  std::vector<std::vector<Output>> files(1);
  std::uint64_t bytes = 0;
  for (auto& output : outputs) {
    if (!files.back().empty() && bytes + output.bytes() > most) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += output.bytes();
    files.back().push_back(std::move(output));
  }
  for (auto& file : files) {
    std::ranges::stable_sort(file, std::greater(), [](const Output& each) { return element_bytes(each.dtype); });
  }
  return files;
}

std::string name_of_file(std::size_t index, std::size_t count) {
  if (count == 1) return "model.safetensors";
  std::ostringstream name;
  name << std::setfill('0') << "model-" << std::setw(5) << index + 1 << "-of-" << std::setw(5) << count
       << ".safetensors";
  return name.str();
}

// Returns how many elements became infinite.
template <class WasRead>
std::uint64_t write_file(FileSystem& files, const Path& path, const std::vector<Output>& outputs, PieceReader& reader,
                         const WasRead& was_read) {
  std::uint64_t too_large = 0;
  std::vector<Entry> entries;
  for (const auto& each : outputs)
    entries.push_back({.name = each.name, .dtype = each.dtype, .shape = each.tensor->shape});
  const auto header = make_header(entries, {{"format", "pt"}});
  const auto file = files.create(path);
  file->write(std::as_bytes(std::span(header)));
  std::vector<std::byte> converted;
  for (const auto& output : outputs) {
    reader.read_parts(*output.tensor, [&](std::int64_t, std::span<const std::byte> part) {
      const bool as_it_is = output.dtype == output.tensor->dtype;
      if (!as_it_is) too_large += convert(output.tensor->dtype, part, output.dtype, converted);
      file->write(as_it_is ? part : std::span<const std::byte>(converted));
      was_read(part.size());
    });
  }
  file->sync();
  return too_large;
}

void write_text(FileSystem& files, const Path& path, std::string_view text) {
  const auto file = files.create(path);
  file->write(std::as_bytes(std::span(text)));
  file->sync();
}

}  // namespace

std::string translated(const std::string& name, const nlohmann::json& about) {
  const auto pairs = about.find("translations");
  if (pairs == about.end() || !pairs->is_array()) return name;
  for (const auto& pair : *pairs) {
    const bool sound = pair.is_array() && pair.size() == 2 && pair[0].is_string() && pair[1].is_string();
    if (!sound) throw base::FormatError("the manifest's translations are no pairs of prefixes");
    const auto& from = pair[0].get_ref<const std::string&>();
    if (name.starts_with(from)) return pair[1].get<std::string>() + name.substr(from.size());
  }
  return name;
}

Merged merge(FileSystem& files, const Found& from, const Path& place, const MergeOptions& options,
             const MergeProgress& progress) {
  if (options.dtype && (!is_floating(*options.dtype) || element_bytes(*options.dtype) > 4)) {
    throw UsageError(base::str(traits(*options.dtype).name, " is no floating dtype of 16 or 32 bits"));
  }
  const auto outputs = model_files(outputs_of(from, options), options.most_file_bytes);
  Merged merged{.files = outputs.size()};
  std::uint64_t all = 0, so_far = 0;
  auto weights = nlohmann::json::object();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (const auto& output : outputs[i]) {
      ++merged.tensors;
      merged.bytes += output.bytes();
      all += bytes_of(*output.tensor);
      weights[output.name] = name_of_file(i, outputs.size());
    }
  }
  FreshFolder folder(files, place);
  PieceReader reader(files, from.folder, from.manifest);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    merged.too_large += write_file(files, folder.path() / name_of_file(i, outputs.size()), outputs[i], reader,
                                   [&](std::uint64_t bytes) { progress(so_far += bytes, all); });
  }
  if (outputs.size() > 1) {
    const nlohmann::json index{{"metadata", {{"total_size", merged.bytes}}}, {"weight_map", weights}};
    write_text(files, folder.path() / "model.safetensors.index.json", index.dump(2) + "\n");
  }
  copy_extra_files(files, from, folder.path());
  folder.commit();
  return merged;
}

}  // namespace lamina::archive
