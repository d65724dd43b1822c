// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "lamina/transport/ucx/ucx_transport.h"

namespace lamina::transport::ucx {

std::string UcxTransport::lanes(base::Rank peer) {
  char* text = nullptr;
  std::size_t size = 0;
  FILE* stream = ::open_memstream(&text, &size);
  {
    Lock lock = enter();
    await_connection(lock, peer, kNoStep.value);
    check(reach(peer), "reach a rank");
    ucp_ep_print_info(peers_[peer.value].endpoint, stream);
  }
  std::fclose(stream);
  std::string description(text, size);
  std::free(text);
  return description;
}

void UcxTransport::send_raw(base::Rank to, const std::string& header, const std::string& data, unsigned id) {
  const ucp_request_param_t param{};
  Lock lock = enter();
  await_connection(lock, to, kNoStep.value);
  check(reach(to), "reach a rank");
  void* request =
      ucp_am_send_nbx(peers_[to.value].endpoint, id, header.data(), header.size(), data.data(), data.size(), &param);
  worker_->signal();
  while (UCS_PTR_IS_PTR(request) && ucp_request_check_status(request) == UCS_INPROGRESS) {
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  }
  if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);
}

std::int64_t UcxTransport::dropped() {
  Lock lock = enter();
  return receiver_->dropped();
}

std::int64_t UcxTransport::rescued() {
  Lock lock = enter();
  return rescued_;
}

int UcxTransport::endpoints() {
  Lock lock = enter();
  return static_cast<int>(std::ranges::count_if(peers_, [](const Peer& peer) { return peer.endpoint != nullptr; }));
}

int UcxTransport::sockets() {
  Lock lock = enter();
  return static_cast<int>(std::ranges::count_if(peers_, [](const Peer& peer) { return peer.met && !peer.gone; }));
}

contact::Secret UcxTransport::key(base::Rank to) { return peers_[to.value].outgoing_key; }

}  // namespace lamina::transport::ucx
