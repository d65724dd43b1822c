// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/backend.h"

#include <algorithm>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/collective/shared_memory_backend.h"
#include "lamina/device/capabilities.h"
#include "lamina/environment/address.h"

namespace lamina::collective {
namespace {

using Keys = std::vector<std::string>;

// Waits of a member while a group is made: all have one end.
class Making {
 public:
  explicit Making(const BackendOptions& options)
      : options_(options), deadline_(options.made_by.value_or(base::Deadline::after(options.timeout))) {}

  base::Deadline deadline() const { return deadline_; }

  // Throws when an interrupt has come, or a member is lost.
  void check() const {
    if (options_.check_interrupt) options_.check_interrupt();
    if (options_.check_members) options_.check_members();
  }

  // Waits for keys of a store; false at the deadline. Throws what check() and `also` do.
  bool await(c10d::Store& store, const Keys& keys, const std::function<void()>& also = {}) const {
    while (!await_a_while(store, keys)) {
      if (deadline_.expired()) return false;
      check();
      if (also) also();
    }
    return true;
  }

 private:
  // Stores have no common error for the end of a wait.
  static bool await_a_while(c10d::Store& store, const Keys& keys) {
    constexpr auto kWhile = std::chrono::milliseconds(500);
    const auto over = base::Deadline::after(kWhile);
    try {
      store.wait(keys, kWhile);
      return true;
    } catch (const c10::Error&) {
      if (!over.expired()) throw;
      return false;
    }
  }

  const BackendOptions& options_;
  const base::Deadline deadline_;
};

// torch's store. Groups that were made before under the same name have left their words there: those of the same
// members are numbered, for each member counts once.
class StoreBoard : public shared_memory::Board {
 public:
  StoreBoard(const BackendOptions& options, const Making& making) : store_(options.store), making_(making) {
    const auto key = base::str("lamina/", base::name_ranks(options.members), "/");
    prefix_ = base::str(key, (store_->add(key + "come", 1) - 1) / std::ssize(options.members), "/");
  }

  // A word ends with a point there: an empty one would be under way for 200 ms, as torch's server says of the length
  // that more follows.
  void put(const std::string& key, const std::string& word) override {
    std::vector<std::uint8_t> bytes(word.begin(), word.end());
    bytes.push_back('.');
    store_->set(prefix_ + key, bytes);
  }
  std::string get(const std::string& key, const std::function<void()>& check) override {
    if (!making_.await(*store_, {prefix_ + key}, check)) throw base::TimeoutError(key + " is not there");
    const auto bytes = store_->get(prefix_ + key);
    return {bytes.begin(), bytes.end() - 1};
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const Making& making_;
  std::string prefix_;
};

// torch's store as Gloo has it: while the group is made, its waits for other members are ours.
class GlooStore : public c10d::Store {
 public:
  using Bytes = std::vector<std::uint8_t>;

  GlooStore(c10::intrusive_ptr<c10d::Store> store, const Making& making)
      : c10d::Store(store->getTimeout()), store_(std::move(store)), making_(&making) {}

  // The group is made, or will not be.
  void let_go() { making_ = nullptr; }
  // Rethrows what has ended a wait: Gloo tells of it in words of its own.
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

  c10::intrusive_ptr<c10d::Store> clone() override { return store_->clone(); }
  void set(const std::string& key, const Bytes& value) override { store_->set(key, value); }
  Bytes compareSet(const std::string& key, const Bytes& current, const Bytes& value) override {
    return store_->compareSet(key, current, value);
  }
  Bytes get(const std::string& key) override {
    if (making_ != nullptr) await({key});
    return store_->get(key);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override { return store_->add(key, value); }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const Keys& keys) override { return store_->check(keys); }
  std::int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const Keys& keys) override { wait(keys, getTimeout()); }
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override {
    making_ != nullptr ? await(keys) : store_->wait(keys, timeout);
  }

 private:
  void await(const Keys& keys) {
    try {
      if (!making_->await(*store_, keys)) throw base::TimeoutError("its members did not come in time");
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const Making* making_;
  std::exception_ptr error_;
};

// Waits until all members have come so far. Throws base::TimeoutError, which names one that has not.
void meet(const BackendOptions& options, const Making& making, const char* where) {
  const auto key = [where](std::size_t member) { return base::str(where, "/", member); };
  options.store->set(key(static_cast<std::size_t>(options.rank)), std::vector<std::uint8_t>{1});
  for (std::size_t member = 0; member < options.members.size(); ++member) {
    if (making.await(*options.store, {key(member)})) continue;
    throw base::TimeoutError(base::str("rank ", options.members[member],
                                       " has not come in time to make the group with rank ",
                                       options.members[options.rank]));
  }
}

c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> gloo_options(const BackendOptions& options, const Making& making) {
  using Gloo = c10d::ProcessGroupGloo;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(making.deadline().at() - base::Clock::now());
  const auto timeout = std::max(left, std::chrono::milliseconds(1));
  if (options.gloo_host.empty()) return Gloo::Options::create_default(timeout);
  auto gloo = Gloo::Options::create(timeout);
  gloo->devices.push_back(Gloo::createDeviceForHostname(options.gloo_host));
  return gloo;
}

c10::intrusive_ptr<c10d::Backend> connect_gloo(const BackendOptions& options, const Making& making) {
  meet(options, making, "to be connected");
  const auto store = c10::make_intrusive<GlooStore>(options.store, making);
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    const auto size = static_cast<int>(options.members.size());
    backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, options.rank, size, gloo_options(options, making));
    store->let_go();
  } catch (const std::exception& error) {
    store->let_go();
    store->rethrow();
    making.check();  // a loss says more
    throw base::PeerError(
        base::str("rank ", options.members[options.rank], ", which listens at ",
                  options.gloo_host.empty() ? "the address of its machine's name" : options.gloo_host,
                  ", was not connected with ", base::name_ranks(options.members),
                  " by Gloo; where MASTER_ADDR is not reached by the network that all share, GLOO_SOCKET_IFNAME names "
                  "that one's interface: ",
                  error.what()),
        std::nullopt, base::Code{"group-not-made"});
  }
  // One that closed its connections while others still make theirs would take the group from those.
  meet(options, making, "connected");
  backend->setTimeout(options.timeout);
  return backend;
}

// Gloo's backend numbers its collectives by a member that others do not see.
struct Numbered : c10d::ProcessGroupGloo {
  static std::uint32_t& next(c10d::ProcessGroupGloo& backend) { return backend.*(&Numbered::collectiveCounter_); }
};

}  // namespace

void number_next(c10d::Backend& backend, std::uint32_t number) {
  if (auto* gloo = dynamic_cast<c10d::ProcessGroupGloo*>(&backend)) Numbered::next(*gloo) = number;
}

std::string gloo_host(const environment::World& world) {
  if (!world.launched) return "";
  const auto here = environment::Address::local_towards(world.master_addr, world.master_port);
  const char* named = std::getenv("GLOO_SOCKET_IFNAME");
  return named == nullptr || here.interface() == named ? here.host() : "";
}

c10::intrusive_ptr<c10d::Backend> make_backend(const BackendOptions& options) {
  const Making making(options);
  StoreBoard board(options, making);
  std::vector<std::string> names;
  for (const auto member : options.members) names.push_back(base::str("rank ", member));
  shared_memory::Neighbours neighbours(board, options.rank, std::move(names), making.deadline());
  if (neighbours.why_not().empty()) {
    return make_shared_memory_backend(std::move(neighbours), options.timeout, options.check_interrupt);
  }
  if (options.rank == 0) {
    base::log_warning(base::str("the group of ", base::name_ranks(options.members),
                                " goes over Gloo, not over shared memory: ", neighbours.why_not()));
  }
  return connect_gloo(options, making);
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendOptions& options) {
  return connect_gloo(options, Making(options));
}

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const BackendOptions& options,
                                                  const c10::intrusive_ptr<c10d::Backend>& backend) {
  constexpr auto kOwn = c10d::ProcessGroup::BackendType::CUSTOM;
  const auto size = static_cast<int>(options.members.size());
  auto group = c10::make_intrusive<c10d::ProcessGroup>(options.store, options.rank, size);
  group->setBackend(devices::kHost, kOwn, backend);
  group->setDefaultBackend(kOwn);
  return group;
}

}  // namespace lamina::collective
