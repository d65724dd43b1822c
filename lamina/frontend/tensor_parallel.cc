// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/tensor_parallel.h"

#include <string>

#include "lamina/frontend/current.h"
#include "lamina/tensor_parallel/operators.h"

namespace lamina {
namespace {

using Sizes = std::vector<std::int64_t>;

// Returns what `run` makes of it, given the name of this rank's team; itself where this rank is alone.
template <class Run>
at::Tensor over_team(const at::Tensor& given, const Run& run) {
  auto& session = *frontend::current().session;
  return session.team() == nullptr ? given : run(session.team_name());
}

using OfCut = at::Tensor(const at::Tensor&, const tensor_parallel::Cut&, const std::string&);

at::Tensor call(OfCut& function, const at::Tensor& given, std::int64_t dim, const Sizes& sizes) {
  return over_team(given, [&](const std::string& team) { return function(given, {dim, sizes}, team); });
}

}  // namespace

at::Tensor tp_copy(const at::Tensor& whole) {
  return over_team(whole, [&](const std::string& team) { return tensor_parallel::copy(whole, team); });
}

at::Tensor tp_all_reduce(const at::Tensor& terms) {
  return over_team(terms, [&](const std::string& team) { return tensor_parallel::all_reduce(terms, team); });
}

at::Tensor tp_gather(const at::Tensor& part, std::int64_t dim, const Sizes& sizes) {
  return call(tensor_parallel::gather, part, dim, sizes);
}

at::Tensor tp_scatter(const at::Tensor& whole, std::int64_t dim, const Sizes& sizes) {
  return call(tensor_parallel::scatter, whole, dim, sizes);
}

at::Tensor tp_all_gather(const at::Tensor& part, std::int64_t dim, const Sizes& sizes) {
  return call(tensor_parallel::all_gather, part, dim, sizes);
}

at::Tensor tp_reduce_scatter(const at::Tensor& terms, std::int64_t dim, const Sizes& sizes) {
  return call(tensor_parallel::reduce_scatter, terms, dim, sizes);
}

at::Tensor tp_all_to_all(const at::Tensor& given, std::int64_t from_dim, std::int64_t to_dim, const Sizes& from_sizes,
                         const Sizes& to_sizes) {
  return over_team(given, [&](const std::string& team) {
    return tensor_parallel::all_to_all(given, {from_dim, from_sizes}, {to_dim, to_sizes}, team);
  });
}

}  // namespace lamina
