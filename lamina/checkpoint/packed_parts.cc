// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/packed_parts.h"

#include <map>
#include <tuple>
#include <utility>

#include "lamina/archive/checksums.h"
#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"

namespace lamina::checkpoint {
namespace {

std::int64_t checksum_of(const at::Tensor& elements) {
  const std::span bytes(static_cast<const std::byte*>(elements.const_data_ptr()), elements.nbytes());
  return static_cast<std::int64_t>(archive::checksum(bytes));
}

}  // namespace

archive::Manifest manifest_of(std::size_t rank, std::span<const Part> parts) {
  archive::Manifest manifest;
  std::map<std::tuple<std::string, archive::Kind, int, std::string>, std::size_t> places;
  std::uint64_t bytes = 0;
  for (const auto& part : parts) {
    const auto& of = part.tensor;
    const auto [place, is_new] =
        places.emplace(std::tuple(of.name, of.kind, of.optimizer, of.state), manifest.tensors.size());
    if (is_new) manifest.tensors.push_back(of);
    auto region = part.region;
    region.size = count(region);
    manifest.tensors[place->second].pieces.push_back({0, bytes, std::move(region)});
    bytes += static_cast<std::uint64_t>(size_bytes(part));
  }
  // Memory has no checksums: what travels has them.
  const std::vector<archive::Checksum> none((bytes + archive::kBlock - 1) / archive::kBlock);
  manifest.files.push_back({base::str("rank-", rank), bytes, none});
  return manifest;
}

std::uint64_t hash_of(const Part& part) {
  const auto& [tensor, region, elements] = part;
  auto hash = base::hash64(tensor.name);
  hash = base::hash64(tensor.state, hash);
  for (const auto number :
       {static_cast<std::int64_t>(tensor.kind), std::int64_t{tensor.optimizer}, static_cast<std::int64_t>(tensor.dtype),
        std::int64_t{region.dim}, region.extent, region.begin, region.end}) {
    hash = base::hash64(number, hash);
  }
  for (const auto size : tensor.shape) hash = base::hash64(size, hash);
  for (const auto& stripe : region.stripes) {
    for (const auto number : {stripe.begin, stripe.at, stripe.count}) hash = base::hash64(number, hash);
  }
  return hash;
}

std::string text_of_parts(std::span<const Part> parts) {
  return archive::write_manifest(manifest_of(0, parts), archive::Elements::kSome);
}

value::Value pack(std::span<const Part> parts) {
  value::List elements, checksums;
  for (const auto& part : parts) {
    elements.items.emplace_back(part.elements);
    checksums.items.emplace_back(checksum_of(part.elements));
  }
  return value::Tuple{{std::move(elements), std::move(checksums)}};
}

std::vector<Part> unpack(const std::string& text, const value::Value& packed) {
  auto manifest = archive::read_manifest(text, archive::Elements::kSome);
  const auto& items = packed.as<value::Tuple>().items;
  const auto& elements = items.at(0).as<value::List>().items;
  const auto& checksums = items.at(1).as<value::List>().items;
  std::vector<Part> parts;
  for (auto& tensor : manifest.tensors) {
    const auto at = parts.size();
    auto& part = parts.emplace_back();
    part.region = std::move(tensor.pieces.at(0).region);
    tensor.pieces.clear();
    part.tensor = std::move(tensor);
    part.elements = elements.at(at).as<at::Tensor>();
    if (checksum_of(part.elements) == checksums.at(at).as<std::int64_t>()) continue;
    throw base::FormatError(base::str(archive::describe(part.tensor),
                                      ", which was kept for a rank that is lost, is not what that had: its checksum "
                                      "differs"),
                            base::Code{"change-damaged"});
  }
  return parts;
}

}  // namespace lamina::checkpoint
