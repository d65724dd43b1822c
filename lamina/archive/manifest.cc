// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/manifest.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "lamina/archive/budget.h"
#include "lamina/base/error.h"
#include "lamina/base/json_text.h"
#include "lamina/base/printable.h"
#include "lamina/base/str.h"
#include "lamina/config/json_reader.h"
#include "lamina/config/problems.h"

namespace lamina::archive {
namespace {

using base::FormatError;
using base::Json;
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

void check_pieces(const Manifest& manifest, Elements elements) {
  struct Place {
    std::size_t file;
    std::uint64_t begin, end;
    const SavedTensor* tensor;
  };
  std::vector<Place> places;
  for (const auto& tensor : manifest.tensors) {
    auto missing = layout::numel(tensor.shape);
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
      missing -= std::min(missing, piece.region.end - piece.region.begin);
    }
    if (missing > 0 && elements == Elements::kAll) {
      throw FormatError(base::str(describe(tensor), ": ", missing, " elements are in no file"));
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

void check(const Manifest& manifest, Elements elements) {
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
  check_pieces(manifest, elements);
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

Json to_json(const DataFile& file) {
  return {{"name", file.name}, {"bytes", file.bytes}, {"checksums", to_hex(file.checksums)}};
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
  if (tensor.shape.size() > kMostDimensions) reader.refuse("shape", base::str("has more than ", kMostDimensions));
  layout::numel(tensor.shape);
  if (reader.has("optimizer")) tensor.optimizer = static_cast<int>(reader.integer("optimizer", 0, 1'000'000));
  if (reader.has("state")) tensor.state = reader.text("state");
  if (reader.has("also")) {
    for (const auto& each : reader.list("also")) {
      if (!each.is_string()) reader.refuse("also", "is no list of names");
      tensor.also.push_back(each);
    }
  }
  const auto& pieces = reader.list("pieces");
  tensor.pieces.reserve(pieces.size());
  for (const auto& each : pieces) tensor.pieces.push_back(read_piece(each, tensor.name, tensor.shape));
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

std::uint64_t memory_of(const SavedTensor& tensor) {
  std::uint64_t bytes = tensor.name.size() + tensor.state.size() + tensor.shape.size() * sizeof(std::int64_t);
  for (const auto& each : tensor.also) bytes += sizeof(std::string) + each.size();
  for (const auto& piece : tensor.pieces) {
    bytes += sizeof(piece) + tensor.shape.size() * sizeof(std::int64_t) +
             piece.region.stripes.size() * sizeof(layout::Stripe);
  }
  return bytes;
}

// Reads a manifest as it comes: files and tensors are taken one by one, so that never all of them stand in memory as
// JSON. What stays is the rest.
class Parser : public Json::json_sax_t {
 public:
  explicit Parser(std::string_view text) : budget_(text.size(), std::uint64_t{128} << 20) {
    constexpr std::uint64_t kCopies = 4;
    const auto tensors = count_of("\"kind\":", text);
    budget_.take(kCopies * longest_string(text) + tensors * sizeof(SavedTensor));
    manifest_.tensors.reserve(tensors);
    Json::sax_parse(text, this);
  }

  Manifest take() {
    JsonReader reader(rest_, "");
    if (!known_) refuse_as_other();
    for (const auto* taken : {"checksum", "format", "version"}) reader.at(taken);
    for (const auto* taken : {"files", "tensors"}) reader.list(taken);
    manifest_.id = reader.text("id");
    manifest_.number = reader.integer("number", 0, kMost);
    const JsonReader about(reader.at("about"), "about");
    reader.finish();
    manifest_.about = std::move(rest_["about"]);
    return std::move(manifest_);
  }

  bool null() override { return value(0) && dom().null(); }
  bool boolean(bool flag) override { return value(0) && dom().boolean(flag); }
  bool number_integer(std::int64_t number) override { return value(0) && dom().number_integer(number); }
  bool number_float(double number, const std::string& text) override {
    return value(0) && dom().number_float(number, text);
  }
  bool binary(Json::binary_t& bytes) override { return value(bytes.size()) && dom().binary(bytes); }
  bool number_unsigned(std::uint64_t number) override {
    if (depth_ == 1 && section_ == "version") recognise(number);
    return value(0) && dom().number_unsigned(number);
  }
  bool string(std::string& text) override {
    if (depth_ == 1 && section_ == "format") ours_ = text == kFormat;
    return value(text.size()) && dom().string(text);
  }
  bool key(std::string& key) override {
    if (depth_ == 1) section_ = key;
    charge(128 + key.size());
    return dom().key(key);
  }
  bool start_object(std::size_t count) override {
    if (depth_ == 1 && in_list()) refuse(section_, "is no list");
    if (depth_ == 2 && in_list()) {
      if (!known_) refuse_as_other();
      element_ = Json();
      element_dom_.emplace(element_);
      element_bytes_ = 0;
    }
    return deeper() && dom().start_object(count);
  }
  bool end_object() override {
    --depth_;
    dom().end_object();
    if (depth_ == 2 && in_list()) take_element();
    return true;
  }
  bool start_array(std::size_t count) override {
    if (depth_ == 2 && in_list()) refuse(section_, "is no list of objects");
    return deeper() && dom().start_array(count);
  }
  bool end_array() override {
    --depth_;
    return dom().end_array();
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception& error) override {
    throw FormatError(base::str("not valid JSON: ", config::json_reason(error)));
  }

 private:
  using Dom = nlohmann::detail::json_sax_dom_parser<Json>;

  [[noreturn]] static void refuse(const std::string& where, const char* what) {
    throw FormatError(base::str(where, ": ", what));
  }
  [[noreturn]] static void refuse_as_other() { throw FormatError("it is no manifest of a checkpoint of lamina's"); }

  bool in_list() const { return section_ == "files" || section_ == "tensors"; }
  Dom& dom() { return element_dom_ ? *element_dom_ : rest_dom_; }

  void charge(std::uint64_t bytes) {
    budget_.take(bytes);
    element_bytes_ += bytes;
  }
  bool value(std::uint64_t bytes) {
    if (depth_ == 2 && in_list()) refuse(section_, "is no list of objects");
    charge((element_dom_ ? 96 : 48) + bytes);  // an element's also as what is made of it
    return true;
  }
  bool deeper() {
    if (++depth_ > kMostDepth) throw FormatError(base::str("lists in more than ", kMostDepth, " lists"));
    charge(64);
    return true;
  }

  // Takes the version, which stands before all that depends on it.
  void recognise(std::uint64_t version) {
    if (!ours_ || version == 0) return;
    if (version > kVersion) {
      throw FormatError(
          base::str("its version is ", version, ", and this lamina knows ", kVersion, ": read it with a newer one"));
    }
    known_ = true;
  }

  void take_element() {
    element_dom_.reset();
    if (section_ == "files") {
      manifest_.files.push_back(read_file(element_, manifest_.files.size()));
      budget_.take(3 * sizeof(DataFile) + manifest_.files.back().checksums.size() * sizeof(Checksum));
    } else {
      manifest_.tensors.push_back(read_tensor(element_, manifest_.tensors.size()));
      budget_.take(memory_of(manifest_.tensors.back()));
    }
    element_ = Json();
    budget_.give_back(std::exchange(element_bytes_, 0));
  }

  Budget budget_;
  Manifest manifest_;
  Json rest_, element_;
  Dom rest_dom_{rest_};
  std::optional<Dom> element_dom_;
  std::uint64_t element_bytes_ = 0;
  bool ours_ = false, known_ = false;
  int depth_ = 0;
  std::string section_;  // the key of the outermost object that is read
};

}  // namespace

std::string describe(const SavedTensor& tensor) {
  const auto name = base::printable_line(tensor.name);
  if (tensor.kind == Kind::kMaster) return "the master of " + name;
  return tensor.kind == Kind::kState ? base::str(base::printable_line(tensor.state), " of ", name) : name;
}

std::string entry_name(const SavedTensor& tensor) {
  if (tensor.kind != Kind::kMaster && tensor.kind != Kind::kState) return tensor.name;
  return base::str(tensor.name, ".", tensor.kind == Kind::kMaster ? "#master" : tensor.state,
                   tensor.optimizer == 0 ? "" : base::str(".", tensor.optimizer));
}

const char* family_of(Kind kind) {
  if (kind == Kind::kContent) return "content";
  return kind == Kind::kParameter || kind == Kind::kBuffer ? "model" : "optimizer";
}

std::string write_manifest(const Manifest& manifest, Elements elements) {
  std::string text;
  const auto add_all = [&](const char* name, const auto& all) {
    text += base::str(",\n\"", name, "\": [");
    for (const auto& each : all) text += (&each == all.data() ? "\n" : ",\n") + to_json(each).dump();
    text += ']';
  };
  try {
    check(manifest, elements);
    text = base::str("\"format\": ", Json(kFormat).dump(), ", \"version\": ", kVersion,
                     ", \"id\": ", Json(manifest.id).dump(), ", \"number\": ", manifest.number,
                     ",\n\"about\": ", manifest.about.dump());
    add_all("files", manifest.files);
    add_all("tensors", manifest.tensors);
    text += '}';
    text = base::str(kBefore, to_hex({{checksum(std::as_bytes(std::span(text)))}}), kBehind, text, "\n");
    if (read_manifest(text, elements) == manifest) return text;
  } catch (const FormatError& error) {
    throw base::UsageError(base::str("what is to be saved makes no checkpoint: ", error.what()));
  } catch (const Json::exception&) {
    throw base::UsageError("what is to be saved makes no checkpoint: some text is not UTF-8");
  }
  throw base::UsageError("what is to be saved makes no checkpoint: some number is infinite, none, or negative");
}

Manifest read_manifest(std::string_view text, Elements elements) {
  const bool begins = text.size() > kPrefix && text.starts_with(kBefore) && text.ends_with('\n') &&
                      text.substr(kPrefix - kBehind.size()).starts_with(kBehind);
  if (!begins) throw FormatError("it does not begin and end as a manifest: it is damaged, or none of lamina's");
  const auto rest = text.substr(kPrefix, text.size() - kPrefix - 1);
  if (from_hex(text.substr(kBefore.size(), 16)).front() != checksum(std::as_bytes(std::span(rest)))) {
    throw FormatError("it is not what was written: the file is damaged");
  }
  try {
    auto manifest = Parser(text).take();
    check(manifest, elements);
    return manifest;
  } catch (const base::ConfigError& error) {  // of the reader, and of layouts
    throw FormatError(error.what());
  }
}

}  // namespace lamina::archive
