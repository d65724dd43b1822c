// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/convert.h"

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

namespace lamina::archive {
namespace {

// The elements of a box that follow each other both in the tensor and in the box: its rows along the last dimension in
// which the box is not all of the tensor. They ascend in both.
class Rows {
 public:
  Rows(const layout::Shape& shape, const ForeignChunk& chunk) : shape_(shape), chunk_(chunk) {
    const auto fits = [&] {
      if (chunk.offsets.size() != shape.size() || chunk.sizes.size() != shape.size()) return false;
      for (std::size_t d = 0; d < shape.size(); ++d) {
        if (chunk.sizes[d] > shape[d] || chunk.offsets[d] > shape[d] - chunk.sizes[d]) return false;
      }
      return true;
    };
    if (!fits()) throw base::FormatError("a part of it lies beyond its shape");
    leading_ = shape.size();
    while (leading_ > 0 && chunk.sizes[leading_ - 1] == shape[leading_ - 1]) length_ *= shape[--leading_];
    if (leading_ > 0) {
      --leading_;
      inner_ = length_;
      length_ *= chunk.sizes[leading_];
      first_ = chunk.offsets[leading_] * inner_;
    }
    for (std::size_t d = 0; d < leading_; ++d) count_ *= chunk.sizes[d];
    if (length_ == 0) count_ = 0;
  }

  std::int64_t count() const { return count_; }
  std::int64_t length() const { return length_; }  // elements of a row
  std::int64_t offset(std::int64_t row) const {    // of its first element in the tensor
    auto stride = leading_ < shape_.size() ? shape_[leading_] * inner_ : length_;
    auto offset = first_;
    for (auto d = leading_; d-- > 0; row /= chunk_.sizes[d], stride *= shape_[d]) {
      offset += (chunk_.offsets[d] + row % chunk_.sizes[d]) * stride;
    }
    return offset;
  }
  // The first one with an element at or after an offset in the tensor.
  std::int64_t first_at(std::int64_t offset_in_tensor) const {
    std::int64_t low = 0, high = count_;
    while (low < high) {
      const auto middle = low + (high - low) / 2;
      if (offset(middle) + length_ > offset_in_tensor) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

 private:
  const layout::Shape& shape_;
  const ForeignChunk& chunk_;
  std::size_t leading_ = 0;  // dimensions before that of the rows
  std::int64_t length_ = 1, inner_ = 1, first_ = 0, count_ = 1;
};

// Reads a tensor out of its boxes.
class BoxReader {
 public:
  explicit BoxReader(FileSystem& files) : files_(files) {}

  void read(const ForeignTensor& tensor, std::int64_t begin, std::span<std::byte> to) {
    const auto size = static_cast<std::int64_t>(element_bytes(tensor.dtype));
    if (!tensor.value.empty()) {
      std::ranges::copy(std::span(tensor.value).subspan(static_cast<std::size_t>(begin * size), to.size()), to.begin());
      return;
    }
    const auto shape = tensor.is_flat ? layout::Shape{layout::numel(tensor.shape)} : tensor.shape;
    const auto end = begin + std::ssize(to) / size;
    auto missing = end - begin;
    for (const auto& chunk : tensor.chunks) {
      const Rows rows(shape, chunk);
      for (auto row = rows.first_at(begin); row < rows.count(); ++row) {
        const auto at = rows.offset(row), from = std::max(at, begin), until = std::min(at + rows.length(), end);
        if (at >= end) break;
        const auto bytes = to.subspan(static_cast<std::size_t>((from - begin) * size),
                                      static_cast<std::size_t>((until - from) * size));
        input(chunk.path)
            .read(chunk.begin + static_cast<std::uint64_t>((row * rows.length() + from - at) * size), bytes);
        missing -= until - from;
      }
    }
    if (missing != 0) throw base::FormatError(base::str(tensor.name, ": its parts have not each element once"));
  }

 private:
  const FileSystem::Input& input(const Path& path) {
    auto& found = inputs_[path];
    if (!found) found = files_.open(path);
    return *found;
  }

  FileSystem& files_;
  std::map<Path, std::unique_ptr<FileSystem::Input>> inputs_;
};

bool is_of_model(const ForeignTensor& tensor) { return family_of(tensor.kind) == std::string_view("model"); }

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

std::vector<ForeignTensor> chosen(const ForeignCheckpoint& from, const NewNames& names, const std::string& prefix) {
  std::vector<ForeignTensor> tensors;
  for (auto tensor : from.tensors) {
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
std::vector<std::vector<ForeignTensor>> foreign_files(std::vector<ForeignTensor> tensors) {
  std::vector<std::vector<ForeignTensor>> files(1);
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
              const std::string& tag, const std::string& id, const Progress& progress) {
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
      manifest.tensors.push_back({.name = each.name,
                                  .kind = each.kind,
                                  .optimizer = each.optimizer,
                                  .state = each.state,
                                  .dtype = each.dtype,
                                  .shape = each.shape,
                                  .also = each.also});
      bytes += bytes_of(manifest.tensors.back());
    }
  }
  auto save = store.begin(tag, id, "lamina checkpoint convert");
  BoxReader reader(files);
  std::vector<std::byte> part;
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
      const auto size = element_bytes(tensor.dtype), own = bytes_of(tensor), most = kPartBytes / size * size;
      for (std::uint64_t at = 0; at < own; at += most) {
        part.resize(std::min(most, own - at));
        reader.read(all[i][j], static_cast<std::int64_t>(at / size), part);
        output.write(part);
        progress(so_far += part.size(), bytes);
      }
    }
    output.finish();
    manifest.files.push_back({name.str(), output.size(), output.checksums()});
  }
  save.commit(std::move(manifest));
  return store.find(tag);
}

}  // namespace lamina::archive
