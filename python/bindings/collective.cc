// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/backend.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lamina/base/error.h"
#include "lamina/collective/hierarchical.h"
#include "lamina/rendezvous/master_address.h"
#include "lamina/session/session.h"
#include "python/bindings/bindings.h"

namespace lamina::python {

namespace {

// "" where the environment does not say where ranks meet: a script may have given torch its own store.
std::string gloo_host() {
  try {
    return collective::gloo_host(
        rendezvous::meeting_outside(environment::read_world(environment::process_environment())));
  } catch (const base::Error&) {
    return "";
  }
}

// `job`: whose groups it makes, within `makes_within_s`; None: the script makes it.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                               const std::vector<int>& members, double timeout_s,
                                               const std::shared_ptr<session::Session>& job, double makes_within_s) {
  collective::BackendOptions options{.store = store,
                                     .rank = rank,
                                     .timeout = milliseconds(timeout_s),
                                     .check_interrupt = &check_signals,
                                     .gloo_host = gloo_host()};
  for (const int member : members) options.members.emplace_back(member);
  if (job) {
    options.made_by = base::Deadline::after(milliseconds(makes_within_s));
    options.check_members = [&] { job->require_nobody_lost(options.members, "making process groups"); };
  }
  return collective::make_backend(options);
}

}  // namespace

void bind_collective(py::module_& module) {
  module.def("make_backend", &make_backend, py::arg("store"), py::arg("rank"), py::arg("members"), py::arg("timeout_s"),
             py::arg("job") = nullptr, py::arg("makes_within_s") = 0.0, py::call_guard<py::gil_scoped_release>(),
             "torch's backend of a group of these world ranks, of which this one is number `rank`: over shared memory "
             "where they are processes of one host, else Gloo's. A job's is made within `makes_within_s`, and hears of "
             "lost ranks; a script's own within `timeout_s`. Collective. See lamina/collective/backend.h.");
  module.def(
      "make_hierarchical",
      [](c10::intrusive_ptr<c10d::ProcessGroup> within, c10::intrusive_ptr<c10d::ProcessGroup> across, double timeout_s,
         const std::shared_ptr<session::Session>& posted_over, const std::vector<int>& hosts) {
        collective::Levels levels{std::move(within), std::move(across), nullptr, {}, nullptr};
        if (posted_over) {
          std::vector<base::Rank> members;
          for (const int rank : hosts) members.emplace_back(rank);
          levels.posted = std::make_shared<collective::PostedGather>(posted_over->transport(), "across", members);
        }
        return collective::make_hierarchical(std::move(levels), milliseconds(timeout_s));
      },
      py::arg("within"), py::arg("across"), py::arg("timeout_s"), py::arg("posted_over") = nullptr,
      py::arg("hosts") = std::vector<int>(),
      "A group that works by the levels `within`, the ranks of one host, and `across`, those of one index on each "
      "host. It has `_allgather_base`, `_reduce_scatter_base` and `allreduce`. See lamina/collective/hierarchical.h.");
}

}  // namespace lamina::python
