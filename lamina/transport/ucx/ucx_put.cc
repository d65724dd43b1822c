// SPDX-License-Identifier: Apache-2.0
#include <c10/util/ScopeExit.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/transport/ucx/posts.h"
#include "lamina/transport/ucx/ucx_transport.h"

// Both ends of puts as the program sees them, and the sender's: see [Note: puts].
namespace lamina::transport::ucx {
namespace {

constexpr std::size_t kMostWords = 1024;  // UCX takes headers of a few KiB

std::string with_header(const PieceHeader& header, const std::string& text) {
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + text;
}

}  // namespace

class UcxTransport::End : public Transfer {
 public:
  End(UcxTransport& transport, std::shared_ptr<Passage> passage)
      : transport_(transport), passage_(std::move(passage)) {}
  ~End() override {
    if (::getpid() != transport_.process_) return;
    const Lock lock = transport_.enter();
    if (transport_.posts_) transport_.posts_->give_up(*passage_);
  }
  bool done() override {
    const Lock lock = transport_.enter();
    return transport_.over(*passage_);
  }
  void wait(const base::Patience& patience) override { transport_.await(*passage_, patience); }

 private:
  UcxTransport& transport_;
  const std::shared_ptr<Passage> passage_;
};

std::unique_ptr<Transfer> UcxTransport::post(base::Rank from, Parcel parcel) {
  require_dense(parcel);
  require_rank(from);
  if (from == rank_) return own_puts_.post(rank_, from, std::move(parcel));
  auto passage = std::make_shared<Passage>(from, std::move(parcel), changed_);
  const Lock lock = enter();
  require_open();
  posts_->add(passage);
  send_ends();
  worker_->signal();
  return std::make_unique<End>(*this, std::move(passage));
}

std::unique_ptr<Transfer> UcxTransport::put(base::Rank to, Parcel parcel) {
  require_dense(parcel);
  require_rank(to);
  const std::string text = parcel.name + parcel.meaning;
  base::internal_check(text.size() <= kMostWords, "a put with a name that is too long");
  if (to == rank_) return own_puts_.put(rank_, to, std::move(parcel));
  PieceHeader header;
  header.id = kPut;
  header.from = static_cast<std::uint32_t>(rank_.value);
  header.piece = static_cast<std::uint32_t>(parcel.name.size());
  header.head_size = parcel.memory.nbytes();
  header.digest = contact::digest(text);
  auto passage = std::make_shared<Passage>(to, std::move(parcel), changed_, /*missing=*/2);
  const Lock lock = enter();
  require_open();
  Peer& peer = peers_[to.value];
  passage->header = with_header(header, text);
  if (peer.why.empty() && !peer.gone && !peer.open) {
    peer.early.push_back(passage);
    call(to);
  } else if (peer.why.empty() && !peer.gone) {
    begin_put(passage);
  }
  return std::make_unique<End>(*this, std::move(passage));
}

void UcxTransport::begin_put(const std::shared_ptr<Passage>& passage) {
  Peer& peer = peers_[passage->peer.value];
  PieceHeader header;
  std::memcpy(&header, passage->header.data(), sizeof header);
  header.sequence = peer.puts++;
  header.sign(*peer.outgoing);
  std::memcpy(passage->header.data(), &header, sizeof header);
  peer.put[header.sequence] = passage;
  post_bytes(passage);
  worker_->signal();
}

void UcxTransport::post_bytes(const std::shared_ptr<Passage>& passage) {
  if (const auto status = reach(passage->peer); status != UCS_OK) return passage->step_done(status);
  const at::Tensor& memory = passage->parcel.memory;
  auto kept = std::make_unique<std::shared_ptr<Passage>>(passage);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE |
                       UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_FLAGS;
  param.cb.send = [](void* request, ucs_status_t status, void* user_data) {
    const std::unique_ptr<std::shared_ptr<Passage>> sent(static_cast<std::shared_ptr<Passage>*>(user_data));
    (*sent)->step_done(status);
    ucp_request_free(request);
  };
  param.user_data = kept.get();
  param.datatype = ucp_dt_make_contig(1);
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  param.flags = memory.nbytes() > kSmallPut ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
  const ucs_status_ptr_t request =
      ucp_am_send_nbx(peers_[passage->peer.value].endpoint, kPut, passage->header.data(), passage->header.size(),
                      memory.const_data_ptr(), memory.nbytes(), &param);
  if (UCS_PTR_IS_PTR(request)) {
    static_cast<void>(kept.release());
  } else {
    passage->step_done(UCS_PTR_STATUS(request));
  }
}

bool UcxTransport::over(const Passage& passage) const {
  return passage.ended() || passage.status != UCS_OK || closing_ || !peers_[passage.peer.value].why.empty();
}

void UcxTransport::await(const Passage& passage, const base::Patience& patience) {
  Lock lock = enter();
  ++waiting_;
  const auto leave = c10::make_scope_exit([&] {
    if (!lock.owns_lock()) lock.lock();  // what the patience threw came without it
    --waiting_;
    changed_.notify_all();
  });
  base::wait_until(
      lock, changed_, patience, [&] { return over(passage); },
      [&] { return base::str(passage.parcel.name, ", with rank ", passage.peer); });
  if (passage.error) std::rethrow_exception(passage.error);
  if (passage.status != UCS_OK) explain_failure(lock, passage.status, passage.peer);
  if (!passage.ended()) refuse_if_lost(passage.peer);
}

void UcxTransport::accept_ends_of_puts() {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kEndOfPut;
  handler.cb = &UcxTransport::end_of_put;
  handler.arg = this;
  check(ucp_worker_set_am_recv_handler(worker_->get(), &handler), "receive");
}

// Called within progress().
ucs_status_t UcxTransport::end_of_put(void* self, const void* header, size_t header_size, void*, size_t,
                                      const ucp_am_recv_param_t*) {
  auto& transport = *static_cast<UcxTransport*>(self);
  PieceHeader end;
  if (header_size < sizeof end) return UCS_OK;
  std::memcpy(&end, header, sizeof end);
  const std::string meaning(static_cast<const char*>(header) + sizeof end, header_size - sizeof end);
  if (!transport.receiver_->genuine(end, kEndOfPut) || contact::digest(meaning) != end.digest) return UCS_OK;
  Peer& peer = transport.peers_[end.from];
  const auto found = peer.put.extract(end.sequence);
  if (found.empty()) return UCS_OK;
  ++peer.ends_received;
  Passage& passage = *found.mapped();
  const std::string& name = passage.parcel.name;
  if (end.answer == PutOutcome::kTaken) {
    passage.step_done(UCS_OK);
  } else if (end.answer == PutOutcome::kFailed) {
    passage.fail(std::make_exception_ptr(given_up(name, passage.peer)));
  } else {
    const ParcelEnd posted{passage.peer, static_cast<std::int64_t>(end.head_size), meaning};
    passage.fail(std::make_exception_ptr(ends_differ(name, end_of(transport.rank_, passage.parcel), posted)));
  }
  return UCS_OK;
}

void UcxTransport::send_ends() {
  for (const auto& end : std::exchange(posts_->ends(), {})) {
    Peer& peer = peers_[end.to.value];
    if (peer.gone || reach(end.to) != UCS_OK) continue;
    PieceHeader header;
    header.id = kEndOfPut;
    header.from = static_cast<std::uint32_t>(rank_.value);
    header.sequence = end.sequence;
    header.head_size = static_cast<std::uint64_t>(end.posted.size_bytes);
    header.answer = end.answer;
    header.digest = contact::digest(end.posted.meaning);
    header.sign(*peer.outgoing);
    ++peer.ends_sent;
    send_header(peer.endpoint, kEndOfPut, with_header(header, end.posted.meaning));
  }
}

}  // namespace lamina::transport::ucx
