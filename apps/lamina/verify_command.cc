// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/verify_command.h"

#include <sys/wait.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "apps/lamina/say.h"
#include "lamina/base/error.h"
#include "lamina/base/system_error.h"
#include "lamina/digests/comparison.h"
#include "lamina/launch/launcher.h"
#include "lamina/launch/options/command_line.h"

namespace lamina::command {
namespace {

constexpr int kDiffers = 3;

// A folder for recordings, gone at the end unless it is to be kept.
class Folder {
 public:
  explicit Folder(const std::string& wanted) : path_(wanted), kept_(!wanted.empty()) {
    if (kept_) {
      std::filesystem::create_directories(path_);
      return;
    }
    std::string path = (std::filesystem::temp_directory_path() / "lamina-verify.XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr)
      throw base::Error(base::str("no folder for recordings: ", base::system_error()));
    path_ = path;
  }
  ~Folder() {
    std::error_code ignored;
    if (!kept_) std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;

  // An empty folder in it.
  std::string make(const std::string& name) const {
    const auto made = path_ / name;
    std::filesystem::remove_all(made);
    std::filesystem::create_directories(made);
    return made.string();
  }

 private:
  std::filesystem::path path_;
  bool kept_;
};

struct Options {
  int processes = 1;
  int steps = 3;
  std::optional<double> tolerance;
  bool bits = false;
  std::string keep;
  std::vector<std::string> compare;
  std::vector<std::string> script;
};

// Runs the script on so many ranks, each of which leaves its recording in the folder. The launcher takes a process of
// its own, which it takes over. Returns its exit code.
int run(const Options& options, int processes, const std::string& folder, bool collapsed) {
  const pid_t child = ::fork();
  if (child < 0) throw base::Error(base::str("cannot start a run: ", base::system_error()));
  if (child == 0) {
    ::setenv("LAMINA_VERIFY_FOLDER", folder.c_str(), 1);
    ::setenv("LAMINA_VERIFY_STEPS", std::to_string(options.steps).c_str(), 1);
    if (options.bits) ::setenv("LAMINA_VERIFY_BITS", "1", 1);
    if (collapsed) ::setenv("LAMINA_VERIFY_COLLAPSED", "1", 1);
    std::vector<std::string> words{"-n", std::to_string(processes)};
    words.insert(words.end(), options.script.begin(), options.script.end());
    const int code = launch::run_command(words);
    std::cout.flush();
    ::_exit(code);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int report(const std::vector<digests::RankRecording>& first, const std::vector<digests::RankRecording>& second,
           const Options& options) {
  const auto comparison = digests::compare(first, second, {options.tolerance, options.bits});
  say_text(digests::describe(comparison));
  return comparison.differences.empty() ? 0 : kDiffers;
}

// How many copies of the model there are in a run.
int copies_of(const std::vector<digests::RankRecording>& run) {
  std::int64_t most = 0;
  for (const auto& rank : run) most = std::max(most, rank.copy);
  return static_cast<int>(most) + 1;
}

int verify(const Options& options) {
  if (!options.compare.empty()) {
    return report(digests::read_run(options.compare.at(0)), digests::read_run(options.compare.at(1)), options);
  }
  const Folder folder(options.keep);
  const auto in_layout = folder.make("layout"), plain = folder.make("plain");
  if (const int code = run(options, options.processes, in_layout, /*collapsed=*/false); code != 0) {
    complain("lamina verify: the run in its layout failed, see above; exit code ", code);
    return code;
  }
  const auto first = digests::read_run(in_layout);
  if (const int code = run(options, copies_of(first), plain, /*collapsed=*/true); code != 0) {
    complain("lamina verify: the run without the layout failed, see above; exit code ", code);
    return code;
  }
  return report(first, digests::read_run(plain), options);
}

}  // namespace

int verify(const std::vector<std::string>& arguments) {
  CLI::App app("Compares a script's first steps in its layout with the same steps on one device for each copy.",
               "lamina verify");
  Options options;
  app.add_option("-n,--nproc", options.processes, "ranks of the layout")->check(CLI::PositiveNumber)->type_name("N");
  app.add_option("--steps", options.steps, "steps that are compared; the script ends after them")
      ->check(CLI::PositiveNumber)
      ->type_name("K");
  app.add_option("--tolerance", options.tolerance, "relative difference that is no error, instead of the numbers' own")
      ->type_name("X");
  app.add_flag("--bits", options.bits, "compare bits, not sizes");
  app.add_option("--keep", options.keep, "a folder that keeps the recordings")->type_name("FOLDER");
  app.add_option("--compare", options.compare, "compare two folders of recordings, and run nothing")
      ->expected(2)
      ->type_name("A B");
  const auto line = launch::split(app, arguments);
  if (auto code = launch::parse(app, "lamina verify", line.options)) return *code;
  options.script = line.rest;
  if (options.script.empty() && options.compare.empty()) {
    complain("lamina verify: say which script; see `lamina verify --help`");
    return 2;
  }
  try {
    return verify(options);
  } catch (const base::Error& error) {
    complain("lamina verify: ", error.what());
    return 2;
  }
}

}  // namespace lamina::command
