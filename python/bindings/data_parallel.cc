// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/data_parallel/buffers.h"
#include "lamina/data_parallel/gradients.h"
#include "lamina/data_parallel/passes.h"
#include "lamina/session/session.h"
#include "python/bindings/bindings.h"
#include "python/bindings/hooks.h"

namespace lamina::python {
namespace {

using session::Session;
using Rows = std::vector<std::pair<std::string, at::Tensor>>;
using Release = py::gil_scoped_release;

std::vector<data_parallel::NamedTensor> named(const Rows& rows) {
  std::vector<data_parallel::NamedTensor> tensors;
  for (const auto& [name, tensor] : rows) tensors.push_back({name, tensor});
  return tensors;
}

// An exception of Python as C++ passes it on.
std::exception_ptr as_thrown(const py::object& exception) {
  PyErr_SetObject(py::type::of(exception).ptr(), exception.ptr());
  try {
    throw py::error_already_set();
  } catch (...) {
    return std::current_exception();
  }
}

// The passes of this rank's replica, and what the replicas compute in them with torch's group of theirs.
class Passes {
 public:
  explicit Passes(std::shared_ptr<Session> session)
      : session_(std::move(session)),
        passes_(session_->job().mailbox(), session_->members(topology::Group::kDp), session_->patience(),
                face_hooks().failures) {}

  void note_call() { passes_.note_call(); }
  std::vector<int> meet(bool trains) { return passes_.meet(trains); }
  void fail(const py::object& exception) {
    const auto error = as_thrown(exception);
    const Release release;
    passes_.fail(error);
  }
  void together(const py::object& compute) {
    const Release release;
    passes_.together([&] {
      const py::gil_scoped_acquire acquire;
      compute();
    });
  }

  void average_gradients(c10d::ProcessGroup& group, const Rows& parameters, std::int64_t bucket_bytes, int divisor) {
    const auto all = replicas(group, "averaging gradients");
    data_parallel::reduce_gradients(named(parameters), *all, bucket_bytes, data_parallel::mean_over(*all, divisor));
  }
  void reduce_gradients(c10d::ProcessGroup& group, const Rows& parameters, std::int64_t bucket_bytes,
                        const py::object& hook) {
    const auto reduce = [&](const data_parallel::GradientBucket& bucket) {
      const py::gil_scoped_acquire acquire;
      return hook(bucket.index, bucket.last, bucket.gradients, bucket.parameters).cast<at::Tensor>();
    };
    data_parallel::reduce_gradients(named(parameters), *replicas(group, "reducing gradients"), bucket_bytes, reduce);
  }
  void broadcast_buffers(c10d::ProcessGroup& group, const Rows& buffers, int root) {
    data_parallel::broadcast_buffers(named(buffers), *replicas(group, "broadcasting buffers"), root);
  }

 private:
  std::unique_ptr<collective::ProcessGroup> replicas(c10d::ProcessGroup& group, const std::string& purpose) {
    auto& job = session_->job();
    return collective::wrap(group, job.mailbox(), job.presence(),
                            {purpose, session_->members(topology::Group::kDp), passes_.patience()});
  }

  const std::shared_ptr<Session> session_;
  data_parallel::Passes passes_;
};

}  // namespace

void bind_data_parallel(py::module_& module) {
  const py::call_guard<Release> release;
  py::class_<Passes>(module, "Passes")
      .def(py::init<std::shared_ptr<Session>>(), py::arg("session"))
      .def("note_call", &Passes::note_call)
      .def("meet", &Passes::meet, py::arg("trains"), release)
      .def("fail", &Passes::fail, py::arg("exception"))
      .def("together", &Passes::together, py::arg("compute"))
      .def("average_gradients", &Passes::average_gradients, release)
      .def("reduce_gradients", &Passes::reduce_gradients, release)
      .def("broadcast_buffers", &Passes::broadcast_buffers, release);
}

}  // namespace lamina::python
