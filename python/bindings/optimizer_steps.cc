// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/optimizer_steps.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/bindings.h"
#include "python/bindings/model.h"

namespace lamina::python {
namespace {

using optim::DynamicLossScale;
using optim::LossScale;
using session::OptimizerSteps;
using session::Session;
using Release = py::gil_scoped_release;

// The tables that Python makes go by this.
OptimizerSteps::Table table_from(const py::function& table) {
  return [table]() -> const model::ParameterTable* {
    const py::gil_scoped_acquire acquire;
    return table().cast<const model::ParameterTable*>();
  };
}

}  // namespace

void bind_optimizer_steps(py::module_& module) {
  py::class_<LossScale, std::shared_ptr<LossScale>>(module, "LossScale")
      .def(py::init<double>(), py::arg("scale"))
      .def(py::init([](double init_scale, double scale_factor, int scale_window, double min_scale, int delayed_shift,
                       bool consecutive_hysteresis) {
             return std::make_shared<LossScale>(DynamicLossScale{init_scale, scale_factor, scale_window, min_scale,
                                                                 delayed_shift, consecutive_hysteresis});
           }),
           py::kw_only(), py::arg("init_scale") = DynamicLossScale().init_scale,
           py::arg("scale_factor") = DynamicLossScale().scale_factor,
           py::arg("scale_window") = DynamicLossScale().scale_window,
           py::arg("min_scale") = DynamicLossScale().min_scale,
           py::arg("delayed_shift") = DynamicLossScale().delayed_shift,
           py::arg("consecutive_hysteresis") = DynamicLossScale().consecutive_hysteresis)
      .def_property_readonly("value", &LossScale::value)
      .def_property_readonly("is_dynamic", &LossScale::is_dynamic)
      .def_property_readonly("is_on", &LossScale::is_on)
      .def("update", &LossScale::update, py::arg("overflow"))
      .def_property(
          "state",
          [](const LossScale& scale) {
            const auto& state = scale.state();
            return py::dict(py::arg("scale") = state.scale, py::arg("overflows_left") = state.overflows_left,
                            py::arg("steps") = state.steps, py::arg("last_overflow") = state.last_overflow);
          },
          [](LossScale& scale, const py::dict& saved) {
            scale.set_state({saved["scale"].cast<double>(), saved["overflows_left"].cast<int>(),
                             saved["steps"].cast<long>(), saved["last_overflow"].cast<long>()});
          });

  py::class_<OptimizerSteps::Begun>(module, "BegunStep")
      .def_readonly("overflow", &OptimizerSteps::Begun::overflow)
      .def_readonly("factor", &OptimizerSteps::Begun::factor)
      .def_readonly("norm", &OptimizerSteps::Begun::norm)
      .def_readonly("clipped_norm", &OptimizerSteps::Begun::clipped_norm);
  py::class_<OptimizerSteps>(module, "OptimizerSteps")
      .def(py::init<Session&, std::shared_ptr<LossScale>>(), py::arg("session"), py::arg("scale"),
           py::keep_alive<1, 2>())
      .def(
          "set_model",
          [](OptimizerSteps& steps, const py::function& table, std::shared_ptr<sharding::Sharding> sharding) {
            steps.set_model(table_from(table), std::move(sharding));
          },
          py::arg("table"), py::arg("sharding").none(true))
      .def("place_of", &OptimizerSteps::place_of, py::arg("held"))
      .def(
          "holder_of",
          [](OptimizerSteps& steps, const at::Tensor& place) {
            const auto number = steps.stand_ins().find(place);
            return number ? steps.stand_ins().of(*number) : place;
          },
          py::arg("place"))
      .def_property_readonly("stand_ins",
                             [](OptimizerSteps& steps) {
                               std::vector<std::pair<at::Tensor, at::Tensor>> all;
                               for (std::size_t i = 0; i < steps.stand_ins().size(); ++i) {
                                 all.emplace_back(steps.stand_ins().stand_in(i), steps.stand_ins().of(i));
                               }
                               return all;
                             })
      .def("is_beside", &OptimizerSteps::is_beside, py::arg("held"))
      .def(
          "take_beside",
          [](OptimizerSteps& steps, const std::vector<at::Tensor>& parameters) { steps.take_beside(parameters); },
          py::arg("parameters"), py::call_guard<Release>())
      .def_property_readonly("beside", [](const OptimizerSteps& steps) { return steps.beside(); })
      .def("bring_beside", &OptimizerSteps::bring_beside, py::call_guard<Release>())
      .def("require_alike", &OptimizerSteps::require_alike, py::arg("options"), py::arg("with_copies"),
           py::call_guard<Release>())
      .def("follow", [](OptimizerSteps& steps) { steps.stand_ins().follow(); })
      .def(
          "begin",
          [](OptimizerSteps& steps, const std::vector<at::Tensor>& places, double max_norm, bool with_copies,
             const std::string& options) { return steps.begin(places, max_norm, with_copies, options); },
          py::arg("places"), py::arg("max_norm"), py::arg("with_copies"), py::arg("options"), py::call_guard<Release>())
      .def("leave_out", &OptimizerSteps::leave_out)
      .def(
          "give_gradients",
          [](OptimizerSteps& steps, const std::vector<at::Tensor>& places, const OptimizerSteps::Begun& begun,
             bool as_is) { steps.give_gradients(places, begun, as_is); },
          py::arg("places"), py::arg("begun"), py::arg("as_is"), py::call_guard<Release>())
      .def("end", &OptimizerSteps::end, py::arg("as_is"), py::call_guard<Release>())
      .def_property_readonly("replaces", &OptimizerSteps::replaces)
      .def_property_readonly("divided_over",
                             [](const OptimizerSteps& steps) {
                               const auto group = steps.divided_over();
                               return group ? std::optional(kind_of(*group)) : std::nullopt;
                             })
      .def(
          "is_part", [](const OptimizerSteps& steps, const at::Tensor& place) { return steps.part(place).has_value(); },
          py::arg("place"))
      .def(
          "spread_wholes",
          [](OptimizerSteps& steps, const std::vector<at::Tensor>& places) { steps.spread_wholes(places); },
          py::arg("places"))
      .def("updates_whole", &OptimizerSteps::updates_whole, py::arg("place"))
      .def(
          "begin_wholes",
          [](OptimizerSteps& steps, const std::vector<at::Tensor>& places) {
            std::vector<std::optional<at::Tensor>> in_step;
            const Release release;
            for (auto& place : steps.begin_wholes(places)) {
              in_step.push_back(place.defined() ? std::optional(std::move(place)) : std::nullopt);
            }
            return in_step;
          },
          py::arg("places"))
      .def("end_wholes", &OptimizerSteps::end_wholes, py::call_guard<Release>())
      .def("forget_wholes", &OptimizerSteps::forget_wholes)
      .def("part_of", &OptimizerSteps::part_of, py::arg("place"), py::arg("whole"))
      .def("whole_of", &OptimizerSteps::whole_of, py::arg("place"), py::arg("value"), py::call_guard<Release>());
}

}  // namespace lamina::python
