// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/archive/file_system.h"
#include "lamina/layout/dtype.h"
#include "lamina/layout/region.h"

// The safetensors format: eight bytes with the size of a header, the header, which is JSON, and the tensors' bytes, one
// behind the other.
namespace lamina::archive {

struct Entry {
  std::string name;
  layout::DType dtype = layout::DType::kFloat32;
  layout::Shape shape;
  std::uint64_t begin = 0, end = 0;  // in the file; filled in where a header is made

  std::uint64_t bytes() const { return end - begin; }
  friend bool operator==(const Entry&, const Entry&) = default;
};

// The name of a kind of elements there; "" for one that the format does not have (complex, quantised).
std::string_view safetensors_name(layout::DType dtype);

// The most bytes of elements of a data file; a tensor that is larger has a file of its own.
inline constexpr std::uint64_t kMostFileBytes = 5'000'000'000;

// The most bytes of a header, by the format.
inline constexpr std::uint64_t kMostHeaderBytes = 100'000'000;

// The beginning of a file that holds these tensors in this order, whose places it fills in. A multiple of eight bytes:
// elements lie as they like best in memory where larger ones come before smaller ones. Throws base::UsageError for a
// kind or a name that the format does not have, a name that comes twice, and a header beyond the format's limit.
std::string make_header(std::vector<Entry>& entries, const std::map<std::string, std::string>& metadata = {});

struct Header {
  std::vector<Entry> entries;  // by place
  std::map<std::string, std::string> metadata;
};

// Reads the header of any file that calls itself one. Throws base::FormatError unless it is one: names that come twice,
// sizes that do not fit, tensors that overlap or leave gaps. Takes at most twice the file's
// bytes of memory, and 16 MiB.
Header read_header(const FileSystem::Input& file, const std::string& name);

}  // namespace lamina::archive
