// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/hooks.h"

#include <ATen/Parallel.h>
#include <torch/csrc/Exceptions.h>

#include "lamina/base/error.h"
#include "lamina/value/reference_tensor.h"
#include "python/bindings/bindings.h"
#include "python/bindings/convert.h"

namespace lamina::python {
namespace {

// Never destroyed: Python may be gone when the library's statics are.
Hooks*& installed() {
  static Hooks* hooks = nullptr;
  return hooks;
}

py::object made(const char* name, const base::Error& error) {
  const py::object exception = hooks().errors.attr(name)(error.what());
  if (*error.code() != '\0') exception.attr("code") = error.code();
  return exception;
}

void set_exception(const py::object& exception) { PyErr_SetObject(py::type::of(exception).ptr(), exception.ptr()); }

void raise_as(const char* name, const base::Error& error) { set_exception(made(name, error)); }

void raise_peer_error(const base::PeerError& error) {
  const py::object exception = made("PeerError", error);
  if (error.loss()) {
    exception.attr("lost_rank") = error.loss()->rank.value;
    exception.attr("cause") = error.loss()->cause;
  }
  set_exception(exception);
}

void raise_file_error(const base::FileError& error) {
  const py::object exception = made("FileError", error);
  exception.attr("errno") = error.error_number();
  set_exception(exception);
}

void raise_remote(const value::Failure& failure) {
  py::object pickled = py::none();
  if (const auto* bytes = failure.object.get_if<std::string>()) pickled = py::bytes(*bytes);
  const py::object exception =
      hooks().rebuild_exception(failure.type, failure.message, failure.traceback, failure.rank.value, pickled);
  set_exception(exception);
}

// The exception that is set in Python, taken from it.
py::object take_python_error() {
  py::error_already_set error;
  py::object exception = error.value();
  if (error.trace()) PyException_SetTraceback(exception.ptr(), error.trace().ptr());
  return exception;
}

class PythonFailures : public value::Failures {
 public:
  value::Failure describe(std::exception_ptr error, base::Rank rank) override {
    py::gil_scoped_acquire gil;
    set_python_error(error);
    const py::tuple parts = hooks().describe_exception(take_python_error(), rank.value);
    value::Failure failure{parts[0].cast<std::string>(),
                           parts[1].cast<std::string>(),
                           parts[2].cast<std::string>(),
                           base::Rank(parts[3].cast<std::int64_t>()),
                           {}};
    if (!parts[4].is_none()) failure.object = parts[4].cast<std::string>();
    return failure;
  }
};

class PythonModules : public model::Modules {
 public:
  PythonModules(std::vector<std::string> names, std::vector<bool> own_stream, std::vector<int> streams,
                std::vector<bool> dynamic)
      : names_(std::move(names)),
        own_stream_(std::move(own_stream)),
        streams_(std::move(streams)),
        dynamic_(std::move(dynamic)) {}

  std::string name(base::ModuleId id) const override { return names_.at(id.value); }
  bool starts_rng_stream(base::ModuleId id) const override { return own_stream_.at(id.value); }
  int rng_streams(base::ModuleId id) const override { return streams_.at(id.value); }
  bool dynamic(base::ModuleId id) const override { return dynamic_.at(id.value); }
  model::CallerState capture_state(base::ModuleId id) override {
    py::gil_scoped_acquire gil;
    auto [state, news] = hooks().capture_state(id.value).cast<std::pair<std::string, std::string>>();
    return {std::move(state), std::move(news)};
  }
  void hear(const std::string& news) override {
    py::gil_scoped_acquire gil;
    hooks().hear(py::bytes(news));
  }
  value::Value call(base::ModuleId id, const std::string& state, value::Value arguments) override {
    const auto& parts = arguments.as<value::Tuple>().items;
    py::gil_scoped_acquire gil;
    const py::object args = to_object(parts.at(0)), kwargs = to_object(parts.at(1));
    arguments = {};  // the module alone holds them now
    return to_value(hooks().run_module(id.value, py::bytes(state), args, kwargs));
  }

 private:
  const std::vector<std::string> names_;
  const std::vector<bool> own_stream_;
  const std::vector<int> streams_;
  const std::vector<bool> dynamic_;
};

// A worker keeps one Python thread state for its whole life: its own, and not one of PyGILState_Ensure(). That one ends
// with its last user, who would be whoever takes the GIL while the thread's own values (threading.local) are destroyed:
// a graph among them does.
thread_local PyThreadState* worker_thread = nullptr;

void begin_thread() {
  worker_thread = PyThreadState_New(PyInterpreterState_Main());
  PyEval_RestoreThread(worker_thread);
  PyEval_SaveThread();
  at::init_num_threads();
}

void end_thread() {
  PyEval_RestoreThread(worker_thread);
  PyThreadState_Clear(worker_thread);
  PyThreadState_DeleteCurrent();
}

// A wait in a thread that may be in Python: reading a tensor's memory holds the GIL, an operation does not.
void without_gil(const std::function<void()>& wait) {
  if (!PyGILState_Check()) return wait();
  const py::gil_scoped_release release;
  wait();
}

// In an operation that Python called, torch keeps the type of Python's exceptions alone.
void raise_in_python(std::exception_ptr error) {
  py::gil_scoped_acquire gil;
  set_python_error(error);
  throw py::error_already_set();
}

// A context of Python (contextvars) as it was at one moment. May be let go without the GIL.
class CallContext {
 public:
  static CallContext of_this_thread() { return CallContext(PyContext_CopyCurrent()); }
  CallContext copy() const { return CallContext(PyContext_Copy(object_.ptr())); }
  void enter() const { require(PyContext_Enter(object_.ptr()) == 0); }
  void exit() const {
    if (PyContext_Exit(object_.ptr()) != 0) PyErr_WriteUnraisable(object_.ptr());
  }

  CallContext(CallContext&&) = default;
  ~CallContext() {
    py::gil_scoped_acquire gil;
    object_ = {};
  }

 private:
  explicit CallContext(PyObject* made) : object_(py::reinterpret_steal<py::object>(made)) { require(made != nullptr); }
  static void require(bool well) {
    if (!well) throw py::error_already_set();
  }
  py::object object_;
};

// This thread is in a copy of a context while it lives.
class InContext {
 public:
  explicit InContext(const CallContext& context) : copy_(copied(context)) {}
  ~InContext() {
    py::gil_scoped_acquire gil;
    copy_.exit();
  }
  InContext(const InContext&) = delete;

 private:
  static CallContext copied(const CallContext& context) {
    py::gil_scoped_acquire gil;
    auto copy = context.copy();
    copy.enter();
    return copy;
  }
  const CallContext copy_;
};

runtime::WorkerPool::Hooks::RunInContext capture_context() {
  py::gil_scoped_acquire gil;
  return [context = std::make_shared<CallContext>(CallContext::of_this_thread())](const std::function<void()>& work) {
    const InContext in_context(*context);
    work();
  };
}

base::Call name_call() {
  py::gil_scoped_acquire gil;
  const auto parts = hooks().name_call().cast<py::tuple>();
  return {parts[0].cast<std::string>(), parts[1].cast<std::string>(), parts[2].cast<std::string>()};
}

}  // namespace

const Hooks& hooks() {
  if (installed() == nullptr) throw base::InternalError("the hooks of the Python face are not set");
  return *installed();
}

void bind_hooks(py::module_& module) {
  module.def(
      "set_hooks",
      [](py::object run_module, py::object capture_state, py::object hear, py::object describe_exception,
         py::object rebuild_exception, py::object pack, py::object unpack, py::object name_call, py::object make_remote,
         py::object errors) {
        delete std::exchange(installed(), new Hooks{run_module, capture_state, hear, describe_exception,
                                                    rebuild_exception, pack, unpack, name_call, make_remote, errors});
      },
      py::kw_only(), py::arg("run_module"), py::arg("capture_state"), py::arg("hear"), py::arg("describe_exception"),
      py::arg("rebuild_exception"), py::arg("pack"), py::arg("unpack"), py::arg("name_call"), py::arg("make_remote"),
      py::arg("errors"),
      "Sets what the engine calls back, once at import. All are called with the GIL held.\n\nrun_module(index, state, "
      "args, kwargs) runs a module that this rank owns. capture_state(index) gives the state that a call of the module "
      "should run under, and the news that its owner is to hear(news) before. describe_exception(exception, rank) "
      "gives (type, message, traceback, rank, pickled or None): an exception that came from another rank keeps that "
      "rank's. Its inverse is rebuild_exception. The codec of objects without an encoding of their own is pack and "
      "unpack. name_call() gives the public function that the calling thread is in, the place in the user's code that "
      "called it, and the line of ours that is executed. make_remote(data) serves a request of another rank to the "
      "face. In `errors` are the exception classes, by the names of the C++ ones: Error, ConfigError, UsageError, "
      "DesyncError, PeerError, TimeoutError, FormatError, CancelledError, InternalError.");
  value::set_rethrow(&raise_in_python);
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const base::Error&) {
      set_python_error(error);
    } catch (const c10::Error&) {
      set_python_error(error);
    } catch (const python_error&) {
      set_python_error(error);
    }
  });
}

void set_python_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const py::error_already_set& python) {
    // Not python.restore(): the same error may be described to other ranks and then raised here.
    py::object type = python.type(), value = python.value(), trace = python.trace();
    PyErr_Restore(type.release().ptr(), value.release().ptr(), trace.release().ptr());
  } catch (const value::RemoteFailure& remote) {
    raise_remote(remote.failure());
  } catch (const base::ConfigError& e) {
    raise_as("ConfigError", e);
  } catch (const base::DesyncError& e) {
    raise_as("DesyncError", e);
  } catch (const base::UsageError& e) {
    raise_as("UsageError", e);
  } catch (const base::PeerError& e) {
    raise_peer_error(e);
  } catch (const base::TimeoutError& e) {
    raise_as("TimeoutError", e);
  } catch (const base::FormatError& e) {
    raise_as("FormatError", e);
  } catch (const base::FileError& e) {
    raise_file_error(e);
  } catch (const base::CancelledError& e) {
    raise_as("CancelledError", e);
  } catch (const base::InternalError& e) {
    raise_as("InternalError", e);
  } catch (const base::Error& e) {
    raise_as("Error", e);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

std::exception_ptr as_thrown(const py::object& exception) {
  PyErr_SetObject(py::type::of(exception).ptr(), exception.ptr());
  try {
    throw py::error_already_set();
  } catch (...) {
    return std::current_exception();
  }
}

std::shared_ptr<model::Modules> python_modules(std::vector<std::string> names, std::vector<bool> own_stream,
                                               std::vector<int> streams, std::vector<bool> dynamic) {
  return std::make_shared<PythonModules>(std::move(names), std::move(own_stream), std::move(streams),
                                         std::move(dynamic));
}

session::FaceHooks face_hooks() {
  return {{.thread_begins = begin_thread,
           .thread_ends = end_thread,
           .blocking = without_gil,
           .holds_interpreter_lock = [] { return PyGILState_Check() == 1; },
           .capture_context = capture_context},
          std::make_shared<PythonFailures>(),
          check_signals,
          name_call};
}

}  // namespace lamina::python
