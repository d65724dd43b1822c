// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/plugin.h"

#include "lamina/transport/ucx/ucx_transport.h"

namespace lamina::transport::ucx {
namespace {

class WorkerPlug : public Plug {
 public:
  explicit WorkerPlug(const Reach& reach) : worker_(std::make_unique<Worker>(reach)) {}
  std::string address(bool near) const override { return PeerMemory::card() + worker_->address(near); }
  std::unique_ptr<Transport> connect(Wiring wiring) override {
    return std::make_unique<UcxTransport>(std::move(worker_), std::move(wiring));
  }

 private:
  std::unique_ptr<Worker> worker_;
};

}  // namespace

extern "C" std::unique_ptr<Plug> lamina_ucx_make_plug(const Reach& reach) {
  return std::make_unique<WorkerPlug>(reach);
}

}  // namespace lamina::transport::ucx
