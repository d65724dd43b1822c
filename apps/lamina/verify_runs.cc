// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/verify_runs.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <iostream>

#include "lamina/base/error.h"
#include "lamina/base/input_file.h"
#include "lamina/base/joined.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/digests/variables.h"
#include "lamina/launch/launcher.h"

namespace lamina::command {
namespace {

namespace fs = std::filesystem;

bool is_recording(const fs::path& path) {
  if (!fs::is_regular_file(fs::symlink_status(path)) || path.extension() != ".jsonl") return false;
  constexpr std::size_t kMost = 4096;
  const auto first = base::read_input(base::open_input(path.string(), path.string() + " "), path.string() + " ", kMost);
  return path.filename().string().starts_with("rank-") &&
         (first.empty() || first.substr(0, first.find('\n')).find("\"lamina recording\"") != std::string::npos);
}

// Throws where there is anything that is not of a run that was compared: it may be all that somebody has.
void refuse_others(const fs::path& folder) {
  const auto refuse = [&](const fs::path& found) {
    throw base::Error(base::str("--keep ", folder.string(), ": there is ", found.string(),
                                ", which is no recording; name an empty folder, or one of earlier recordings"));
  };
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename();
    if ((name != "layout" && name != "plain") || !fs::is_directory(entry.symlink_status())) refuse(entry.path());
    for (const auto& each : fs::directory_iterator(entry.path())) {
      if (!is_recording(each.path())) refuse(each.path());
    }
  }
}

constexpr std::string_view kTemporary = "lamina-verify.", kUnique = "XXXXXX";

// Locks a folder of this user's; none where there is no such any more or, with LOCK_NB, another process has it.
base::Fd locked(const fs::path& folder, int how) {
  base::Fd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat opened{}, there{};
  const bool is_ours = fd && ::fstat(fd.get(), &opened) == 0 && opened.st_uid == ::geteuid() &&
                       ::flock(fd.get(), how) == 0 && ::lstat(folder.c_str(), &there) == 0 &&
                       opened.st_ino == there.st_ino && opened.st_dev == there.st_dev;
  return is_ours ? std::move(fd) : base::Fd();
}

// Removes the folders of those that were killed.
void sweep(const fs::path& among) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(among, fs::directory_options::skip_permission_denied, ignored)) {
    const auto name = entry.path().filename().string();
    if (!name.starts_with(kTemporary) || name.size() != kTemporary.size() + kUnique.size()) continue;
    if (const auto lock = locked(entry.path(), LOCK_EX | LOCK_NB)) fs::remove_all(entry.path(), ignored);
  }
}

// The signals that end a program which does not know them, without those that this one was told to ignore.
sigset_t ending_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action{};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) ::sigaddset(&set, signal);
  }
  ::sigaddset(&set, SIGCHLD);
  return set;
}

// Waits for the run, which is in a group of its own, and passes signals on.
int await(pid_t child, const sigset_t& signals) {
  while (true) {
    int status = 0;
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (ended < 0 && errno != EINTR) throw base::Error(base::str("cannot wait for a run: ", base::system_error()));
    const int signal = ::sigwaitinfo(&signals, nullptr);
    if (signal > 0 && signal != SIGCHLD) ::kill(child, signal);
  }
}

void send_output(int to) {
  std::cout.flush();
  ::dup2(to, STDOUT_FILENO);
}

// Has this process read its input from the beginning, as each run before it did. What comes by a pipe comes once.
void rewind_input() {
  struct stat kind{};
  if (::fstat(STDIN_FILENO, &kind) != 0 || !S_ISREG(kind.st_mode)) return;
  const int input = ::open("/proc/self/fd/0", O_RDONLY | O_CLOEXEC);
  if (input < 0) return;
  ::dup2(input, STDIN_FILENO);
  ::close(input);
}

// In the child: becomes the launcher of the run, and cleans up after `parent` where that was killed meanwhile.
[[noreturn]] void be_run(const RecordedRun& run, const std::string& folder, pid_t parent) {
  const auto tell = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
  tell(digests::kFolderVariable, folder);
  tell(digests::kStepsVariable, std::to_string(run.steps));
  if (run.bits) tell(digests::kBitsVariable, "1");
  if (run.collapsed) tell(digests::kCollapsedVariable, "1");
  if (!run.layout.empty()) tell(digests::kLayoutVariable, run.layout);
  if (!run.looked_at.empty()) tell(digests::kLookedAtVariable, base::joined(run.looked_at, ","));
  if (run.quiet) {
    const int nothing = ::open("/dev/null", O_WRONLY);
    send_output(nothing);
    ::dup2(nothing, STDERR_FILENO);
  } else {
    send_output(STDERR_FILENO);
  }
  rewind_input();
  std::vector<std::string> words;
  if (run.processes) words = {"-n", *run.processes};
  words.insert(words.end(), run.words.begin(), run.words.end());
  int code = 1;
  try {
    code = launch::run_command(words);
  } catch (const std::exception& error) {
    std::cerr << "lamina run: " << error.what() << '\n';
  }
  std::cout.flush();
  std::error_code ignored;
  if (::getppid() != parent && !run.temporary.empty()) fs::remove_all(run.temporary, ignored);
  ::_exit(code);
}

}  // namespace

RecordingFolder::RecordingFolder(const std::string& wanted) : path_(wanted), kept_(!wanted.empty()) {
  try {
    if (kept_) {
      fs::create_directories(path_);
      refuse_others(path_);
      return;
    }
  } catch (const fs::filesystem_error& error) {
    throw base::Error(base::str("--keep ", wanted, ": ", error.code().message()));
  }
  const auto among = fs::temp_directory_path();
  sweep(among);
  do {  // once more where another process has taken it for one that was left
    std::string path = (among / base::str(kTemporary, kUnique)).string();
    if (::mkdtemp(path.data()) == nullptr)
      throw base::Error(base::str("no folder for recordings: ", base::system_error()));
    path_ = path;
    lock_ = locked(path_, LOCK_EX);
  } while (!lock_ && !fs::exists(path_));
}

RecordingFolder::~RecordingFolder() {
  std::error_code ignored;
  if (!kept_) fs::remove_all(path_, ignored);
}

std::string RecordingFolder::make(const std::string& name) const {
  const auto made = path_ / name;
  try {
    fs::create_directories(made);
    if (fs::is_symlink(fs::symlink_status(made))) throw base::Error(base::str(made.string(), " is a link; remove it"));
    std::vector<fs::path> old;
    for (const auto& entry : fs::directory_iterator(made)) {
      if (is_recording(entry.path())) old.push_back(entry.path());
    }
    for (const auto& path : old) fs::remove(path);
  } catch (const fs::filesystem_error& error) {
    throw base::Error(base::str("no folder for recordings: ", made.string(), ": ", error.code().message()));
  }
  return fs::absolute(made).string();
}

int run_recorded(const RecordedRun& run, const std::string& folder) {
  const sigset_t signals = ending_signals();
  sigset_t before;
  ::pthread_sigmask(SIG_BLOCK, &signals, &before);
  std::cout.flush();
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) {
    ::setpgid(0, 0);  // signals to the group of this process, as from a terminal, come once
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (::getppid() != parent) ::_exit(128 + SIGTERM);
    be_run(run, folder, parent);
  }
  int code = 0;
  std::string problem;
  try {
    if (child < 0) throw base::Error(base::str("cannot start a run: ", base::system_error()));
    code = await(child, signals);
  } catch (const base::Error& error) {
    problem = error.what();
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!problem.empty()) throw base::Error(problem);
  return code;
}

std::string quoted(const std::vector<std::string>& words) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=,:@%+";
  std::string line;
  for (const auto& word : words) {
    if (!line.empty()) line += ' ';
    if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) {
      line += word;
      continue;
    }
    line += '\'';
    for (const char each : word) line += each == '\'' ? std::string("'\\''") : std::string(1, each);
    line += '\'';
  }
  return line;
}

}  // namespace lamina::command
