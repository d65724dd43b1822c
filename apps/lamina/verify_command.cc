// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/verify_command.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>

#include "apps/lamina/say.h"
#include "apps/lamina/verify_session.h"
#include "lamina/base/error.h"
#include "lamina/config/layout_text.h"
#include "lamina/launch/options/command_line.h"
#include "lamina/launch/options/options.h"

namespace lamina::command {
namespace {

constexpr const char* kFooter =
    "The second run has the same copies of the model, seeds, microbatches and data, and one rank for each copy.\n"
    "A LAYOUT is keys of the configuration, as in pp=2,tp=1,shards=1,microbatches=4; what it does not name is the\n"
    "script's. What the script prints goes to stderr. `lamina run --help` explains the other options.\n"
    "The exit code is 0 where the runs are equal, 3 where they differ, 2 for wrong arguments and runs that cannot be\n"
    "compared, or of which something is missing, and else that of the run that failed.";

struct VerifyOptions {
  VerifyTerms terms;
  bool compare = false;  // run.target is two folders
  bool bisect = false;
  launch::Options run;  // of `lamina run`, which checks them
};

void add_options(CLI::App& app, VerifyOptions& options) {
  VerifyTerms& terms = options.terms;
  app.add_option("SCRIPT", options.run.target, "what to run; all words after it go to it")->type_name("ARGUMENTS");
  app.add_option("-n,--nproc,--nproc-per-node,--nproc_per_node", terms.processes, "ranks of the layout")
      ->type_name("N");
  app.add_option("--steps", terms.steps, "steps that are compared; the script ends after them")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->type_name("K");
  app.add_option("--against", terms.against, "the layout of the second run, instead of one rank for each copy")
      ->type_name("LAYOUT");
  app.add_option("--layout", terms.layout, "a layout for both runs, instead of the script's")->type_name("LAYOUT");
  app.add_option("--tolerance", terms.compared.tolerance,
                 "relative difference that is no error, instead of the numbers' own")
      ->check(CLI::NonNegativeNumber)
      ->type_name("X");
  app.add_flag("--bits", terms.compared.bits, "compare bits, not sizes");
  app.add_flag("--bisect", options.bisect, "look for the smallest layout that still differs");
  app.add_option("--keep", terms.keep, "a folder that keeps the recordings, in layout/ and plain/")
      ->type_name("FOLDER");
  app.add_flag("--compare", options.compare, "SCRIPT and ARGUMENTS are two folders of recordings; run nothing");
  app.footer(kFooter);
}

// The words that gave these options.
std::vector<std::string> given(const std::vector<const CLI::Option*>& options) {
  std::vector<std::string> words;
  for (const CLI::Option* option : options) {
    const bool is_long = !option->get_lnames().empty();
    const std::string name = is_long ? "--" + option->get_lnames().front() : "-" + option->get_snames().front();
    const bool takes_value = option->get_items_expected_max() > 0;
    for (const std::string& value : option->results()) {
      words.push_back(takes_value && is_long ? base::str(name, '=', value) : name);
      if (takes_value && !is_long) words.push_back(value);
    }
  }
  return words;
}

// Says what is wrong with the arguments; empty: nothing.
std::string wrong_with(const VerifyOptions& options) {
  if (options.compare) return options.run.target.size() == 2 ? "" : "--compare takes two folders of recordings";
  if (options.run.target.empty()) return "say which script";
  if (options.run.restarts > 0) return "--restarts: a run that is compared is not started again";
  if (options.run.timeline) return "--timeline: a run that is compared has none; use `lamina run`";
  return "";
}

int run(const VerifyOptions& options) {
  const VerifyTerms& terms = options.terms;
  if (options.compare) return compare_recordings(options.run.target.at(0), options.run.target.at(1), terms);
  for (const auto& layout : {terms.layout, terms.against.value_or("")}) config::in_layout({}, layout);
  return options.bisect ? verify_and_bisect(terms) : verify_once(terms);
}

}  // namespace

int verify(const std::vector<std::string>& arguments) {
  CLI::App app("Compares a script's first steps in its layout with the same steps on one device for each copy.",
               "lamina verify");
  VerifyOptions options;
  launch::add_options_of_one_run(app, options.run);
  const std::vector<const CLI::Option*> launched = std::as_const(app).get_options();
  add_options(app, options);
  const auto line = launch::split(app, arguments);
  if (auto code = launch::parse(app, "lamina verify", line.options)) return *code;
  options.run.target = line.rest;
  if (const auto wrong = wrong_with(options); !wrong.empty()) {
    complain("lamina verify: ", wrong, "; see `lamina verify --help`");
    return 2;
  }
  options.terms.words = given(launched);
  options.terms.words.insert(options.terms.words.end(), line.rest.begin(), line.rest.end());
  try {
    return run(options);
  } catch (const base::Error& error) {
    complain("lamina verify: ", error.what());
    return 2;
  }
}

}  // namespace lamina::command
