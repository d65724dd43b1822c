// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lamina/archive/manifest.h"
#include "lamina/checkpoint/part.h"
#include "lamina/value/value.h"

namespace lamina::checkpoint {

// The manifest of what a rank has in its memory: one file without checksums, in which its parts follow each other. It
// may have several of a tensor.
archive::Manifest manifest_of(std::size_t rank, std::span<const Part> parts);

// The hash of what a part is, but for its values: tensor and region.
std::uint64_t hash_of(const Part& part);

// Parts as a text that says what they are, and a value for another rank: their elements, each with a checksum. Parts of
// the host.
std::string text_of_parts(std::span<const Part> parts);
value::Value pack(std::span<const Part> parts);
// The way back. Throws base::FormatError where elements are not those that were packed.
std::vector<Part> unpack(const std::string& text, const value::Value& packed);

}  // namespace lamina::checkpoint
