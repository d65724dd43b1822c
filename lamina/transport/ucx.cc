// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx.h"

#include "lamina/transport/bootstrap.h"
#include "lamina/transport/ucx/plugin.h"

namespace lamina::transport {
namespace {

Joined join_world(const UcxOptions& options, const std::string& wire_address) {
  if (options.size > 1) {
    return join({options.rank, options.size, options.master_addr, options.master_port, options.configuration,
                 wire_address, options.join_timeout, options.check_interrupt});
  }
  Joined alone{random_secret(), "", {wire_address}, {}};
  alone.liveness_sockets.resize(1);
  return alone;
}

}  // namespace

std::unique_ptr<Transport> open_ucx(const UcxOptions& options) {
  const bool one_machine =
      options.size == 1 || Address::local_towards(options.master_addr, options.master_port).loopback();
  std::unique_ptr<ucx::Plug> plug = ucx::load_plugin()(options.size, one_machine);
  Joined joined = join_world(options, plug->address());
  ucx::Wiring wiring;
  wiring.rank = options.rank;
  wiring.addresses = std::move(joined.wire_addresses);
  wiring.liveness = std::make_unique<Liveness>(std::move(joined.liveness_sockets));
  wiring.send_timeout = options.send_timeout;
  for (int peer = 0; peer < options.size; ++peer) {
    wiring.outgoing.push_back(pair_token(joined.secret, joined.generation, options.rank, base::Rank(peer)));
    wiring.incoming.push_back(pair_token(joined.secret, joined.generation, base::Rank(peer), options.rank));
  }
  return plug->connect(std::move(wiring));
}

}  // namespace lamina::transport
