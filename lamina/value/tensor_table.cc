// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/tensor_table.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/value/reference_tensor.h"

namespace lamina::value {
namespace {

// The bytes of its storage that a tensor covers.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

// Buffers begin at multiples of this in their storage, so that rows of any dtype stay aligned in the receiver's copy.
constexpr std::int64_t kAlignment = 64;

Range covered(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};  // wherever it says it lies, even beyond its storage
  const std::int64_t item = tensor.element_size();
  const std::int64_t begin = tensor.storage_offset() * item;
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {begin, begin + (last + 1) * item};
}

// The dtypes of numbers: no quantized and no packed ones.
bool travels(at::ScalarType dtype) {
  return at::isFloatingType(dtype) || at::isComplexType(dtype) || at::isIntegralType(dtype, /*includeBool=*/true);
}

void require_sendable(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const bool wrapper = tensor.key_set().has(c10::DispatchKey::Python);
  if (tensor.layout() != at::kStrided || !travels(tensor.scalar_type()) || tensor.is_meta() || tensor.is_nested() ||
      wrapper || !tensor.has_storage()) {
    throw base::UsageError(base::str("a tensor of layout ", tensor.layout(), " and type ", tensor.toString(),
                                     wrapper ? ", a subclass with its own dispatch," : "",
                                     " cannot be sent to another rank; send a dense, strided tensor"),
                           base::Code{"step-cannot-travel"});
  }
}

// The tensor that stands for `tensor` on the way: itself, or a contiguous copy where it covers much more storage than
// it has elements and nothing else of the tree shares that storage.
at::Tensor compacted(const at::Tensor& tensor, bool shared) {
  at::Tensor plain = tensor.detach();
  if (plain._is_zerotensor()) return plain.clone();  // it has no memory
  if (plain.is_conj() || plain.is_neg()) plain = plain.resolve_conj().resolve_neg();
  const bool wasteful = covered(plain).size() > static_cast<std::int64_t>(plain.numel() * plain.element_size());
  return wasteful && !shared ? plain.contiguous() : plain;
}

struct Row {
  std::int32_t buffer = -1;  // -1: an undefined tensor
  std::int8_t dtype = 0;
  bool requires_grad = false;
  std::int64_t offset = 0;  // in elements, from the buffer's begin
};

at::Tensor bytes_of(const at::Tensor& tensor, const Range& range) {
  at::Tensor bytes = at::empty({0}, tensor.options().dtype(at::kByte));
  bytes.set_(tensor.storage(), range.begin, {range.size()}, {1});
  return bytes;
}

void require_fits(const Row& row, at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t item,
                  const at::Tensor& buffer) {
  std::int64_t last = 0, count = 1;
  bool overflow = row.offset < 0, empty = false;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    std::int64_t span = 0;
    overflow |= __builtin_mul_overflow(count, std::max<std::int64_t>(sizes[dim], 1), &count);
    overflow |= sizes[dim] < 0 || strides[dim] < 0;
    empty |= sizes[dim] == 0;
    overflow |= __builtin_mul_overflow(std::max<std::int64_t>(sizes[dim], 1) - 1, strides[dim], &span);
    overflow |= __builtin_add_overflow(last, span, &last);
  }
  overflow |= __builtin_add_overflow(last, row.offset, &last);
  std::int64_t end = 0;
  overflow |= __builtin_add_overflow(last, empty ? 0 : 1, &end) || __builtin_mul_overflow(end, item, &end);
  if (overflow || (!empty && end > buffer.numel())) throw base::FormatError("a tensor exceeds its buffer");
}

at::Tensor read_tensor(Reader& in, const std::vector<at::Tensor>& buffers) {
  Row row;
  row.buffer = in.get<std::int32_t>();
  if (row.buffer < 0) return {};
  row.dtype = in.get<std::int8_t>();
  row.requires_grad = in.get<std::uint8_t>() != 0;
  row.offset = in.get<std::int64_t>();
  std::vector<std::int64_t> sizes(in.get_count()), strides(sizes.size());
  for (auto& size : sizes) size = in.get<std::int64_t>();
  for (auto& stride : strides) stride = in.get<std::int64_t>();
  if (row.dtype < 0 || row.dtype >= static_cast<int>(at::ScalarType::NumOptions) ||
      static_cast<std::size_t>(row.buffer) >= buffers.size() || sizes.size() > 64) {
    throw base::FormatError("a tensor's row is malformed");
  }
  const auto dtype = static_cast<at::ScalarType>(row.dtype);
  if (!travels(dtype) || (row.requires_grad && !at::isFloatingType(dtype) && !at::isComplexType(dtype))) {
    throw base::FormatError("a tensor's dtype is malformed");
  }
  const at::Tensor& buffer = buffers[row.buffer];
  require_fits(row, sizes, strides, static_cast<std::int64_t>(c10::elementSize(dtype)), buffer);
  if (auto source = source_of(buffer)) {  // see [Note: no room]
    const TensorSpec spec{std::move(sizes), std::move(strides), dtype, buffer.device()};
    return make_reference(spec, std::move(source), Strides::kAsSpecified).set_requires_grad(row.requires_grad);
  }
  at::Tensor tensor = at::empty({0}, buffer.options().dtype(dtype));
  tensor.set_(buffer.storage(), row.offset, sizes, strides);
  return tensor.set_requires_grad(row.requires_grad);
}

}  // namespace

TensorTable::TensorTable(const Value& tree) {
  for_each_tensor(tree, [&](const at::Tensor& tensor) {
    require_sendable(tensor);
    const auto [place, fresh] = index_.try_emplace(tensor.unsafeGetTensorImpl(), tensors_.size());
    if (fresh) tensors_.push_back(tensor);
  });
}

std::uint32_t TensorTable::index(const at::Tensor& tensor) const { return index_.at(tensor.unsafeGetTensorImpl()); }

std::vector<at::Tensor> TensorTable::write(Writer& out) const {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  std::unordered_map<const void*, int> users;
  for (const auto& tensor : tensors_) {
    if (tensor.defined()) ++users[tensor.storage().unsafeGetStorageImpl()];
  }
  std::vector<at::Tensor> plain;
  std::unordered_map<const void*, Range> ranges;
  for (const auto& tensor : tensors_) {
    if (!tensor.defined()) {
      plain.emplace_back();
      continue;
    }
    plain.push_back(compacted(tensor, users[tensor.storage().unsafeGetStorageImpl()] > 1));
    const Range range = covered(plain.back());
    Range& whole = ranges[plain.back().storage().unsafeGetStorageImpl()];
    if (range.size() == 0) continue;
    whole.begin = (whole.size() == 0 ? range.begin : std::min(whole.begin, range.begin)) / kAlignment * kAlignment;
    whole.end = std::max(whole.end, range.end);
  }
  std::vector<at::Tensor> buffers;
  std::unordered_map<const void*, std::int32_t> buffer_index;
  out.put<std::uint64_t>(tensors_.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    if (!plain[i].defined()) {
      out.put<std::int32_t>(-1);
      continue;
    }
    const void* storage = plain[i].storage().unsafeGetStorageImpl();
    const Range& range = ranges.at(storage);
    const auto [place, fresh] = buffer_index.try_emplace(storage, buffers.size());
    if (fresh) buffers.push_back(bytes_of(plain[i], range));
    out.put(place->second);
    out.put(static_cast<std::int8_t>(plain[i].scalar_type()));
    out.put<std::uint8_t>(tensors_[i].requires_grad());
    const auto skipped = range.begin / static_cast<std::int64_t>(plain[i].element_size());
    out.put<std::int64_t>(plain[i].numel() == 0 ? 0 : plain[i].storage_offset() - skipped);
    out.put<std::uint64_t>(plain[i].dim());
    for (auto size : plain[i].sizes()) out.put<std::int64_t>(size);
    for (auto stride : plain[i].strides()) out.put<std::int64_t>(stride);
  }
  return buffers;
}

std::vector<at::Tensor> TensorTable::read(Reader& in, const std::vector<at::Tensor>& buffers) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors(in.get_count());
  for (auto& tensor : tensors) tensor = read_tensor(in, buffers);
  return tensors;
}

}  // namespace lamina::value
