// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/posts.h"

#include <cstring>
#include <optional>
#include <utility>

namespace lamina::transport::ucx {

void Passage::step_done(ucs_status_t with) {
  if (with != UCS_OK) status = with;
  if (missing > 0 && --missing == 0) changed.notify_all();
}

void Passage::fail(std::exception_ptr with) {
  error = std::move(with);
  missing = 0;
  changed.notify_all();
}

// Bytes on their way to their place.
struct Posts::Receiving {
  Posts* posts;
  PieceHeader header;
  std::shared_ptr<Passage> passage;
};

Posts::Posts(Worker& worker, Receiver& receiver, base::Rank self, int size)
    : worker_(worker), receiver_(receiver), self_(self), peers_(static_cast<std::size_t>(size)) {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                       UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  handler.id = kPut;
  handler.cb = &Posts::arrived;
  handler.arg = this;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  check(ucp_worker_set_am_recv_handler(worker_.get(), &handler), "receive");
}

// Called within progress(). What is posted is received at once: the sender's permission to send is then ahead of the
// bytes that a permission of its own, in the same turn, has us send.
ucs_status_t Posts::arrived(void* self, const void* header, size_t header_size, void* data, size_t size,
                            const ucp_am_recv_param_t* param) {
  auto& posts = *static_cast<Posts*>(self);
  PieceHeader put;
  if (header_size < sizeof put) {
    posts.receiver_.drop(base::Rank(-1), "it is shorter than a header");
    return UCS_OK;
  }
  std::memcpy(&put, header, sizeof put);
  const std::string_view text(static_cast<const char*>(header) + sizeof put, header_size - sizeof put);
  if (!posts.receiver_.genuine(put, kPut) || contact::digest(text) != put.digest || put.piece > text.size() ||
      put.head_size != size) {
    posts.receiver_.drop(base::Rank(-1), "no rank of this job has signed it");
    return UCS_OK;
  }
  if (!posts.is_new(put)) {
    posts.receiver_.drop(base::Rank(put.from), "it came before");
    return UCS_OK;
  }
  const bool announced = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  const bool kept = posts.take({put,
                                std::string(text.substr(0, put.piece)),
                                std::string(text.substr(put.piece)),
                                announced ? nullptr : data,
                                announced ? data : nullptr,
                                {}});
  return kept ? UCS_INPROGRESS : UCS_OK;
}

bool Posts::is_new(const PieceHeader& header) {
  Peer& peer = peers_[header.from];
  if (header.sequence < peer.next || !peer.ahead.insert(header.sequence).second) return false;
  while (peer.ahead.erase(peer.next) > 0) ++peer.next;
  ++peer.count;
  return true;
}

bool Posts::take(Arrival arrival) {
  Peer& peer = peers_[arrival.header.from];
  if (const auto post = peer.posted.extract(arrival.name); !post.empty()) return receive(arrival, post.mapped());
  if (closed_) return false;
  if (peer.given_up.erase(arrival.name) > 0 || peer.early.contains(arrival.name)) {
    end(arrival, PutOutcome::kFailed);
    return false;
  }
  if (arrival.bytes != nullptr) arrival.kept.assign(static_cast<const char*>(arrival.bytes), arrival.header.head_size);
  arrival.bytes = nullptr;
  const bool announced = arrival.announcement != nullptr;
  peer.early.emplace(arrival.name, std::move(arrival));
  return announced;
}

void Posts::add(const std::shared_ptr<Passage>& passage) {
  Peer& peer = peers_[passage->peer.value];
  if (const auto put = peer.early.extract(passage->parcel.name); !put.empty()) {
    if (!receive(put.mapped(), passage)) release(put.mapped());
    return;
  }
  const bool added = peer.posted.try_emplace(passage->parcel.name, passage).second;
  base::internal_check(added, "two posts of one name");
}

void Posts::give_up(Passage& passage) {
  Peer& peer = peers_[passage.peer.value];
  const auto found = peer.posted.find(passage.parcel.name);
  if (found == peer.posted.end() || found->second.get() != &passage) return;
  peer.posted.erase(found);
  peer.given_up.insert(passage.parcel.name);
}

bool Posts::receive(const Arrival& arrival, const std::shared_ptr<Passage>& passage) {
  const ParcelEnd sender{arrival.from(), static_cast<std::int64_t>(arrival.header.head_size), arrival.meaning};
  const ParcelEnd receiver = end_of(self_, passage->parcel);
  if (!sender.fits(receiver)) {
    passage->fail(std::make_exception_ptr(ends_differ(arrival.name, sender, receiver)));
    end(arrival, PutOutcome::kDiffers, receiver);
    return false;
  }
  void* const to = receiver.size_bytes > 0 ? passage->parcel.memory.mutable_data_ptr() : nullptr;
  if (arrival.announcement == nullptr) {
    const void* bytes = arrival.bytes != nullptr ? arrival.bytes : arrival.kept.data();
    if (receiver.size_bytes > 0) std::memcpy(to, bytes, arrival.header.head_size);
    received(arrival.header, *passage, UCS_OK);
    return false;
  }
  auto* receiving = new Receiving{this, arrival.header, passage};
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE |
                       UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = &Posts::finished;
  param.user_data = receiving;
  param.datatype = ucp_dt_make_contig(1);
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  const ucs_status_ptr_t request =
      ucp_am_recv_data_nbx(worker_.get(), arrival.announcement, to, arrival.header.head_size, &param);
  if (request == nullptr || UCS_PTR_IS_ERR(request)) {
    delete receiving;
    received(arrival.header, *passage, UCS_PTR_STATUS(request));
  }
  return true;
}

void Posts::finished(void* request, ucs_status_t status, size_t, void* user_data) {
  const std::unique_ptr<Receiving> receiving(static_cast<Receiving*>(user_data));
  receiving->posts->received(receiving->header, *receiving->passage, status);
  ucp_request_free(request);
}

void Posts::received(const PieceHeader& header, Passage& passage, ucs_status_t status) {
  passage.step_done(status);
  ends_.push_back(
      {base::Rank(header.from), header.sequence, status == UCS_OK ? PutOutcome::kTaken : PutOutcome::kFailed, {}});
}

void Posts::end(const Arrival& arrival, PutOutcome answer, const ParcelEnd& posted) {
  ends_.push_back({arrival.from(), arrival.header.sequence, answer, posted});
}

void Posts::release(const Arrival& arrival) {
  if (arrival.announcement != nullptr) ucp_am_data_release(worker_.get(), arrival.announcement);
}

void Posts::close() {
  closed_ = true;
  for (Peer& peer : peers_) {
    for (const auto& [name, arrival] : std::exchange(peer.early, {})) release(arrival);
  }
}

}  // namespace lamina::transport::ucx
