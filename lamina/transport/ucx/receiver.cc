// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/receiver.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/contact/secret.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/copies.h"
#include "lamina/value/large_blocks.h"

namespace lamina::transport::ucx {
namespace {

constexpr const char* kAgain = "it came before, or belongs to a message that was skipped";

// How much of a packet its digest covers.
std::uint64_t signed_size(const PieceHeader& header) {
  return header.head_size + std::uint64_t(header.offers) * sizeof(std::uint64_t) +
         std::uint64_t(header.lent) * sizeof(std::uint32_t);
}

bool fits(const PieceHeader& header, std::size_t packet) {
  const std::uint64_t before_buffers = signed_size(header);
  return header.head_size <= kMaxHeadSize && before_buffers <= packet && packet - before_buffers <= kSmallBuffers;
}

}  // namespace

// One piece on its way to its place.
struct Receiver::Receiving {
  Receiver* receiver;
  PieceHeader header;
};

Receiver::Receiver(Worker& worker, const LentMemory& lent, int size)
    : worker_(worker), lent_(lent), peers_(static_cast<std::size_t>(size)) {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                       UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  handler.id = kPiece;
  handler.cb = &Receiver::arrived;
  handler.arg = this;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG | UCP_AM_FLAG_PERSISTENT_DATA;
  check(ucp_worker_set_am_recv_handler(worker_.get(), &handler), "receive");
}

bool Receiver::genuine(const PieceHeader& header, unsigned id) {
  if (header.magic != PieceHeader().magic || header.id != id || header.from >= peers_.size()) return false;
  auto& key = peers_[header.from].key;
  return key && header.signed_by(*key);
}

// Called within progress(): only decides whether the piece is one of ours and keeps it for take_arrivals().
ucs_status_t Receiver::arrived(void* self, const void* header, size_t header_size, void* data, size_t size,
                               const ucp_am_recv_param_t* param) {
  auto& receiver = *static_cast<Receiver*>(self);
  PieceHeader piece;
  const bool held = param->recv_attr & (UCP_AM_RECV_ATTR_FLAG_DATA | UCP_AM_RECV_ATTR_FLAG_RNDV);
  if (header_size == sizeof piece && held) {
    std::memcpy(&piece, header, sizeof piece);
    if (piece.answer == PutOutcome::kNone && receiver.genuine(piece, kPiece)) {
      receiver.arrivals_.push_back({piece, data, size, (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0});
      return UCS_INPROGRESS;
    }
  }
  receiver.drop(base::Rank(-1), "no rank of this job has signed it");
  return UCS_OK;
}

void Receiver::take_arrivals() {
  // Receiving never makes progress, so nothing arrives meanwhile.
  for (const Arrival& arrival : std::exchange(deferred_, {})) take(arrival);
  for (const Arrival& arrival : arrivals_) take(arrival);
  arrivals_.clear();
}

void Receiver::take(const Arrival& arrival) {
  Peer& peer = peers_[arrival.header.from];
  if (arrival.header.sequence < peer.next) return refuse(arrival, kAgain);
  Assembly& assembly = peer.open[arrival.header.sequence];
  const bool packet = arrival.header.piece == 0;
  if (assembly.skipped || (packet && !assembly.head.empty())) {
    refuse(arrival, kAgain);
  } else if (!packet && !assembly.head_here) {
    assembly.waiting.push_back(arrival);
  } else if (!packet) {
    take_buffer(arrival, assembly);
  } else if (!fits(arrival.header, arrival.size)) {
    refuse(arrival, "it is not as long as its header says");
  } else {
    assembly.head.resize(arrival.size);
    receive(arrival, assembly, assembly.head.data());
  }
}

void Receiver::refuse(const Arrival& arrival, const char* why) {
  ucp_am_data_release(worker_.get(), arrival.data);
  drop(base::Rank(arrival.header.from), why);
}

void Receiver::take_buffer(const Arrival& arrival, Assembly& assembly) {
  const std::size_t index = arrival.header.piece - 1;
  const bool known = index < assembly.expected.size();
  if (known && !assembly.expected[index]) return refuse(arrival, kAgain);
  if (!known || static_cast<std::size_t>(assembly.buffers[index].numel()) != arrival.size) {
    return refuse(arrival, "a buffer of it is not what its head says");
  }
  const auto room = assembly.rooms.find(index);
  const bool is_lent = room != assembly.rooms.end();
  if (is_lent && arrival.here) return refuse(arrival, "a buffer of a device came with its announcement");
  try {
    if (is_lent && !room->second.are_ready()) return deferred_.push_back(arrival);
  } catch (const std::exception& error) {
    refuse(arrival, "there is no device any more");
    return skip(arrival.header, assembly, error.what());
  }
  assembly.expected[index] = false;
  const auto& buffer = assembly.buffers[index];
  if (is_lent) return receive(arrival, assembly, lent_.address(buffer), lent_.type());
  receive(arrival, assembly, buffer.mutable_data_ptr());
}

void Receiver::receive(const Arrival& arrival, Assembly& assembly, void* to, ucs_memory_type_t type) {
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
  param.memory_type = type;
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
  const auto packet = std::string_view(assembly.head);
  if (contact::digest(packet.substr(0, signed_size(header))) != header.digest) {
    drop(base::Rank(header.from), "its head is not the one that was signed");
    assembly.head.clear();  // that one may still come
    ++assembly.missing;
    return;
  }
  assembly.head_here = true;
  try {
    make_room(header, assembly, buffer_specs(packet.substr(0, header.head_size)));
  } catch (const std::exception& error) {
    return skip(header, assembly, error.what());
  }
  assembly.head.resize(header.head_size);
  for (const Arrival& arrival : std::exchange(assembly.waiting, {})) take(arrival);
}

// Allocates the buffers, fills those that came with the packet, and counts those that come on their own or are offered.
void Receiver::make_room(const PieceHeader& header, Assembly& assembly, const std::vector<BufferSpec>& specs) {
  PacketPlan plan;
  const auto lent = lent_buffers(header, assembly.head, specs.size());
  std::size_t at = signed_size(header);
  const auto take_bytes = [&](void* to, std::size_t size) {
    if (assembly.head.size() - at < size) throw base::FormatError("the packet ends within its buffers");
    if (size > 0) std::memcpy(to, assembly.head.data() + at, size);
    at += size;
  };
  std::vector<std::size_t> large;
  for (const BufferSpec& spec : specs) {
    if (spec.size_bytes < 0) throw base::FormatError("a buffer of negative size");
    const bool inside = plan.takes(spec.size_bytes);
    const bool is_lent = lent.contains(static_cast<std::uint32_t>(assembly.buffers.size()));
    if (is_lent && (inside || devices::is_host(spec.device))) throw base::FormatError("a buffer that cannot be lent");
    at::Tensor& buffer = assembly.buffers.emplace_back(room_for(spec, is_lent, assembly));
    if (inside) take_bytes(buffer.mutable_data_ptr(), static_cast<std::size_t>(spec.size_bytes));
    if (!inside && !is_lent) large.push_back(assembly.buffers.size() - 1);
    assembly.expected.push_back(is_lent || (!inside && header.offers == 0));
  }
  if (at != assembly.head.size()) throw base::FormatError("the packet goes on after its buffers");
  assembly.missing += static_cast<int>(std::ranges::count(assembly.expected, true));
  if (header.offers == 0) return;
  if (header.offers != large.size()) throw base::FormatError("the packet has other addresses than its head says");
  Offer offer{base::Rank(header.from), header.sequence, {}};
  for (at = header.head_size; const std::size_t index : large) {
    at::Tensor& buffer = assembly.buffers[index];
    offer.parts.push_back({buffer.mutable_data_ptr(), 0, static_cast<std::size_t>(buffer.numel())});
    take_bytes(&offer.parts.back().address, sizeof(std::uint64_t));
  }
  ++assembly.missing;
  ++assembly.receiving;
  offers_.push_back(std::move(offer));
}

// The numbers of the buffers that come from device to device.
std::set<std::uint32_t> Receiver::lent_buffers(const PieceHeader& header, std::string_view packet,
                                               std::size_t buffers) const {
  if (header.lent > 0 && lent_.kind().empty()) throw base::FormatError("it is for a device that lends nothing");
  std::set<std::uint32_t> numbers;
  auto at = signed_size(header) - header.lent * sizeof(std::uint32_t);
  for (std::uint32_t i = 0; i < header.lent; ++i, at += sizeof(std::uint32_t)) {
    std::uint32_t number = 0;
    std::memcpy(&number, packet.data() + at, sizeof number);
    if (number >= buffers || !numbers.insert(number).second)
      throw base::FormatError("it lends a buffer that it has not");
  }
  return numbers;
}

// Without room on the device, or memory that it lends, such a buffer comes to the host, from where it goes the way of
// all others that find none.
at::Tensor Receiver::room_for(const BufferSpec& spec, bool is_lent, Assembly& assembly) {
  if (devices::is_host(spec.device)) return value::large_block(spec.size_bytes);
  if (is_lent) {
    try {
      auto room = devices::LentBytes::room(spec.size_bytes);
      if (lent_.address(room.bytes()) == nullptr) return devices::pinned_bytes(spec.size_bytes);
      return assembly.rooms.emplace(assembly.buffers.size(), std::move(room)).first->second.bytes();
    } catch (const c10::OutOfMemoryError&) {  // NOLINT(bugprone-empty-catch): see above
    }
  }
  return devices::pinned_bytes(spec.size_bytes);
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
