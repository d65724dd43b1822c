// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "lamina/transport/ucx/sending.h"
#include "lamina/transport/ucx/ucx_transport.h"

// [Note: offers] A large buffer for a rank of the same machine is not sent: its address is, and the receiver copies it
// straight out of the sender's memory (process_vm_readv), the way UCX itself would. We do it because UCX aborts the
// receiving process when the sender dies under the copy, where we get an error and go on.
namespace lamina::transport::ucx {

void UcxTransport::accept_receipts() {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kReceipt;
  handler.cb = &UcxTransport::receipt;
  handler.arg = this;
  check(ucp_worker_set_am_recv_handler(worker_->get(), &handler), "receive");
}

// Called within progress(): ends the send that waits for it.
ucs_status_t UcxTransport::receipt(void* self, const void* header, size_t header_size, void*, size_t,
                                   const ucp_am_recv_param_t*) {
  auto& transport = *static_cast<UcxTransport*>(self);
  PieceHeader receipt;
  if (header_size != sizeof receipt) return UCS_OK;
  std::memcpy(&receipt, header, sizeof receipt);
  if (receipt.answer == PutOutcome::kNone || !transport.receiver_->genuine(receipt, kReceipt)) return UCS_OK;
  const auto found = transport.peers_[receipt.from].offered.extract(receipt.sequence);
  if (!found.empty()) found.mapped()->piece_done(receipt.answer == PutOutcome::kTaken ? UCS_OK : UCS_ERR_IO_ERROR);
  return UCS_OK;
}

void UcxTransport::send_receipt(base::Rank to, std::uint64_t sequence, bool all) {
  Peer& peer = peers_[to.value];
  if (peer.gone || reach(to) != UCS_OK) return;
  PieceHeader header;
  header.from = static_cast<std::uint32_t>(rank_.value);
  header.sequence = sequence;
  header.id = kReceipt;
  header.answer = all ? PutOutcome::kTaken : PutOutcome::kFailed;
  header.sign(*peer.outgoing);
  send_header(peer.endpoint, kReceipt, std::string(reinterpret_cast<const char*>(&header), sizeof header));
}

void UcxTransport::send_header(ucp_ep_h endpoint, unsigned id, std::string header) {
  auto kept = std::make_unique<std::string>(std::move(header));  // UCX reads it until it is sent
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.user_data = kept.get();
  param.cb.send = [](void* request, ucs_status_t, void* sent_header) {
    delete static_cast<std::string*>(sent_header);
    ucp_request_free(request);
  };
  const auto request = ucp_am_send_nbx(endpoint, id, kept->data(), kept->size(), nullptr, 0, &param);
  if (UCS_PTR_IS_PTR(request)) static_cast<void>(kept.release());
}

}  // namespace lamina::transport::ucx
