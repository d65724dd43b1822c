// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lamina/archive/file_system.h"

// Files of torch's, as bytes: parts of pickles of protocol 2, archives that hold them, folders.
namespace lamina::foreign::testing {

using archive::FileSystem;
using archive::Path;

template <class T>
std::string little(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

inline std::string text(const std::string& words) {
  return "X" + little(static_cast<std::uint32_t>(words.size())) + words;
}
inline std::string integer(std::int32_t value) { return "J" + little(value); }
inline std::string tuple(const std::string& items) { return "(" + items + "t"; }
inline std::string list(const std::string& items) { return "](" + items + "e"; }
inline std::string dict(const std::string& items) { return "}(" + items + "u"; }
inline std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
inline std::string call(const std::string& function, const std::string& arguments) {
  return function + tuple(arguments) + "R";
}
inline std::string pickle(const std::string& value) { return "\x80\x02" + value + "."; }

// The storage "0", of so many elements.
inline std::string storage(const std::string& name, std::size_t elements) {
  return tuple(text("storage") + global("torch", name) + text("0") + text("cpu") +
               integer(static_cast<std::int32_t>(elements)));
}
inline std::string rebuilt(const std::string& storage, const std::string& sizes, const std::string& strides) {
  return call(global("torch._utils", "_rebuild_tensor_v2"), storage + "Q" + integer(0) + tuple(sizes) + tuple(strides) +
                                                                "\x89" +
                                                                call(global("collections", "OrderedDict"), ""));
}

// A tensor of two elements, or fewer, in that storage.
inline std::string tensor(int elements = 2) {
  return rebuilt(storage("FloatStorage", 2), integer(elements), integer(1));
}

// A tensor of bytes, row by row.
inline std::string byte_tensor(const std::vector<std::int64_t>& shape) {
  std::string sizes, strides;
  std::int64_t count = 1;
  for (auto size = shape.rbegin(); size != shape.rend(); ++size) {
    strides.insert(0, integer(static_cast<std::int32_t>(count)));
    sizes.insert(0, integer(static_cast<std::int32_t>(*size)));
    count *= *size;
  }
  return rebuilt(storage("ByteStorage", static_cast<std::size_t>(count)), sizes, strides);
}

// A zip archive of these files, none of them compressed, with sums of zero: nobody looks at them.
inline std::string zip(const std::vector<std::pair<std::string, std::string>>& files) {
  std::string bytes, directory;
  for (const auto& [name, content] : files) {
    const auto size = little(static_cast<std::uint32_t>(content.size())),
               begin = little(static_cast<std::uint32_t>(bytes.size()));
    const auto named = little(static_cast<std::uint16_t>(name.size()));
    const auto described = std::string(16, '\0') + size + size + named;
    bytes += std::string("PK\x03\x04") + described.substr(2) + std::string(2, '\0') + name + content;
    directory += std::string("PK\x01\x02") + described + std::string(12, '\0') + begin + name;
  }
  const auto count = little(static_cast<std::uint16_t>(files.size()));
  const auto places =
      little(static_cast<std::uint32_t>(directory.size())) + little(static_cast<std::uint32_t>(bytes.size()));
  return bytes + directory + std::string("PK\x05\x06") + std::string(4, '\0') + count + count + places +
         std::string(2, '\0');
}

// Returns what torch.save writes of an object.
inline std::string torch_file(const std::string& pickle, const std::string& elements = std::string(8, 'x')) {
  return zip({{"archive/data.pkl", pickle}, {"archive/data/0", elements}});
}

// The metadata of torch.distributed.checkpoint: of the tensor "w" of these sizes, with these chunks, each of which lies
// in a part of one file.
inline std::string chunk(const std::string& offsets = tuple(integer(0)), const std::string& sizes = tuple(integer(2))) {
  return call(global("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"), "") +
         dict(text("offsets") + offsets + text("sizes") + sizes) + "b";
}
inline std::string place(const std::string& offsets, std::size_t begin, std::size_t bytes) {
  const auto index = call(global("torch.distributed.checkpoint.metadata", "MetadataIndex"), "") +
                     dict(text("fqn") + text("w") + text("offset") + offsets + text("index") + integer(0)) + "b";
  return index + call(global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), "") +
         dict(text("relative_path") + text("__0_0.distcp") + text("offset") +
              integer(static_cast<std::int32_t>(begin)) + text("length") + integer(static_cast<std::int32_t>(bytes))) +
         "b";
}
inline std::string metadata_of(const std::string& sizes, const std::string& chunks, const std::string& places) {
  const std::string module = "torch.distributed.checkpoint.metadata";
  const auto tensor = call(global(module, "TensorStorageMetadata"), "") +
                      dict(text("size") + sizes + text("chunks") + list(chunks)) + "b";
  return pickle(call(global(module, "Metadata"), "") +
                dict(text("state_dict_metadata") + dict(text("w") + tensor) + text("storage_data") + dict(places)) +
                "b");
}
inline std::string metadata(std::size_t file_bytes, const std::string& chunks = chunk()) {
  return metadata_of(tuple(integer(2)), chunks, place(tuple(integer(0)), 0, file_bytes));
}

inline void write_file(FileSystem& files, const Path& path, const std::string& bytes) {
  files.create(path)->write(std::as_bytes(std::span(bytes)));
}

// Writes that folder.
inline void write_distributed(FileSystem& files, const Path& folder, const std::string& metadata,
                              const std::string& file) {
  files.make_folder(folder);
  write_file(files, folder / ".metadata", metadata);
  write_file(files, folder / "__0_0.distcp", file);
}

// Pickles of smdistributed's partial files: of a module with the tensor "w", whose elements lie in the flat groups of
// so many files.
inline std::string smp_model(const std::string& tensors = text("w") + tensor()) {
  return pickle(dict(text("module") + dict(tensors)));
}
inline std::string smp_optimizer(int partition_count) {
  const auto state = dict(text("exp_avg") + tensor() + text("step") + integer(3));
  return pickle(dict(text("partition_count") + integer(partition_count) + text("fp32_flat_groups") + list(tensor()) +
                     text("state") + dict(text("w") + state)));
}
inline std::string smp_content(const std::string& shapes = text("w") + tuple(integer(2))) {
  return pickle(dict(text("buffer_names") + list(text("b")) + text("param_shapes") + list(dict(shapes))));
}

using Pickles = std::map<std::string, std::string>;  // by the names of their files

// Writes a folder of them, of one rank, with these in the place of others or beside them.
inline void write_smp(FileSystem& files, const Path& folder, Pickles pickles = {}) {
  pickles.merge(Pickles{{"model_0.pt", smp_model()},
                        {"optimizer_0_0_0.pt", smp_optimizer(1)},
                        {"fp16_states_0.pt", pickle(dict(text("masters") + dict(text("w") + tensor())))},
                        {"user_content.pt", smp_content()}});
  files.make_folder(folder);
  for (const auto& [name, pickle] : pickles) write_file(files, folder / name, torch_file(pickle));
}

}  // namespace lamina::foreign::testing
