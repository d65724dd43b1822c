// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/convert.h"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "lamina/archive/checksums.h"
#include "lamina/archive/piece_reader.h"
#include "lamina/archive/safetensors.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::foreign {

using archive::CheckedOutput;
using archive::element_bytes;
using archive::Entry;
using archive::family_of;
using archive::FileSystem;
using archive::Found;
using archive::Kind;
using archive::kMostFileBytes;
using archive::Manifest;
using archive::MergeProgress;
using archive::Path;
using archive::PieceReader;
using archive::SavedTensor;
using archive::Store;

namespace {

bool is_of_model(const SavedTensor& tensor) { return family_of(tensor.kind) == std::string_view("model"); }

// The names that tensors have without a prefix.
class NewNames {
 public:
  NewNames(const ForeignCheckpoint& from, const std::string& prefix) : prefix_(prefix) {
    for (const auto& tensor : from.tensors) {
      if (is_of_model(tensor) && has_prefix(tensor.name)) here_.insert(tensor.name.substr(prefix.size()));
    }
  }

  bool has_prefix(const std::string& name) const { return name.starts_with(prefix_) && name != prefix_; }
  bool empty() const { return here_.empty(); }
  // The name of a parameter by the one that its optimizer has for it, which may lack the prefix; none of one that is
  // left.
  std::optional<std::string> of_parameter(const std::string& name) const {
    if (has_prefix(name) && here_.contains(name.substr(prefix_.size()))) return name.substr(prefix_.size());
    return here_.contains(name) ? std::optional(name) : std::nullopt;
  }

 private:
  const std::string prefix_;
  std::set<std::string> here_;
};

std::vector<SavedTensor> chosen(const ForeignCheckpoint& from, const NewNames& names, const std::string& prefix) {
  std::vector<SavedTensor> tensors;
  for (auto tensor : from.tensors) {
    if (tensor.kind == Kind::kContent) {  // which stands in `about`
      tensors.push_back(std::move(tensor));
      continue;
    }
    if (!is_of_model(tensor)) {
      const auto name = names.of_parameter(tensor.name);
      if (!name) continue;
      tensor.name = *name;
    } else if (names.has_prefix(tensor.name)) {
      tensor.name.erase(0, prefix.size());
      std::erase_if(tensor.also, [&](const auto& name) { return !name.starts_with(prefix); });
      for (auto& name : tensor.also) name.erase(0, prefix.size());
    } else {
      continue;
    }
    tensors.push_back(std::move(tensor));
  }
  if (names.empty()) {
    std::string some;
    for (std::size_t i = 0; i < std::min<std::size_t>(from.tensors.size(), 5); ++i) some += " " + from.tensors[i].name;
    throw base::UsageError(
        base::str("no tensor's name begins with \"", prefix, "\"; some are", some.empty() ? " none" : some));
  }
  return tensors;
}

// The groups of optimizers, with the names that parameters have now.
nlohmann::json renamed(nlohmann::json about, const NewNames& names) {
  about.erase("form");  // which is lamina's own now
  about.erase("no_optimizer");
  if (!about.contains("optimizers")) return about;
  for (auto& optimizer : about["optimizers"]) {
    for (auto& group : optimizer["groups"]) {
      auto params = nlohmann::json::array();
      for (const auto& each : group["params"]) {
        if (const auto name = names.of_parameter(each.get<std::string>())) params.push_back(*name);
      }
      group["params"] = std::move(params);
    }
  }
  return about;
}

// As many to a file as have room, those of the model first; larger elements first, which keeps all of them aligned.
std::vector<std::vector<SavedTensor>> foreign_files(std::vector<SavedTensor> tensors) {
  std::vector<std::vector<SavedTensor>> files(1);
  std::uint64_t bytes = 0;
  std::ranges::stable_partition(tensors, is_of_model);
  for (auto& tensor : tensors) {
    const auto own = static_cast<std::uint64_t>(layout::numel(tensor.shape)) * element_bytes(tensor.dtype);
    if (!files.back().empty() &&
        (bytes + own > kMostFileBytes || is_of_model(tensor) != is_of_model(files.back().back()))) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += own;
    files.back().push_back(std::move(tensor));
  }
  for (auto& file : files) {
    std::ranges::stable_sort(file, std::greater(), [](const auto& each) { return element_bytes(each.dtype); });
  }
  return files;
}

}  // namespace

Found convert(FileSystem& files, const ForeignCheckpoint& from, const std::string& prefix, const Path& to,
              const std::string& tag, const std::string& id, const MergeProgress& progress) {
  const NewNames names(from, prefix);
  const auto all = foreign_files(chosen(from, names, prefix));
  Store store(files, to);
  for (const auto& each : store.list()) {
    if (each.tag == tag)
      throw base::UsageError(base::str(to.string(), " has a checkpoint ", tag, " already: name another tag"));
  }
  std::uint64_t bytes = 0, so_far = 0;
  Manifest manifest;
  manifest.about = renamed(from.about, names);
  for (const auto& file : all) {
    for (const auto& each : file) {
      manifest.tensors.push_back(each);
      manifest.tensors.back().pieces.clear();
      manifest.tensors.back().value.clear();
      bytes += bytes_of(each);
    }
  }
  auto save = store.begin(tag, id, "lamina checkpoint convert");
  PieceReader reader(files, from.folder, from);
  std::size_t number = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::vector<Entry> entries;
    for (std::size_t j = 0; j < all[i].size(); ++j) {
      const auto& tensor = manifest.tensors[number + j];
      entries.push_back({.name = entry_name(tensor), .dtype = tensor.dtype, .shape = tensor.shape});
    }
    const auto header = make_header(entries, {{"format", "pt"}});
    std::ostringstream name;
    name << family_of(all[i].front().kind) << '-' << std::setfill('0') << std::setw(5) << i + 1 << ".safetensors";
    CheckedOutput output(files.create(save.folder() / name.str()));
    output.write(std::as_bytes(std::span(header)));
    for (std::size_t j = 0; j < all[i].size(); ++j, ++number) {
      auto& tensor = manifest.tensors[number];
      tensor.pieces.push_back({i, entries[j].begin, layout::whole(tensor.shape)});
      reader.read_parts(all[i][j], [&](std::int64_t, std::span<const std::byte> part) {
        output.write(part);
        progress(so_far += part.size(), bytes);
      });
    }
    output.finish();
    manifest.files.push_back({name.str(), output.size(), output.checksums()});
  }
  save.commit(std::move(manifest));
  return store.find(tag);
}

}  // namespace lamina::foreign
