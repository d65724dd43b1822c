// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/job_checkpoint/job.h"
#include "lamina/job_checkpoint/resumption.h"
#include "lamina/session/session.h"
#include "python/bindings/carried_errors.h"
#include "python/bindings/convert.h"
#include "python/bindings/user_optimizer.h"

namespace lamina::python {

// An object of Python's that the engine asks, and lets go of without the GIL.
class Asked {
 public:
  explicit Asked(py::object object)
      : object_(new py::object(std::move(object)), [](py::object* held) {
          const py::gil_scoped_acquire acquire;
          delete held;
        }) {}

  template <class Result, class... Arguments>
  Result ask(const char* name, Arguments... arguments) const {
    return carrying([&] {
      const py::object result = object_->attr(name)(arguments...);
      if constexpr (!std::is_void_v<Result>) return result.template cast<Result>();
    });
  }
  // Asks for a value.
  value::Value ask_value(const char* name) const {
    return carrying([&] { return to_value(object_->attr(name)()); });
  }
  const py::object& object() const { return *object_; }

 private:
  std::shared_ptr<py::object> object_;
};

// CheckpointedOptimizer in python/lamina/checkpoints/checkpointed_job.py.
class PythonCheckpointedOptimizer : public job_checkpoint::OptimizerAccess {
 public:
  explicit PythonCheckpointedOptimizer(py::object lent)
      : lent_(std::move(lent)),
        engine_(lent_.object().attr("engine").cast<distributed_optimizer::Optimizer*>()),
        user_(py::handle(lent_.object().attr("user").ptr())) {}

  distributed_optimizer::Optimizer& engine() override { return *engine_; }
  distributed_optimizer::UserOptimizer& user() override { return user_; }
  std::vector<std::string> class_names() const override { return lent_.ask<std::vector<std::string>>("class_names"); }
  std::vector<value::Dict> options() const override {
    std::vector<value::Dict> all;
    const auto told = lent_.ask_value("options");
    for (const auto& group : told.as<value::List>().items) all.push_back(group.as<value::Dict>());
    return all;
  }
  value::Value rest() const override { return lent_.ask_value("rest"); }
  std::vector<std::string> lacking(std::size_t, const value::Dict& options) const override {
    const py::gil_scoped_acquire acquire;
    return lent_.ask<std::vector<std::string>>("lacking", to_object(options));
  }
  bool load_options(const job_checkpoint::OptimizerAbout& about) override {
    const py::gil_scoped_acquire acquire;
    py::list options;
    for (const auto& group : about.groups) options.append(to_object(group.options));
    lent_.ask<void>("load_options", options);
    return true;
  }
  void load(const std::map<std::string, value::Dict>& states, const job_checkpoint::OptimizerAbout& about) override {
    const py::gil_scoped_acquire acquire;
    py::dict named;
    for (const auto& [name, state] : states) named[py::str(name)] = to_object(state);
    py::list groups;
    for (const auto& group : about.groups) {
      groups.append(py::make_tuple(to_object(group.options), group.parameters));
    }
    lent_.ask<void>("load", named, groups, to_object(about.rest));
  }

 private:
  const Asked lent_;
  distributed_optimizer::Optimizer* const engine_;
  PythonOptimizer user_;
};

// CheckpointedJob in python/lamina/checkpoints/checkpointed_job.py.
class PythonCheckpointedJob : public job_checkpoint::JobAccess {
 public:
  PythonCheckpointedJob(session::Session& session, py::object lent)
      : JobAccess(session.ranks(), session.job()), lent_(std::move(lent)) {}

  bool has_model() const override { return lent_.ask<bool>("has_model"); }
  bool is_cut() const override { return lent_.ask<bool>("is_cut"); }
  bool accumulates() const override { return lent_.ask<bool>("accumulates"); }
  std::vector<job_checkpoint::NamesOf> model_state() const override {
    return lent_.ask<std::vector<job_checkpoint::NamesOf>>("model_state");
  }
  std::vector<std::int64_t> whole_shape(const at::Tensor& tensor) const override {
    return lent_.ask<std::vector<std::int64_t>>("whole_shape", tensor);
  }
  const model::ParameterTable& table() const override { return *lent_.ask<const model::ParameterTable*>("table"); }
  sharding::Sharding* sharding() const override { return lent_.ask<sharding::Sharding*>("sharding"); }
  plan::KeptPartition partition() const override { return lent_.ask<plan::KeptPartition>("partition"); }
  std::vector<job_checkpoint::OptimizerAccess*> optimizers() override {
    const py::gil_scoped_acquire acquire;
    std::vector<job_checkpoint::OptimizerAccess*> all;
    for (auto& lent : lent_.ask<std::vector<py::object>>("optimizers")) {
      auto& known = optimizers_[lent.ptr()];
      if (known == nullptr) known = std::make_unique<PythonCheckpointedOptimizer>(lent);
      all.push_back(known.get());
    }
    return all;
  }
  optim::LossScale* loss_scale() const override { return lent_.ask<optim::LossScale*>("loss_scale"); }
  void settle() override { lent_.ask<void>("settle"); }
  void begin_load() override { lent_.ask<void>("begin_load"); }

  value::Value user_content() override { return lent_.ask_value("user_content"); }
  std::map<std::string, std::string> texts() override { return lent_.ask<std::map<std::string, std::string>>("texts"); }
  value::Dict extra_states() override { return lent_.ask_value("extra_states").as<value::Dict>(); }
  value::Value generators() override { return lent_.ask_value("generators"); }

  void take_content(const value::Value& content) override { give("take_content", content); }
  void take_pickle(const std::filesystem::path& file, const value::Value&) override {
    lent_.ask<void>("take_pickle", file.string());
  }
  void take_extra_states(const value::Value& states) override { give("take_extra_states", states); }
  void load_extra_states() override { lent_.ask<void>("load_extra_states"); }
  void take_generators(const value::Value& states) override { give("take_generators", states); }
  void set_generators() override { lent_.ask<void>("set_generators"); }

  void wait_for_cut(std::shared_ptr<job_checkpoint::Resumption> resumption) override {
    const py::gil_scoped_acquire acquire;
    lent_.ask<void>("wait_for_cut", resumption == nullptr ? py::object(py::none()) : py::cast(resumption));
  }
  void load_translated(std::map<std::string, at::Tensor> state) override {
    const py::gil_scoped_acquire acquire;
    lent_.ask<void>("load_translated", state);
  }

 private:
  void give(const char* name, const value::Value& value) const {
    carrying([&] { lent_.object().attr(name)(to_object(value)); });
  }

  const Asked lent_;
  std::map<const PyObject*, std::unique_ptr<PythonCheckpointedOptimizer>> optimizers_;
};

}  // namespace lamina::python
