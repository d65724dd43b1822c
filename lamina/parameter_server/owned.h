// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/parameter_server/optimizer.h"
#include "lamina/parameter_server/parameter.h"
#include "lamina/parameter_server/protocol.h"

namespace lamina::parameter_server {

// A module, or a parameter, as it is placed on its owner. `call` is run in threads of the owner's, one call at a time.
struct Placed {
  std::string name;  // by which others find it; "": they are told
  std::function<value::Value(value::Value arguments)> call;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
};

// [Note: release] A rank may have another one make a module without a name, or an optimizer. Its maker alone can name
// that, until it shares it: it tells the owner before it tells a third rank. What was not shared goes when its maker
// has left, or is lost. What has a name, or was placed by its owner, stays until the job ends.
enum class Shared : std::uint8_t { kModule, kOptimizer };

// Modules, parameters and optimizers that lie on this rank and that others use, by their numbers. From any thread.
class Owned {
 public:
  Owned(base::Rank rank, std::int64_t job) : rank_(rank), job_(job) {}

  // A thread makes things for a rank that asked for them, while this lives.
  class MadeFor {
   public:
    explicit MadeFor(base::Rank asker);
    ~MadeFor();
    MadeFor(const MadeFor&) = delete;

   private:
    const std::optional<base::Rank> before_;
  };

  // Throws base::UsageError for a name that is taken, and a parameter that is no leaf.
  RemoteModule place(Placed placed);
  // Throws base::UsageError for a parameter that does not lie here.
  std::int64_t add_optimizer(const std::vector<std::int64_t>& parameters, std::shared_ptr<Updater> updater);
  // Has others than its maker able to name it.
  void share(Shared what, std::int64_t number);
  // Lets go of what this rank alone could name. What goes may be objects of Python.
  void release(base::Rank maker);

  // The module of a name; none where none is placed.
  std::optional<RemoteModule> find(const std::string& name);
  // They throw base::UsageError for what is not here.
  std::shared_ptr<const Placed> module(std::int64_t number);
  std::shared_ptr<Parameter> parameter(std::int64_t number);
  std::shared_ptr<Optimizer> optimizer(std::int64_t number);

  // How many are here.
  std::size_t modules();
  std::size_t optimizers();

 private:
  // The rank that alone can name it; none where others can.
  using Maker = std::optional<base::Rank>;
  struct Module {
    std::shared_ptr<const Placed> what;  // nullptr: released, as below
    Maker maker;
    std::vector<std::int64_t> parameters;
  };
  struct Made {
    std::shared_ptr<Optimizer> what;
    Maker maker;
  };
  std::vector<RemoteParameter> add_parameters(const Placed& placed);  // under the lock

  const base::Rank rank_;
  const std::int64_t job_;
  Parameters parameters_of_;
  std::mutex mutex_;  // of all below
  std::vector<Module> modules_;
  std::map<std::string, RemoteModule> names_;
  std::vector<std::shared_ptr<Parameter>> parameters_;
  std::map<const Parameter*, std::int64_t> parameter_numbers_;
  std::vector<Made> optimizers_;
};

}  // namespace lamina::parameter_server
