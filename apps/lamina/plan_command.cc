// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/plan_command.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/launch/command_line.h"
#include "lamina/plan/plan_file.h"

namespace lamina::command {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file || file.bad()) throw base::ConfigError(base::str(path, ": cannot be read: ", std::strerror(errno)));
  return text.str();
}

void print(const plan::PlanFile& file, const plan::Report& report, bool json) {
  if (json) {
    std::cout << plan::to_json(file, report) << '\n';
    return;
  }
  std::cout << plan::assignments_line(file.tree, report.owners, file.goal.partitions) << '\n'
            << plan::describe(file.tree, report);
}

}  // namespace

int plan(const std::vector<std::string>& arguments) {
  CLI::App app("Says which rank would own which module of a model, and how long a step would take.", "lamina plan");
  std::string path;
  bool json = false;
  bool baseline = false;
  app.add_option("FILE", path, "modules and their costs, as docs/planning.md says")->required()->type_name("");
  app.add_flag("--json", json, "print the plan as one line of JSON");
  app.add_flag("--baseline", baseline, "plan as the published tree algorithm does");
  if (auto code = launch::parse(app, "lamina plan", arguments)) return *code;
  try {
    const plan::PlanFile file = plan::read_plan_file(read(path));
    const auto planner = baseline ? plan::tree_planner() : plan::step_planner();
    print(file, plan::report(file.tree, planner->assign(file.tree, file.goal), file.goal), json);
    return 0;
  } catch (const base::ConfigError& error) {
    std::cerr << "lamina plan: " << path << ": " << error.what() << '\n';
    return 2;
  }
}

}  // namespace lamina::command
