// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/verify_session.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "apps/lamina/say.h"
#include "apps/lamina/verify_runs.h"
#include "lamina/base/error.h"
#include "lamina/config/config.h"
#include "lamina/config/layout_text.h"
#include "lamina/digests/causes.h"

namespace lamina::command {
namespace {

using digests::RankRecordings;

constexpr int kDiffers = 3, kNotProven = 2;

struct TwoRuns {
  int code = 0;  // of the one that failed
  RankRecordings first, second;
};

// The layout of a run that was recorded.
struct Layout {
  config::Config keys;
  int processes = 1;
  int copies = 1;  // of the model

  explicit Layout(const RankRecordings& run) : processes(static_cast<int>(run.front().world)) {
    const auto text = run.front().about.find("configuration");
    if (text != run.front().about.end()) keys = config::parse_config({.json = text->second}).config;
    for (const auto& rank : run) copies = std::max(copies, static_cast<int>(rank.copy) + 1);
  }
};

std::string joined(const std::string& layout, const std::string& more) {
  return layout.empty() || more.empty() ? layout + more : base::str(layout, ",", more);
}

// Runs one of the two, and says so.
int run_one(const RecordedRun& run, const std::string& number, const std::string& folder) {
  if (!run.quiet) {
    const std::string ranks =
        run.processes ? base::str(", ", *run.processes, *run.processes == "1" ? " rank" : " ranks") : "";
    complain("lamina verify: ", number, ": ", run.what, ranks);
  }
  const int code = run_recorded(run, folder);
  if (code != 0 && !run.quiet) {
    const std::string how =
        code > 128 ? base::str(" was ended by signal ", code - 128) : base::str(" failed, see above; exit code ", code);
    complain("lamina verify: the run ", run.collapsed ? "without the layout" : "in " + run.what, how);
  }
  return code;
}

RankRecordings read_recordings(const std::string& folder) {
  std::error_code ignored;
  if (std::filesystem::is_empty(folder, ignored)) {
    throw base::Error(
        "no rank has recorded anything: the script must call lamina.init(), and be Python or C++ that "
        "trains a model of lamina's");
  }
  return digests::read_run(folder);
}

// Runs the script in its layout, then in the other. A quiet one leaves no word.
TwoRuns run_both(const VerifyTerms& terms, const RecordingFolder& folder, bool quiet = false,
                 const std::vector<std::string>& looked_at = {}) {
  TwoRuns runs;
  RecordedRun run{.what = terms.layout.empty() ? "the layout" : "layout " + terms.layout,
                  .processes = terms.processes,
                  .words = terms.words,
                  .layout = terms.layout,
                  .steps = terms.steps,
                  .bits = terms.compared.bits,
                  .looked_at = looked_at,
                  .quiet = quiet,
                  .temporary = folder.temporary()};
  const auto first = folder.make("layout"), second = folder.make("plain");
  runs.code = run_one(run, "1 of 2", first);
  if (runs.code != 0) return runs;
  runs.first = read_recordings(first);
  const Layout layout(runs.first);
  int in_copy = 1;
  if (terms.against) {
    const auto other = config::in_layout(layout.keys, *terms.against);
    in_copy = other.partitions * other.tensor_parallel_degree;
  }
  run.what = terms.against ? "layout " + *terms.against : "no partitions, slices and shards";
  run.processes = std::to_string(layout.copies * in_copy);
  run.layout = joined(terms.layout, terms.against.value_or(""));
  run.collapsed = !terms.against;
  runs.code = run_one(run, "2 of 2", second);
  if (runs.code == 0) runs.second = read_recordings(second);
  return runs;
}

bool has_steps(const RankRecordings& run) {
  return std::ranges::any_of(run, [](const auto& rank) { return rank.steps > 0; });
}

digests::Comparison compare(const TwoRuns& runs, const VerifyTerms& terms) {
  if (!has_steps(runs.first) || !has_steps(runs.second)) {
    throw base::Error("the script has made no step: it must call a step function, or the model and an optimizer");
  }
  auto compared = terms.compared;
  compared.steps = terms.steps;
  return digests::compare(runs.first, runs.second, compared);
}

// Runs both again, up to the first difference, and has the modules that may have made it say what they read.
void look_at_cause(digests::Comparison& comparison, const RankRecordings& run, VerifyTerms terms) {
  auto& first = comparison.differences.front();
  if (!digests::cause_of(first).empty()) return;
  const auto calls = digests::calls_to_look_at(first, run);
  if (calls.empty()) return;
  std::vector<std::string> names;
  for (const auto& call : calls) names.push_back(std::get<std::string>(call));
  const std::string one = names.front().empty() ? "the model" : names.front();
  complain("lamina verify: both once more, to see what ",
           names.size() > 1
               ? base::str(one, " and ", digests::counted(names.size() - 1, "other"), " read")
               : base::str(one, first.seen.kind >= digests::RecordedKind::kParameter ? " is updated with" : " reads"));
  terms.steps = static_cast<int>(first.seen.step) + 1;
  const RecordingFolder folder;
  const auto runs = run_both(terms, folder, /*quiet=*/true, names);
  if (runs.code == 0) first.reads = digests::reads_apart(runs.first, runs.second, first, calls, comparison.tolerance);
}

// Adds what the recordings lack as a whole to what was missed tensor by tensor.
void note_gaps(digests::Comparison& comparison, const TwoRuns& runs) {
  const auto most = [](const RankRecordings& run) {
    return std::ranges::max(run, {}, &digests::RankRecording::steps).steps;
  };
  auto missing = digests::gaps(runs.first, "first run");
  for (auto& gap : digests::gaps(runs.second, "second run")) missing.push_back(std::move(gap));
  if (most(runs.first) != most(runs.second)) {
    missing.push_back(base::str("the first run has recorded ", digests::counted(most(runs.first), "step"),
                                ", the second one ", most(runs.second)));
  }
  if (comparison.modules == 0) missing.emplace_back("no module was compared");
  if (comparison.parameters == 0) missing.emplace_back("no parameter was compared");
  comparison.missing.insert(comparison.missing.begin(), missing.begin(), missing.end());
}

int report(digests::Comparison comparison, const TwoRuns& runs) {
  note_gaps(comparison, runs);
  say_text(digests::describe(comparison));
  if (comparison.differences.empty()) return comparison.missing.empty() ? 0 : kNotProven;
  for (const auto& each : comparison.missing) say(each);
  return kDiffers;
}

struct Verified {
  int code = 0;
  RankRecordings first;
};

Verified verify(const VerifyTerms& terms) {
  const RecordingFolder folder(terms.keep);
  auto runs = run_both(terms, folder);
  if (runs.code != 0) return {runs.code, {}};
  auto comparison = compare(runs, terms);
  if (!comparison.differences.empty()) look_at_cause(comparison, runs.second, terms);
  return {report(std::move(comparison), runs), std::move(runs.first)};
}

// A layout that is smaller than another in one respect.
struct Smaller {
  int processes = 1;
  std::string keys;  // that are others
};

// The respects in which a layout is made smaller, the large ones first.
enum class Respect { kCopies, kPartitions, kPipeline, kShards, kMicrobatches, kOrder };
constexpr std::array kRespects{Respect::kCopies, Respect::kPartitions,   Respect::kPipeline,
                               Respect::kShards, Respect::kMicrobatches, Respect::kOrder};

// Nothing where it cannot be smaller in that respect.
std::optional<Smaller> smaller(const Layout& is, Respect respect) {
  const config::Config& keys = is.keys;
  const int ranks_of_partition = is.processes / keys.partitions;
  const bool sharded = keys.sharded_data_parallel_degree > 1 || keys.shard_optimizer_state;
  switch (respect) {
    case Respect::kCopies:
      if (is.copies > 1) return Smaller{keys.partitions * keys.tensor_parallel_degree, sharded ? "shards=1" : ""};
      break;
    case Respect::kPartitions:
      if (keys.partitions > 2) return Smaller{2 * ranks_of_partition, "pp=2"};
      break;
    case Respect::kPipeline:
      if (keys.partitions > 1 && is.copies > 1) return Smaller{ranks_of_partition, "pp=1"};
      break;
    case Respect::kShards:
      if (sharded) return Smaller{is.processes, "shards=1"};
      break;
    case Respect::kMicrobatches:
      if (keys.microbatches > 1) return Smaller{is.processes, "microbatches=1"};
      break;
    case Respect::kOrder:
      if (!keys.deterministic_server) return Smaller{is.processes, "deterministic_server=1"};
  }
  return {};
}

// Says how this is run again.
std::string command_for(const VerifyTerms& terms) {
  std::vector<std::string> words{"lamina", "verify"};
  if (terms.processes) words.insert(words.end(), {"-n", *terms.processes});
  words.insert(words.end(), {"--steps", std::to_string(terms.steps)});
  if (!terms.layout.empty()) words.insert(words.end(), {"--layout", terms.layout});
  if (terms.against) words.insert(words.end(), {"--against", *terms.against});
  if (terms.compared.tolerance) words.insert(words.end(), {"--tolerance", base::str(*terms.compared.tolerance)});
  if (terms.compared.bits) words.emplace_back("--bits");
  words.insert(words.end(), terms.words.begin(), terms.words.end());
  return quoted(words);
}

// Compares the two runs without a word. Runs that cannot be compared do not differ.
Verified verify_quietly(const VerifyTerms& terms) {
  const RecordingFolder folder;
  try {
    auto runs = run_both(terms, folder, /*quiet=*/true);
    if (runs.code != 0) return {runs.code, {}};
    return {compare(runs, terms).differences.empty() ? 0 : kDiffers, std::move(runs.first)};
  } catch (const base::Error&) {
    return {};
  }
}

}  // namespace

int compare_recordings(const std::string& first, const std::string& second, const VerifyTerms& terms) {
  const TwoRuns runs{0, digests::read_run(first), digests::read_run(second)};
  const Layout one(runs.first), other(runs.second);
  if (one.copies != other.copies) {
    complain("lamina verify: the first run has ", one.copies, one.copies == 1 ? " copy" : " copies",
             " of the model, the second ", other.copies, ": what both have is compared");
  }
  return report(digests::compare(runs.first, runs.second, terms.compared), runs);
}

int verify_once(const VerifyTerms& terms) { return verify(terms).code; }

int verify_and_bisect(const VerifyTerms& terms) {
  auto [code, recorded] = verify(terms);
  if (code != kDiffers) return code;
  VerifyTerms smallest = terms;
  bool found = false;
  for (const Respect respect : kRespects) {
    const auto next = smaller(Layout(recorded), respect);
    if (!next) continue;
    VerifyTerms tried = smallest;
    tried.processes = std::to_string(next->processes);
    tried.layout = joined(smallest.layout, next->keys);
    complain("lamina verify: trying ", digests::counted(next->processes, "rank"),
             tried.layout.empty() ? "" : ", " + tried.layout);
    auto outcome = verify_quietly(tried);
    if (outcome.code > 128) return outcome.code;  // a signal
    if (outcome.code != kDiffers) continue;
    recorded = std::move(outcome.first);
    smallest = tried;
    found = true;
  }
  say(found ? "the smallest layout that still differs: " : "no smaller layout differs: ", command_for(smallest));
  return kDiffers;
}

}  // namespace lamina::command
