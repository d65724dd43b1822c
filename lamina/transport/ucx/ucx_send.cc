// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/transport/ucx/sending.h"
#include "lamina/transport/ucx/ucx_transport.h"

namespace lamina::transport::ucx {
namespace {

constexpr auto kMoment = std::chrono::seconds(1);   // for what is being sent as this rank leaves
constexpr auto kVerdict = std::chrono::seconds(2);  // within which the death of a peer is noticed

}  // namespace

// The progress thread takes the lock again and again; this makes it let us in.
UcxTransport::Lock UcxTransport::enter() {
  ++entering_;
  Lock lock(mutex_);
  --entering_;
  return lock;
}

void UcxTransport::require_rank(base::Rank rank) const {
  if (rank.value >= 0 && rank.value < size()) return;
  throw base::InternalError(base::str("a message to rank ", rank, " in a world of ", size()));
}

void UcxTransport::require_open() const {
  base::internal_check(!closing_, "a message to another rank after the transport was closed");
}

void UcxTransport::refuse_if_lost(base::Rank to) const {
  require_open();
  const base::Loss loss{to, peers_[to.value].why, ""};
  if (!loss.cause.empty()) throw base::PeerError(loss.text(), loss);
}

std::unique_ptr<Sending> UcxTransport::sending_of(base::Rank to, Frame frame, base::Step about) {
  require_rank(to);
  if (frame.head.size() > kMaxHeadSize) {
    throw base::UsageError(base::str("a message with ", frame.head.size() >> 20, " MiB besides its tensors; at most ",
                                     kMaxHeadSize >> 20, " MiB travel: send large data as tensors"),
                           base::Code{"step-cannot-travel"});
  }
  if (to != rank_) {
    return std::make_unique<Sending>(std::move(frame), peers_[to.value].reads_us, changed_, about);
  }
  send_to_self(std::move(frame));
  return nullptr;
}

void UcxTransport::tell(base::Rank to, const Message& message) {
  auto sending = sending_of(to, pack(message), message.call.step);
  if (!sending) return;
  const Lock lock = enter();
  refuse_if_lost(to);
  if (!peers_[to.value].open) {
    peers_[to.value].words.push_back(std::move(sending));
    return call(to);
  }
  if (const auto status = reach(to); status != UCS_OK) {
    const base::Loss loss{to, base::str("UCX cannot reach it: ", ucs_status_string(status)), ""};
    throw base::PeerError(loss.text(), loss);
  }
  post_word(std::move(sending), to);
}

void UcxTransport::post_word(std::unique_ptr<Sending> sending, base::Rank to) {
  post(*sending, to);
  if (sending->pending == 0) return;
  sending.release()->unawaited = true;
  worker_->signal();
}

void UcxTransport::send(base::Rank to, const Message& message) { send_packed(to, pack(message), message.call.step); }

void UcxTransport::send_packed(base::Rank to, Frame frame, base::Step about) {
  require_rank(to);
  if (to != rank_ && !peers_[to.value].open) {
    Lock lock = enter();
    refuse_if_lost(to);
    await_connection(lock, to, about.value);
  }
  auto sending = sending_of(to, std::move(frame), about);
  if (!sending) return;
  Lock lock = enter();
  refuse_if_lost(to);
  try {
    if (const auto status = reach(to); status != UCS_OK) explain_failure(lock, status, to);
    post(*sending, to);
    if (sending->pending > 0) wait(lock, *sending, to);
    if (sending->status != UCS_OK) explain_failure(lock, sending->status, to);
  } catch (...) {
    if (sending->pending > 0) static_cast<void>(sending.release());
    throw;
  }
}

// UCX noticed that the peer is gone before its liveness socket told us, or something else is wrong.
void UcxTransport::explain_failure(Lock& lock, ucs_status_t status, base::Rank to) {
  changed_.wait_for(lock, kVerdict, [&] { return closing_ || !peers_[to.value].why.empty(); });
  refuse_if_lost(to);
  check(status, base::str("exchange bytes with rank ", to).c_str());
}

void UcxTransport::send_to_self(Frame frame) {
  for (at::Tensor& buffer : frame.buffers) buffer = buffer.clone();
  {
    Lock lock = enter();
    refuse_if_lost(rank_);
    deliveries_.emplace_back(Receiver::Received{rank_, std::move(frame.head), std::move(frame.buffers)});
  }
  worker_->signal();
}

ucs_status_t UcxTransport::reach(base::Rank to) {
  Peer& peer = peers_[to.value];
  if (peer.endpoint != nullptr) return UCS_OK;
  if (!peer.met) return UCS_ERR_NOT_CONNECTED;
  const auto status = worker_->connect(peer.address, peer.endpoint);
  if (status == UCS_OK) peer.address = {};
  return status;
}

void UcxTransport::post(Sending& sending, base::Rank to) {
  Peer& peer = peers_[to.value];
  PieceHeader header = sending.header;
  header.from = static_cast<std::uint32_t>(rank_.value);
  header.sequence = peer.sent++;
  header.sign(*peer.outgoing);
  sending.headers[0] = header;
  const Frame& frame = sending.frame;
  post_piece(sending, peer.endpoint, sending.headers[0], {frame.head.data(), frame.head.size()});
  if (header.offers > 0) {
    ++sending.pending;  // until the receipt comes
    peer.offered[header.sequence] = &sending;
  }
  header.digest = {};
  for (std::size_t i = 0; i < sending.alone.size(); ++i) {
    header.piece = sending.alone[i] + 1;
    header.sign(*peer.outgoing);
    sending.headers[i + 1] = header;
    const at::Tensor& buffer = frame.buffers[sending.alone[i]];
    const auto size = static_cast<std::size_t>(buffer.numel());
    const bool is_lent = !devices::is_host(buffer);
    post_piece(sending, peer.endpoint, sending.headers[i + 1],
               is_lent ? Bytes{lent_.address(buffer), size, lent_.type(), UCP_AM_SEND_FLAG_RNDV}
                       : Bytes{buffer.const_data_ptr(), size});
  }
}

bool UcxTransport::takes(base::Rank to, const at::Tensor& buffer) {
  require_rank(to);
  if (to == rank_ || !goes_lent(lent_.kind(), peers_[to.value].lends, buffer.numel())) return false;
  void* const address = lent_.address(buffer);
  if (address == nullptr) return false;
  const Lock lock = enter();
  return !closing_ && worker_->registers(address, static_cast<std::size_t>(buffer.numel()), lent_.type());
}

void UcxTransport::post_piece(Sending& sending, ucp_ep_h endpoint, const PieceHeader& header, const Bytes& bytes) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE |
                       UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_FLAGS;
  param.cb.send = &UcxTransport::sent;
  param.user_data = &sending;
  param.datatype = ucp_dt_make_contig(1);
  param.memory_type = bytes.type;
  param.flags = bytes.flags;
  const ucs_status_ptr_t request =
      ucp_am_send_nbx(endpoint, kPiece, &header, sizeof header, bytes.at, bytes.size, &param);
  if (UCS_PTR_IS_ERR(request)) {
    sending.status = UCS_PTR_STATUS(request);
  } else if (request != nullptr) {
    ++sending.pending;
  }
}

// Called within progress(), or while a piece is posted.
void UcxTransport::sent(void* request, ucs_status_t status, void* user_data) {
  static_cast<Sending*>(user_data)->piece_done(status);
  ucp_request_free(request);
}

void UcxTransport::give_up_sends(std::optional<base::Step> step) {
  Lock lock = enter();
  if (step) {
    ended_step_ = std::max(ended_step_, step->value);
  } else {
    changed_.wait_for(lock, kMoment, [&] { return waiting_ == 0; });
    leaving_ = true;
  }
  changed_.notify_all();
}

bool UcxTransport::is_given_up(std::int64_t step) const {
  return leaving_ || (step != kNoStep.value && step <= ended_step_);
}

void UcxTransport::wait(Lock& lock, Sending& sending, base::Rank to) {
  worker_->signal();
  ++waiting_;
  const bool ended = changed_.wait_for(lock, send_timeout_, [&] {
    return sending.pending == 0 || closing_ || is_given_up(sending.step) || !peers_[to.value].why.empty();
  });
  --waiting_;
  changed_.notify_all();
  if (sending.pending == 0) return;
  refuse_if_lost(to);
  if (is_given_up(sending.step)) {
    throw base::CancelledError(base::str("a message to rank ", to, ", which has not taken it, was given up"));
  }
  if (!ended) {
    throw base::TimeoutError(
        base::str("rank ", to, " has not taken a message for ", send_timeout_.count(), " s, though its process lives"));
  }
}

}  // namespace lamina::transport::ucx
