// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cctype>
#include <map>

#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/dist/current.h"
#include "lamina/dist/dist.h"
#include "lamina/value/guarded_calls.h"

namespace lamina::dist {
namespace {

using collective::CallOptions;
using collective::Group;
using collective::Reduction;

Reduction reduction_of(std::string name) {
  static const std::map<std::string, Reduction> known = {{"SUM", Reduction::kSum},     {"PRODUCT", Reduction::kProduct},
                                                         {"MIN", Reduction::kMin},     {"MAX", Reduction::kMax},
                                                         {"BAND", Reduction::kBitAnd}, {"BOR", Reduction::kBitOr},
                                                         {"BXOR", Reduction::kBitXor}};
  const std::string given = name;
  std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::toupper(letter); });
  const auto found = known.find(name);
  if (found != known.end()) return found->second;
  throw base::UsageError(
      base::str("all_reduce: '", given, "' is not allowed; expected one of SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR"));
}

// A collective would take slices of a parameter for the same.
void require_here(const std::string& what, const at::Tensor& tensor) {
  value::require_whole(tensor, what);
  if (devices::is_host(tensor)) return;
  throw base::UsageError(base::str(what, ": a tensor on ", tensor.device().str(), ": Gloo takes those of the CPU"));
}

// A group's tensors are dense; what is not is copied there and back.
template <class Start>
void run_in_place(const std::string& what, const at::Tensor& tensor, const Start& start) {
  require_here(what, tensor);
  if (group_for(what) == nullptr) return;
  const auto dense = tensor.contiguous();
  run(what,
      [&](Group& group, const collective::CallOptions& call_options) { return start(group, dense, call_options); });
  if (!dense.is_same(tensor)) tensor.copy_(dense);
}

}  // namespace

void barrier() {
  if (group_for("barrier()") == nullptr) return;
  run("barrier()",
      [](Group& group, const collective::CallOptions& call_options) { return group.barrier(call_options); });
}

void all_reduce(const at::Tensor& tensor, const std::string& reduce_operation) {
  const auto reduction = reduction_of(reduce_operation);
  run_in_place("all_reduce()", tensor,
               [&](Group& group, const at::Tensor& dense, const collective::CallOptions& call_options) {
                 return group.all_reduce(dense, reduction, call_options);
               });
}

void broadcast(const at::Tensor& tensor, int src) {
  if (src < 0 || src >= get_world_size()) {
    throw base::UsageError(
        base::str("broadcast(): rank ", src, " is none of the ", get_world_size(), " of this world"));
  }
  run_in_place("broadcast()", tensor,
               [&](Group& group, const at::Tensor& dense, const collective::CallOptions& call_options) {
                 return group.broadcast(dense, src, call_options);
               });
}

std::vector<at::Tensor> all_gather(const at::Tensor& tensor) {
  if (group_for("all_gather()") == nullptr) return {tensor};
  require_here("all_gather()", tensor);
  auto shape = tensor.sizes().vec();
  shape.insert(shape.begin(), get_world_size());
  const auto all = at::empty(shape, tensor.options());
  const auto own = tensor.contiguous();
  run("all_gather()", [&](Group& group, const collective::CallOptions& call_options) {
    return group.all_gather(all, own, call_options);
  });
  return all.unbind(0);
}

}  // namespace lamina::dist
