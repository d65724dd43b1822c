// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/optimizer_state.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/serialize/archive.h>

#include <sstream>
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

OptimizerState read_checked(InputArchive& archive) {
  OptimizerState state;
  if (c10::IValue saved_by; archive.try_read(kSavedBy, saved_by)) state.saved_by = saved_by.toIntVector();
  InputArchive groups, states;
  archive.read("param_groups", groups);
  archive.read("state", states);
  // torch has any words for parameters; in a whole optimizer they stand in their order.
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
      const auto number = state.saved_by.empty() ? next : std::stoll(word.toStringRef());
      group.parameters.push_back(numbers.emplace(word.toStringRef(), number).first->second);
    }
  }
  for (const auto& word : states.keys()) {
    if (const auto number = numbers.find(word); number != numbers.end()) {
      state.states[number->second] = read_fields(word, states);
    }
  }
  if (InputArchive masters; archive.try_read(kMasters, masters)) {
    for (const auto& word : masters.keys()) masters.read(word, state.masters[numbers.at(word)], /*is_buffer=*/true);
  }
  if (InputArchive scale; archive.try_read(kScale, scale)) {
    const auto fields = read_fields(kScale, archive);
    state.scale = {fields.at("scale").toDouble(), fields.at("overflows_left").toInt(), fields.at("steps").toInt(),
                   fields.at("last_overflow").toInt()};
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
