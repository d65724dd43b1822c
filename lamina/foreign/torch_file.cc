// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/torch_file.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "lamina/archive/budget.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/foreign/pickle.h"
#include "lamina/foreign/plain_values.h"
#include "lamina/foreign/torch_dtype.h"

namespace lamina::foreign {

using archive::Budget;
using archive::FileSystem;
using archive::Path;
using archive::SavedTensor;

namespace {

using layout::DType;

constexpr int kMostDepth = 32;

bool in_torch_file(std::string_view global) {
  constexpr std::string_view kAllowed[] = {"collections.OrderedDict",
                                           "torch._utils._rebuild_tensor_v2",
                                           "torch._utils._rebuild_tensor_v3",
                                           "torch._utils._rebuild_parameter",
                                           "torch.storage.UntypedStorage",
                                           "torch.Size",
                                           "torch.device"};
  return std::ranges::find(kAllowed, global) != std::end(kAllowed) || dtype_of_storage(global) || dtype_of(global);
}

// One file, or a part of it.
class TorchFile {
 public:
  TorchFile(FileSystem& files, const Path& path, const TorchFileOptions& options)
      : path_(path), file_(files.open(path)), options_(options) {
    members_ = read_zip(*file_, options.within.value_or(Extent{0, file_->size()}));
    for (const auto& [name, extent] : members_) {
      constexpr std::string_view kPickle = "/data.pkl";
      if (name.ends_with(kPickle)) root_ = name.substr(0, name.size() - kPickle.size() + 1);
    }
    if (root_.empty()) throw base::FormatError("it has no data.pkl");
    if (const auto order = members_.find(root_ + "byteorder");
        order != members_.end() && text(order->second) != "little") {
      throw base::FormatError("its elements are big-endian");
    }
  }

  ForeignCheckpoint read() {
    const auto& member = members_.at(root_ + "data.pkl");
    const auto bytes = text(member);
    if (options_.verify && !is_undamaged(*file_, member)) {
      throw base::FormatError("its data.pkl, which has the names of tensors, is damaged: its checksum is another one");
    }
    const Pickle pickle(bytes, options_.names == Names::kAny ? [](std::string_view) { return true; } : in_torch_file);
    PlainValues plain(bytes.size());
    plain_ = &plain;
    budget_.emplace(bytes.size(), std::uint64_t{64} << 20);
    found_.folder = path_.parent_path();
    found_.files.push_back({path_.filename().string(), file_->size(), {}});
    if (options_.names == Names::kAny) found_.plain_root = plain.of(pickle.root());
    add(options_.name, pickle.root(), 0);
    return std::move(found_);
  }

 private:
  std::string text(Extent extent) const {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 30;
    if (extent.size > kMost) throw base::FormatError("its data.pkl has more than 1 GiB");
    std::string bytes(extent.size, '\0');
    file_->read(extent.begin, std::as_writable_bytes(std::span(bytes)));
    return bytes;
  }

  void add(const std::string& name, const PickleValue& value, int depth) {
    if (depth > kMostDepth) throw base::FormatError("it has too many dicts in dicts");
    budget_->take(sizeof(ForeignValue) + name.size());   // a value may stand in many places
    const bool is_own = name.ends_with("_extra_state");  // of a module, in any form
    if (value.is_object("torch._utils._rebuild_parameter")) {
      const auto* data = value.argument(0);
      if (data == nullptr) throw base::FormatError(name + ": a parameter without a tensor");
      add(name, *data, depth + 1);
    } else if (is_tensor(value)) {
      add_tensor(name, value);
    } else if (!is_own && value.is(PickleValue::Type::kDict) &&
               std::ranges::all_of(keys_of(value), [](const auto* key) { return key->is(PickleValue::Type::kText); })) {
      for (std::size_t i = 0; i < value.items.size(); i += 2) {
        add(name.empty() ? value.items[i]->text : base::str(name, ".", value.items[i]->text), *value.items[i + 1],
            depth + 1);
      }
    } else if (!is_own && (value.is(PickleValue::Type::kList) || value.is(PickleValue::Type::kTuple)) &&
               std::ranges::any_of(value.items, [](const auto* item) { return is_tensor(*item); })) {
      for (std::size_t i = 0; i < value.items.size(); ++i) add(base::str(name, ".", i), *value.items[i], depth + 1);
    } else {
      found_.left.push_back({name, plain_->of(value)});
    }
  }

  static bool is_tensor(const PickleValue& value) {
    return value.is_object("torch._utils._rebuild_tensor_v2") || value.is_object("torch._utils._rebuild_tensor_v3");
  }

  static std::vector<const PickleValue*> keys_of(const PickleValue& dict) {
    std::vector<const PickleValue*> keys;
    for (std::size_t i = 0; i < dict.items.size(); i += 2) keys.push_back(dict.items[i]);
    return keys;
  }

  void add_tensor(const std::string& name, const PickleValue& value) {
    const auto refuse = [&](const char* what) { throw base::FormatError(base::str(name, ": ", what)); };
    const auto *storage = value.argument(0), *offset = value.argument(1), *size = value.argument(2),
               *stride = value.argument(3);
    if (stride == nullptr || !storage->is(PickleValue::Type::kPersistent) || !offset->is(PickleValue::Type::kInteger) ||
        offset->integer < 0) {
      refuse("a tensor that is none");
    }
    const auto* id = storage->items[0];  // ("storage", class, key, device, elements)
    if (!id->is(PickleValue::Type::kTuple) || id->items.size() != 5 || !id->items[1]->is(PickleValue::Type::kGlobal) ||
        !id->items[2]->is(PickleValue::Type::kText)) {
      refuse("a tensor without a storage");
    }
    auto dtype = dtype_of_storage(id->items[1]->text);
    if (const auto* named = value.argument(6); !dtype && named != nullptr) dtype = dtype_of(named->text);
    if (!dtype) refuse("elements of an unknown kind");
    const auto shape = shape_of(*size), strides = shape_of(*stride);
    if (!shape || !strides || shape->size() != strides->size()) refuse("a tensor without a shape");
    std::int64_t count = 0, step = 1;
    try {
      count = layout::numel(*shape);
    } catch (const base::ConfigError& error) {
      refuse(error.what());
    }
    bool in_rows = true;
    for (auto d = shape->size(); d-- > 0; step *= std::max<std::int64_t>((*shape)[d], 1)) {
      in_rows = in_rows && ((*shape)[d] <= 1 || count == 0 || (*strides)[d] == step);
    }
    if (!in_rows && !options_.gather) refuse("its elements do not lie row by row: save a copy made by contiguous()");
    const auto bytes = static_cast<std::uint64_t>(traits(*dtype).size_bytes);
    const auto member = members_.find(base::str(root_, "data/", id->items[2]->text));
    if (member == members_.end()) refuse("its storage is not in the file");
    const auto begin = static_cast<std::uint64_t>(offset->integer), elements = member->second.size / bytes;
    if (is_to_verify(member->first, /*is_read=*/!in_rows) && !is_undamaged(*file_, member->second)) {
      refuse("its elements are damaged: their checksum is another one");
    }
    if (begin > elements || static_cast<std::uint64_t>(count) > elements - begin)
      refuse("its elements are not in its storage");
    const auto place = member->second.begin + begin * bytes;
    const auto [first, fresh] = by_place_.try_emplace(
        std::tuple(place, *dtype, *shape, in_rows ? layout::Shape() : *strides), found_.tensors.size());
    if (!fresh && count > 0) {
      found_.tensors[first->second].also.push_back(name);
      return;
    }
    budget_->take(sizeof(SavedTensor));
    SavedTensor tensor{.name = name, .dtype = *dtype, .shape = *shape};
    if (in_rows) {
      tensor.pieces.push_back({0, place, layout::whole(*shape)});
    } else {
      tensor.value = in_rows_of(member->second, begin * bytes, *shape, *strides, bytes);
      if (tensor.value.empty()) refuse("its elements are not in its storage");
    }
    found_.tensors.push_back(std::move(tensor));
  }

  // True for storages that this rank reads, and those of its share: their names say whose they are.
  bool is_to_verify(const std::string& storage, bool is_read) {
    if (!options_.verify) return false;
    const auto whose = path_.filename().string() + storage;
    const bool is_own =
        archive::checksum(std::as_bytes(std::span(whose))) % options_.verify->of == options_.verify->index;
    return (is_own || is_read) && verified_.insert(storage).second;
  }

  // Reads elements that do not lie row by row, and puts them so; empty where one lies outside. A tensor has no more of
  // them than its storage, so that this takes no more memory than the file has bytes.
  std::vector<std::byte> in_rows_of(const Extent& storage, std::uint64_t begin, const layout::Shape& shape,
                                    const layout::Shape& strides, std::uint64_t size) const {
    std::uint64_t last = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      const auto steps = static_cast<std::uint64_t>(shape[d] - 1), stride = static_cast<std::uint64_t>(strides[d]);
      if (steps > 0 && stride > storage.size / steps) return {};
      last += steps * stride;
    }
    if (last >= (storage.size - begin) / size) return {};
    std::vector<std::byte> from((last + 1) * size), to(static_cast<std::uint64_t>(layout::numel(shape)) * size);
    file_->read(storage.begin + begin, from);
    layout::Shape at(shape.size(), 0);
    for (std::uint64_t place = 0; place < to.size(); place += size) {
      std::int64_t offset = 0;
      for (std::size_t d = 0; d < shape.size(); ++d) offset += at[d] * strides[d];
      std::memcpy(&to[place], &from[static_cast<std::uint64_t>(offset) * size], size);
      for (auto d = shape.size(); d > 0; --d) {
        if (++at[d - 1] < shape[d - 1]) break;
        at[d - 1] = 0;
      }
    }
    return to;
  }

  const Path path_;
  const std::unique_ptr<FileSystem::Input> file_;
  std::map<std::string, ZipMember> members_;
  std::string root_;  // "archive/"
  ForeignCheckpoint found_;
  std::map<std::tuple<std::uint64_t, DType, layout::Shape, layout::Shape>, std::size_t> by_place_;
  const TorchFileOptions options_;
  std::set<std::string> verified_;  // storages
  PlainValues* plain_ = nullptr;
  std::optional<Budget> budget_;
};

}  // namespace

const SavedTensor* ForeignCheckpoint::find(std::string_view tensor) const {
  const auto found = std::ranges::find(tensors, tensor, &SavedTensor::name);
  return found != tensors.end() ? &*found : nullptr;
}

const nlohmann::json* ForeignCheckpoint::plain(std::string_view value) const {
  const auto found = std::ranges::find(left, value, &ForeignValue::name);
  return found != left.end() && found->plain ? &*found->plain : nullptr;
}

ForeignCheckpoint read_torch_file(FileSystem& files, const Path& path, const TorchFileOptions& options) {
  try {
    return TorchFile(files, path, options).read();
  } catch (const base::FormatError& error) {
    throw base::FormatError(base::str(path.string(), ": ", error.what()));
  }
}

}  // namespace lamina::foreign
