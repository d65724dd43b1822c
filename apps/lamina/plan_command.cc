// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/plan_command.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <sstream>

#include "apps/lamina/model_costs.h"
#include "apps/lamina/say.h"
#include "lamina/base/error.h"
#include "lamina/base/input_file.h"
#include "lamina/launch/options/command_line.h"
#include "lamina/plan/graph_plan.h"
#include "lamina/plan/plan_file.h"
#include "lamina/plan/planner.h"

namespace lamina::command {
namespace {

// The job that is planned for, where a model in Python is given instead of a file.
struct Target {
  int partitions = 0;
  int microbatches = 8;
  std::string schedule = "interleaved";
  double memory_weight = 0.8;
  std::int64_t memory_limit_bytes = -1;
  double link_latency_us = 0;
  double link_bytes_per_us = 0;
};

// The plan's file, with these members that a model has.
std::string plan_of(const Target& target, const std::string& members) {
  std::ostringstream json;
  json << R"({"partitions":)" << target.partitions << R"(,"microbatches":)" << target.microbatches << R"(,"schedule":")"
       << target.schedule << R"(","memory_weight":)" << target.memory_weight;
  if (target.memory_limit_bytes >= 0) json << R"(,"memory_limit_bytes":)" << target.memory_limit_bytes;
  if (target.link_bytes_per_us > 0) {
    json << R"(,"link":{"latency_us":)" << target.link_latency_us << R"(,"bytes_per_us":)" << target.link_bytes_per_us
         << '}';
  }
  json << ',' << members << '}';
  return json.str();
}

// Options that describe a model and what it is planned for; they need --model, and each other.
void add_model_options(CLI::App& app, PlannedModel& model, Target& target) {
  auto* named = app.add_option("--model", model.callable, "a model instead of FILE: what returns it")
                    ->type_name("MODULE:CALLABLE");
  const auto with_model = [&](CLI::Option* option) { return option->needs(named); };
  with_model(app.add_option("--input", model.inputs, "an argument of one microbatch, in Python, where torch is known")
                 ->type_name("[NAME=]EXPRESSION")
                 ->expected(1)
                 ->take_all());
  auto* ranks = with_model(app.add_option("-n,--partitions", target.partitions, "ranks to cut it for"));
  with_model(app.add_option("--tensor-parallel-degree", model.degree, "ranks that marked layers are cut over")
                 ->check(CLI::Range(1, 65'536))
                 ->capture_default_str());
  with_model(app.add_flag("--prescaled-batch", model.has_one_batch, "these ranks read one batch"));
  with_model(app.add_option("--optimize", model.optimize, "memory or speed, of layers that are cut")
                 ->check(CLI::IsMember({"memory", "speed"}))
                 ->capture_default_str());
  named->needs(ranks);
  with_model(app.add_option("-m,--microbatches", target.microbatches, "of a step")->capture_default_str());
  with_model(app.add_option("--schedule", target.schedule, "interleaved, simple or zero_bubble")
                 ->check(CLI::IsMember({"simple", "interleaved", "zero_bubble"}))
                 ->capture_default_str());
  with_model(
      app.add_option("--memory-weight", target.memory_weight, "of memory against time, 0 to 1")->capture_default_str());
  with_model(app.add_option("--memory-limit-bytes", target.memory_limit_bytes, "that a rank has"));
  with_model(app.add_option("--link-latency-us", target.link_latency_us, "of a message"));
  with_model(app.add_option("--link-bytes-per-us", target.link_bytes_per_us, "between ranks; else messages are free"));
  app.add_flag("--times", model.times, "run the model and measure, instead of counting operations")->needs(named);
}

void print(const plan::PlanFile& file, const plan::Report& report, bool json) {
  if (json) {
    say_text(plan::to_json(file, report) + "\n");
    return;
  }
  say(plan::assignments_line(file.tree, report.owners, file.goal.partitions));
  say_text(plan::describe(file.tree, report) + plan::describe(file.sliced));
}

}  // namespace

int plan(const std::vector<std::string>& arguments) {
  CLI::App app("Says which rank would own which module of a model, and how long a step would take.", "lamina plan");
  std::string path;
  bool json = false;
  bool baseline = false;
  PlannedModel model;
  Target target;
  auto* given = app.add_option("FILE", path, "modules and their costs, as docs/planning.md says")->type_name("");
  add_model_options(app, model, target);
  given->excludes("--model");
  app.add_flag("--json", json, "print the plan as one line of JSON");
  app.add_flag("--baseline", baseline, "plan as the published tree algorithm does");
  if (auto code = launch::parse(app, "lamina plan", arguments)) return *code;
  if (path.empty() && model.callable.empty()) {
    complain("lamina plan: say what to plan, a FILE or a --model; see `lamina plan --help`");
    return 2;
  }
  const std::string what = path.empty() ? model.callable : path;
  try {
    model.partitions = target.partitions;
    const auto members = path.empty() ? model_members(model) : std::string();
    if (!members) return 2;
    const plan::PlanFile file =
        plan::read_plan_file(path.empty() ? plan_of(target, *members) : base::read_file(path, "", base::kMostOfRows));
    const auto automatic = file.graph ? plan::graph_planner : plan::step_planner;
    const auto owners = (baseline ? plan::tree_planner : automatic)()->assign(file.tree, file.goal);
    const auto report = file.graph ? plan::report_graph : plan::report;
    print(file, report(file.tree, owners, file.goal), json);
    return 0;
  } catch (const base::ConfigError& error) {
    complain("lamina plan: ", what, ": ", error.what());
    return 2;
  }
}

}  // namespace lamina::command
