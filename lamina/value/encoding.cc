// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/encoding.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/role.h"
#include "lamina/faces/sayings.h"
#include "lamina/value/bytes.h"
#include "lamina/value/tensor_table.h"

namespace lamina::value {
namespace {

// A tree deeper than this is a mistake, and would exhaust the stack of a thread.
constexpr int kMaxDepth = 500;

class Encoder {
 public:
  Encoder(const TensorTable& table, Writer& out) : table_(table), out_(out) {}

  void write(const Value& tree) {
    if (++depth_ > kMaxDepth) throw faces::refusal("too-deep", kMaxDepth);
    out_.put<std::uint8_t>(tree.variant().index());
    std::visit([this](const auto& held) { write_held(held); }, tree.variant());
    --depth_;
  }

 private:
  void write_held(None) {}
  void write_held(bool flag) { out_.put<std::uint8_t>(flag); }
  void write_held(std::int64_t number) { out_.put(number); }
  void write_held(double number) { out_.put(number); }
  void write_held(const std::string& text) { out_.put_block(text); }
  void write_held(const at::Tensor& tensor) { out_.put(table_.index(tensor)); }
  void write_held(const Reference& reference) {
    out_.put(reference.name);
    out_.put(reference.argument);
    out_.put<std::uint8_t>(reference.requires_grad);
  }
  void write_held(at::ScalarType dtype) { out_.put(static_cast<std::int8_t>(dtype)); }
  void write_held(at::Device device) {
    out_.put(static_cast<std::uint8_t>(devices::role_of(device, "the device ", device)));
  }
  void write_held(const Slice& slice) { write_all(slice.bounds); }
  void write_held(const List& list) { write_all(list.items); }
  void write_held(const Tuple& tuple) { write_all(tuple.items); }
  void write_held(const Dict& dict) {
    out_.put<std::uint64_t>(dict.items.size());
    for (const auto& [key, item] : dict.items) {
      write(key);
      write(item);
    }
  }
  void write_held(const Opaque& opaque) {
    out_.put_block(opaque.codec);
    out_.put_block(opaque.bytes);
    out_.put<std::uint64_t>(opaque.tensors.size());
    for (const auto& tensor : opaque.tensors) write_held(tensor);
  }
  void write_all(const std::vector<Value>& items) {
    out_.put<std::uint64_t>(items.size());
    for (const auto& item : items) write(item);
  }

  const TensorTable& table_;
  Writer& out_;
  int depth_ = 0;
};

class Decoder {
 public:
  Decoder(const std::vector<at::Tensor>& tensors, Reader& in) : tensors_(tensors), in_(in) {}

  Value read() {
    if (++depth_ > kMaxDepth) throw base::FormatError("a value is nested too deep");
    Value tree = read_kind(std::make_index_sequence<std::variant_size_v<Value::Variant>>{}, in_.get<std::uint8_t>());
    --depth_;
    return tree;
  }

 private:
  template <std::size_t... kIndex>
  Value read_kind(std::index_sequence<kIndex...>, std::size_t kind) {
    Value tree;
    const bool known = ((kind == kIndex ? (tree = read_held(std::in_place_type<KindAt<kIndex>>), true) : false) || ...);
    if (!known) throw base::FormatError("an unknown kind of value");
    return tree;
  }
  template <std::size_t kIndex>
  using KindAt = std::variant_alternative_t<kIndex, Value::Variant>;

  Value read_held(std::in_place_type_t<None>) { return None{}; }
  Value read_held(std::in_place_type_t<bool>) { return in_.get<std::uint8_t>() != 0; }
  Value read_held(std::in_place_type_t<std::int64_t>) { return in_.get<std::int64_t>(); }
  Value read_held(std::in_place_type_t<double>) { return in_.get<double>(); }
  Value read_held(std::in_place_type_t<std::string>) { return std::string(in_.get_block()); }
  Value read_held(std::in_place_type_t<at::Tensor>) { return read_tensor(); }
  Value read_held(std::in_place_type_t<Reference>) {
    Reference reference;
    reference.name = in_.get<base::CallId>();
    reference.argument = in_.get<std::int64_t>();
    reference.requires_grad = in_.get<std::uint8_t>() != 0;
    return reference;
  }
  Value read_held(std::in_place_type_t<at::ScalarType>) {
    const auto dtype = in_.get<std::int8_t>();
    if (dtype < 0 || dtype >= static_cast<int>(at::ScalarType::NumOptions)) throw base::FormatError("an unknown dtype");
    return static_cast<at::ScalarType>(dtype);
  }
  Value read_held(std::in_place_type_t<at::Device>) {
    return devices::device_of(devices::read_role(in_.get<std::uint8_t>()));
  }
  Value read_held(std::in_place_type_t<Slice>) {
    Slice slice{read_all()};
    if (slice.bounds.size() != 3) throw base::FormatError("a slice without three bounds");
    return slice;
  }
  Value read_held(std::in_place_type_t<List>) { return List{read_all()}; }
  Value read_held(std::in_place_type_t<Tuple>) { return Tuple{read_all()}; }
  Value read_held(std::in_place_type_t<Dict>) {
    Dict dict;
    for (auto left = in_.get_count(); left > 0; --left) {
      Value key = read();
      dict.items.emplace_back(std::move(key), read());
    }
    return dict;
  }
  Value read_held(std::in_place_type_t<Opaque>) {
    Opaque opaque;
    opaque.codec = in_.get_block();
    opaque.bytes = in_.get_block();
    for (auto left = in_.get_count(); left > 0; --left) opaque.tensors.push_back(read_tensor());
    return opaque;
  }
  std::vector<Value> read_all() {
    std::vector<Value> items;
    for (auto left = in_.get_count(); left > 0; --left) items.push_back(read());
    return items;
  }
  at::Tensor read_tensor() {
    const auto index = in_.get<std::uint32_t>();
    if (index >= tensors_.size()) throw base::FormatError("a tensor that is not in the table");
    return tensors_[index];
  }

  const std::vector<at::Tensor>& tensors_;
  Reader& in_;
  int depth_ = 0;
};

}  // namespace

Encoded encode(const Value& tree) {
  const TensorTable table(tree);
  Writer out;
  Encoded encoded;
  encoded.buffers = table.write(out);
  Encoder(table, out).write(tree);
  encoded.meta = out.take();
  return encoded;
}

Value decode(std::string_view meta, std::vector<at::Tensor> buffers) {
  Reader in(meta);
  const auto tensors = TensorTable::read(in, buffers);
  Value tree = Decoder(tensors, in).read();
  in.expect_end();
  return tree;
}

Value copied(const Value& tree) {
  Encoded encoded = encode(tree);
  for (at::Tensor& buffer : encoded.buffers) buffer = buffer.clone();
  return decode(encoded.meta, std::move(encoded.buffers));
}

}  // namespace lamina::value
