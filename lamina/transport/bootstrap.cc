// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/bootstrap.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/transport/handshake.h"
#include "lamina/transport/hello.h"
#include "lamina/transport/job_store.h"

namespace lamina::transport {
namespace {

// How long rank 0 holds the store for the others to leave it, and how much longer than their own timeout they wait for
// its verdict: it may have started later.
constexpr auto kFarewell = std::chrono::seconds(10);
// The verdict when nobody is missing. Not "": c10d's store announces each value's size as the begin of something
// longer, so the kernel holds an empty one back for 200 ms.
constexpr auto kAllJoined = "all joined";

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

std::string next_generation() {
  static std::atomic<int> joins = 0;
  return base::str("lamina/", variable("TORCHELASTIC_RUN_ID", "job"), "/", variable("TORCHELASTIC_RESTART_COUNT", "0"),
                   "/", ++joins, "/");
}

// One join, from this rank's side.
class Meeting {
 public:
  explicit Meeting(const JoinOptions& options)
      : options_(options),
        deadline_(base::Deadline::after(options.timeout)),
        verdict_by_(base::Deadline::after(options.timeout + kFarewell)),
        here_(Address::local_towards(options.master_addr, options.master_port)),
        generation_(next_generation()) {}

  Joined run() {
    Fd listener = here_.listen();
    const Hello own = greet(Address::bound_to(listener));
    std::vector<Hello> hellos;
    Secret secret;
    {
      JobStore store({options_.master_addr, options_.master_port, hosts_store(options_.rank), deadline_,
                      options_.check_interrupt});
      publish(store, own);
      hellos = collect(store);
      secret = agreed_secret(store);
      leave(store);
    }
    return connect(std::move(listener), own, hellos, secret);
  }

 private:
  bool first() const { return options_.rank == base::Rank(0); }

  std::vector<std::string> keys(const char* name) const {
    std::vector<std::string> keys;
    for (int rank = 0; rank < options_.size; ++rank) keys.push_back(base::str(generation_, name, "/", rank));
    return keys;
  }

  Hello greet(const Address& listening) const {
    Hello own = Hello::of_this_process();
    own.size = std::to_string(options_.size);
    own.configuration = options_.configuration;
    own.liveness_address = listening.text();
    own.wire_address = options_.wire_address;
    return own;
  }

  void publish(JobStore& store, const Hello& own) {
    if (first() && !inherited_secret()) {
      const Secret made = random_secret();
      store.set(generation_ + "secret", std::string(made.begin(), made.end()));
    }
    store.set(base::str(generation_, "hello/", options_.rank), own.encode());
  }

  std::vector<Hello> collect(JobStore& store) {
    const std::string verdict = first() ? judge(store) : await_verdict(store);
    if (verdict != kAllJoined) {
      leave(store);
      throw base::TimeoutError(verdict);
    }
    std::vector<Hello> hellos;
    for (const auto& key : keys("hello")) hellos.push_back(Hello::decode(store.get(key)));
    return hellos;
  }

  // Rank 0 alone decides who is missing, so that all ranks report the same.
  std::string judge(JobStore& store) {
    const auto missing = store.wait(keys("hello"), deadline_);
    for (const auto& key : missing) absent_.push_back(key.substr(key.rfind('/') + 1));
    const std::string verdict = absent_.empty() ? kAllJoined : did_not_join();
    store.set(generation_ + "verdict", verdict);
    return verdict;
  }

  std::string await_verdict(JobStore& store) {
    const std::string key = generation_ + "verdict";
    if (!store.wait({key}, verdict_by_).empty()) return base::str("rank 0 did not join within ", seconds());
    return store.get(key);
  }

  std::string seconds() const { return base::str(options_.timeout.count(), " s"); }

  std::string did_not_join() const {
    std::string ranks;
    for (const auto& rank : absent_) ranks += base::str(ranks.empty() ? "" : ", ", rank);
    return base::str(absent_.size() == 1 ? "rank " : "ranks ", ranks, " did not join within ", seconds(),
                     ": was it started, and with the same MASTER_ADDR and MASTER_PORT?");
  }

  Secret agreed_secret(JobStore& store) {
    if (const auto inherited = inherited_secret()) return *inherited;
    const std::string key = generation_ + "secret";
    if (!store.wait({key}, base::Deadline::after({})).empty()) {
      throw base::ConfigError("rank 0 has a job secret from its launcher and this rank has none: start all alike");
    }
    const std::string bytes = store.get(key);
    Secret secret;
    if (bytes.size() != secret.size()) throw base::FormatError("the store holds a malformed secret");
    std::copy(bytes.begin(), bytes.end(), secret.begin());
    return secret;
  }

  // Rank 0 lets the store go when the others have read what they need, and leaves nothing in it.
  void leave(JobStore& store) {
    store.set(base::str(generation_, "left/", options_.rank), "");
    if (!first()) return;
    auto awaited = keys("left");
    for (const auto& rank : absent_) std::erase(awaited, base::str(generation_, "left/", rank));
    store.wait(awaited, base::Deadline::after(kFarewell));
    for (const char* name : {"secret", "verdict"}) store.remove(generation_ + name);
    for (const char* name : {"hello", "left"}) {
      for (const auto& key : keys(name)) store.remove(key);
    }
  }

  Joined connect(Fd listener, const Hello& own, const std::vector<Hello>& hellos, const Secret& secret) {
    if (hellos[options_.rank.value].process != own.process) {
      throw base::ConfigError(base::str("two processes call themselves rank ", options_.rank, ": check RANK"));
    }
    check_compatible(hellos);
    Joined joined{secret, generation_, {}, {}};
    std::vector<std::string> addresses;
    for (const auto& hello : hellos) {
      addresses.push_back(hello.liveness_address);
      joined.wire_addresses.push_back(hello.wire_address);
    }
    const Identity self{options_.rank, options_.size, secret, generation_};
    joined.liveness_sockets = connect_mesh(self, std::move(listener), addresses, deadline_, options_.check_interrupt);
    return joined;
  }

  const JoinOptions& options_;
  const base::Deadline deadline_;
  const base::Deadline verdict_by_;
  const Address here_;
  const std::string generation_;
  std::vector<std::string> absent_;  // rank 0: who did not join
};

}  // namespace

Joined join(const JoinOptions& options) { return Meeting(options).run(); }

}  // namespace lamina::transport
