// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/bootstrap.h"

#include <algorithm>
#include <atomic>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/transport/handshake.h"
#include "lamina/transport/hello.h"
#include "lamina/transport/job_store.h"
#include "lamina/transport/roll_call.h"

namespace lamina::transport {
namespace {

std::string next_generation() {
  static std::atomic<int> joins = 0;
  return base::str(start_of_job(), ++joins, "/");
}

// One join, from this rank's side.
class Joining {
 public:
  explicit Joining(const JoinOptions& options)
      : options_(options),
        deadline_(base::Deadline::after(options.timeout)),
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
      RollCall ranks(store, {generation_, options_.rank, options_.size, options_.timeout, deadline_});
      publish_secret(ranks);
      for (const auto& said : ranks.call(own.encode())) hellos.push_back(Hello::decode(said));
      secret = agreed_secret(store);
      ranks.leave();
    }
    return connect(std::move(listener), hellos, secret);
  }

 private:
  bool first() const { return options_.rank == base::Rank(0); }

  Hello greet(const Address& listening) const {
    Hello own = Hello::of_this_version();
    own.configuration = options_.configuration;
    own.liveness_address = listening.text();
    own.wire_address = options_.wire_address;
    return own;
  }

  void publish_secret(RollCall& ranks) {
    if (!first() || inherited_secret()) return;
    const Secret made = random_secret();
    ranks.announce("secret", std::string(made.begin(), made.end()));
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

  Joined connect(Fd listener, const std::vector<Hello>& hellos, const Secret& secret) {
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
  const Address here_;
  const std::string generation_;
};

}  // namespace

Joined join(const JoinOptions& options) { return Joining(options).run(); }

}  // namespace lamina::transport
