// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/guarded_places.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

#include "lamina/value/guarded.h"

namespace lamina::value {
namespace {

constexpr auto kToTheEnd = std::numeric_limits<std::int64_t>::max();

// How many places each result of an operation has that gives several.
std::vector<std::int64_t> sizes_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack, std::int64_t all) {
  const auto& schema = op.schema();
  const auto along = [&](std::int64_t size) { return std::vector((all + size - 1) / size, size); };
  if (schema.name() == "aten::unbind") return along(1);
  if (schema.name() == "aten::split") {
    const auto size = number(argument(schema, stack, "split_size"), all);
    return size > 0 ? along(size) : std::vector<std::int64_t>();
  }
  std::vector<std::int64_t> sizes;
  if (schema.name() != "aten::split_with_sizes") return sizes;
  for (const c10::IValue& each : argument(schema, stack, "split_sizes")->toListRef()) sizes.push_back(number(each, 0));
  return sizes;
}

bool are_of_whole(const PlacesAlong& places, const at::Tensor& slice) {
  const auto [cut, extent] = where_cut(slice);
  if (cut == WhereCut::kJoined) return has_parts_at(slice, places);
  if (cut >= 0 && places.dim != cut) return true;
  return places.begin == 0 && places.step == 1 && places.end >= extent;
}

}  // namespace

std::optional<c10::IValue> argument(const c10::FunctionSchema& schema, const torch::jit::Stack& stack,
                                    const std::string& name) {
  const auto index = schema.argumentIndexWithName(name);
  if (!index) return std::nullopt;
  return torch::jit::peek(stack, static_cast<std::size_t>(*index), schema.arguments().size());
}

std::int64_t number(const std::optional<c10::IValue>& value, std::int64_t otherwise) {
  return !value || value->isNone() ? otherwise : value->toSymInt().guard_int(__FILE__, __LINE__);
}

std::vector<PlacesAlong> places_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                                   const at::Tensor& tensor) {
  const auto& schema = op.schema();
  const auto given = number(argument(schema, stack, "dim"), 0);
  const auto dim = static_cast<int>(given < 0 ? given + tensor.dim() : given);
  if (dim < 0 || dim >= tensor.dim()) return {};
  const auto read = [&](const char* name, std::int64_t otherwise) {
    return number(argument(schema, stack, name), otherwise);
  };
  if (schema.name() == "aten::slice") return {{dim, read("start", 0), read("end", kToTheEnd), read("step", 1)}};
  if (schema.name() == "aten::select") {
    const auto index = read("index", 0), first = index < 0 ? index + tensor.size(dim) : index;
    return {{dim, first, first + 1}};
  }
  std::vector<PlacesAlong> places;
  std::int64_t begin = 0;
  for (const auto size : sizes_of(op, stack, tensor.size(dim))) {
    places.push_back({dim, begin, begin + size});
    begin += size;
  }
  return places;
}

bool has_places_of_whole(const c10::OperatorHandle& op, const std::vector<PlacesAlong>& places,
                         const at::Tensor& slice) {
  constexpr std::array<std::string_view, 3> kOthers{"aten::diagonal", "aten::unfold", "aten::as_strided"};
  if (places.empty()) return std::ranges::find(kOthers, op.schema().name()) == kOthers.end();
  return std::ranges::all_of(places, [&](const PlacesAlong& each) { return are_of_whole(each, slice); });
}

}  // namespace lamina::value
