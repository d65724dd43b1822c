// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/receiver.h"

#include <chrono>
#include <cstring>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/transport/secret.h"
#include "lamina/transport/ucx/buffer_pool.h"

namespace lamina::transport::ucx {

// One piece on its way to its place.
struct Receiver::Receiving {
  Receiver* receiver;
  PieceHeader header;
};

Receiver::Receiver(Worker& worker, std::vector<Token> incoming) : worker_(worker), peers_(incoming.size()) {
  for (std::size_t rank = 0; rank < incoming.size(); ++rank) peers_[rank].token = incoming[rank];
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                       UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  handler.id = kPiece;
  handler.cb = &Receiver::arrived;
  handler.arg = this;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG | UCP_AM_FLAG_PERSISTENT_DATA;
  check(ucp_worker_set_am_recv_handler(worker_.get(), &handler), "receive");
}

bool Receiver::genuine(const PieceHeader& header) const {
  return header.magic == PieceHeader().magic && header.from < peers_.size() &&
         same(header.token, peers_[header.from].token);
}

// Called within progress(): only decides whether the piece is one of ours and keeps it for take_arrivals().
ucs_status_t Receiver::arrived(void* self, const void* header, size_t header_size, void* data, size_t size,
                               const ucp_am_recv_param_t* param) {
  auto& receiver = *static_cast<Receiver*>(self);
  PieceHeader piece;
  const bool held = param->recv_attr & (UCP_AM_RECV_ATTR_FLAG_DATA | UCP_AM_RECV_ATTR_FLAG_RNDV);
  if (header_size == sizeof piece && held) {
    std::memcpy(&piece, header, sizeof piece);
    if (receiver.genuine(piece)) {
      receiver.arrivals_.push_back({piece, data, size, (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0});
      return UCS_INPROGRESS;
    }
  }
  receiver.drop(base::Rank(-1), "it lacks the token of this job");
  return UCS_OK;
}

void Receiver::take_arrivals() {
  // Receiving never makes progress, so nothing arrives meanwhile.
  for (const Arrival& arrival : arrivals_) take(arrival);
  arrivals_.clear();
}

void Receiver::take(const Arrival& arrival) {
  Peer& peer = peers_[arrival.header.from];
  if (arrival.header.sequence < peer.next) {  // a piece of a skipped message
    ucp_am_data_release(worker_.get(), arrival.data);
    return;
  }
  Assembly& assembly = peer.open[arrival.header.sequence];
  const bool packet = arrival.header.piece == 0;
  if (assembly.skipped || (packet && !assembly.head.empty())) {
    ucp_am_data_release(worker_.get(), arrival.data);
  } else if (!packet && !assembly.head_here) {
    assembly.waiting.push_back(arrival);
  } else if (!packet) {
    take_buffer(arrival, assembly);
  } else if (arrival.header.head_size > arrival.size || arrival.size > kMaxHeadSize + kSmallBuffers) {
    ucp_am_data_release(worker_.get(), arrival.data);
    skip(arrival.header, assembly, base::str("a head of ", arrival.header.head_size, " bytes"));
  } else {
    assembly.head.resize(arrival.size);
    receive(arrival, assembly, assembly.head.data());
  }
}

void Receiver::take_buffer(const Arrival& arrival, Assembly& assembly) {
  const std::size_t index = arrival.header.piece - 1;
  const bool fits = index < assembly.expected.size() && assembly.expected[index] &&
                    static_cast<std::size_t>(assembly.buffers[index].numel()) == arrival.size;
  if (!fits) {
    ucp_am_data_release(worker_.get(), arrival.data);
    skip(arrival.header, assembly, base::str("buffer ", index, " is not what the head says"));
    return;
  }
  assembly.expected[index] = false;
  receive(arrival, assembly, assembly.buffers[index].mutable_data_ptr());
}

void Receiver::receive(const Arrival& arrival, Assembly& assembly, void* to) {
  ++assembly.receiving;
  if (arrival.here) {
    std::memcpy(to, arrival.data, arrival.size);
    ucp_am_data_release(worker_.get(), arrival.data);
    return received_piece(arrival.header, UCS_OK);
  }
  auto* receiving = new Receiving{this, arrival.header};
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE |
                       UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = &Receiver::finished;
  param.user_data = receiving;
  param.datatype = ucp_dt_make_contig(1);
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  const ucs_status_ptr_t request = ucp_am_recv_data_nbx(worker_.get(), arrival.data, to, arrival.size, &param);
  if (request == nullptr || UCS_PTR_IS_ERR(request)) {
    delete receiving;
    received_piece(arrival.header, UCS_PTR_STATUS(request));
  }
}

void Receiver::finished(void* request, ucs_status_t status, size_t, void* user_data) {
  auto* receiving = static_cast<Receiving*>(user_data);
  receiving->receiver->received_piece(receiving->header, status);
  delete receiving;
  ucp_request_free(request);
}

void Receiver::received_piece(const PieceHeader& header, ucs_status_t status) {
  Assembly& assembly = peers_[header.from].open.at(header.sequence);
  --assembly.missing;
  --assembly.receiving;
  if (status != UCS_OK) {
    skip(header, assembly, ucs_status_string(status));
  } else if (header.piece == 0 && !assembly.skipped) {
    open_packet(header, assembly);
  }
  release_in_order(base::Rank(header.from));
}

void Receiver::open_packet(const PieceHeader& header, Assembly& assembly) {
  assembly.head_here = true;
  assembly.head_size = header.head_size;
  const auto head = std::string_view(assembly.head).substr(0, header.head_size);
  try {
    if (!authentic(head, header.token)) throw base::FormatError("the head lacks the token");
    make_room(header, assembly, buffer_specs(head));
  } catch (const std::exception& error) {
    return skip(header, assembly, error.what());
  }
  assembly.head.resize(assembly.head_size);
  for (const Arrival& arrival : std::exchange(assembly.waiting, {})) take(arrival);
}

// Allocates the buffers, fills those that came with the packet, and counts those that come on their own or are offered.
void Receiver::make_room(const PieceHeader& header, Assembly& assembly, const std::vector<BufferSpec>& specs) {
  PacketPlan plan;
  std::size_t at = assembly.head_size;
  const auto take_bytes = [&](void* to, std::size_t size) {
    if (assembly.head.size() - at < size) throw base::FormatError("the packet ends within its buffers");
    if (size > 0) std::memcpy(to, assembly.head.data() + at, size);
    at += size;
  };
  std::vector<std::size_t> large;
  for (const BufferSpec& spec : specs) {
    if (!spec.device.is_cpu()) throw base::FormatError(base::str("buffers on ", spec.device, " are not supported yet"));
    if (spec.size_bytes < 0) throw base::FormatError("a buffer of negative size");
    at::Tensor& buffer = assembly.buffers.emplace_back(receive_buffer(spec.size_bytes));
    const bool inside = plan.takes(spec.device, spec.size_bytes);
    if (inside) take_bytes(buffer.mutable_data_ptr(), static_cast<std::size_t>(spec.size_bytes));
    if (!inside) large.push_back(assembly.buffers.size() - 1);
    assembly.expected.push_back(!inside && !header.offers);
  }
  Offer offer{base::Rank(header.from), header.sequence, {}};
  for (const std::size_t index : header.offers ? large : std::vector<std::size_t>()) {
    at::Tensor& buffer = assembly.buffers[index];
    offer.parts.push_back({buffer.mutable_data_ptr(), 0, static_cast<std::size_t>(buffer.numel())});
    take_bytes(&offer.parts.back().address, sizeof(std::uint64_t));
  }
  if (at != assembly.head.size()) throw base::FormatError("the packet goes on after its buffers");
  if (header.offers) {
    ++assembly.missing;
    ++assembly.receiving;
    offers_.push_back(std::move(offer));
  } else {
    assembly.missing += static_cast<int>(large.size());
  }
}

void Receiver::copied(const Offer& offer, bool all) {
  PieceHeader header;
  header.from = static_cast<std::uint32_t>(offer.from.value);
  header.sequence = offer.sequence;
  header.piece = 1;
  received_piece(header, all ? UCS_OK : UCS_ERR_CONNECTION_RESET);
}

void Receiver::skip(const PieceHeader& header, Assembly& assembly, const std::string& why) {
  if (assembly.skipped) return;
  assembly.skipped = true;
  for (const Arrival& arrival : std::exchange(assembly.waiting, {})) {
    ucp_am_data_release(worker_.get(), arrival.data);
  }
  drop(base::Rank(header.from), why);
  release_in_order(base::Rank(header.from));
}

// A skipped message keeps its place while UCX writes to it.
void Receiver::release_in_order(base::Rank from) {
  Peer& peer = peers_[from.value];
  for (auto at = peer.open.find(peer.next); at != peer.open.end(); at = peer.open.find(++peer.next)) {
    Assembly& assembly = at->second;
    if (assembly.skipped ? assembly.receiving > 0 : assembly.missing > 0) return;
    if (!assembly.skipped) ready_.push_back({from, std::move(assembly.head), std::move(assembly.buffers)});
    peer.open.erase(at);
  }
}

void Receiver::drop(base::Rank from, const std::string& why) {
  ++dropped_;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const auto now_s = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  if (now_s < next_warning_s_) return;
  next_warning_s_ = now_s + 10;
  base::log_warning(base::str("dropped a message", from.value < 0 ? "" : base::str(" of rank ", from), ": ", why, " (",
                              dropped_, " dropped so far)"));
}

}  // namespace lamina::transport::ucx
