// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/diff.h"

#include <cmath>
#include <cstring>
#include <map>
#include <tuple>

#include "lamina/archive/floats.h"
#include "lamina/archive/piece_reader.h"
#include "lamina/base/joined.h"
#include "lamina/base/str.h"

namespace lamina::archive {
namespace {

using PieceKey = std::tuple<std::string, Kind, int, std::string>;

std::map<PieceKey, const SavedTensor*> by_key(const Manifest& manifest) {
  std::map<PieceKey, const SavedTensor*> all;
  for (const auto& each : manifest.tensors) all[{each.name, each.kind, each.optimizer, each.state}] = &each;
  return all;
}

std::string text(const layout::Shape& shape) { return base::str("(", base::joined(shape), ")"); }

// Counts elements of two tensors of one dtype and shape that differ.
class Comparison {
 public:
  explicit Comparison(layout::DType dtype) : dtype_(dtype) {
    if (is_floating(dtype)) largest_ = 0;
  }

  void add(std::span<const std::byte> one, std::span<const std::byte> other) {
    if (std::memcmp(one.data(), other.data(), one.size()) == 0) return;
    const auto size = element_bytes(dtype_);
    if (largest_) {
      widen(dtype_, one, one_);
      widen(dtype_, other, other_);
    }
    for (std::size_t at = 0; at < one.size(); at += size) {
      if (std::memcmp(&one[at], &other[at], size) == 0) continue;
      ++elements_;
      if (!largest_ || std::isnan(*largest_)) continue;
      const auto a = one_[at / size], b = other_[at / size];
      const auto difference = a == b ? 0 : std::abs(a - b);  // equal infinities have none
      if (std::isnan(difference) || difference > *largest_) largest_ = difference;
    }
  }

  std::uint64_t elements() const { return elements_; }
  std::optional<double> largest() const { return largest_; }

 private:
  const layout::DType dtype_;
  std::uint64_t elements_ = 0;
  std::optional<double> largest_;
  std::vector<double> one_, other_;
};

void diff_about(const nlohmann::json& one, const nlohmann::json& other, std::vector<Difference>& found) {
  auto first = one, second = other;
  for (auto* each : {&first, &second}) each->erase("saved_at");
  for (const auto& change : nlohmann::json::diff(first, second)) {
    const auto path = change.at("path").get<std::string>();
    const nlohmann::json::json_pointer place(path);
    const auto shown = [&](const nlohmann::json& all) {
      return all.contains(place) ? all.at(place).dump().substr(0, 100) : "nothing";
    };
    found.push_back({.what = "about" + path, .how = base::str(shown(first), " and ", shown(second))});
  }
}

}  // namespace

std::vector<Difference> diff(FileSystem& files, const Found& one, const Found& other, const MergeProgress& progress) {
  std::vector<Difference> found;
  const auto first = by_key(one.manifest), second = by_key(other.manifest);
  PieceReader reader(files, one.folder, one.manifest), others(files, other.folder, other.manifest);
  std::uint64_t all = 0, so_far = 0;
  for (const auto& [key, tensor] : first) all += second.contains(key) ? bytes_of(*tensor) : 0;
  std::vector<std::byte> part;
  for (const auto& [key, tensor] : first) {
    const auto match = second.find(key);
    if (match == second.end()) {
      found.push_back({.what = describe(*tensor), .how = "only in the first"});
      continue;
    }
    const auto& twin = *match->second;
    if (tensor->dtype != twin.dtype || tensor->shape != twin.shape) {
      const bool shapes = tensor->shape != twin.shape;
      found.push_back({.what = describe(*tensor),
                       .how = shapes ? base::str("shape ", text(tensor->shape), " and ", text(twin.shape))
                                     : base::str(traits(tensor->dtype).name, " and ", traits(twin.dtype).name)});
      continue;
    }
    Comparison comparison(tensor->dtype);
    reader.read_parts(*tensor, [&](std::int64_t begin, std::span<const std::byte> bytes) {
      part.resize(bytes.size());
      others.read(twin, begin, part);
      comparison.add(bytes, part);
      progress(so_far += bytes.size(), all);
    });
    if (comparison.elements() == 0) continue;
    found.push_back({.what = describe(*tensor),
                     .how = base::str(comparison.elements(), " of ", layout::numel(tensor->shape), " elements"),
                     .elements = comparison.elements(),
                     .largest = comparison.largest()});
  }
  for (const auto& [key, tensor] : second) {
    if (!first.contains(key)) found.push_back({.what = describe(*tensor), .how = "only in the second"});
  }
  diff_about(one.manifest.about, other.manifest.about, found);
  return found;
}

}  // namespace lamina::archive
