// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "lamina/base/error.h"
#include "lamina/value/reference_tensor.h"

namespace lamina::tensor_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Ints = at::IntArrayRef;

// Signatures that torch's dispatcher knows them by.
using OfWhole = at::Tensor(const at::Tensor&, const std::string&);
using OfCopied = void(const at::Tensor&, const std::string&);
using OfCut = at::Tensor(const at::Tensor&, std::int64_t, c10::SymIntArrayRef, const std::string&);
using OfCuts = at::Tensor(const at::Tensor&, std::int64_t, c10::SymIntArrayRef, std::int64_t, c10::SymIntArrayRef,
                          const std::string&);

TORCH_LIBRARY_FRAGMENT(lamina, library) {
  const auto def = [&](const std::string& schema) { library.def(schema.c_str(), {at::Tag::pt2_compliant_tag}); };
  def("tp_own(Tensor(a) slice) -> Tensor(a)");
  def("tp_copy(Tensor(a) whole, str team) -> Tensor(a)");
  def("tp_copied(Tensor whole, str team) -> ()");
  def("tp_all_reduce(Tensor given, str team) -> Tensor");
  for (const std::string name : {"tp_gather", "tp_scatter", "tp_all_gather", "tp_reduce_scatter"}) {
    def(name + "(Tensor given, int dim, SymInt[] sizes, str team) -> Tensor");
  }
  def("tp_all_to_all(Tensor given, int from_dim, SymInt[] from_sizes, int to_dim, SymInt[] to_sizes, str team) -> "
      "Tensor");
}

template <class Signature>
auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Values.

Cut cut_of(std::int64_t dim, Ints sizes) { return {dim, sizes.vec()}; }

template <class Make>
at::Tensor for_user(const Make& make) {
  at::Tensor made;
  value::for_user([&] { made = make(); });
  return made;
}

at::Tensor all_reduce_values(const at::Tensor& given, const std::string& team) {
  return for_user([&] { return find_team(team)->all_reduce(given); });
}

// Operators of one cut, as members of a team do them.
template <auto function>
at::Tensor values_of_cut(const at::Tensor& given, std::int64_t dim, Ints sizes, const std::string& team) {
  return for_user([&] { return (find_team(team).get()->*function)(given, cut_of(dim, sizes)); });
}

at::Tensor all_to_all_values(const at::Tensor& given, std::int64_t from_dim, Ints from_sizes, std::int64_t to_dim,
                             Ints to_sizes, const std::string& team) {
  return for_user(
      [&] { return find_team(team)->all_to_all(given, cut_of(from_dim, from_sizes), cut_of(to_dim, to_sizes)); });
}

// Does nothing: a trace sees by it that a copy's gradient is to be added up.
void copied(const at::Tensor& /*whole*/, const std::string& /*team*/) {}

TORCH_LIBRARY_IMPL(lamina, CompositeExplicitAutograd, library) {
  library.impl("tp_copied", &copied);
  library.impl("tp_all_reduce", &all_reduce_values);
  library.impl("tp_gather", &values_of_cut<&Team::all_gather>);
  library.impl("tp_all_gather", &values_of_cut<&Team::all_gather>);
  library.impl("tp_scatter", &values_of_cut<&Team::scatter>);
  library.impl("tp_reduce_scatter", &values_of_cut<&Team::reduce_scatter>);
  library.impl("tp_all_to_all", &all_to_all_values);
}

// Shapes.

std::size_t wrapped(std::int64_t dim, const at::Tensor& tensor) {
  return static_cast<std::size_t>(dim < 0 ? dim + tensor.dim() : dim);
}

at::Tensor empty(const at::Tensor& given, const std::vector<c10::SymInt>& shape) {
  return given.new_empty_symint(shape);
}

// Extents along a dimension that this member has a part of, or gets one of.
c10::SymInt whole_extent(const c10::SymInt& part, c10::SymIntArrayRef sizes, const Team& team) {
  if (sizes.empty()) return part * team.size();
  c10::SymInt sum = 0;
  for (const auto& size : sizes) sum = sum + size;
  return sum;
}
c10::SymInt part_extent(const c10::SymInt& whole, c10::SymIntArrayRef sizes, const Team& team) {
  return sizes.empty() ? whole / team.size() : sizes[static_cast<std::size_t>(team.rank())];
}

at::Tensor shape_of_sum(const at::Tensor& given, const std::string& /*team*/) {
  return empty(given, given.sym_sizes().vec());
}

// The shape that an operator of one cut gives, by the extent along it.
template <auto extent_of>
at::Tensor shape_of_cut(const at::Tensor& given, std::int64_t dim, c10::SymIntArrayRef sizes, const std::string& team) {
  auto shape = given.sym_sizes().vec();
  auto& extent = shape.at(wrapped(dim, given));
  extent = extent_of(extent, sizes, *find_team(team));
  return empty(given, shape);
}

at::Tensor shape_of_exchanged(const at::Tensor& given, std::int64_t from_dim, c10::SymIntArrayRef from_sizes,
                              std::int64_t to_dim, c10::SymIntArrayRef to_sizes, const std::string& team) {
  const auto members = find_team(team);
  auto shape = given.sym_sizes().vec();
  auto &from = shape.at(wrapped(from_dim, given)), &to = shape.at(wrapped(to_dim, given));
  from = part_extent(from, from_sizes, *members);
  to = whole_extent(to, to_sizes, *members);
  return empty(given, shape);
}

TORCH_LIBRARY_IMPL(lamina, Meta, library) {
  library.impl("tp_all_reduce", &shape_of_sum);
  library.impl("tp_gather", &shape_of_cut<&whole_extent>);
  library.impl("tp_all_gather", &shape_of_cut<&whole_extent>);
  library.impl("tp_scatter", &shape_of_cut<&part_extent>);
  library.impl("tp_reduce_scatter", &shape_of_cut<&part_extent>);
  library.impl("tp_all_to_all", &shape_of_exchanged);
}

// Gradients: the table in operators.h, right to left.

struct CopyFunction : Function<CopyFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& whole, const std::string& team) {
    context->saved_data["team"] = team;
    static const auto operation = op<OfCopied>("lamina::tp_copied");
    if (Alone::here()) operation.call(whole, team);
    return at::alias(whole);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {all_reduce(gradients[0], context->saved_data["team"].toStringRef()), {}};
  }
};

struct AllReduceFunction : Function<AllReduceFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given, const std::string& team) {
    context->saved_data["team"] = team;
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto operation = op<OfWhole>("lamina::tp_all_reduce");
    return operation.call(given, team);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {copy(gradients[0], context->saved_data["team"].toStringRef()), {}};
  }
};

// An operator of one cut, and the one that its gradients go through.
enum class OneCut { kGather, kScatter, kAllGather, kReduceScatter };

constexpr const char* name_of(OneCut kind) {
  switch (kind) {
    case OneCut::kGather:
      return "lamina::tp_gather";
    case OneCut::kScatter:
      return "lamina::tp_scatter";
    case OneCut::kAllGather:
      return "lamina::tp_all_gather";
    case OneCut::kReduceScatter:
      return "lamina::tp_reduce_scatter";
  }
  return "";
}

constexpr OneCut back_of(OneCut kind) {
  switch (kind) {
    case OneCut::kGather:
      return OneCut::kScatter;
    case OneCut::kScatter:
      return OneCut::kGather;
    case OneCut::kAllGather:
      return OneCut::kReduceScatter;
    case OneCut::kReduceScatter:
      return OneCut::kAllGather;
  }
  return kind;
}

// Sizes of all members along a cut, which the gradient needs, too: those of equal parts follow from the tensor.
template <OneCut kind>
struct CutFunction : Function<CutFunction<kind>> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given, std::int64_t dim,
                            c10::SymIntArrayRef sizes, const std::string& team) {
    context->saved_data["dim"] = dim;
    context->saved_data["sizes"] = sizes;
    context->saved_data["team"] = team;
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto operation = op<OfCut>(name_of(kind));
    return operation.call(given, dim, sizes, team);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& saved = context->saved_data;
    static const auto operation = op<OfCut>(name_of(back_of(kind)));
    return {operation.call(gradients[0], saved["dim"].toInt(), saved["sizes"].toSymIntVector(),
                           saved["team"].toStringRef()),
            {},
            {},
            {}};
  }
};

struct AllToAllFunction : Function<AllToAllFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given, std::int64_t from_dim,
                            c10::SymIntArrayRef from_sizes, std::int64_t to_dim, c10::SymIntArrayRef to_sizes,
                            const std::string& team) {
    auto& saved = context->saved_data;
    saved["from_dim"] = from_dim;
    saved["from_sizes"] = from_sizes;
    saved["to_dim"] = to_dim;
    saved["to_sizes"] = to_sizes;
    saved["team"] = team;
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto operation = op<OfCuts>("lamina::tp_all_to_all");
    return operation.call(given, from_dim, from_sizes, to_dim, to_sizes, team);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& saved = context->saved_data;
    static const auto operation = op<OfCuts>("lamina::tp_all_to_all");
    return {
        operation.call(gradients[0], saved["to_dim"].toInt(), saved["to_sizes"].toSymIntVector(),
                       saved["from_dim"].toInt(), saved["from_sizes"].toSymIntVector(), saved["team"].toStringRef()),
        {},
        {},
        {},
        {},
        {}};
  }
};

at::Tensor copy_with_gradient(const at::Tensor& whole, const std::string& team) {
  return CopyFunction::apply(whole, team);
}
at::Tensor all_reduce_with_gradient(const at::Tensor& given, const std::string& team) {
  return AllReduceFunction::apply(given, team);
}
template <OneCut kind>
at::Tensor cut_with_gradient(const at::Tensor& given, std::int64_t dim, c10::SymIntArrayRef sizes,
                             const std::string& team) {
  return CutFunction<kind>::apply(given, dim, sizes, team);
}
at::Tensor all_to_all_with_gradient(const at::Tensor& given, std::int64_t from_dim, c10::SymIntArrayRef from_sizes,
                                    std::int64_t to_dim, c10::SymIntArrayRef to_sizes, const std::string& team) {
  return AllToAllFunction::apply(given, from_dim, from_sizes, to_dim, to_sizes, team);
}

// The slice of a layer, as it computes with it. What is guarded goes by way of the wrapper key.
at::Tensor own_slice(const at::Tensor& slice) { return at::alias(slice); }

TORCH_LIBRARY_IMPL(lamina, CompositeImplicitAutograd, library) {
  library.impl("tp_own", &own_slice);
  library.impl("tp_copy", &copy_with_gradient);
}

TORCH_LIBRARY_IMPL(lamina, Autograd, library) {
  library.impl("tp_all_reduce", &all_reduce_with_gradient);
  library.impl("tp_gather", &cut_with_gradient<OneCut::kGather>);
  library.impl("tp_scatter", &cut_with_gradient<OneCut::kScatter>);
  library.impl("tp_all_gather", &cut_with_gradient<OneCut::kAllGather>);
  library.impl("tp_reduce_scatter", &cut_with_gradient<OneCut::kReduceScatter>);
  library.impl("tp_all_to_all", &all_to_all_with_gradient);
}

template <OneCut kind>
at::Tensor call(const at::Tensor& given, const Cut& cut, const std::string& team) {
  static const auto operation = op<OfCut>(name_of(kind));
  return operation.call(given, cut.dim, c10::fromIntArrayRefSlow(cut.sizes), team);
}

}  // namespace

at::Tensor own(const at::Tensor& slice) {
  static const auto operation = op<at::Tensor(const at::Tensor&)>("lamina::tp_own");
  return slice.defined() ? operation.call(slice) : slice;
}

at::Tensor copy(const at::Tensor& whole, const std::string& team) {
  static const auto operation = op<OfWhole>("lamina::tp_copy");
  return operation.call(whole, team);
}

at::Tensor all_reduce(const at::Tensor& given, const std::string& team) {
  static const auto operation = op<OfWhole>("lamina::tp_all_reduce");
  return operation.call(given, team);
}

at::Tensor gather(const at::Tensor& part, const Cut& cut, const std::string& team) {
  return call<OneCut::kGather>(part, cut, team);
}

at::Tensor scatter(const at::Tensor& whole, const Cut& cut, const std::string& team) {
  return call<OneCut::kScatter>(whole, cut, team);
}

at::Tensor all_gather(const at::Tensor& part, const Cut& cut, const std::string& team) {
  return call<OneCut::kAllGather>(part, cut, team);
}

at::Tensor reduce_scatter(const at::Tensor& given, const Cut& cut, const std::string& team) {
  return call<OneCut::kReduceScatter>(given, cut, team);
}

at::Tensor all_to_all(const at::Tensor& given, const Cut& from, const Cut& to, const std::string& team) {
  static const auto operation = op<OfCuts>("lamina::tp_all_to_all");
  return operation.call(given, from.dim, c10::fromIntArrayRefSlow(from.sizes), to.dim,
                        c10::fromIntArrayRefSlow(to.sizes), team);
}

}  // namespace lamina::tensor_parallel
