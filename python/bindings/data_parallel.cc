// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/data_parallel/batch_record.h"
#include "lamina/data_parallel/device_losses.h"
#include "lamina/data_parallel/reducer.h"
#include "lamina/model/float_types.h"
#include "lamina/pipeline/backwards.h"
#include "lamina/session/session.h"
#include "python/bindings/bindings.h"
#include "python/bindings/hooks.h"
#include "python/bindings/session.h"

namespace lamina::python {
namespace {

using data_parallel::BatchRecord;
using data_parallel::NamedTensor;
using data_parallel::Reducer;
using session::Session;

Reducer::Tensors tensors(const py::function& named) {
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

// The job's group of this rank.
Reducer::Replicas group(const std::shared_ptr<Session>& session, topology::Group kind) {
  return [session, kind](const base::Patience& patience) -> collective::Group& {
    return session->groups().get(kind, patience);
  };
}

std::unique_ptr<Reducer> make(const std::shared_ptr<Session>& session, int passes_per_reduction,
                              std::int64_t bucket_bytes, bool broadcast_buffers, bool overlap, bool gradients_are_views,
                              const py::function& parameters, const py::function& buffers,
                              const std::optional<py::function>& scaled_batch) {
  const data_parallel::ReducerOptions options{
      passes_per_reduction,
      bucket_bytes,
      broadcast_buffers,
      overlap,
      gradients_are_views ? data_parallel::Gradients::kViews : data_parallel::Gradients::kCopied,
      model::scalar_type(session->config().reduce_dtype)};
  Reducer::Parts parts{tensors(parameters), tensors(buffers), group(session, topology::kReplicas)};
  parts.in_one_order = session->topology().size(topology::kPartitions) == 1;
  if (scaled_batch) parts.scaled.emplace(tensors(*scaled_batch), group(session, topology::kSameParts));
  return std::make_unique<Reducer>(options, session->mailbox(), session->members(topology::kReplicas),
                                   session->patience(), face_hooks().failures, std::move(parts));
}

base::UsageError wrong_result(const char* what, const py::object& found) {
  const auto kind = py::type::of(found).attr("__name__").cast<std::string>();
  return base::UsageError(base::str(what, ", not ", kind), base::Code{"replica-hook"});
}

// The tensor that a hook's future holds.
at::Tensor waited_for(const py::object& future) {
  const auto kind = py::module_::import("torch._C").attr("Future");  // what then() returns, too
  if (!py::isinstance(future, kind)) {
    throw wrong_result("a communication hook returns a torch.futures.Future", future);
  }
  py::object reduced = future.attr("wait")();
  const bool listed = py::isinstance<py::list>(reduced) || py::isinstance<py::tuple>(reduced);
  if (listed && py::len(reduced) == 1) reduced = reduced[py::int_(0)];
  if (!THPVariable_Check(reduced.ptr())) {
    throw wrong_result("the future of a communication hook holds a tensor", reduced);
  }
  return reduced.cast<at::Tensor>();
}

void set_hook(Reducer& reducer, const py::function& hook) {
  reducer.set_hook([hook](const data_parallel::GradientBucket& bucket) {
    const Acquire acquire;
    return waited_for(hook(bucket.index, bucket.last, bucket.gradients, bucket.parameters));
  });
}

void run_backward(pipeline::Backwards& backwards, const remote::Tensors& tensors,
                  const std::vector<std::optional<at::Tensor>>& given, data_parallel::Reducer* reducer) {
  remote::Tensors gradients;
  for (const auto& gradient : given) gradients.push_back(gradient.value_or(at::Tensor()));
  const Release release;
  const auto run = [&] { backwards.run(tensors, gradients); };
  reducer == nullptr ? run() : reducer->run_backward(run);
}

}  // namespace

void bind_batch_record(py::module_& module) {
  py::class_<BatchRecord>(module, "BatchRecord")
      .def(py::init([](bool is_after_step) { return BatchRecord{.is_after_step = is_after_step}; }),
           py::arg("is_after_step") = false)
      .def("give_samples", &BatchRecord::give_samples, py::arg("samples"), py::arg("tokens"))
      .def(
          "name_losses", [](BatchRecord& record, const std::vector<std::string>& names) { record.name_losses(names); },
          py::arg("names"))
      .def(
          "together",
          [](const BatchRecord& own, Session& session) {
            return data_parallel::together(session.mailbox(), session.members(topology::Group::kWorld), own,
                                           session.patience());
          },
          py::arg("session"), py::call_guard<Release>())
      .def_readonly("samples", &BatchRecord::samples)
      .def_readonly("tokens", &BatchRecord::tokens)
      .def_readonly("most_samples", &BatchRecord::most_samples)
      .def_readonly("names_differ", &BatchRecord::names_differ)
      .def_readwrite("ended", &BatchRecord::ended)
      .def_readwrite("seconds", &BatchRecord::seconds)
      .def_readwrite("losses", &BatchRecord::losses)
      .def_readwrite("has_data", &BatchRecord::has_data)
      .def_readwrite("lacks_data", &BatchRecord::lacks_data)
      .def_readwrite("stops", &BatchRecord::stops)
      .def_readwrite("lacks_memory", &BatchRecord::lacks_memory);
  module.def(
      "sum_of_copies",
      [](const std::shared_ptr<Session>& session, const at::Tensor& own) {
        const auto patience = session->patience();
        return data_parallel::sum_of_copies(session->groups().get(topology::kReplicas, patience), own, patience);
      },
      py::arg("session"), py::arg("own"), py::call_guard<Release>());
}

void bind_backwards(py::module_& module) {
  py::class_<pipeline::Backwards>(module, "Backwards",
                                  "The backwards of a job's model, which with `averages` make gradients the mean over "
                                  "a step's samples; see lamina/pipeline/backwards.h.")
      .def(py::init([](Session& session, bool averages) {
             return std::make_unique<pipeline::Backwards>(session.job(), averages);
           }),
           py::arg("session"), py::arg("averages"), py::keep_alive<1, 2>())
      .def("add_up", &pipeline::Backwards::add_up,
           "From now on they divide by nothing: somebody else averages the gradients.")
      .def(
          "scale_by",
          [](pipeline::Backwards& backwards, std::shared_ptr<optim::LossScale> scale) {
            backwards.scale_by(std::move(scale));
          },
          py::arg("scale"), "Losses are multiplied by that, while it lives.")
      .def_property_readonly("count", &pipeline::Backwards::count, "How many have run on this rank.")
      .def(
          "watch",
          [](pipeline::Backwards& backwards, const std::vector<at::Tensor>& parameters, bool forgets) {
            backwards.watch(parameters, forgets);
          },
          py::arg("parameters"), py::arg("forgets"),
          "With a loss scale, other backwards are noticed by the gradients that they leave in these, as they are now. "
          "`forgets`: those of others are gone when none of these has one.")
      .def_property_readonly("plain", &pipeline::Backwards::plain,
                             "Counts what other backwards have left while losses were scaled.")
      .def_property_readonly("plain_forgotten", &pipeline::Backwards::plain_forgotten,
                             "Counts what of it was there when all gradients were last forgotten.")
      .def("forget_plain", &pipeline::Backwards::forget_plain, "They are forgotten now.")
      .def("run", &run_backward, py::arg("tensors"), py::arg("gradients"), py::arg("reducer"),
           "One backward, over all ranks of the pipeline; with several copies of the model the reducer hears of it.");
}

void bind_data_parallel(py::module_& module) {
  const py::call_guard<Release> release;
  py::class_<data_parallel::ShardedGradients, std::shared_ptr<data_parallel::ShardedGradients>>(module,
                                                                                                "ShardedGradients");
  py::class_<Reducer>(module, "Reducer",
                      "The gradients and buffers of this rank's part of a model, and those of the same part on the "
                      "other replicas; see lamina/data_parallel/reducer.h, also for the order of the "
                      "calls.\n\n`parameters` and `buffers` return those of this rank as they are now.")
      .def(py::init(&make), py::arg("session"), py::arg("passes_per_reduction"), py::arg("bucket_bytes"),
           py::arg("broadcast_buffers"), py::arg("overlap"), py::arg("gradients_are_views"), py::arg("parameters"),
           py::arg("buffers"), py::arg("scaled_batch") = py::none(),
           "`scaled_batch`: parameters beside those of `parameters`; see [Note: two reductions].")
      .def("set_hook", &set_hook, py::arg("hook"),
           "The gradients become the tensor of the future that `hook` returns for each bucket: for its index, whether "
           "it is the last, the gradients of its parameters as one 1-D tensor, and those. UsageError where it is none.")
      .def("set_sharded", &Reducer::set_sharded, py::arg("sharded"),
           "Has gradients of other parameters reduced by these.")
      .def_property_readonly("stuck", &Reducer::stuck,
                             "A collective was left that may never end: a group cannot be closed then.")
      .def("close", &Reducer::close, release, "The end of the job: lets go of its group. Nothing is reduced any more.")
      .def(
          "see_batch", [](Reducer& reducer, const std::vector<at::Tensor>& batch) { reducer.see_batch(batch); },
          py::arg("batch"), "Before the first pass: tensors that this replica is about to be trained on.")
      .def("share_batches", &Reducer::share_batches, "The replicas have the same batches on purpose.")
      .def_property_readonly("looks_at_batches", &Reducer::looks_at_batches,
                             "True until the first pass, unless batches are shared.")
      .def("note_call", &Reducer::note_call, py::arg("training"), release,
           "The model is called outside of steps. Returns the call's number; 0 for one without gradients.")
      .def("await_backward", &Reducer::await_backward, py::arg("call"),
           "A backward has reached the output of that call of the model: its end is noticed.")
      .def("let_go", &Reducer::let_go,
           "Holds none of the parameters until the next `watch`: all replicas do so between passes.")
      .def("forget_call", &Reducer::forget_call, py::arg("call"), "No backward can follow that call.")
      .def("hold_back", &Reducer::hold_back,
           "From now on backwards are held back: their gradients stay here until the next pass that averages.")
      .def("release", &Reducer::release, "Ends one `hold_back`.")
      .def("complete", &Reducer::complete, py::arg("what"), release,
           "Before somebody looks at gradients: what waits for a later pass is averaged now, collective over the "
           "replicas. `what` names the caller. UsageError in a backward or a step whose gradients are still to be "
           "averaged.")
      .def("before_update", &Reducer::before_update, release,
           "Does so before an update, of which the next pass tells the other replicas.")
      .def(
          "watch", [](Reducer& self, const std::vector<at::Tensor>& parameters) { self.watch(parameters); },
          py::arg("parameters"),
          "From now on, until the next time, gradients that come to these, as they are now, are noticed.")
      .def_property_readonly("joining", &Reducer::joining)
      .def_property_readonly("accumulates", &Reducer::accumulates,
                             "There are gradients that the next reduction is to have: passes since the last one.")
      .def("begin_join", &Reducer::begin_join, py::arg("by_everyone"), py::arg("throws"))
      .def(
          "fail_join",
          [](Reducer& self, const py::object& exception) {
            const auto error = as_thrown(exception);
            const Release released;
            self.fail_join(error);
          },
          py::arg("exception"))
      .def("end_join", &Reducer::end_join, release);
}

}  // namespace lamina::python
