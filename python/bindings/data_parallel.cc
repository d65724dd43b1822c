// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/data_parallel/reducer.h"
#include "lamina/session/session.h"
#include "python/bindings/bindings.h"
#include "python/bindings/hooks.h"

namespace lamina::python {
namespace {

using data_parallel::NamedTensor;
using session::Session;
using topology::Group;
using Release = py::gil_scoped_release;
using Acquire = py::gil_scoped_acquire;

// An exception of Python as C++ passes it on.
std::exception_ptr as_thrown(const py::object& exception) {
  PyErr_SetObject(py::type::of(exception).ptr(), exception.ptr());
  try {
    throw py::error_already_set();
  } catch (...) {
    return std::current_exception();
  }
}

data_parallel::Reducer::Tensors tensors(const py::function& named) {
  return [named] {
    const Acquire acquire;
    std::vector<NamedTensor> tensors;
    for (const auto& row : named()) {
      auto [name, tensor] = row.cast<std::pair<std::string, at::Tensor>>();
      tensors.push_back({std::move(name), std::move(tensor)});
    }
    return tensors;
  };
}

// The job's group of the replicas.
data_parallel::Reducer::Replicas replicas(const std::shared_ptr<Session>& session) {
  return [session](const base::Patience& patience) -> collective::Group& {
    return session->groups().get(Group::kDp, patience);
  };
}

// The engine's, which calls Python for the tensors.
class Reducer {
 public:
  Reducer(const std::shared_ptr<Session>& session, int passes_per_reduction, std::int64_t bucket_bytes,
          bool broadcast_buffers, const py::function& parameters, const py::function& buffers)
      : reducer_({passes_per_reduction, bucket_bytes, broadcast_buffers}, session->mailbox(),
                 session->members(Group::kDp), session->patience(), face_hooks().failures,
                 {tensors(parameters), tensors(buffers), replicas(session)}) {}

  void set_hook(const py::function& hook) {
    reducer_.set_hook([hook](const data_parallel::GradientBucket& bucket) {
      const Acquire acquire;
      return hook(bucket.index, bucket.last, bucket.gradients, bucket.parameters).cast<at::Tensor>();
    });
  }

  void fail_step(const py::object& exception) { fail(&data_parallel::Reducer::fail_step, exception); }
  void fail_backward(const py::object& exception) { fail(&data_parallel::Reducer::fail_backward, exception); }
  void fail_join(const py::object& exception) { fail(&data_parallel::Reducer::fail_join, exception); }

  data_parallel::Reducer& engine() { return reducer_; }

 private:
  using Fail = void (data_parallel::Reducer::*)(const std::exception_ptr&);
  void fail(Fail how, const py::object& exception) {
    const auto error = as_thrown(exception);
    const Release release;
    (reducer_.*how)(error);
  }

  data_parallel::Reducer reducer_;
};

// A method of the engine's.
template <class... Arguments>
auto of_engine(void (data_parallel::Reducer::*method)(Arguments...)) {
  return [method](Reducer& self, Arguments... arguments) { (self.engine().*method)(arguments...); };
}

}  // namespace

void bind_data_parallel(py::module_& module) {
  using Engine = data_parallel::Reducer;
  const py::call_guard<Release> release;
  py::class_<Reducer>(module, "Reducer")
      .def(py::init<std::shared_ptr<Session>, int, std::int64_t, bool, py::function, py::function>(),
           py::arg("session"), py::arg("passes_per_reduction"), py::arg("bucket_bytes"), py::arg("broadcast_buffers"),
           py::arg("parameters"), py::arg("buffers"))
      .def("set_hook", &Reducer::set_hook, py::arg("hook"))
      .def_property_readonly("hooked", [](Reducer& self) { return self.engine().hooked(); })
      .def_property_readonly("broke_off", [](Reducer& self) { return self.engine().broke_off(); })
      .def("begin_step", of_engine(&Engine::begin_step), py::arg("training"), release)
      .def("passed", [](Reducer& self) { return self.engine().passed(); })
      .def("end_step", of_engine(&Engine::end_step))
      .def("fail_step", &Reducer::fail_step, py::arg("exception"))
      .def("note_call", of_engine(&Engine::note_call), py::arg("training"), release)
      .def("begin_backward", of_engine(&Engine::begin_backward))
      .def("fail_backward", &Reducer::fail_backward, py::arg("exception"))
      .def(
          "note_backward", [](Reducer& self, bool accumulated) { return self.engine().note_backward(accumulated); },
          py::arg("accumulated"))
      .def("end_backward", of_engine(&Engine::end_backward), release)
      .def("finish_pass", of_engine(&Engine::finish_pass), release)
      .def("begin_join", of_engine(&Engine::begin_join), py::arg("by_everyone"), py::arg("throws"))
      .def("fail_join", &Reducer::fail_join, py::arg("exception"))
      .def("end_join", of_engine(&Engine::end_join), release);
}

}  // namespace lamina::python
