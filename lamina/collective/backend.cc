// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/collective/shared_memory_backend.h"

namespace lamina::collective {
namespace {

// torch's store. Groups that were made before under the same name have left their words there: those of the same
// members are numbered, for each member counts once.
class StoreBoard : public shared_memory::Board {
 public:
  StoreBoard(const BackendOptions& options, base::Deadline deadline)
      : store_(options.store), check_interrupt_(options.check_interrupt), deadline_(deadline) {
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
    while (!await(prefix_ + key)) {
      if (deadline_.expired()) throw base::TimeoutError(key + " is not there");
      if (check_interrupt_) check_interrupt_();
      check();
    }
    const auto bytes = store_->get(prefix_ + key);
    return {bytes.begin(), bytes.end() - 1};
  }

 private:
  // Waits a while. Stores have no common error for the end of a wait.
  bool await(const std::string& key) {
    constexpr auto kWhile = std::chrono::milliseconds(500);
    const auto over = base::Deadline::after(kWhile);
    try {
      store_->wait({key}, kWhile);
      return true;
    } catch (const c10::Error&) {
      if (!over.expired()) throw;
      return false;
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::function<void()> check_interrupt_;
  std::string prefix_;
  const base::Deadline deadline_;
};

// Waits until all members are connected by Gloo: one that closed its connections while others still make theirs would
// take the group from those.
void await_connected(const BackendOptions& options) {
  const auto key = [](std::size_t member) { return base::str("connected/", member); };
  options.store->set(key(options.rank), std::vector<std::uint8_t>{1});
  std::vector<std::string> all;
  for (std::size_t member = 0; member < options.members.size(); ++member) all.push_back(key(member));
  options.store->wait(all, options.timeout);
}

// Gloo's backend numbers its collectives by a member that others do not see.
struct Numbered : c10d::ProcessGroupGloo {
  static std::uint32_t& next(c10d::ProcessGroupGloo& backend) { return backend.*(&Numbered::collectiveCounter_); }
};

}  // namespace

void number_next(c10d::Backend& backend, std::uint32_t number) {
  if (auto* gloo = dynamic_cast<c10d::ProcessGroupGloo*>(&backend)) Numbered::next(*gloo) = number;
}

c10::intrusive_ptr<c10d::Backend> make_backend(const BackendOptions& options) {
  const auto deadline = base::Deadline::after(options.timeout);
  StoreBoard board(options, deadline);
  std::vector<std::string> names;
  for (const auto member : options.members) names.push_back(base::str("rank ", member));
  shared_memory::Neighbours neighbours(board, options.rank, std::move(names), deadline);
  if (neighbours.why_not().empty()) {
    return make_shared_memory_backend(std::move(neighbours), options.timeout, options.check_interrupt);
  }
  if (options.rank == 0) {
    base::log_warning(base::str("the group of ", base::name_ranks(options.members),
                                " goes over Gloo, not over shared memory: ", neighbours.why_not()));
  }
  return make_gloo(options);
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendOptions& options) {
  auto gloo = options.gloo_host.empty() ? c10d::ProcessGroupGloo::Options::create_default(options.timeout)
                                        : c10d::ProcessGroupGloo::Options::create(options.timeout);
  if (!options.gloo_host.empty()) {
    gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(options.gloo_host));
  }
  const auto size = static_cast<int>(options.members.size());
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(options.store, options.rank, size, gloo);
  await_connected(options);
  return backend;
}

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const BackendOptions& options,
                                                  const c10::intrusive_ptr<c10d::Backend>& backend) {
  constexpr auto kOwn = c10d::ProcessGroup::BackendType::CUSTOM;
  const auto size = static_cast<int>(options.members.size());
  auto group = c10::make_intrusive<c10d::ProcessGroup>(options.store, options.rank, size);
  group->setBackend(c10::DeviceType::CPU, kOwn, backend);
  group->setDefaultBackend(kOwn);
  return group;
}

}  // namespace lamina::collective
