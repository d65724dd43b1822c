// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/plugin.h"

#include "lamina/base/peer_memory.h"
#include "lamina/transport/ucx/ucx_transport.h"

namespace lamina::transport::ucx {
namespace {

class WorkerEndpoint : public LocalEndpoint {
 public:
  explicit WorkerEndpoint(const Reach& reach)
      : worker_(std::make_unique<Worker>(reach)), lent_(reach.lends, *worker_) {}
  std::string address(bool near) const override {
    return base::PeerMemory::descriptor() + lent_.word() + worker_->address(near);
  }
  std::unique_ptr<Transport> connect(PeerConnections peers) override {
    return std::make_unique<UcxTransport>(std::move(worker_), std::move(lent_), std::move(peers));
  }

 private:
  std::unique_ptr<Worker> worker_;
  LentMemory lent_;
};

}  // namespace

extern "C" std::unique_ptr<LocalEndpoint> lamina_ucx_make_endpoint(const Reach& reach) {
  return std::make_unique<WorkerEndpoint>(reach);
}

}  // namespace lamina::transport::ucx
