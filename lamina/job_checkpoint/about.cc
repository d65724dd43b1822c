// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/about.h"

#include <algorithm>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/tree_json.h"

namespace lamina::job_checkpoint {
namespace {

using value::Dict;
using value::List;
using value::Value;

constexpr const char* kParameters = "params";  // among the options of a group
constexpr std::string_view kSmpForm = "smp";

std::int64_t number_at(const Dict& dict, const char* key) { return at(dict, key).as<std::int64_t>(); }

// Gives the text that it is, "" where it is none.
std::string text_of(const Value& value) {
  const auto* text = value.get_if<std::string>();
  return text == nullptr ? "" : *text;
}

// Items by their keys: such a dictionary is an object in JSON.
Dict sorted(Dict dict) {
  std::ranges::sort(dict.items, {}, [](const auto& item) { return item.first.template as<std::string>(); });
  return dict;
}

Value layout_value(const JobLayout& layout) {
  return Dict{{{"pp", layout.pp},
               {"rdp", layout.rdp},
               {"sharded_data_parallel_degree", layout.shard},
               {"tp", layout.tp},
               {"world", layout.world}}};
}

JobLayout to_layout(const Dict& saved) {
  return {number_at(saved, "pp"), number_at(saved, "rdp"), number_at(saved, "sharded_data_parallel_degree"),
          number_at(saved, "tp"), number_at(saved, "world")};
}

Value optimizer_value(const OptimizerAbout& optimizer) {
  List groups;
  for (const auto& group : optimizer.groups) {
    List parameters;
    for (const auto& name : group.parameters) parameters.items.emplace_back(name);
    auto options = group.options;
    options.items.emplace_back(kParameters, std::move(parameters));
    groups.items.emplace_back(sorted(std::move(options)));
  }
  return Dict{{{"class", optimizer.class_name}, {"groups", std::move(groups)}, {"rest", optimizer.rest}}};
}

OptimizerAbout to_optimizer(const Dict& saved) {
  OptimizerAbout optimizer{.class_name = text_of(at(saved, "class")), .groups = {}, .rest = at(saved, "rest")};
  if (optimizer.rest.get_if<value::None>() == nullptr) optimizer.rest.as<Dict>();  // throws for another kind
  for (const auto& each : at(saved, "groups").as<List>().items) {
    auto& group = optimizer.groups.emplace_back();
    for (const auto& item : each.as<Dict>().items) {
      if (item.first.as<std::string>() != kParameters) {
        group.options.items.push_back(item);
        continue;
      }
      for (const auto& name : item.second.as<List>().items) group.parameters.push_back(name.as<std::string>());
    }
  }
  return optimizer;
}

Value scale_value(const optim::LossScale::State& state) {
  return Dict{{{"last_overflow", static_cast<std::int64_t>(state.last_overflow)},
               {"overflows_left", state.overflows_left},
               {"scale", state.scale},
               {"steps", static_cast<std::int64_t>(state.steps)}}};
}

optim::LossScale::State to_scale(const Dict& saved) {
  const auto& scale = at(saved, "scale");
  const auto* whole = scale.get_if<std::int64_t>();
  const optim::LossScale::State state{whole != nullptr ? static_cast<double>(*whole) : scale.as<double>(),
                                      number_at(saved, "overflows_left"), number_at(saved, "steps"),
                                      number_at(saved, "last_overflow")};
  optim::LossScale().set_state(state);  // throws for what is none
  return state;
}

void require_known_version(const About& about) {
  if (about.version <= kVersion) return;
  throw base::UsageError(
      base::str("the checkpoint was saved by lamina ", about.lamina, ", in version ", about.version,
                " of its manifest, and this lamina reads those up to ", kVersion, ": load it with one as new"),
      base::Code{"checkpoint-newer"});
}

}  // namespace

const Value& at(const Dict& dict, const std::string& key) {
  static const Value none;
  for (const auto& [name, held] : dict.items) {
    const auto* text = name.get_if<std::string>();
    if (text != nullptr && *text == key) return held;
  }
  return none;
}

JobLayout JobLayout::of(const topology::Topology& topology) {
  using topology::Group;
  return {topology.size(Group::kPp), topology.size(Group::kRdp), topology.size(Group::kShard),
          topology.size(Group::kTp), topology.size(Group::kWorld)};
}

nlohmann::json write_about(const About& about, std::vector<at::Tensor>& tensors, bool allow_objects) {
  auto json = nlohmann::json::object();
  const auto tell = [&](const char* key, const Value& value) {
    json[key] = checkpoint::to_json(value, tensors, allow_objects);
  };
  tell("version", about.version);
  tell("lamina", about.lamina);
  tell("saved_at", about.saved_at);
  if (!about.form.empty()) tell("form", about.form);
  if (about.layout) tell("layout", layout_value(*about.layout));
  Dict partition;
  for (const auto& [name, number] : about.partition) partition.items.emplace_back(name, std::int64_t{number});
  tell("partition", std::move(partition));
  if (about.seeded_steps) tell("seeded_steps", static_cast<std::int64_t>(*about.seeded_steps));
  if (about.loss_scale) tell("loss_scale", scale_value(*about.loss_scale));
  if (!about.form.empty()) return json;
  List optimizers;
  for (const auto& optimizer : about.optimizers) optimizers.items.push_back(optimizer_value(optimizer));
  tell("optimizers", std::move(optimizers));
  tell("user_content", about.user_content);
  if (const auto* states = about.extra_state.get_if<Dict>()) tell("extra_state", sorted(*states));
  return json;
}

About read_about(const nlohmann::json& json, const std::function<at::Tensor(std::size_t)>& tensor,
                 const AboutWanted& wanted) {
  const auto told = [&](const char* key, bool allow_objects = false) {
    return json.contains(key) ? checkpoint::to_value(json[key], tensor, allow_objects) : Value();
  };
  About about{.version = 1};
  const auto version = told("version");
  if (const auto* number = version.get_if<std::int64_t>()) about.version = *number;
  about.lamina = text_of(told("lamina"));
  require_known_version(about);
  about.saved_at = text_of(told("saved_at"));
  about.form = text_of(told("form"));
  if (!about.form.empty() && about.form != kSmpForm) {
    throw base::UsageError(base::str("the checkpoint has the form ", about.form, ", which this lamina does not know"),
                           base::Code{"checkpoint-newer"});
  }
  about.no_optimizer = text_of(told("no_optimizer"));
  const auto layout = told("layout"), partition = told("partition"), scale = told("loss_scale");
  if (const auto* sizes = layout.get_if<Dict>()) about.layout = to_layout(*sizes);
  if (const auto* modules = partition.get_if<Dict>()) {
    for (const auto& [name, number] : modules->items) {
      about.partition[name.as<std::string>()] = static_cast<int>(number.as<std::int64_t>());
    }
  }
  const auto optimizers = wanted.optimizers ? told("optimizers", wanted.allow_objects) : Value();
  if (const auto* list = optimizers.get_if<List>()) {
    for (const auto& each : list->items) about.optimizers.push_back(to_optimizer(each.as<Dict>()));
  }
  const auto generators = told("generators"), steps = told("seeded_steps");
  if (const auto* list = generators.get_if<List>()) about.generators = list->items;
  if (const auto* number = steps.get_if<std::int64_t>()) about.seeded_steps = static_cast<std::uint64_t>(*number);
  if (const auto* state = scale.get_if<Dict>()) about.loss_scale = to_scale(*state);
  about.extra_state = told("extra_state", wanted.allow_objects);
  about.user_content = told("user_content", wanted.allow_objects);
  return about;
}

}  // namespace lamina::job_checkpoint
