// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/tree_json.h"

#include <array>
#include <cmath>
#include <limits>

#include "lamina/base/error.h"
#include "lamina/base/hex.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/part.h"
#include "lamina/faces/sayings.h"
#include "lamina/value/dtype.h"

namespace lamina::checkpoint {
namespace {

using base::Json;
using value::Value;

constexpr std::array kTags{"tuple", "dict", "float", "tensor", "dtype", "device", "slice", "bytes", "object"};

bool is_tag(const std::string& key) { return std::ranges::find(kTags, key) != kTags.end(); }

[[noreturn]] void refuse(const Json& json) {
  const auto text = json.dump(-1, ' ', true, Json::error_handler_t::replace);
  throw base::FormatError(base::str(text.substr(0, 60), " is no value of a checkpoint"));
}

std::string from_hex(const Json& json) {
  if (!json.is_string() || json.get_ref<const std::string&>().size() % 2 != 0) refuse(json);
  const auto digit = [&](char each) {
    if (each >= '0' && each <= '9') return each - '0';
    if (each >= 'a' && each <= 'f') return each - 'a' + 10;
    refuse(json);
  };
  const auto& text = json.get_ref<const std::string&>();
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<char>(digit(text[i]) * 16 + digit(text[i + 1])));
  }
  return bytes;
}

bool is_utf8(const std::string& text) {
  try {
    Json(text).dump();
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

class TreeWriter {
 public:
  TreeWriter(std::vector<at::Tensor>& tensors, bool allow_objects) : tensors_(tensors), allow_objects_(allow_objects) {}

  Json write(const Value& tree) {
    return std::visit([this](const auto& held) { return json(held); }, tree.variant());
  }

 private:
  Json json(value::None) { return nullptr; }
  Json json(bool held) { return held; }
  Json json(std::int64_t held) { return held; }
  Json json(double held) {
    if (std::isfinite(held)) return held;
    return {{"float", std::isnan(held) ? "nan" : held > 0 ? "inf" : "-inf"}};
  }
  Json json(const std::string& held) {
    if (is_utf8(held)) return held;
    return {{"bytes", base::to_hex(held)}};
  }
  Json json(const at::Tensor& held) {
    tensors_.push_back(held.detach());
    return {{"tensor", tensors_.size() - 1}};
  }
  Json json(const value::Reference&) { throw base::InternalError("a reference is to be saved"); }
  Json json(at::ScalarType held) {
    const auto dtype = value::dtype_of(held);
    if (!dtype) throw base::UsageError("a dtype that lamina does not know has no place in a checkpoint");
    return {{"dtype", traits(*dtype).name}};
  }
  Json json(const at::Device& held) { return {{"device", held.str()}}; }
  Json json(const value::Slice& held) { return {{"slice", list(held.bounds)}}; }
  Json json(const value::List& held) { return list(held.items); }
  Json json(const value::Tuple& held) { return {{"tuple", list(held.items)}}; }
  Json json(const value::Dict& held) {
    const auto is_plain = [](const auto& item) {
      const auto* key = item.first.template get_if<std::string>();
      return key != nullptr && is_utf8(*key);
    };
    const bool plain = std::ranges::all_of(held.items, is_plain);
    const bool ambiguous =
        plain && held.items.size() == 1 && is_tag(held.items.front().first.template as<std::string>());
    // JSON's objects have no order here.
    if (plain && !ambiguous && std::ranges::is_sorted(held.items, {}, [](const auto& item) {
          return item.first.template as<std::string>();
        })) {
      Json object = Json::object();
      for (const auto& [key, each] : held.items) object[key.as<std::string>()] = write(each);
      return object;
    }
    Json pairs = Json::array();
    for (const auto& [key, each] : held.items) pairs.push_back(Json::array({write(key), write(each)}));
    return {{"dict", std::move(pairs)}};
  }
  Json json(const value::Opaque& held) {
    if (!allow_objects_) {
      throw base::UsageError(
          "an object of a class that is not plain data would have to be pickled, and a pickle can execute anything "
          "when "
          "it is loaded: save its state_dict() or numbers, or give allow_pickle=True here and where it is loaded",
          base::Code{"checkpoint-pickle"});
    }
    Json tensors = Json::array();
    for (const auto& tensor : held.tensors) tensors.push_back(json(tensor));
    return {{"object", {{"codec", held.codec}, {"bytes", base::to_hex(held.bytes)}, {"tensors", std::move(tensors)}}}};
  }

  Json list(const std::vector<Value>& items) {
    Json array = Json::array();
    for (const auto& each : items) array.push_back(write(each));
    return array;
  }

  std::vector<at::Tensor>& tensors_;
  const bool allow_objects_;
};

class TreeReader {
 public:
  TreeReader(const std::function<at::Tensor(std::size_t)>& tensor, bool allow_objects)
      : tensor_(tensor), allow_objects_(allow_objects) {}

  Value read(const Json& json) {
    if (++depth_ > kMostDepth) throw base::FormatError("a value of a checkpoint is nested too deeply");
    auto value = held(json);
    --depth_;
    return value;
  }

 private:
  Value held(const Json& json) {
    switch (json.type()) {
      case Json::value_t::null:
        return value::None{};
      case Json::value_t::boolean:
        return json.get<bool>();
      case Json::value_t::number_integer:
      case Json::value_t::number_unsigned:
        if (json.is_number_unsigned() && json.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max()) {
          refuse(json);
        }
        return json.get<std::int64_t>();
      case Json::value_t::number_float:
        return json.get<double>();
      case Json::value_t::string:
        return json.get<std::string>();
      case Json::value_t::array:
        return value::List{items(json)};
      case Json::value_t::object:
        return json.size() == 1 && is_tag(json.begin().key()) ? tagged(json.begin().key(), *json.begin()) : dict(json);
      default:
        refuse(json);
    }
  }

  std::vector<Value> items(const Json& json) {
    if (!json.is_array()) refuse(json);
    std::vector<Value> values;
    for (const auto& each : json) values.push_back(read(each));
    return values;
  }

  Value dict(const Json& json) {
    value::Dict dict;
    for (const auto& [key, each] : json.items()) dict.items.emplace_back(key, read(each));
    return dict;
  }

  at::Tensor tensor(const Json& json) {
    if (!json.is_number_unsigned()) refuse(json);
    return tensor_(json.get<std::size_t>());
  }

  Value tagged(const std::string& tag, const Json& json) {
    if (tag == "tuple") return value::Tuple{items(json)};
    if (tag == "tensor") return tensor(json);
    if (tag == "bytes") return from_hex(json);
    if (tag == "object") return object(json);
    if (tag == "slice") {
      auto bounds = items(json);
      if (bounds.size() != 3) refuse(json);
      return value::Slice{std::move(bounds)};
    }
    if (tag == "dict") {
      value::Dict dict;
      for (const auto& pair : items(json)) {
        const auto* both = pair.get_if<value::List>();
        if (both == nullptr || both->items.size() != 2) refuse(json);
        dict.items.emplace_back(both->items[0], both->items[1]);
      }
      return dict;
    }
    if (!json.is_string()) refuse(json);
    const auto text = json.get<std::string>();
    if (tag == "float" && text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (tag == "float" && text == "inf") return std::numeric_limits<double>::infinity();
    if (tag == "float" && text == "-inf") return -std::numeric_limits<double>::infinity();
    if (tag == "device") return device(json, text);
    if (tag != "dtype") refuse(json);
    for (int i = 0; i < 24; ++i) {
      const auto dtype = static_cast<layout::DType>(i);
      if (traits(dtype).name == text) return scalar_type(dtype);
    }
    refuse(json);
  }

  static Value device(const Json& json, const std::string& text) {
    try {
      return at::Device(text);
    } catch (const c10::Error&) {
      refuse(json);
    }
  }

  Value object(const Json& json) {
    if (!allow_objects_) {
      throw faces::refusal("pickled", "the checkpoint");
    }
    if (!json.is_object() || !json.contains("codec") || !json["codec"].is_string() || !json.contains("bytes") ||
        !json.contains("tensors")) {
      refuse(json);
    }
    value::Opaque opaque{json["codec"].get<std::string>(), from_hex(json["bytes"]), {}};
    for (const auto& each : items(json["tensors"])) opaque.tensors.push_back(each.as<at::Tensor>());
    return opaque;
  }

  static constexpr int kMostDepth = 200;  // more than a manifest has; the stack has room for it

  const std::function<at::Tensor(std::size_t)>& tensor_;
  const bool allow_objects_;
  int depth_ = 0;
};

}  // namespace

Json to_json(const Value& tree, std::vector<at::Tensor>& tensors, bool allow_objects) {
  return TreeWriter(tensors, allow_objects).write(tree);
}

Value to_value(const Json& json, const std::function<at::Tensor(std::size_t)>& tensor, bool allow_objects) {
  return TreeReader(tensor, allow_objects).read(json);
}

}  // namespace lamina::checkpoint
