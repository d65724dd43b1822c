// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/ucx.h"

#include <algorithm>
#include <string>

#include "lamina/base/str.h"
#include "lamina/environment/address.h"
#include "lamina/rendezvous/bootstrap.h"
#include "lamina/rendezvous/place.h"
#include "lamina/transport/message.h"
#include "lamina/transport/news.h"
#include "lamina/transport/ucx/plugin.h"
#include "lamina/transport/ucx/wire.h"

namespace lamina::transport {
namespace {

// This rank's end of UCX, once it is known where all ranks are, and its address for each of them.
class Ends {
 public:
  explicit Ends(const UcxOptions& options) : options_(options), make_(ucx::load_plugin()) {
    reach_.size = options.size;
    reach_.lends = options.lends;
    reach_.loopback =
        options.size > 1 && environment::Address::local_towards(options.master_addr, options.master_port).loopback();
  }

  std::vector<std::string> open(const std::vector<std::string>& places) {
    std::vector<bool> near;
    for (const std::string& place : places)
      near.push_back(rendezvous::share_memory(places[options_.rank.value], place));
    near[options_.rank.value] = true;
    reach_.shared = std::ranges::find(near, false) == near.end();
    plug_ = make_(reach_);
    std::vector<std::string> addresses;
    for (const bool shared : near) addresses.push_back(plug_->address(shared));
    return addresses;
  }

  std::unique_ptr<Transport> connect(rendezvous::Joined joined) {
    return plug_->connect({options_.rank, std::move(joined), options_.send_timeout, options_.silence});
  }

 private:
  const UcxOptions& options_;
  ucx::MakeEndpoint& make_;
  ucx::Reach reach_;
  std::unique_ptr<ucx::LocalEndpoint> plug_;
};

}  // namespace

std::unique_ptr<Transport> open_ucx(const UcxOptions& options) {
  Ends ends(options);
  const auto addresses = [&](const auto& places) { return ends.open(places); };
  if (options.size > 1) {
    std::vector<base::Rank> all;
    for (int rank = 0; rank < options.size; ++rank) all.emplace_back(rank);
    return ends.connect(rendezvous::join({options.rank, options.size, options.master_addr, options.master_port,
                                          options.configuration, base::str(kFrameVersion, ".", ucx::kPieceVersion),
                                          addresses, neighbours(all, static_cast<std::size_t>(options.rank.value)),
                                          options.join_timeout, options.check_interrupt}));
  }
  ends.open({rendezvous::own_place()});
  return ends.connect({std::vector<contact::Connection>(1), nullptr});
}

}  // namespace lamina::transport
