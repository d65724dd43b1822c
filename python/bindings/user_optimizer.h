// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/distributed_optimizer/user_optimizer.h"
#include "python/bindings/convert.h"

namespace lamina::python {

// States as values of the engine's. Objects that no other rank is to have stay themselves: what stands for them in a
// value is their number here.
class KeptStates {
 public:
  value::Value keep(py::handle state) {
    auto* const object = state.ptr();
    const bool is_plain = THPVariable_Check(object) || state.is_none() || PyBool_Check(object) ||
                          PyLong_CheckExact(object) || PyFloat_CheckExact(object) || PyUnicode_CheckExact(object);
    if (is_plain) return to_value(state);
    if (PyDict_CheckExact(object)) {
      value::Dict kept;
      for (const auto& [name, field] : py::reinterpret_borrow<py::dict>(state)) {
        kept.items.emplace_back(to_value(name), keep(field));
      }
      return kept;
    }
    if (PyList_CheckExact(object)) return value::List{all_kept(state)};
    if (PyTuple_CheckExact(object)) return value::Tuple{all_kept(state)};
    objects_.push_back(py::reinterpret_borrow<py::object>(state));
    return value::Opaque{kCodec, std::to_string(objects_.size() - 1), {}};
  }

  py::object give(const value::Value& state) const {
    if (const auto* fields = state.get_if<value::Dict>()) {
      py::dict given;
      for (const auto& [name, field] : fields->items) given[to_object(name)] = give(field);
      return given;
    }
    if (const auto* list = state.get_if<value::List>()) return all_given(list->items);
    if (const auto* tuple = state.get_if<value::Tuple>()) return py::tuple(all_given(tuple->items));
    return is_kept(state) ? objects_.at(std::stoul(state.as<value::Opaque>().bytes)) : to_object(state);
  }

  // True where some object stays itself.
  static bool has_objects(const value::Value& state) {
    bool has = false;
    value::for_each_leaf(state, [&](const value::Value& leaf) { has = has || is_kept(leaf); });
    return has;
  }

 private:
  static constexpr const char* kCodec = "kept";
  static bool is_kept(const value::Value& value) {
    const auto* object = value.get_if<value::Opaque>();
    return object != nullptr && object->codec == kCodec;
  }

  std::vector<value::Value> all_kept(py::handle items) {
    std::vector<value::Value> kept;
    for (const auto& item : items) kept.push_back(keep(item));
    return kept;
  }
  py::list all_given(const std::vector<value::Value>& items) const {
    py::list given;
    for (const auto& item : items) given.append(give(item));
    return given;
  }

  std::vector<py::object> objects_;
};

// An optimizer of Python's: LentOptimizer in python/lamina/optim/lent_optimizer.py.
class PythonOptimizer : public distributed_optimizer::UserOptimizer {
 public:
  // It outlives this.
  explicit PythonOptimizer(py::handle lent) : lent_(lent) {}

  KeptStates& kept() const { return kept_; }

  std::vector<Given> named_parameters() const override {
    std::vector<Given> all;
    for (auto& [tensor, name] : call<std::vector<std::pair<at::Tensor, std::string>>>("named_parameters")) {
      all.push_back({std::move(tensor), std::move(name)});
    }
    return all;
  }
  std::vector<std::vector<Given>> groups() const override {
    const py::gil_scoped_acquire acquire;
    std::vector<std::vector<Given>> groups;
    for (const auto& group : call<std::vector<std::vector<std::pair<at::Tensor, std::string>>>>("groups")) {
      auto& members = groups.emplace_back();
      for (const auto& [tensor, name] : group) members.push_back({tensor, name});
    }
    return groups;
  }
  std::vector<at::Tensor> members() const override { return call<std::vector<at::Tensor>>("members"); }
  void trim(const std::vector<std::vector<Given>>& groups, std::span<const Moved> moved) override {
    const py::gil_scoped_acquire acquire;
    py::list all;
    for (const auto& group : groups) {
      py::list members;
      for (const auto& [tensor, name] : group) members.append(py::make_tuple(tensor, name));
      all.append(std::move(members));
    }
    call<void>("trim", all, pairs_of(moved));
  }
  void exchange(const std::vector<std::vector<at::Tensor>>& groups, std::span<const Moved> moved) override {
    const py::gil_scoped_acquire acquire;
    call<void>("exchange", groups, pairs_of(moved));
  }
  value::Value state_of(const at::Tensor& member) const override {
    const py::gil_scoped_acquire acquire;
    return kept_.keep(call<py::object>("state_of", member));
  }
  void set_state(const at::Tensor& member, value::Value state) override {
    const py::gil_scoped_acquire acquire;
    call<void>("set_state", member, kept_.give(state));
  }
  value::Value travelling(value::Value state) const override {
    if (!KeptStates::has_objects(state)) return state;
    const py::gil_scoped_acquire acquire;
    return to_value(kept_.give(state));
  }
  std::string options(bool counts) const override { return call<std::string>("options", counts); }
  fused::Needs needs() const override {
    const auto word = call<std::string>("needs");
    return word == "whole" ? fused::Needs::kWhole : word == "norms" ? fused::Needs::kNorms : fused::Needs::kElements;
  }
  bool needs_norm() const override { return call<bool>("needs_norm"); }
  bool takes_any_gradient() override { return call<bool>("takes_any_gradient"); }
  void update(const distributed_optimizer::UpdateTerms& terms) override { call<void>("update", &terms); }
  void zero_grad(bool set_to_none) override { call<void>("zero_grad", set_to_none); }

 private:
  template <class Result, class... Arguments>
  Result call(const char* name, Arguments... arguments) const {
    const py::gil_scoped_acquire acquire;
    const py::object result = lent_.attr(name)(arguments...);
    if constexpr (!std::is_void_v<Result>) return result.template cast<Result>();
  }

  static py::list pairs_of(std::span<const Moved> moved) {
    py::list pairs;
    for (const auto& [from, to] : moved) pairs.append(py::make_tuple(from, to.defined() ? py::cast(to) : py::none()));
    return pairs;
  }

  py::handle lent_;
  mutable KeptStates kept_;
};

}  // namespace lamina::python
