// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/plugin.h"

#include "lamina/transport/ucx/ucx_transport.h"

namespace lamina::transport::ucx {
namespace {

class WorkerPlug : public Plug {
 public:
  WorkerPlug(int size, bool one_machine) : worker_(std::make_unique<Worker>(size, one_machine)) {}
  std::string address() const override { return PeerMemory::card() + worker_->address(); }
  std::unique_ptr<Transport> connect(Wiring wiring) override {
    return std::make_unique<UcxTransport>(std::move(worker_), std::move(wiring));
  }

 private:
  std::unique_ptr<Worker> worker_;
};

}  // namespace

extern "C" std::unique_ptr<Plug> lamina_ucx_make_plug(int size, bool one_machine) {
  return std::make_unique<WorkerPlug>(size, one_machine);
}

}  // namespace lamina::transport::ucx
