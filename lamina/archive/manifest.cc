// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/manifest.h"

#include <algorithm>
#include <array>
#include <set>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/config/json_reader.h"
#include "lamina/config/problems.h"

namespace lamina::archive {
namespace {

using Json = nlohmann::json;
using base::FormatError;
using config::JsonReader;

constexpr auto kFormat = "lamina checkpoint";
constexpr std::int64_t kVersion = 1;
constexpr std::int64_t kMost = std::int64_t{1} << 60;
constexpr int kMostDepth = 100;  // of what others put there
constexpr std::array kKinds{"parameter", "buffer", "master", "state", "content"};
constexpr std::string_view kBefore = "{\"checksum\": \"", kBehind = "\",\n";
constexpr std::size_t kPrefix = kBefore.size() + 16 + kBehind.size();

std::uint64_t size_of(const SavedTensor& tensor) { return static_cast<std::uint64_t>(traits(tensor.dtype).size_bytes); }

// Rules for a manifest beyond its form, whoever made it.

void check_name(const DataFile& file) {
  const bool inside = !file.name.empty() && file.name != "." && file.name != ".." && file.name != kManifestName &&
                      file.name.find('/') == std::string::npos && file.name.find('\0') == std::string::npos;
  if (!inside) throw FormatError(base::str("\"", file.name, "\" is no name of a file in a checkpoint"));
  if (file.checksums.size() != (file.bytes + kBlock - 1) / kBlock) {
    throw FormatError(base::str(file.name, ": ", file.checksums.size(), " checksums for ", file.bytes, " bytes"));
  }
}

bool is_sound(const layout::Region& region) {
  const auto dimensions = static_cast<int>(region.whole.size());
  if (region.dim < 0 || region.dim >= std::max(dimensions, 1) || region.extent < 0) return false;
  const auto positions = dimensions == 0 ? 1 : region.whole[static_cast<std::size_t>(region.dim)];
  std::int64_t next = 0, next_at = 0;
  for (std::size_t i = 0; i < region.stripes.size(); ++i) {
    const auto& stripe = region.stripes[i];
    const bool fits = stripe.count > 0 && stripe.begin >= next && stripe.at >= next_at &&
                      stripe.count <= positions - stripe.begin && stripe.count <= region.extent - stripe.at;
    const bool touches = i > 0 && stripe.begin == next && stripe.at == next_at;
    if (!fits || touches) return false;
    next = stripe.begin + stripe.count;
    next_at = stripe.at + stripe.count;
  }
  auto slice = region.whole;
  if (!slice.empty()) slice[static_cast<std::size_t>(region.dim)] = region.extent;
  const auto most = region.stripes.empty() ? 0 : layout::numel(slice);
  return region.begin >= 0 && region.begin <= region.end && region.end <= most;
}

void check_pieces(const Manifest& manifest) {
  struct Place {
    std::size_t file;
    std::uint64_t begin, end;
    const SavedTensor* tensor;
  };
  std::vector<Place> places;
  for (const auto& tensor : manifest.tensors) {
    for (const auto& piece : tensor.pieces) {
      if (piece.file >= manifest.files.size()) {
        throw FormatError(base::str(describe(tensor), ": in file ", piece.file, " of ", manifest.files.size()));
      }
      if (piece.region.whole != tensor.shape || !is_sound(piece.region)) {
        throw FormatError(base::str(describe(tensor), ": a piece that no layout makes"));
      }
      const auto& file = manifest.files[piece.file];
      const auto bytes = static_cast<std::uint64_t>(piece.region.end - piece.region.begin) * size_of(tensor);
      if (piece.begin > file.bytes || bytes > file.bytes - piece.begin) {
        throw FormatError(base::str(describe(tensor), ": ", bytes, " bytes at ", piece.begin, " are not in ", file.name,
                                    ", which has ", file.bytes));
      }
      if (bytes > 0) places.push_back({piece.file, piece.begin, piece.begin + bytes, &tensor});
    }
  }
  std::ranges::sort(places, {}, [](const Place& each) { return std::pair(each.file, each.begin); });
  for (std::size_t i = 1; i < places.size(); ++i) {
    const auto &one = places[i - 1], &next = places[i];
    if (one.file == next.file && next.begin < one.end) {
      throw FormatError(base::str(manifest.files[one.file].name, ": ", describe(*one.tensor), " and ",
                                  describe(*next.tensor), " lie in the same bytes"));
    }
  }
}

void check(const Manifest& manifest) {
  std::set<std::string_view> names;
  for (const auto& file : manifest.files) {
    check_name(file);
    if (!names.insert(file.name).second) throw FormatError(file.name + ": twice in the manifest");
  }
  std::set<std::tuple<std::string_view, Kind, int, std::string_view>> tensors;
  for (const auto& tensor : manifest.tensors) {
    if (tensors.emplace(tensor.name, tensor.kind, tensor.optimizer, tensor.state).second) continue;
    throw FormatError(describe(tensor) + ": twice in the manifest");
  }
  check_pieces(manifest);
}

// JSON, and back.

Json to_json(const SavedPiece& piece) {
  Json json{{"file", piece.file}, {"begin", piece.begin}};
  if (piece.region == layout::whole(piece.region.whole)) return json;
  Json stripes = Json::array();
  for (const auto& [begin, at, count] : piece.region.stripes) stripes.push_back({begin, at, count});
  json["dim"] = piece.region.dim;
  json["stripes"] = std::move(stripes);
  json["extent"] = piece.region.extent;
  json["elements"] = {piece.region.begin, piece.region.end};
  return json;
}

Json to_json(const SavedTensor& tensor) {
  Json json{{"name", tensor.name},
            {"kind", kKinds.at(static_cast<std::size_t>(tensor.kind))},
            {"dtype", traits(tensor.dtype).name},
            {"shape", tensor.shape},
            {"pieces", Json::array()}};
  if (tensor.kind == Kind::kState || tensor.kind == Kind::kMaster) json["optimizer"] = tensor.optimizer;
  if (!tensor.state.empty()) json["state"] = tensor.state;
  if (!tensor.also.empty()) json["also"] = tensor.also;
  for (const auto& piece : tensor.pieces) json["pieces"].push_back(to_json(piece));
  return json;
}

// A list of integers from 0, so many where `count` is not negative.
std::vector<std::int64_t> integers(JsonReader& reader, const std::string& key, std::ptrdiff_t count = -1) {
  std::vector<std::int64_t> numbers;
  for (const auto& each : reader.list(key)) {
    if (!each.is_number_unsigned() || each.get<std::uint64_t>() > std::uint64_t{kMost}) {
      reader.refuse(key, "is no list of integers from 0");
    }
    numbers.push_back(each.get<std::int64_t>());
  }
  if (count >= 0 && std::ssize(numbers) != count) reader.refuse(key, base::str("is no list of ", count, " integers"));
  return numbers;
}

SavedPiece read_piece(const Json& json, const std::string& where, const layout::Shape& shape) {
  JsonReader reader(json, where);
  SavedPiece piece;
  piece.file = static_cast<std::size_t>(reader.integer("file", 0, kMost));
  piece.begin = static_cast<std::uint64_t>(reader.integer("begin", 0, kMost));
  piece.region = layout::whole(shape);
  if (reader.has("elements")) {
    piece.region.dim = static_cast<int>(reader.integer("dim", 0, 1000));
    piece.region.extent = reader.integer("extent", 0, kMost);
    piece.region.stripes.clear();
    for (const auto& each : reader.list("stripes")) {
      const Json wrapped{{"stripe", each}};
      JsonReader stripe(wrapped, where);
      const auto numbers = integers(stripe, "stripe", 3);
      piece.region.stripes.push_back({numbers[0], numbers[1], numbers[2]});
    }
    const auto elements = integers(reader, "elements", 2);
    piece.region.begin = elements[0];
    piece.region.end = elements[1];
    piece.region.size = elements[1] - elements[0];
  }
  reader.finish();
  return piece;
}

template <class Names>
std::size_t named(JsonReader& reader, const std::string& key, const Names& name_of, std::size_t count) {
  const auto text = reader.text(key);
  for (std::size_t i = 0; i < count; ++i) {
    if (name_of(i) == text) return i;
  }
  reader.refuse(key, base::str("\"", text, "\" is not known"));
}

SavedTensor read_tensor(const Json& json, std::size_t index) {
  JsonReader reader(json, base::str("tensor ", index));
  SavedTensor tensor;
  tensor.name = reader.text("name");
  reader.call_it(tensor.name);
  tensor.kind =
      static_cast<Kind>(named(reader, "kind", [](auto i) { return std::string_view(kKinds.at(i)); }, kKinds.size()));
  const auto dtype_name = [](auto i) { return traits(static_cast<layout::DType>(i)).name; };
  tensor.dtype = static_cast<layout::DType>(named(reader, "dtype", dtype_name, 24));
  tensor.shape = integers(reader, "shape");
  layout::numel(tensor.shape);
  if (reader.has("optimizer")) tensor.optimizer = static_cast<int>(reader.integer("optimizer", 0, 1'000'000));
  if (reader.has("state")) tensor.state = reader.text("state");
  if (reader.has("also")) {
    for (const auto& each : reader.list("also")) {
      if (!each.is_string()) reader.refuse("also", "is no list of names");
      tensor.also.push_back(each);
    }
  }
  for (const auto& each : reader.list("pieces")) tensor.pieces.push_back(read_piece(each, tensor.name, tensor.shape));
  reader.finish();
  return tensor;
}

DataFile read_file(const Json& json, std::size_t index) {
  JsonReader reader(json, base::str("file ", index));
  DataFile file;
  file.name = reader.text("name");
  reader.call_it(file.name);
  file.bytes = static_cast<std::uint64_t>(reader.integer("bytes", 0, kMost));
  file.checksums = from_hex(reader.text("checksums"));
  reader.finish();
  return file;
}

Json parse(std::string_view text) {
  const auto shallow = [](int depth, Json::parse_event_t, Json&) {
    if (depth > kMostDepth) throw FormatError(base::str("lists in more than ", kMostDepth, " lists"));
    return true;
  };
  try {
    return Json::parse(text, shallow);
  } catch (const Json::exception& error) {
    throw FormatError(base::str("not valid JSON: ", config::json_reason(error)));
  }
}

Manifest read_body(const Json& json) {
  JsonReader reader(json, "");
  if (!reader.has("format") || reader.text("format") != kFormat) {
    throw FormatError("it is no manifest of a checkpoint of lamina's");
  }
  if (const auto version = reader.integer("version", 1, kMost); version > kVersion) {
    throw FormatError(
        base::str("its version is ", version, ", and this lamina knows ", kVersion, ": read it with a newer one"));
  }
  Manifest manifest;
  reader.at("checksum");
  manifest.id = reader.text("id");
  manifest.number = reader.integer("number", 0, kMost);
  const Json &files = reader.list("files"), &tensors = reader.list("tensors");
  for (std::size_t i = 0; i < files.size(); ++i) manifest.files.push_back(read_file(files[i], i));
  for (std::size_t i = 0; i < tensors.size(); ++i) manifest.tensors.push_back(read_tensor(tensors[i], i));
  manifest.about = reader.at("about");
  JsonReader(manifest.about, "about");
  reader.finish();
  return manifest;
}

}  // namespace

std::string describe(const SavedTensor& tensor) {
  if (tensor.kind == Kind::kMaster) return "the master of " + tensor.name;
  return tensor.kind == Kind::kState ? tensor.state + " of " + tensor.name : tensor.name;
}

std::string write_manifest(const Manifest& manifest) {
  try {
    check(manifest);
    Json json{{"format", kFormat},         {"version", kVersion},    {"id", manifest.id},
              {"number", manifest.number}, {"files", Json::array()}, {"tensors", Json::array()},
              {"about", manifest.about}};
    for (const auto& file : manifest.files) {
      json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}, {"checksums", to_hex(file.checksums)}});
    }
    for (const auto& tensor : manifest.tensors) json["tensors"].push_back(to_json(tensor));
    const auto text = json.dump();
    const auto rest = std::string_view(text).substr(1);
    return base::str(kBefore, to_hex({{checksum(std::as_bytes(std::span(rest)))}}), kBehind, rest, "\n");
  } catch (const FormatError& error) {
    throw base::UsageError(base::str("what is to be saved makes no checkpoint: ", error.what()));
  } catch (const Json::exception&) {
    throw base::UsageError("what is to be saved makes no checkpoint: some name is not UTF-8");
  }
}

Manifest read_manifest(std::string_view text) {
  const bool begins = text.size() > kPrefix && text.starts_with(kBefore) && text.ends_with("\n") &&
                      text.substr(kPrefix - kBehind.size()).starts_with(kBehind);
  if (!begins) throw FormatError("it does not begin and end as a manifest: it is damaged, or none of lamina's");
  const auto rest = text.substr(kPrefix, text.size() - kPrefix - 1);
  if (from_hex(text.substr(kBefore.size(), 16)).front() != checksum(std::as_bytes(std::span(rest)))) {
    throw FormatError("it is not what was written: the file is damaged");
  }
  try {
    auto manifest = read_body(parse(text));
    check(manifest);
    return manifest;
  } catch (const base::ConfigError& error) {  // of the reader, and of layouts
    throw FormatError(error.what());
  }
}

}  // namespace lamina::archive
