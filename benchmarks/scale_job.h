// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/archive/store.h"
#include "lamina/base/deadline.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/save.h"
#include "lamina/data_parallel/batch_record.h"
#include "lamina/data_parallel/passes.h"
#include "lamina/distributed_optimizer/gradients.h"
#include "lamina/messaging/agreement.h"
#include "lamina/messaging/messenger.h"
#include "lamina/messaging/relay.h"
#include "lamina/messaging/same_arguments.h"
#include "lamina/model/agreement.h"
#include "lamina/model/values.h"
#include "lamina/optim/step.h"
#include "lamina/session/epoch_talk.h"
#include "lamina/topology/topology.h"
#include "lamina/transport/forwarding.h"
#include "lamina/transport/inproc/network.h"
#include "lamina/transport/message.h"
#include "lamina/transport/news.h"

namespace lamina::benchmarks {

// The messages of one rank, and their bytes.
struct Sent {
  std::int64_t messages = 0, bytes = 0;
};

// Counts what is sent through another transport, and notes to whom.
class CountingTransport : public transport::ForwardingTransport {
 public:
  CountingTransport(std::unique_ptr<transport::Transport> inner, std::atomic<std::int64_t>& messages,
                    std::atomic<std::int64_t>& bytes, std::vector<std::atomic<bool>>& sent_to)
      : ForwardingTransport(std::move(inner)), messages_(messages), bytes_(bytes), sent_to_(sent_to) {}

  void send(base::Rank to, const transport::Message& message) override {
    sent_to_[to.value] = true;
    const auto frame = transport::pack(message);
    ++messages_;
    bytes_ += static_cast<std::int64_t>(frame.head.size());
    for (const auto& buffer : frame.buffers) bytes_ += static_cast<std::int64_t>(buffer.nbytes());
    ForwardingTransport::send(to, message);
  }
  void tell(base::Rank to, const transport::Message& message) override { send(to, message); }

 private:
  std::atomic<std::int64_t>&messages_, &bytes_;
  std::vector<std::atomic<bool>>& sent_to_;
};

// A job of so many ranks in this process, two of which have one copy of a model of two tensors together. Its acts are
// those of the engine in which ranks exchange words; collectives of tensors are of a backend, and not counted.
class ScaleJob {
 public:
  explicit ScaleJob(int size) : network_(size, 0), topology_(size, 2, 1) {
    for (int i = 0; i < size; ++i) {
      auto& rank = *ranks_.emplace_back(std::make_unique<Rank>(size));
      world_.emplace_back(i);
      rank.messenger = std::make_unique<messaging::Messenger>(
          std::make_unique<CountingTransport>(network_.connect(base::Rank(i)), rank.messages, rank.bytes, rank.sent_to),
          rank.recorder);
      rank.messenger->start();
      rank.passes = std::make_unique<data_parallel::Passes>(rank.messenger->mailbox(), copies(i), patience(),
                                                            std::make_shared<value::Failures>());
    }
  }
  ~ScaleJob() {
    for (auto& rank : ranks_) rank->messenger->close(false);
  }

  // All ranks build one model: they agree on its cut, and have the first one's values already.
  void start(int rank) {
    model::agree({"a description of the model", "", rank == 0 ? value::Value("a plan") : value::Value()}, world_,
                 mailbox(rank), patience());
    at::Tensor tensors[] = {at::ones({4}), at::ones({2, 3})};
    const auto table = table_of(rank, tensors);
    model::give_values(table, {world_, {}}, mailbox(rank), patience(),
                       {.why = [](const auto&) { return std::string(); }});
  }

  // Copies of the model average their gradients, by collectives that are not counted.
  void step(int rank) { ranks_[rank]->passes->meet(); }

  // The numbers that ranks of a training loop add up before and after a batch: of its samples, and of a loss with two
  // parts.
  void batch(int rank) {
    data_parallel::BatchRecord before, after{.is_after_step = true, .losses = {0.1, 0.2, 0.3}};
    before.give_samples(32, 0);
    data_parallel::together(mailbox(rank), world_, before, patience());
    data_parallel::together(mailbox(rank), world_, after, patience());
  }

  void clipped_step(int rank) {
    step(rank);
    at::Tensor tensors[] = {at::ones({4}).set_requires_grad(true), at::ones({2, 3}).set_requires_grad(true)};
    const auto table = table_of(rank, tensors);
    auto& own = tensors[partition(rank)];
    own.mutable_grad() = at::ones_like(own);
    const distributed_optimizer::Measurers measurers{
        .table = &table,
        .one_copy = topology_.members(topology::kOneCopy, base::Rank(rank)),
        .pipeline = topology_.members(topology::kPartitions, base::Rank(rank)),
        .copies = copies(rank),
        .mailbox = mailbox(rank),
        .patience = patience()};
    const auto measure = distributed_optimizer::measure_gradients({&own, 1}, measurers, *optim::shared_threads());
    base::internal_check(measure.norm * measure.norm > 9.99 && measure.norm * measure.norm < 10.01, "another norm");
  }

  // A checkpoint of one small tensor of each rank.
  void save(int rank, const std::filesystem::path& folder) {
    require_same(rank, "save_checkpoint()");
    succeed(rank);
    checkpoint::SaveRequest request{.folder = folder, .tag = "latest", .about = nlohmann::json::object()};
    request.parts.push_back(checkpoint::whole_part(base::str("w", rank), archive::Kind::kParameter, at::ones({4})));
    checkpoint::Save save(archive::file_system(), std::move(request), {world_, mailbox(rank), patience()});
    save.start();
    save.wait();
  }

  // The agreements of a resumption, without what is read: where the checkpoint is, and that each part of it went well.
  void resume(int rank) {
    constexpr int kParts = 7;  // found, opened, its content, generators, damage, names, how it goes on
    require_same(rank, "resume_from_checkpoint()");
    std::optional<value::Value> place;
    if (rank == 0) place = "a folder";
    messaging::first_given(mailbox(rank), world_, place, patience());
    for (int part = 0; part < kParts; ++part) succeed(rank);
  }

  // One rank fails, and all hear why.
  void fail(int rank) {
    const base::Rank failed[] = {world_.back()};
    if (rank == failed->value) messaging::tell_failed(ranks_[rank]->messenger->transport(), "its device failed");
    const auto loss = mailbox(rank).loss(failed, std::chrono::seconds(120));
    base::internal_check(loss && loss->cause == "its device failed", "a rank has not heard why another one failed");
  }

  // Its program ends, as those of all others do, of which it hears and tells on.
  void leave(int rank) {
    mailbox(rank).waits().tell_leaving("came to the end of its program");
    const auto has_heard = [&](base::Rank of) { return of == world_[rank] || !mailbox(rank).waits().left(of).empty(); };
    for (const auto by = base::Deadline::after(patience().timeout); !std::ranges::all_of(world_, has_heard);) {
      base::internal_check(!by.expired(), "a rank has not heard of the end of another one");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  // The process of a rank ends, and the others agree to go on.
  void lose(int rank) { network_.kill(base::Rank(rank)); }
  void go_on_without(int lost, int rank) {
    if (rank == lost) return;
    session::EpochTalk talk(mailbox(rank), ranks_[rank]->messenger->transport(), /*least=*/1, patience(), {});
    const auto members = talk.next();
    base::internal_check(members.size() + 1 == world_.size(), "others go on");
    talk.all_gather(members, std::int64_t{rank});
  }

  // Runs an act on all ranks, each in a thread of its own: the most that any of them has sent, from that rank on.
  // Throws what one threw.
  Sent most_sent(const std::function<void(int)>& act, int from = 0) {
    for (auto& rank : ranks_) rank->messages = rank->bytes = 0;
    std::vector<std::exception_ptr> errors(ranks_.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < std::ssize(ranks_); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          act(rank);
        } catch (...) {
          errors[rank] = std::current_exception();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& error : errors) {
      if (error) std::rethrow_exception(error);
    }
    Sent most;
    for (std::size_t rank = from; rank < ranks_.size(); ++rank) {
      most.messages = std::max(most.messages, ranks_[rank]->messages.load());
      most.bytes = std::max(most.bytes, ranks_[rank]->bytes.load());
    }
    return most;
  }

  // The most sockets that a rank has by now: to its neighbours, and to those with which it has exchanged messages.
  int most_sockets() const {
    return most_peers([&](std::size_t rank) { return transport::neighbours(world_, rank); },
                      [&](std::size_t rank, std::size_t other) { return have_talked(rank, other); });
  }
  // The most endpoints: to the ranks beside it, and to those to which it has sent.
  int most_endpoints() const {
    const auto beside = [&](std::size_t rank) {
      return std::vector{world_[(rank + 1) % world_.size()], world_[(rank + world_.size() - 1) % world_.size()]};
    };
    return most_peers(beside, [&](std::size_t rank, std::size_t other) { return ranks_[rank]->sent_to[other].load(); });
  }

 private:
  struct Rank {
    explicit Rank(int size) : sent_to(static_cast<std::size_t>(size)) {}
    std::atomic<std::int64_t> messages = 0, bytes = 0;
    std::vector<std::atomic<bool>> sent_to;
    observe::Recorder recorder;
    std::unique_ptr<messaging::Messenger> messenger;
    std::unique_ptr<data_parallel::Passes> passes;
  };

  int most_peers(const std::function<std::vector<base::Rank>(std::size_t)>& from_the_start,
                 const std::function<bool(std::size_t, std::size_t)>& is_met) const {
    std::size_t most = 0;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const auto first = from_the_start(rank);
      std::set<base::Rank> peers(first.begin(), first.end());
      for (std::size_t other = 0; other < ranks_.size(); ++other) {
        if (is_met(rank, other)) peers.insert(world_[other]);
      }
      peers.erase(world_[rank]);
      most = std::max(most, peers.size());
    }
    return static_cast<int>(most);
  }
  bool have_talked(std::size_t one, std::size_t other) const {
    return one != other && (ranks_[one]->sent_to[other] || ranks_[other]->sent_to[one]);
  }
  messaging::Mailbox& mailbox(int rank) { return ranks_[rank]->messenger->mailbox(); }
  int partition(int rank) const { return topology_.index(topology::Group::kPp, base::Rank(rank)); }
  std::vector<base::Rank> copies(int rank) const { return topology_.members(topology::kSameParts, base::Rank(rank)); }
  static base::Patience patience() { return {std::chrono::seconds(120), nullptr}; }
  void require_same(int rank, const char* call) {
    const std::vector<messaging::Argument> arguments{{"path", "a folder"}, {"tag", "latest"}};
    const auto differences = messaging::differing_arguments(mailbox(rank), world_, call, arguments, patience());
    base::internal_check(differences.empty(), "arguments that are alike differ");
  }
  void succeed(int rank) {
    messaging::act_together(mailbox(rank), world_, [] {}, patience());
  }
  model::ParameterTable table_of(int rank, std::span<const at::Tensor, 2> tensors) const {
    std::vector<model::Parameter> rows;
    for (int i = 0; i < 2; ++i) {
      rows.push_back(model::whole_in(base::Partition(i), base::str("row ", i), tensors[i], false, 1));
    }
    return {std::move(rows), base::Partition(partition(rank)), 2};
  }

  transport::inproc::Network network_;
  const topology::Topology topology_;
  std::vector<base::Rank> world_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace lamina::benchmarks
