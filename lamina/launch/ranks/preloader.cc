// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/preloader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <chrono>
#include <cstring>
#include <string_view>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/ranks/descendants.h"
#include "lamina/launch/ranks/error.h"
#include "lamina/launch/ranks/watch.h"

namespace lamina::embedded {
extern const char* const kPreload;  // preload.py
}

namespace lamina::launch {
namespace {

// A fork takes some milliseconds; a process that a signal has stopped takes for ever.
constexpr std::chrono::seconds kForkLimit{20};
constexpr std::chrono::milliseconds kEndLimit{500};
constexpr std::size_t kMostDescriptors = 16;  // with one request

base::Fd memory_file(const std::string& text) {
  base::Fd file(::memfd_create("lamina-rank", MFD_CLOEXEC));
  if (!file || ::pwrite(file.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    throw StartError("cannot hold what a rank is told in memory: " + base::system_error());
  }
  return file;
}

std::pair<base::Fd, base::Fd> link() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw StartError("cannot make a socket: " + base::system_error());
  }
  return {base::Fd(ends[0]), base::Fd(ends[1])};
}

// Waits for a message; nothing at its end or the deadline.
std::optional<std::string> receive(const base::Fd& socket, const base::Deadline& deadline) {
  bool ready = false;
  Watch watch;
  watch.add(socket.get(), POLLIN, [&] { ready = true; });
  watch.until(deadline);
  do watch.wait();
  while (!ready && !deadline.expired());
  std::array<char, 4096> text;
  const ssize_t count = ready ? ::recv(socket.get(), text.data(), text.size(), MSG_DONTWAIT) : 0;
  return count > 0 ? std::optional(std::string(text.data(), static_cast<std::size_t>(count))) : std::nullopt;
}

bool send(const base::Fd& socket, const std::vector<int>& descriptors) {
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMostDescriptors)> space{};
  const std::size_t size = sizeof(int) * descriptors.size();
  msghdr message{.msg_iov = &data, .msg_iovlen = 1, .msg_control = space.data(), .msg_controllen = CMSG_SPACE(size)};
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(size);
  std::memcpy(CMSG_DATA(header), descriptors.data(), size);
  return ::sendmsg(socket.get(), &message, MSG_NOSIGNAL) == 1;
}

// The words after the interpreter.
std::vector<std::string> script(const Program& program) {
  return {program.arguments.begin() + 1, program.arguments.end()};
}

std::string describe(const RankStart& start) {
  const auto words = script(start.program);
  std::string text = base::str(words.size()) + '\0';
  for (const int fd : start.kept) text += base::str(fd, " ");
  for (const auto* strings : {&words, &start.environment}) {
    for (const std::string& each : *strings) text += '\0' + each;
  }
  return text;
}

}  // namespace

Preloader::Preloader(const Preparation& prepared, const Job& job, const sigset_t& mask, const Report& report)
    : prepared_(prepared), report_(report) {
  const base::Fd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!null) throw StartError("cannot open /dev/null: " + base::system_error());
  auto [ours, theirs] = link();
  const std::string_view source = embedded::kPreload;
  if (::send(ours.get(), source.data(), source.size(), MSG_NOSIGNAL) < 0) {
    throw StartError("cannot start the preloader: " + base::system_error());
  }
  const std::string run = base::str("exec(compile(__import__('os').read(", theirs.get(),
                                    ", 65536), '<lamina run --preload>', 'exec'), {'__name__': 'lamina_preload'})");
  std::string modules;
  for (const std::string& name : prepared.options.preload) modules += (modules.empty() ? "" : ",") + name;
  Program program{.path = prepared.program.path,
                  .arguments = own_script(prepared.program.path, run, {base::str(theirs.get()), modules})};
  for (std::string& word : script(prepared.program)) program.arguments.push_back(std::move(word));
  process_.emplace(RankStart{.rank = base::Rank(prepared.layout.base_rank),
                             .program = program,
                             .environment = common_environment(job, prepared.inherited),
                             .input = null.get(),
                             .output = STDOUT_FILENO,
                             .error = STDERR_FILENO,
                             .kept = {theirs.get()},
                             .signal_mask = mask});
  control_ = std::move(ours);
}

Preloader::~Preloader() {
  process_.reset();
  if (!end_descendants(base::Deadline::after(kReapLimit))) base::log_warning("some processes could not be killed");
}

std::optional<int> Preloader::load(ControlPipe& control) {
  const auto limit = prepared_.options.hang_timeout;
  const auto deadline = limit ? std::optional(base::Deadline::after(*limit)) : std::nullopt;
  bool over = false;
  while (!over && !(deadline && deadline->expired())) {
    Watch watch;
    watch.add(control_.get(), POLLIN, [&] { over = true; });
    watch.add(process_->fd(), POLLIN, [&] { over = true; });
    watch.add(control.fd(), POLLIN, [] {});
    watch.until(deadline);
    watch.wait();
    if (const auto signal = control.next()) return 128 + *signal;
    if (control.abandoned()) return 128 + SIGKILL;
  }
  const std::string said = receive(control_, base::Deadline::after({})).value_or("");
  if (said.starts_with('I')) {
    throw base::ConfigError(
        base::str("--preload cannot import ", said.substr(1), ": correct the name, or start without --preload"),
        base::Code{"run-preload"});
  }
  if (said.starts_with('F')) give_up(said.substr(1));
  if (said.empty()) give_up(over ? end() : base::str("the imports did not end within ", limit->count(), " s"));
  return {};
}

RankProcess Preloader::start(const RankStart& start) {
  if (process_) {
    if (const auto pid = fork(start)) return {start.rank, *pid};
    give_up(end());
  }
  return RankProcess(start);
}

// Nothing where it has not become a rank.
std::optional<pid_t> Preloader::fork(const RankStart& start) {
  const base::Fd request = memory_file(describe(start));
  auto [ours, theirs] = link();
  std::vector<int> descriptors{request.get(), theirs.get(), start.input, start.output, start.error};
  descriptors.insert(descriptors.end(), start.kept.begin(), start.kept.end());
  if (!send(control_, descriptors)) return {};
  theirs.reset();
  const auto said = receive(ours, base::Deadline::after(kForkLimit));
  pid_t pid = 0;
  if (said) std::from_chars(said->data(), said->data() + said->size(), pid);
  return pid > 0 ? std::optional(pid) : std::nullopt;
}

void Preloader::give_up(const std::string& why) {
  report_.warn("ranks start without --preload: " + why);
  process_.reset();
}

// Words for why it does not answer.
std::string Preloader::end() const {
  bool ended = false;
  Watch watch;
  watch.add(process_->fd(), POLLIN, [&] { ended = true; });
  watch.until(base::Deadline::after(kEndLimit));
  watch.wait();
  const std::string it = base::str("the process that imports for them (", process_->pid(), ") ");
  if (!ended) return it + "does not answer";
  const auto end = process_->end();  // nothing if it ended a while ago
  return end ? base::str(it, "has ended: ", end->words()) : it + "has ended";
}

}  // namespace lamina::launch
