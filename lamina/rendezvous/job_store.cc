// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/job_store.h"

#include <fcntl.h>
#include <poll.h>
#include <resolv.h>
#include <sys/socket.h>

#include <c10/util/Logging.h>
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/fork_guard.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/base/wait.h"
#include "lamina/rendezvous/socket.h"

namespace lamina::rendezvous {
namespace {

using std::chrono::milliseconds;
constexpr auto kOperation = std::chrono::seconds(10);  // for one answer of a store that accepted our connection
constexpr auto kAccept = std::chrono::seconds(2);      // for its accepting, where something listens

bool connects(const Address& remote) {
  const Fd socket = remote.begin_connect();
  pollfd ready{socket.get(), POLLOUT, 0};
  if (::poll(&ready, 1, static_cast<int>(kJoinSlice.count())) <= 0) return false;
  int error = 0;
  socklen_t length = sizeof error;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
}

// The one of these addresses where something listens. c10d's own client would wait and retry for seconds, deaf to
// interrupts.
std::optional<Address> listening(const std::vector<Address>& addresses) {
  const auto found = std::ranges::find_if(addresses, connects);
  return found == addresses.end() ? std::nullopt : std::optional(*found);
}

// A socket for c10d's server to listen on. Its own takes connections from everywhere and of both families. Where the
// job meets at a loopback address, nobody else shall reach it. Elsewhere an IPv4 address may be seen as an IPv6 one
// that no /etc/hosts knows. The store then asks the name server for its name, only to log it, and serves nobody until
// there is an answer. Empty where other addresses of both families are to be listened on, or the port is taken, perhaps
// by a server of c10d in this process, which then serves us too.
Fd listener_for(const std::vector<Address>& addresses, int port) {
  std::vector<Address> own;
  if (std::ranges::all_of(addresses, &Address::loopback)) {
    if (listening(addresses)) return {};
    own = addresses;
    std::ranges::stable_partition(own, &Address::ipv4);
  } else if (std::ranges::all_of(addresses, &Address::ipv4)) {
    own.push_back(Address::parse(base::str("0.0.0.0 ", port)));
  }
  for (const Address& address : own) {
    try {
      Fd socket = address.listen();
      base::close_in_forked_children(socket.get());  // a worker would keep the port from the next store in its place
      ::fcntl(socket.get(), F_SETFL, ::fcntl(socket.get(), F_GETFL) & ~O_NONBLOCK);
      return socket;
    } catch (const base::Error&) {
    }
  }
  return {};
}

// c10d logs what it tries on the way, with the names of the addresses, for which it asks the name server. What fails it
// also throws. While this lives, there is no name server for this thread, so addresses are to be numeric, and no log of
// torch's, unless it is set to tell everything (TORCH_CPP_LOG_LEVEL=INFO).
class Quietly {
 public:
  Quietly() {
    if (_res.nscount == 0) ::res_init();
    servers_ = std::exchange(_res.nscount, 0);
    const std::lock_guard lock(mutex_);
    if (users_++ == 0 && (level_ = FLAGS_caffe2_log_level) > kInfo) FLAGS_caffe2_log_level = kNothing;
  }
  ~Quietly() {
    _res.nscount = servers_;
    const std::lock_guard lock(mutex_);
    if (--users_ == 0) FLAGS_caffe2_log_level = level_;
  }

 private:
  static constexpr int kInfo = 0, kNothing = 3;
  int servers_;

  static inline std::mutex mutex_;
  static inline int users_ = 0;
  static inline int level_ = kInfo;  // the one to go back to
};

// c10d and Gloo write to sockets whose other end may have gone. That is an error of theirs, and not to end a C++
// program, whose default it would be; Python ignores the signal in any case.
void survive_closed_sockets() {
  struct sigaction present{};
  if (::sigaction(SIGPIPE, nullptr, &present) == 0 && present.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

// How often processes have met to do what `kind` names, where names begin with `start`.
struct Meetings {
  std::string start;
  int& number;  // under `guard`
  std::unique_lock<std::mutex> guard;
};

Meetings meetings_of(const std::string& kind) {
  static std::mutex mutex;
  static std::map<std::string, int> numbers;  // under it
  auto start =
      base::str("lamina/", variable("TORCHELASTIC_RUN_ID", "job"), "/", variable("TORCHELASTIC_RESTART_COUNT", "0"),
                "/", variable("LAMINA_EPOCH", "0"), "/", kind, "/");
  std::unique_lock guard(mutex);
  auto& number = numbers[start];
  return {std::move(start), number, std::move(guard)};
}

}  // namespace

bool hosts_store(base::Rank rank) {
  return rank == base::Rank(0) && variable("TORCHELASTIC_USE_AGENT_STORE", "") != "True";
}

std::string next_meeting(const std::string& kind) {
  const auto meetings = meetings_of(kind);
  return base::str(meetings.start, ++meetings.number, "/");
}

struct JobStore::Connection {
  Connection(const std::string& host, const c10d::TCPStoreOptions& options) {
    const Quietly quietly;
    store = c10::make_intrusive<c10d::TCPStore>(host, options);
    store->setTimeout(kOperation);
  }

  c10::intrusive_ptr<c10d::TCPStore> store;
};

JobStore::JobStore(Options options) : options_(std::move(options)) {
  survive_closed_sockets();
  connect();
}
JobStore::~JobStore() = default;

void JobStore::connect() {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(options_.port);
  options.isServer = options_.is_host;
  options.waitWorkers = false;
  options.multiTenant = options_.is_host;
  // A host may have gone since we looked: c10d would try again and again, deaf to interrupts.
  options.timeout = options_.is_host ? kOperation : kAccept;
  options.useLibUV = false;  // the libuv server asks for names in any case
  const auto where = base::str("MASTER_ADDR:MASTER_PORT ", options_.host, ":", options_.port);
  std::string why = "nothing listens there";
  const auto slow = base::Deadline::after(base::kSlow);
  bool told = false;
  for (auto pause = milliseconds(1); !options_.deadline.expired(); pause = std::min(2 * pause, milliseconds(20))) {
    if (options_.check_interrupt) options_.check_interrupt();
    if (slow.expired() && !std::exchange(told, true)) {
      base::log_warning(
          base::str("the job's store at ", where, ": ", why, " for 10 s, still waiting: did rank 0 start?"));
    }
    try {
      const auto addresses = Address::resolve(options_.host, options_.port);
      if (options_.is_host) {
        if (Fd listener = listener_for(addresses, options_.port)) options.masterListenFd = listener.release();
        const auto heard = listening(addresses);
        connection_ = std::make_unique<Connection>(heard ? heard->host() : "127.0.0.1", options);
        if (listening(addresses)) return;
        throw base::Error(
            base::str("rank 0 cannot host the job's store at ", where, ": its machine has no such address"),
            base::Code{"start-store-failed"});
      }
      if (const auto address = listening(addresses)) {
        connection_ = std::make_unique<Connection>(address->host(), options);
        return;
      }
    } catch (const c10::Error& error) {
      if (options_.is_host) {
        throw base::Error(
            base::str("rank 0 cannot host the job's store at ", where, ": ", error.what_without_backtrace()),
            base::Code{"start-store-failed"});
      }
      why = error.what_without_backtrace();
    }
    std::this_thread::sleep_for(pause);
  }
  throw base::TimeoutError(base::str("the job's store at ", where, " cannot be reached (", why, "): did rank 0 start?"),
                           base::Code{"start-rank-missing"});
}

// Runs `operation` on the store. A store that went away under us (a process group of the script ended and took with it
// the server it hosted) is looked for again, and told again what we had set.
template <class Operation>
auto JobStore::attempt(const Operation& operation) {
  while (true) {
    try {
      const Quietly quietly;
      return operation(*connection_->store);
    } catch (const c10::DistNetworkError& error) {
      if (options_.is_host || options_.deadline.expired()) {
        throw base::Error(base::str("the job's store failed: ", error.what_without_backtrace()),
                          base::Code{"start-store-failed"});
      }
    } catch (const c10::Error& error) {
      throw base::Error(base::str("the job's store failed: ", error.what_without_backtrace()),
                        base::Code{"start-store-failed"});
    }
    connection_.reset();
    connect();
    for (const auto& [key, value] : written_) {
      connection_->store->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
    }
  }
}

void JobStore::set(const std::string& key, const std::string& value) {
  written_[key] = value;
  attempt([&](auto& store) { store.set(key, std::vector<std::uint8_t>(value.begin(), value.end())); });
}

std::string JobStore::get(const std::string& key) {
  const auto bytes = attempt([&](auto& store) { return store.get(key); });
  return std::string(bytes.begin(), bytes.end());
}

std::string JobStore::claim(const std::string& key, const std::string& value) {
  return attempt([&](c10d::Store& store) { return store.compareSet(key, std::string(), value); });
}

c10::intrusive_ptr<c10d::Store> JobStore::c10d() const { return connection_->store; }

void JobStore::remove(const std::string& key) {
  attempt([&](auto& store) { store.deleteKey(key); });
}

void JobStore::forget_meetings() {
  const auto keys = attempt([](auto& store) { return store.listKeys(); });
  for (const auto* kind : {kJoin, kGroups}) {
    const auto [start, last] = [&] {
      auto meetings = meetings_of(kind);
      return std::pair(std::move(meetings.start), meetings.number);
    }();
    for (const auto& key : keys) {
      if (key.starts_with(start) && std::atoi(key.c_str() + start.size()) <= last) remove(key);
    }
  }
}

bool JobStore::has(const std::vector<std::string>& keys) {
  return attempt([&](auto& store) { return store.check(keys); });
}

std::vector<std::string> JobStore::wait(const std::vector<std::string>& keys, base::Deadline deadline) {
  for (auto pause = milliseconds(1); !has(keys) && !deadline.expired(); pause = std::min(2 * pause, milliseconds(50))) {
    if (options_.check_interrupt) options_.check_interrupt();
    std::this_thread::sleep_for(pause);
  }
  std::vector<std::string> missing;
  if (!has(keys)) {
    for (const auto& key : keys) {
      if (!has({key})) missing.push_back(key);
    }
  }
  return missing;
}

}  // namespace lamina::rendezvous
