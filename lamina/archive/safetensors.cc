// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "lamina/archive/budget.h"
#include "lamina/base/error.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"
#include "lamina/config/problems.h"

namespace lamina::archive {
namespace {

using base::Json;
using layout::DType;

constexpr std::array<std::pair<DType, std::string_view>, 17> kNames{{{DType::kBool, "BOOL"},
                                                                     {DType::kUInt8, "U8"},
                                                                     {DType::kInt8, "I8"},
                                                                     {DType::kUInt16, "U16"},
                                                                     {DType::kInt16, "I16"},
                                                                     {DType::kUInt32, "U32"},
                                                                     {DType::kInt32, "I32"},
                                                                     {DType::kUInt64, "U64"},
                                                                     {DType::kInt64, "I64"},
                                                                     {DType::kFloat8E4M3Fn, "F8_E4M3"},
                                                                     {DType::kFloat8E5M2, "F8_E5M2"},
                                                                     {DType::kFloat8E8M0FnU, "F8_E8M0"},
                                                                     {DType::kFloat16, "F16"},
                                                                     {DType::kBFloat16, "BF16"},
                                                                     {DType::kFloat32, "F32"},
                                                                     {DType::kFloat64, "F64"},
                                                                     {DType::kComplex64, "C64"}}};
constexpr auto kMetadata = "__metadata__";
constexpr std::size_t kSizeBytes = sizeof(std::uint64_t);

[[noreturn]] void refuse_twice(const std::string& file, const std::string& name) {
  throw base::FormatError(base::str(file, ": \"", name, "\" stands there twice"));
}

void check_names(const Header& header, const std::string& file) {
  std::vector<const std::string*> names;
  names.reserve(header.entries.size());
  for (const auto& entry : header.entries) names.push_back(&entry.name);
  std::ranges::sort(names, {}, [](const std::string* name) -> const std::string& { return *name; });
  const auto twice =
      std::ranges::adjacent_find(names, {}, [](const auto* name) -> const std::string& { return *name; });
  if (twice != names.end()) refuse_twice(file, **twice);
}

std::uint64_t bytes_of(const Entry& entry, const std::string& file) {
  try {
    return static_cast<std::uint64_t>(layout::numel(entry.shape)) *
           static_cast<std::uint64_t>(traits(entry.dtype).size_bytes);
  } catch (const base::ConfigError& error) {
    throw base::FormatError(base::str(file, ": \"", entry.name, "\": ", error.what()));
  }
}

// Reads a header as it comes, which takes no more memory than what it holds: of what does not belong there, nothing.
class HeaderReader : public Json::json_sax_t {
 public:
  HeaderReader(std::string name, std::string_view text, Budget& budget)
      : name_(std::move(name)), counted_(count_of("\"data_offsets\":", text)), budget_(budget) {
    budget_.take(counted_ * sizeof(Entry));
    header_.entries.reserve(counted_);
  }

  Header take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    ++depth_;
    if (depth_ == 1) return true;
    if (depth_ > 2 || in_list_) refuse("an object", "");
    if (key_ != kMetadata) entry_ = {.name = key_};
    return true;
  }
  bool end_object() override {
    if (--depth_ != 1) return true;
    if (outer_ == kMetadata) return true;
    if (!has_dtype_ || !has_shape_ || offsets_.size() != 2) refuse("too little", "its dtype, shape and data_offsets");
    entry_.begin = offsets_[0];
    entry_.end = offsets_[1];
    constexpr std::uint64_t kAllocation = 32;                // about what one takes beside its bytes
    const bool counted = header_.entries.size() < counted_;  // else that key was written otherwise, and the list grows
    budget_.take(entry_.name.size() + entry_.shape.size() * 2 * sizeof(std::int64_t) + kAllocation +
                 (counted ? 0 : 3 * sizeof(Entry)));
    header_.entries.push_back(std::move(entry_));
    has_dtype_ = has_shape_ = false;
    offsets_.clear();
    return true;
  }
  bool key(std::string& key) override {
    if (depth_ == 1) {
      if (key == kMetadata && std::exchange(has_metadata_, true)) refuse_twice(name_, key);
      outer_ = key;
    }
    key_ = std::move(key);
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_list_ || (key_ != "shape" && key_ != "data_offsets")) refuse("a list", "");
    if (key_ == "shape" ? std::exchange(has_shape_, true) : !offsets_.empty()) refuse("a list", "one of a kind");
    return in_list_ = true;
  }
  bool end_array() override {
    in_list_ = false;
    return true;
  }
  bool string(std::string& text) override {
    if (depth_ == 2 && !in_list_ && outer_ == kMetadata) {
      constexpr std::uint64_t kNode = 128;  // of the map, about
      budget_.take(kNode + key_.size() + text.size());
      header_.metadata[key_] = std::move(text);
      return true;
    }
    if (depth_ != 2 || in_list_ || key_ != "dtype" || has_dtype_) refuse(base::str("\"", text.substr(0, 60), "\""), "");
    const auto* found = std::ranges::find(kNames, text, &decltype(kNames)::value_type::second);
    if (found == kNames.end()) refuse(base::str("\"", text.substr(0, 60), "\""), "a dtype that lamina knows");
    entry_.dtype = found->first;
    return has_dtype_ = true;
  }
  bool number_unsigned(std::uint64_t number) override {
    if (!in_list_) refuse(base::str(number), "");
    if (key_ == "shape") {
      if (entry_.shape.size() == kMostDimensions) refuse("more", base::str(kMostDimensions, " dimensions").c_str());
      if (number > std::uint64_t{layout::kMostElements}) refuse(base::str(number), "a size");
      entry_.shape.push_back(static_cast<std::int64_t>(number));
    } else if (offsets_.size() < 2) {
      offsets_.push_back(number);
    } else {
      refuse(base::str(number), "two of them");
    }
    return true;
  }
  bool number_integer(std::int64_t number) override { refuse(base::str(number), "a number from 0"); }
  bool number_float(double, const std::string& text) override { refuse(text, "an integer"); }
  bool boolean(bool) override { refuse("a boolean", ""); }
  bool null() override { refuse("null", ""); }
  bool binary(Json::binary_t&) override { refuse("bytes", ""); }
  bool parse_error(std::size_t, const std::string&, const Json::exception& error) override {
    throw base::FormatError(base::str(name_, ": the header is not valid JSON: ", config::json_reason(error)));
  }

 private:
  [[noreturn]] void refuse(const std::string& found, const char* expected) const {
    const auto where = depth_ == 0 ? std::string() : base::str(" at \"", depth_ == 1 ? key_ : outer_, "\"");
    throw base::FormatError(base::str(name_, ": the header has ", found, where,
                                      *expected == '\0' ? ", which has no place there" : ", where it should have ",
                                      expected));
  }

  const std::string name_;
  const std::uint64_t counted_;  // entries, by that key
  Budget& budget_;
  Header header_;
  bool has_metadata_ = false;
  int depth_ = 0;
  bool in_list_ = false;
  std::string outer_, key_;  // of the first and of the innermost level
  Entry entry_;
  bool has_dtype_ = false, has_shape_ = false;
  std::vector<std::uint64_t> offsets_;
};

Header parse(const FileSystem::Input& file, std::uint64_t size, const std::string& name) {
  Budget budget(file.size(), std::uint64_t{16} << 20);
  constexpr std::uint64_t kCopies = 8;
  budget.take(size);
  std::string text(size, '\0');
  file.read(kSizeBytes, std::as_writable_bytes(std::span(text)));
  try {
    budget.take(kCopies * longest_string(text));
    HeaderReader reader(name, text, budget);
    Json::sax_parse(text, &reader);
    return reader.take();
  } catch (const base::FormatError& error) {
    if (std::string_view(error.what()).starts_with(name)) throw;
    throw base::FormatError(base::str(name, ": ", error.what()));
  }
}

}  // namespace

std::string_view safetensors_name(DType dtype) {
  const auto* found = std::ranges::find(kNames, dtype, &decltype(kNames)::value_type::first);
  return found == kNames.end() ? std::string_view() : found->second;
}

std::string make_header(std::vector<Entry>& entries, const std::map<std::string, std::string>& metadata) {
  Json json = Json::object();
  if (!metadata.empty()) json[kMetadata] = metadata;
  std::uint64_t at = 0;
  for (auto& entry : entries) {
    const auto dtype = safetensors_name(entry.dtype);
    const auto size = static_cast<std::uint64_t>(traits(entry.dtype).size_bytes);
    if (dtype.empty()) {
      throw base::UsageError(
          base::str(entry.name, ": elements of ", traits(entry.dtype).name, " have no place in a safetensors file"));
    }
    if (entry.name == kMetadata)
      throw base::UsageError(base::str("no tensor of a safetensors file is called ", kMetadata));
    if (json.contains(entry.name)) throw base::UsageError(base::str("\"", entry.name, "\" twice in one file"));
    entry.begin = at;
    at += static_cast<std::uint64_t>(layout::numel(entry.shape)) * size;
    entry.end = at;
    json[entry.name] = {{"dtype", dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const Json::exception&) {
    throw base::UsageError("a name of a tensor, or some metadata, is not UTF-8");
  }
  text.append((kSizeBytes - text.size() % kSizeBytes) % kSizeBytes, ' ');
  if (text.size() > kMostHeaderBytes) {
    throw base::UsageError(base::str(entries.size(), " tensors make a header of ", text.size(), " bytes; a file has ",
                                     kMostHeaderBytes, " at most"));
  }
  const std::uint64_t size = text.size();
  for (auto& entry : entries) {
    entry.begin += kSizeBytes + size;
    entry.end += kSizeBytes + size;
  }
  return std::string(reinterpret_cast<const char*>(&size), kSizeBytes) + text;
}

Header read_header(const FileSystem::Input& file, const std::string& name) {
  std::uint64_t size = 0;
  file.read(0, std::as_writable_bytes(std::span(&size, 1)));
  if (size > kMostHeaderBytes || size > file.size() - kSizeBytes) {
    throw base::FormatError(base::str(name, ": a header of ", size, " bytes in a file of ", file.size()));
  }
  auto header = parse(file, size, name);
  check_names(header, name);
  std::ranges::sort(header.entries, {}, [](const Entry& each) { return std::pair(each.begin, each.end); });
  std::uint64_t at = 0;
  for (auto& entry : header.entries) {
    const auto bytes = bytes_of(entry, name);
    if (entry.begin != at || entry.end < entry.begin || entry.end - entry.begin != bytes) {
      throw base::FormatError(base::str(name, ": \"", entry.name, "\" has ", bytes,
                                        " bytes by its shape, and those from ", entry.begin, " to ", entry.end,
                                        ", where the next begins at ", at));
    }
    at = entry.end;
    entry.begin += kSizeBytes + size;
    entry.end += kSizeBytes + size;
  }
  if (kSizeBytes + size + at != file.size()) {
    throw base::FormatError(
        base::str(name, ": ", file.size(), " bytes, where its header speaks of ", kSizeBytes + size + at));
  }
  return header;
}

}  // namespace lamina::archive
