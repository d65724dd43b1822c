// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/views.h"

#include <ATen/ops/as_strided.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "lamina/remote/signature.h"
#include "lamina/value/bytes.h"
#include "lamina/value/released.h"

namespace lamina::remote {
namespace {

namespace autograd = torch::autograd;

using Numbers = std::vector<std::int64_t>;

struct View {
  std::int64_t output = 0, argument = 0;
  Numbers of;  // the argument's strides
  Numbers sizes, strides;
  std::int64_t offset = 0;
  bool requires_grad = false;
};

// Backwards of views that a strided one can stand for.
constexpr std::array<std::string_view, 17> kViews = {
    "ViewBackward",   "ReshapeAliasBackward", "SliceBackward",     "SelectBackward",  "TransposeBackward",
    "TBackward",      "PermuteBackward",      "UnsqueezeBackward", "SqueezeBackward", "ExpandBackward",
    "AliasBackward",  "AsStridedBackward",    "DiagonalBackward",  "UnfoldBackward",  "SplitBackward",
    "UnbindBackward", "UnsafeViewBackward"};

bool is_plain_view(autograd::Node& node) {
  const auto name = node.name();
  const bool known = std::ranges::any_of(kViews, [&](std::string_view view) {
    return name.starts_with(view) && name.find_first_not_of("0123456789", view.size()) == std::string::npos;
  });
  return known && node.tensor_pre_hooks().empty() && node.pre_hooks().empty() && node.post_hooks().empty() &&
         node.retains_grad_hooks().empty() && node.num_outputs() == 1;
}

// Says that the gradient of `output` is that of a view of `argument`, too.
bool leads_to(const at::Tensor& output, const at::Tensor& argument) {
  const auto end = autograd::impl::gradient_edge(argument);
  auto edge = autograd::impl::gradient_edge(output);
  while (edge.is_valid() && end.is_valid()) {
    if (edge == end) return true;
    if (!is_plain_view(*edge.function)) return false;
    edge = edge.function->next_edge(0);
  }
  return false;
}

bool has_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !value::is_pending(tensor) &&
         !value::is_released(tensor) && tensor.has_storage() && tensor.numel() > 0;
}

bool is_view(const at::Tensor& output, const at::Tensor& argument) {
  return has_memory(argument) && output.storage().is_alias_of(argument.storage()) &&
         output.dtype() == argument.dtype() && (!output.requires_grad() || leads_to(output, argument));
}

void put(value::Writer& out, at::IntArrayRef numbers) {
  out.put<std::uint64_t>(numbers.size());
  for (const auto number : numbers) out.put(number);
}

Numbers get(value::Reader& in) {
  Numbers numbers(in.get_count());
  for (auto& number : numbers) number = in.get<std::int64_t>();
  return numbers;
}

std::vector<View> from_bytes(const std::string& bytes) {
  std::vector<View> found;
  value::Reader in(bytes);
  for (auto count = bytes.empty() ? 0 : in.get_count(); count > 0; --count) {
    View view;
    view.output = in.get<std::int64_t>();
    view.argument = in.get<std::int64_t>();
    view.of = get(in);
    view.sizes = get(in);
    view.strides = get(in);
    view.offset = in.get<std::int64_t>();
    view.requires_grad = in.get<bool>();
    found.push_back(std::move(view));
  }
  return found;
}

// The strides of dimensions of one say nothing.
bool laid_out(const at::Tensor& tensor, const Numbers& strides) {
  if (tensor.dim() != std::ssize(strides)) return false;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) != 1 && tensor.stride(i) != strides[i]) return false;
  }
  return true;
}

at::Tensor made_of(const at::Tensor& argument, const View& view) {
  const at::AutoGradMode grad(view.requires_grad || (!argument.requires_grad() && at::GradMode::is_enabled()));
  const at::Tensor base = argument.requires_grad() && !view.requires_grad ? argument.detach() : argument;
  return base.as_strided(view.sizes, view.strides, argument.storage_offset() + view.offset);
}

void count(const at::Tensor& tensor, WriteCounts& counts) {
  if (tensor.is_inference()) return;
  const auto& version = tensor.unsafeGetTensorImpl()->version_counter();
  counts.emplace_back(version, version.current_version());
}

}  // namespace

std::string views(const value::Value& outputs, const Tensors& arguments) {
  value::Writer out;
  std::uint64_t count = 0;
  const auto tensors = distinct_tensors(outputs);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    if (!has_memory(tensor)) continue;
    const auto found = std::ranges::find_if(arguments, [&](const auto& argument) { return is_view(tensor, argument); });
    if (found == arguments.end()) continue;
    ++count;
    out.put(static_cast<std::int64_t>(i));
    out.put<std::int64_t>(found - arguments.begin());
    put(out, found->strides());
    put(out, tensor.sizes());
    put(out, tensor.strides());
    out.put<std::int64_t>(tensor.storage_offset() - found->storage_offset());
    out.put(tensor.requires_grad());
  }
  if (count == 0) return "";
  value::Writer all;
  all.put(count);
  return all.take() + out.take();
}

SharedViews share_views(value::Value& outputs, const std::string& views, const Tensors& arguments, bool fetches) {
  SharedViews shared;
  if (views.empty()) return shared;
  const auto tensors = distinct_tensors(outputs);
  std::map<const void*, at::Tensor> made;
  for (const auto& view : from_bytes(views)) {
    const auto& argument = arguments.at(view.argument);
    const auto& output = tensors.at(view.output);
    if (value::is_pending(argument)) {
      if (fetches) value::materialise(argument);
      shared.left_apart = shared.left_apart || !fetches;
    }
    count(argument, shared.counts);
    if (!value::is_pending(argument) && has_memory(argument) && laid_out(argument, view.of)) {
      made[output.unsafeGetTensorImpl()] = made_of(argument, view);
    } else {
      count(output, shared.counts);
    }
  }
  value::for_each_tensor(outputs, [&](at::Tensor& tensor) {
    const auto found = tensor.defined() ? made.find(tensor.unsafeGetTensorImpl()) : made.end();
    if (found != made.end()) tensor = found->second;
  });
  return shared;
}

bool any_written(const WriteCounts& counts) {
  return std::ranges::any_of(counts, [](const auto& one) { return one.first.current_version() != one.second; });
}

}  // namespace lamina::remote
