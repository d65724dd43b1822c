// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/optimizer_state.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/serialize/archive.h>

#include <sstream>
#include <stdexcept>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::frontend {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr const char* kSavedBy = "saved_by";
constexpr const char* kMasters = "masters";
constexpr const char* kScale = "loss_scale";
constexpr const char* kNames = "names";
constexpr const char* kParts = "parts";
constexpr const char* kRngSteps = "rng_steps";

at::Tensor count(std::size_t number) { return at::scalar_tensor(static_cast<std::int64_t>(number), at::kLong); }

std::size_t read_count(InputArchive& archive, const std::string& key) {
  at::Tensor number;
  archive.read(key, number);
  return static_cast<std::size_t>(number.item<std::int64_t>());
}

void write_fields(const Fields& fields, const std::string& key, OutputArchive& into) {
  OutputArchive archive(into.compilation_unit());
  for (const auto& [name, value] : fields) archive.write(name, value);
  into.write(key, archive);
}

Fields read_fields(const std::string& key, InputArchive& from) {
  InputArchive archive;
  from.read(key, archive);
  Fields fields;
  for (const auto& name : archive.keys()) archive.read(name, fields[name]);
  return fields;
}

// Written and read again: what an archive is made of has no other way into one that is read.
void move(OutputArchive& from, InputArchive& to) {
  std::stringstream bytes;
  from.save_to(bytes);
  to.load_from(bytes);
}

template <class Serialized>
Fields all_fields(const Serialized& serialized) {
  OutputArchive written;
  serialized.serialize(written);
  InputArchive archive;
  move(written, archive);
  Fields fields;
  for (const auto& name : archive.keys()) archive.read(name, fields[name]);
  return fields;
}

// Reads whose part it is, if it is a rank's.
void read_part(InputArchive& archive, OptimizerState& state) {
  c10::IValue saved_by, names;
  if (!archive.try_read(kSavedBy, saved_by)) return;
  state.saved_by = saved_by.toIntVector();
  if (!archive.try_read(kNames, names)) return;
  auto& known = state.names.emplace();
  for (const c10::IValue& name : names.toListRef()) known.push_back(name.toStringRef());
  if (InputArchive parts; archive.try_read(kParts, parts)) {
    const auto fields = read_fields(kParts, archive);
    state.parts = {fields.at("over").toStringRef(), fields.at("part").toInt(), fields.at("count").toInt()};
  }
}

OptimizerState read_checked(InputArchive& archive) {
  OptimizerState state;
  read_part(archive, state);
  InputArchive groups, states;
  archive.read("param_groups", groups);
  archive.read("state", states);
  // torch has any words for parameters, which stand in their order.
  std::map<std::string, std::int64_t> numbers;
  for (std::size_t i = 0; i < read_count(groups, "param_groups/size"); ++i) {
    InputArchive from;
    groups.read("param_groups/" + std::to_string(i), from);
    auto& group = state.groups.emplace_back();
    group.options = read_fields("options", from);
    for (std::size_t k = 0; k < read_count(from, "params/size"); ++k) {
      c10::IValue word;
      from.read("params/" + std::to_string(k), word);
      const auto next = static_cast<std::int64_t>(numbers.size());
      const auto number = state.has_old_numbers() ? std::stoll(word.toStringRef()) : next;
      group.parameters.push_back(numbers.emplace(word.toStringRef(), number).first->second);
    }
  }
  for (const auto& word : states.keys()) {
    if (const auto number = numbers.find(word); number != numbers.end()) {
      state.states[number->second] = read_fields(word, states);
    }
  }
  if (state.names && state.names->size() != numbers.size()) throw std::out_of_range("as many names as parameters");
  if (InputArchive masters; archive.try_read(kMasters, masters)) {
    for (const auto& word : masters.keys()) masters.read(word, state.masters[numbers.at(word)], /*is_buffer=*/true);
  }
  if (InputArchive scale; archive.try_read(kScale, scale)) {
    const auto fields = read_fields(kScale, archive);
    state.scale = {fields.at("scale").toDouble(), fields.at("overflows_left").toInt(), fields.at("steps").toInt(),
                   fields.at("last_overflow").toInt()};
  }
  if (c10::IValue steps; archive.try_read(kRngSteps, steps)) {
    state.rng_steps = static_cast<std::uint64_t>(steps.toInt());
  }
  return state;
}

}  // namespace

void write(const OptimizerState& state, OutputArchive& archive) {
  archive.write("pytorch_version", c10::IValue("1.5.0"));  // of the form
  OutputArchive states(archive.compilation_unit()), groups(archive.compilation_unit());
  for (const auto& [number, fields] : state.states) write_fields(fields, std::to_string(number), states);
  archive.write("state", states);
  groups.write("param_groups/size", count(state.groups.size()));
  for (std::size_t i = 0; i < state.groups.size(); ++i) {
    const auto& [parameters, options] = state.groups[i];
    OutputArchive group(archive.compilation_unit());
    group.write("params/size", count(parameters.size()));
    for (std::size_t k = 0; k < parameters.size(); ++k) {
      group.write("params/" + std::to_string(k), c10::IValue(std::to_string(parameters[k])));
    }
    write_fields(options, "options", group);
    groups.write("param_groups/" + std::to_string(i), group);
  }
  archive.write("param_groups", groups);
  if (!state.saved_by.empty()) archive.write(kSavedBy, c10::IValue(state.saved_by));
  if (state.names) {
    c10::List<std::string> names;
    for (const auto& name : *state.names) names.push_back(name);
    archive.write(kNames, c10::IValue(std::move(names)));
  }
  if (const auto& parts = state.parts) {
    write_fields({{"over", parts->over}, {"part", parts->part}, {"count", parts->count}}, kParts, archive);
  }
  if (state.rng_steps) archive.write(kRngSteps, c10::IValue(static_cast<std::int64_t>(*state.rng_steps)));
  if (!state.masters.empty()) {
    OutputArchive masters(archive.compilation_unit());
    for (const auto& [number, master] : state.masters)
      masters.write(std::to_string(number), master, /*is_buffer=*/true);
    archive.write(kMasters, masters);
  }
  if (const auto& scale = state.scale) {
    write_fields({{"scale", scale->scale},
                  {"overflows_left", scale->overflows_left},
                  {"steps", static_cast<std::int64_t>(scale->steps)},
                  {"last_overflow", static_cast<std::int64_t>(scale->last_overflow)}},
                 kScale, archive);
  }
}

OptimizerState read(InputArchive& archive) {
  try {
    return read_checked(archive);
  } catch (const base::Error&) {
    throw;
  } catch (const std::exception& error) {
    throw base::UsageError(base::str("the archive has no state of an optimizer: ", error.what()),
                           base::Code{"state-other-optimizer"});
  }
}

distributed_optimizer::StateDict rows_of(const OptimizerState& state) {
  distributed_optimizer::StateDict rows;
  rows.is_partial = state.names.has_value();
  rows.saved_by = state.saved_by;
  rows.parts = state.parts;
  rows.scale = state.scale;
  for (const auto& group : state.groups) {
    auto& members = rows.groups.emplace_back();
    for (const auto number : group.parameters) {
      auto& row = members.emplace_back();
      if (state.names) row.name = state.names->at(static_cast<std::size_t>(number));
      if (const auto found = state.states.find(number); found != state.states.end()) {
        row.state = state_value(found->second);
      }
      if (const auto master = state.masters.find(number); master != state.masters.end()) row.master = master->second;
    }
  }
  return rows;
}

OptimizerState from_rows(const distributed_optimizer::StateDict& rows, std::vector<Fields> options) {
  OptimizerState state{.saved_by = rows.saved_by, .parts = rows.parts};
  state.scale = rows.scale;
  if (rows.is_partial) state.names.emplace();
  std::int64_t number = 0;
  for (std::size_t i = 0; i < rows.groups.size(); ++i) {
    auto& group = state.groups.emplace_back();
    group.options = std::move(options.at(i));
    for (const auto& row : rows.groups[i]) {
      if (row.state.get_if<value::Dict>() != nullptr) state.states[number] = to_fields(row.state);
      if (row.master.defined()) state.masters[number] = row.master;
      if (state.names) state.names->push_back(row.name);
      group.parameters.push_back(number++);
    }
  }
  return state;
}

Fields options_of(const torch::optim::OptimizerParamGroup& group) {
  return group.has_options() ? all_fields(group.options()) : Fields();
}

Fields fields_of(const torch::optim::OptimizerParamState& state) { return all_fields(state); }

void give(torch::optim::OptimizerParamState& state, const Fields& fields) {
  OutputArchive written;
  for (const auto& [name, value] : fields) written.write(name, value);
  InputArchive archive;
  move(written, archive);
  state.serialize(archive);
}

OptimizerState state_of(const torch::optim::Optimizer& optimizer) {
  OutputArchive written;
  optimizer.save(written);
  InputArchive archive;
  move(written, archive);
  return read(archive);
}

void give(torch::optim::Optimizer& optimizer, const OptimizerState& state) {
  OutputArchive written;
  write(state, written);
  InputArchive archive;
  move(written, archive);
  optimizer.state().clear();
  optimizer.load(archive);
}

}  // namespace lamina::frontend
