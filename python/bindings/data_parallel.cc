// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/data_parallel/buffers.h"
#include "lamina/data_parallel/gradients.h"
#include "lamina/pipeline/session.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using pipeline::Session;
using Rows = std::vector<std::pair<std::string, at::Tensor>>;

std::unique_ptr<collective::ProcessGroup> replicas(Session& session, c10d::ProcessGroup& group,
                                                   const std::string& purpose) {
  return collective::wrap(group, session.job().mailbox(), session.job().presence(),
                          {purpose, session.members(topology::Group::kDp), session.patience()});
}

std::vector<data_parallel::NamedTensor> named(const Rows& rows) {
  std::vector<data_parallel::NamedTensor> tensors;
  for (const auto& [name, tensor] : rows) tensors.push_back({name, tensor});
  return tensors;
}

void average_gradients(Session& session, c10d::ProcessGroup& group, const Rows& parameters, std::int64_t bucket_bytes,
                       int divisor) {
  const auto all = replicas(session, group, "averaging gradients");
  data_parallel::reduce_gradients(named(parameters), *all, bucket_bytes, data_parallel::mean_over(*all, divisor));
}

void reduce_gradients(Session& session, c10d::ProcessGroup& group, const Rows& parameters, std::int64_t bucket_bytes,
                      const py::object& hook) {
  const auto reduce = [&](const data_parallel::GradientBucket& bucket) {
    const py::gil_scoped_acquire acquire;
    return hook(bucket.index, bucket.last, bucket.gradients, bucket.parameters).cast<at::Tensor>();
  };
  const auto all = replicas(session, group, "reducing gradients");
  data_parallel::reduce_gradients(named(parameters), *all, bucket_bytes, reduce);
}

void broadcast_buffers(Session& session, c10d::ProcessGroup& group, const Rows& buffers, int root) {
  data_parallel::broadcast_buffers(named(buffers), *replicas(session, group, "broadcasting buffers"), root);
}

void sum_over_replicas(Session& session, c10d::ProcessGroup& group, at::Tensor tensor, const std::string& purpose) {
  replicas(session, group, purpose)->sum(tensor);
}

}  // namespace

void bind_data_parallel(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> release;
  module.def("average_gradients", &average_gradients, release);
  module.def("reduce_gradients", &reduce_gradients, release);
  module.def("broadcast_buffers", &broadcast_buffers, release);
  module.def("sum_over_replicas", &sum_over_replicas, release);
}

}  // namespace lamina::python
