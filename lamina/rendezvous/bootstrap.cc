// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/bootstrap.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/rendezvous/hello.h"
#include "lamina/rendezvous/job_store.h"
#include "lamina/rendezvous/place.h"
#include "lamina/rendezvous/roll_call.h"

namespace lamina::rendezvous {
namespace {

constexpr const char* kHasNone = "it has none: start all alike, by `lamina run`";
constexpr const char* kHasAnother =
    "it has another one (is --secret-file the same on all machines?), or somebody changed it at "
    "MASTER_ADDR:MASTER_PORT";

// One join, from this rank's side.
class Joining {
 public:
  explicit Joining(const JoinOptions& options)
      : options_(options),
        deadline_(base::Deadline::after(options.timeout)),
        here_(Address::local_towards(options.master_addr, options.master_port)) {}

  Joined run() {
    Fd listener = here_.listen();
    Hello own = greet(Address::bound_to(listener));
    std::vector<Hello> hellos;
    std::string generation;
    {
      JobStore store({options_.master_addr, options_.master_port, hosts_store(options_.rank), deadline_,
                      options_.check_interrupt});
      RollCall ranks(store, {next_meeting(kJoin), options_.rank, options_.size, options_.timeout, deadline_});
      generation = ranks.meet();
      if (contact::inherited_secret()) own.sign(*contact::inherited_secret(), generation, options_.rank);
      const std::vector<std::string> said = ranks.call(own.encode());
      ranks.leave();
      for (const auto& each : said) hellos.push_back(Hello::decode(each));
    }
    check_compatible(hellos);
    const contact::Secret secret = agreed_secret(hellos[0]);
    refuse_unsigned(hellos, generation);
    return connect(std::move(listener), hellos, {options_.rank, options_.size, secret, generation, {}});
  }

 private:
  Hello greet(const Address& listening) const {
    Hello own = Hello::of_this_version();
    own.wire = options_.wire_version;
    own.configuration = options_.configuration;
    own.liveness_address = listening.text();
    own.place = own_place();
    if (options_.rank == base::Rank(0) && !contact::inherited_secret()) {
      const contact::Secret made = contact::random_secret();
      own.secret.assign(made.begin(), made.end());
    }
    return own;
  }

  // `first`: what rank 0 says.
  static contact::Secret agreed_secret(const Hello& first) {
    const auto inherited = contact::inherited_secret();
    if (inherited && first.secret.empty()) return *inherited;
    if (inherited) {
      throw base::ConfigError("this rank has a job secret from its launcher and rank 0 has none: start all alike",
                              base::Code{"start-secret-missing"});
    }
    if (first.secret.empty()) {
      throw base::ConfigError("rank 0 has a job secret from its launcher and this rank has none: start all alike",
                              base::Code{"start-secret-missing"});
    }
    contact::Secret secret;
    if (first.secret.size() != secret.size())
      throw base::FormatError("the store holds a malformed secret", base::Code{"start-store-foreign"});
    std::ranges::copy(first.secret, secret.begin());
    return secret;
  }

  static void refuse_unsigned(const std::vector<Hello>& hellos, const std::string& generation) {
    const auto secret = contact::inherited_secret();
    for (std::size_t i = 0; secret && i < hellos.size(); ++i) {
      const base::Rank rank(static_cast<std::int64_t>(i));
      if (hellos[i].signed_by(*secret, generation, rank)) continue;
      throw base::ConfigError(
          base::str("what rank ", rank, " says in the job's store is not signed with this job's secret: ",
                    hellos[i].signature.empty() ? kHasNone : kHasAnother),
          base::Code{"start-unsigned"});
    }
  }

  Joined connect(Fd listener, const std::vector<Hello>& hellos, contact::Identity self) {
    std::vector<std::string> addresses, places;
    for (const auto& hello : hellos) {
      addresses.push_back(hello.liveness_address);
      places.push_back(hello.place);
    }
    self.told = options_.wire_addresses(places);
    return connect_peers(std::make_unique<Switchboard>(std::move(self), std::move(listener), std::move(addresses)),
                         options_.neighbours, deadline_, options_.check_interrupt);
  }

  const JoinOptions& options_;
  const base::Deadline deadline_;
  const Address here_;
};

}  // namespace

Joined join(const JoinOptions& options) { return Joining(options).run(); }

}  // namespace lamina::rendezvous
