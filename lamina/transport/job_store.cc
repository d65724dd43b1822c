// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/job_store.h"

#include <poll.h>
#include <resolv.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/transport/socket.h"

namespace lamina::transport {
namespace {

using std::chrono::milliseconds;
constexpr auto kOperation = std::chrono::seconds(10);  // for one answer of a store that accepted our connection

bool connects(const Address& remote) {
  const Fd socket = remote.begin_connect();
  pollfd ready{socket.get(), POLLOUT, 0};
  if (::poll(&ready, 1, static_cast<int>(kJoinSlice.count())) <= 0) return false;
  int error = 0;
  socklen_t length = sizeof error;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
}

// Whether something listens there. c10d's own client would wait and retry for seconds, deaf to interrupts.
bool answers(const std::string& host, int port) {
  const auto addresses = Address::resolve(host, port);
  return std::any_of(addresses.begin(), addresses.end(), connects);
}

// While it connects, c10d asks the name server for the names of the addresses, only to log them, and would wait five
// seconds and more for one that does not answer. This thread now waits one second at most.
class ImpatientNames {
 public:
  ImpatientNames() : initialized_(::res_init()), retrans_(_res.retrans), retry_(_res.retry) {
    _res.retrans = _res.retry = 1;
  }
  ~ImpatientNames() {
    _res.retrans = retrans_;
    _res.retry = retry_;
  }

 private:
  const int initialized_, retrans_, retry_;
};

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

}  // namespace

bool hosts_store(base::Rank rank) {
  return rank == base::Rank(0) && variable("TORCHELASTIC_USE_AGENT_STORE", "") != "True";
}

std::string start_of_job() {
  return base::str("lamina/", variable("TORCHELASTIC_RUN_ID", "job"), "/", variable("TORCHELASTIC_RESTART_COUNT", "0"),
                   "/");
}

struct JobStore::Connection {
  c10::intrusive_ptr<c10d::TCPStore> store;
};

JobStore::JobStore(Options options) : options_(std::move(options)) { connect(); }
JobStore::~JobStore() = default;

void JobStore::connect() {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(options_.port);
  options.isServer = options_.is_host;
  options.waitWorkers = false;
  options.multiTenant = options_.is_host;
  options.timeout = kOperation;
  options.useLibUV = false;  // the libuv server asks for the name of whoever connects, and serves nobody meanwhile
  const auto where = base::str("MASTER_ADDR:MASTER_PORT ", options_.host, ":", options_.port);
  std::string why = "nothing listens there";
  for (auto pause = milliseconds(1); !options_.deadline.expired(); pause = std::min(2 * pause, milliseconds(20))) {
    if (options_.check_interrupt) options_.check_interrupt();
    try {
      if (options_.is_host || answers(options_.host, options_.port)) {
        const ImpatientNames names;
        connection_ = std::make_unique<Connection>(c10::make_intrusive<c10d::TCPStore>(options_.host, options));
        return;
      }
    } catch (const c10::Error& error) {
      if (options_.is_host) {
        throw base::Error(
            base::str("rank 0 cannot host the job's store at ", where, ": ", error.what_without_backtrace()));
      }
      why = error.what_without_backtrace();
    }
    std::this_thread::sleep_for(pause);
  }
  throw base::TimeoutError(
      base::str("the job's store at ", where, " cannot be reached (", why, "): did rank 0 start?"));
}

// Runs `operation` on the store. A store that went away under us (a process group of the script ended and took with it
// the server it hosted) is looked for again, and told again what we had set.
template <class Operation>
auto JobStore::attempt(const Operation& operation) {
  while (true) {
    try {
      return operation(*connection_->store);
    } catch (const c10::DistNetworkError& error) {
      if (options_.is_host || options_.deadline.expired()) {
        throw base::Error(base::str("the job's store failed: ", error.what_without_backtrace()));
      }
    } catch (const c10::Error& error) {
      throw base::Error(base::str("the job's store failed: ", error.what_without_backtrace()));
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

std::int64_t JobStore::add(const std::string& key, std::int64_t value) {
  return attempt([&](auto& store) { return store.add(key, value); });
}

c10::intrusive_ptr<c10d::Store> JobStore::c10d() const { return connection_->store; }

void JobStore::remove(const std::string& key) {
  attempt([&](auto& store) { store.deleteKey(key); });
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

}  // namespace lamina::transport
