// SPDX-License-Identifier: Apache-2.0
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/dist/meeting.h"
#include "lamina/dist/ranks.h"
#include "lamina/dist/sampler.h"
#include "lamina/environment/address.h"
#include "lamina/environment/progress.h"
#include "lamina/rendezvous/job_store.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

rendezvous::JobStore::Options store_of(const environment::World& world, double timeout_s) {
  return {world.master_addr, world.master_port, rendezvous::hosts_store(world.rank),
          base::Deadline::after(milliseconds(timeout_s)), &check_signals};
}

}  // namespace

void bind_dist(py::module_& module) {
  module.def("next_meeting", &rendezvous::next_meeting, py::arg("kind"),
             "Names the next meeting of a kind in the job's store; see lamina/rendezvous/job_store.h.");
  py::class_<rendezvous::JobStore>(
      module, "JobStore",
      "The job's store; rank 0 hosts it while this lives, on the loopback device only where all ranks meet there.")
      .def(py::init([](const environment::World& world, double timeout_s) {
             return std::make_unique<rendezvous::JobStore>(store_of(world, timeout_s));
           }),
           py::arg("world"), py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>(),
           "Raises TimeoutError when nothing answers in time. Notices signals.");
  py::class_<dist::Meeting>(
      module, "Meeting", "All ranks of a launched world, met at the job's store, which rank 0 hosts while this lives.")
      .def(py::init([](const environment::World& world, const std::string& kind, double timeout_s) {
             return std::make_unique<dist::Meeting>(world, rendezvous::next_meeting(kind), milliseconds(timeout_s),
                                                    &check_signals);
           }),
           py::arg("world"), py::arg("kind"), py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>(),
           "Raises TimeoutError, which names the ranks that did not come, ConfigError "
           "when two processes have one rank, or ranks know of different numbers of ranks. Notices signals.");
  module.def(
      "batch_weights",
      [](std::int64_t samples, int num_replicas, int rank, std::size_t batch_size, bool drop_last) {
        const dist::Sampler sampler({.size = samples, .num_replicas = num_replicas, .rank = rank, .exact = true});
        return sampler.batch_weights(batch_size, drop_last);
      },
      py::arg("samples"), py::arg("num_replicas"), py::arg("rank"), py::arg("batch_size"), py::arg("drop_last"),
      "The weights of the losses of this rank's batches, of samples that are split exactly; see Sampler in "
      "lamina/dist/sampler.h.");
  module.def(
      "report_consequence", [](const std::string& words) { return environment::ProgressReporter().consequence(words); },
      py::arg("words"),
      "Tells `lamina run` that this process ends because of an error of another rank. True when it is there: it shows "
      "the first cause, or these words if it finds none.");
  module.def(
      "interface_of",
      [](const environment::World& world) {
        return environment::Address::local_towards(world.master_addr, world.master_port).interface();
      },
      py::arg("world"),
      "The network interface by which this rank reaches MASTER_ADDR; \"\" where none has the address.");
  module.def(
      "told", [](const std::string& name) { return dist::told(name, environment::process_environment()); },
      py::arg("name"),
      "Returns what the environment says of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE or NODE_RANK: the variable, "
      "else the launcher in its own words; None when nobody tells. Raises ConfigError.");
  module.def(
      "world_to_meet", [] { return dist::world_to_meet(environment::process_environment()); },
      "As read_world; a world of one where WORLD_SIZE is 1, also when the rest is not set.");
}

}  // namespace lamina::python
