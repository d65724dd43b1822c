// SPDX-License-Identifier: Apache-2.0
// Jobs of four ranks that change their layout while they train, as tests/multiprocess/cases_change.py and
// cases_change_parts.py have them for Python. Each check begins a job of its own.
//
//     lamina run -n 4 -c frontend_changes
#include <torch/serialize.h>
#include <torch/torch.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "lamina/frontend/optimizer_state.h"
#include "lamina/lamina.h"
#include "tests/frontend/expect.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;
using at::Tensor;

constexpr int kSteps = 8, kRows = 16, kMicrobatches = 8;  // of a batch of all copies

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> first, second, third, last;
  Child<torch::nn::Dropout> drop;
  Tensor scale;
  explicit NetImpl(double dropout) {
    first = register_module("first", torch::nn::Linear(6, 5));
    second = register_module("second", torch::nn::Linear(5, 7));
    drop = register_module("drop", torch::nn::Dropout(dropout));
    third = register_module("third", torch::nn::Linear(7, 4));
    last = register_module("last", torch::nn::Linear(4, 1));
    scale = register_buffer("scale", torch::full({5}, 0.5));
  }
  Tensor forward(const Tensor& x) {
    const auto y = drop(torch::gelu(second(torch::tanh(first(x)) * scale)));
    return last(torch::tanh(third(y))).square().mean();
  }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

Net net(double dropout = 0) {
  torch::manual_seed(3);
  Net net(dropout);
  net->to(torch::kDouble);
  return net;
}

Tensor batch(int number) {
  torch::manual_seed(1000 + number);
  return torch::randn({kRows, 6}, torch::kDouble);
}

Tensor share(int number) { return batch(number).chunk(size_of(Group::kDp))[rank_in(Group::kDp)]; }

// Any of torch's, or of ours.
using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>)>;

std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.02).weight_decay(0.1));
}
std::unique_ptr<torch::optim::Optimizer> momentum(std::vector<Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
}
std::unique_ptr<torch::optim::Optimizer> lamb(std::vector<Tensor> parameters) {
  return std::make_unique<FusedOptimizer>("LAMB", parameters, HyperValues{{"lr", 0.02}, {"weight_decay", 0.1}});
}

using Keys = std::vector<std::pair<std::string, Setting>>;

std::string json(const Keys& keys) {
  std::string text;
  for (const auto& [key, value] : keys) text += (text.empty() ? "\"" : ", \"") + key + "\": " + value.json();
  return "{" + text + "}";
}

Keys sharded(int degree, int partitions = 1) {
  return {{"sharded_data_parallel_degree", degree}, {"partitions", partitions}, {"shard_optimizer_state", false}};
}
Keys whole(int partitions = 1) { return sharded(1, partitions); }
Keys divided(int partitions = 1) {
  auto keys = whole(partitions);
  keys.back().second = true;
  return keys;
}

void start(const Keys& layout, const Keys& more = {}) {
  int partitions = 1;
  for (const auto& [key, value] : layout) {
    if (key == "partitions") partitions = std::stoi(value.json());
  }
  Keys keys{{"ddp", true},
            {"timeout_s", 60},
            {"microbatches", kMicrobatches * partitions / 4},
            {"sdp_param_persistence_threshold", 0},
            {"sdp_gradient_clipping", std::nullopt}};
  keys.insert(keys.end(), layout.begin(), layout.end());
  keys.insert(keys.end(), more.begin(), more.end());
  init(json(keys));
}

// The mean over the ranks that read parts of one batch.
double mean(double own) {
  const auto all = all_gather(Group::kDp, own);
  double sum = 0;
  for (const auto each : all) sum += each;
  return sum / static_cast<double>(all.size());
}

// A training of a model in a job.
struct Training {
  DistributedModel<Net> model;
  DistributedOptimizer<torch::optim::Optimizer> optimizer;
  torch::optim::StepLR schedule;
  std::function<Tensor(const Tensor&)> run;
  int number = 0;

  explicit Training(const Make& make, double dropout = 0, const LossScale& scale = LossScale())
      : model(net(dropout)), optimizer(make(model.parameters()), scale), schedule(*optimizer, 3, 0.5) {
    auto train = lamina::step([this](const Tensor& x) {
      const auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    run = [train](const Tensor& x) mutable { return train(x).reduce_mean(); };
  }
  Training(const Training&) = delete;

  // Returns the loss of the next batch.
  double step() {
    optimizer.zero_grad();
    const auto x = share(number++).to(model.parameters().front().scalar_type());
    const auto loss = mean(run(x).item<double>());
    optimizer.step();
    schedule.step();
    optimizer.zero_grad();
    return loss;
  }
};

// One process that trains on whole batches.
struct Plain {
  Net model = net();
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<double> losses;

  explicit Plain(const Make& make, double clip = 0) : optimizer(make(model->parameters())) {
    torch::optim::StepLR schedule(*optimizer, 3, 0.5);
    for (int number = 0; number < kSteps; ++number) {
      optimizer->zero_grad();
      const auto loss = model->forward(batch(number));
      loss.backward();
      if (clip > 0) torch::nn::utils::clip_grad_norm_(model->parameters(), clip);
      optimizer->step();
      schedule.step();
      losses.push_back(loss.item<double>());
    }
  }
};

bool near(const Tensor& ours, const Tensor& theirs, double tolerance) {
  return torch::allclose(ours, theirs, tolerance, tolerance);
}

void agree(const std::vector<double>& losses, const std::vector<double>& expected, const std::string& what,
           double tolerance = 1e-12) {
  const auto ours = torch::tensor(losses, torch::kDouble), theirs = torch::tensor(expected, torch::kDouble);
  expect(ours.sizes() == theirs.sizes() && near(ours, theirs, tolerance),
         base::str(what, ": the losses ", losses.back(), " and ", expected.back()));
}

// Tensors of the whole state of an optimizer, as it saves that; collective for one of a job.
template <class Optimizer>
std::map<std::string, Tensor> states(const Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::stringstream file;
  archive.save_to(file);
  torch::serialize::InputArchive saved;
  saved.load_from(file);
  std::map<std::string, Tensor> found;
  const auto state = frontend::read(saved);
  for (const auto& [number, fields] : state.states) {
    for (const auto& [name, field] : fields) {
      if (field.isTensor()) found[base::str(number, " ", name)] = field.toTensor();
      if (field.isInt() || field.isDouble())
        found[base::str(number, " ", name)] = torch::tensor(field.toScalar().toDouble());
    }
  }
  for (std::size_t group = 0; group < state.groups.size(); ++group) {
    const auto& options = state.groups[group].options;
    if (const auto lr = options.find("lr"); lr != options.end()) {
      found[base::str("lr ", group)] = torch::tensor(lr->second.toDouble(), torch::kDouble);
    }
  }
  return found;
}

void states_agree(Training& training, Plain& plain, const std::string& what, double tolerance = 1e-12) {
  const auto state = training.model.state_dict();
  for (const auto& item : plain.model->named_parameters()) {
    expect(near(state[item.key()], item.value(), tolerance), what + ": " + item.key());
  }
  const auto ours = states(training.optimizer), theirs = states(*plain.optimizer);
  expect(!theirs.empty() && ours.size() == theirs.size(), what + ": the states that there are");
  for (const auto& [name, value] : theirs) {
    expect(ours.contains(name) && near(ours.at(name), value, tolerance), what + ": the state " + name);
  }
}

using Changes = std::map<int, Keys>;  // by the step before which they come

std::vector<double> run(Training& training, const Changes& changes, int steps = kSteps) {
  std::vector<double> losses;
  for (int number = 0; number < steps; ++number) {
    if (const auto keys = changes.find(number); keys != changes.end()) change(json(keys->second));
    losses.push_back(training.step());
  }
  return losses;
}

struct Way {
  std::string name;
  Keys begin;
  Changes changes;
};

const std::vector<Way> kWays{
    {"copies to partitions and back", whole(), {{2, {{"partitions", 4}}}, {5, {{"partitions", 1}}}}},
    {"partitions to copies", whole(4), {{3, {{"partitions", 1}}}}},
    {"each number of partitions",
     whole(),
     {{1, {{"partitions", 4}}}, {3, {{"partitions", 2}}}, {4, {{"partitions", 1}}}, {6, {{"partitions", 2}}}}},
    {"placed in another way",
     whole(2),
     {{2, {{"placement_strategy", "spread"}}}, {5, {{"placement_strategy", "cluster"}}}}},
    {"copies to shards and back", whole(), {{2, sharded(4)}, {5, whole()}}},
    {"shards to partitions and back", sharded(4), {{2, whole(4)}, {5, sharded(4)}}},
    {"divided states to shards and back", divided(), {{2, sharded(4)}, {5, divided()}}},
    {"partitions of shards", sharded(2, 2), {{2, whole(2)}, {4, divided(2)}, {6, sharded(2, 2)}}},
    {"before the first step", whole(4), {{0, whole(2)}, {4, whole(4)}}},
};

void losses_and_states_are_those_of_one_process() {
  for (const auto& [name, make] : {std::pair<std::string, Make>{"AdamW", adamw}, {"SGD", momentum}, {"LAMB", lamb}}) {
    Plain plain(make);
    for (const auto& way : kWays) {
      start(way.begin);
      Training training(make);
      const auto* const held = training.model.ptr().get();
      const auto parameters = training.model.parameters();
      agree(run(training, way.changes), plain.losses, name + ", " + way.name);
      states_agree(training, plain, name + ", " + way.name);
      expect(training.model.ptr().get() == held, "the module stays");
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        expect(parameters[i].is_same(training.model.parameters()[i]), "parameters stay the same tensors");
      }
      shutdown();
    }
  }
}

void gradients_are_clipped_as_before() {
  Plain clipped(adamw, 0.05);
  start(sharded(4), {{"sdp_gradient_clipping", 0.05}});
  Training training(adamw);
  agree(run(training, {{2, whole(4)}, {4, whole()}, {6, sharded(4)}}), clipped.losses, "clipping goes on", 1e-5);
  shutdown();
  Plain plain(adamw);
  start(whole(), {{"sdp_gradient_clipping", 0.01}});
  Training other(adamw);
  agree(run(other, {{2, sharded(4)}, {5, whole()}}), plain.losses, "nothing is clipped that was not");
  shutdown();
}

void random_numbers_go_on() {
  std::vector<std::vector<double>> runs;
  for (const Changes& changes : {Changes{}, Changes{{2, whole(4)}, {4, whole(2)}, {6, whole()}}}) {
    start(whole(), {{"seed", 5}});
    Training training(adamw, 0.5);
    runs.push_back(run(training, changes));
    expect(rng_step() == kSteps, "as many steps have drawn");
    shutdown();
  }
  agree(runs[1], runs[0], "dropout");
}

void masters_and_the_loss_scale_are_kept_bit_by_bit() {
  for (const auto& [begin, changes] : {std::pair<Keys, std::vector<Keys>>{whole(), {sharded(4), whole(2), divided()}},
                                       {divided(), {sharded(4), whole(4), divided()}}}) {
    start(begin, {{"bf16", true}});
    Training training(adamw, 0, LossScale(DynamicLossScale{.init_scale = 64, .scale_window = 2}));
    run(training, {}, 3);
    const auto before = states(training.optimizer);
    const auto values = training.model.state_dict();
    const auto scale = training.optimizer.loss_scale();
    expect(scale != 64, "the loss scale has moved");
    for (const auto& keys : changes) {
      change(json(keys));
      const auto after = states(training.optimizer);
      expect(training.optimizer.loss_scale() == scale, "the loss scale stays");
      expect(!before.empty() && after.size() == before.size(), "all states are there");
      for (const auto& [name, value] : before) expect(torch::equal(after.at(name), value), "the state " + name);
      for (const auto& item : training.model.state_dict()) {
        expect(torch::equal(item.value(), values[item.key()]), item.key() + " stays");
      }
    }
    training.step();
    shutdown();
  }
}

void each_rank_has_its_part_alone_afterwards() {
  start(whole(4));
  Training training(adamw);
  training.step();
  change({{"partitions", 1}});
  const auto bytes = [](const Tensor& tensor) { return static_cast<std::int64_t>(tensor.storage().nbytes()); };
  std::int64_t all = 0, own = 0, sum = 0;
  for (const auto& parameter : training.model.parameters()) all += bytes(parameter);
  training.step();
  change({{"partitions", 4}});
  for (const auto& item : training.model.local_parameters()) own += bytes(item.second);
  for (const auto each : all_gather(Group::kWorld, own)) sum += each;
  expect(own < all && sum == all, base::str("parts of ", sum, " bytes and not ", all));
  expect(training.optimizer->state().size() == training.model.local_parameters().size(), "states of its part");
  shutdown();
}

void microbatches_are_shared_out() {
  start(whole());
  Training training(momentum);
  training.step();
  change({{"partitions", 4}});
  expect(num_microbatches() == 8, "of one copy");
  change({{"partitions", 2}});
  expect(num_microbatches() == 4, "of two");
  change({{"partitions", 1}, {"microbatches", 4}});
  expect(num_microbatches() == 4 && size_of(Group::kDp) == 4, "as many as were given");
  shutdown();
}

std::ptrdiff_t descriptors() { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); }

void many_changes_take_no_more_descriptors() {
  start(whole());
  Training training(adamw);
  std::vector<std::ptrdiff_t> seen;
  for (int number = 0; number < 15; ++number) {
    training.step();
    change({{"partitions", std::vector{1, 2, 4}[number % 3]}});
    if (number % 3 == 2) seen.push_back(descriptors());
  }
  expect(seen.back() <= seen[1], base::str(seen.back(), " descriptors, and ", seen[1], " before"));
  shutdown();
}

void refused(const std::vector<std::string>& words, const std::function<void()>& call) {
  expect_error<UsageError>(call, words);
}

// Has not said what it needs of a parameter.
struct Unknown : torch::optim::SGD {
  using torch::optim::SGD::SGD;
};

void what_cannot_change_is_refused_and_nothing_is_lost() {
  Plain plain(adamw);
  start(whole(4));
  Training training(adamw);
  std::vector<double> losses = run(training, {}, 3);
  expect_error<ConfigError>([] { change({{"partitions", 3}}); }, {"partitions"});
  refused({"is no JSON object"}, [] { change("partitions: 2"); });
  refused({"partitions is 1 on rank 0 and 2 on ranks 1-3"}, [] { change({{"partitions", rank() == 0 ? 1 : 2}}); });
  refused({"schedule is not given on rank 0"},
          [] { rank() == 0 ? change({{"partitions", 2}}) : change({{"schedule", "simple"}}); });
  training.run(batch(3));
  refused({"has a gradient"}, [] { change({{"partitions", 2}}); });
  training.optimizer.zero_grad();
  const auto inside = lamina::step([&](const Tensor& x) {
    refused({"inside a step function"}, [] { change({{"partitions", 2}}); });
    return training.model(x);
  });
  {
    const torch::NoGradGuard no_grad;
    inside(batch(0));
  }
  for (int number = 3; number < kSteps; ++number) losses.push_back(training.step());
  agree(losses, plain.losses, "after refusals");
  shutdown();
}

void jobs_that_cannot_change_are_refused() {
  start(whole(), {{"ddp", false}});
  refused({"train apart"}, [] { change({{"partitions", 2}}); });
  shutdown();
  start(whole());
  {
    Training training([](auto parameters) { return std::make_unique<Unknown>(parameters, 0.1); });
    for (const auto& keys : {sharded(4), divided()}) {
      refused({"Unknown would have a part of each parameter", "kWhole"}, [&] { change(json(keys)); });
    }
    training.step();
    change({{"partitions", 4}});
    training.step();
    shutdown();
  }
  start(whole());
  {
    DistributedModel model(net());
    model.register_comm_hook([](const GradBucket& bucket) { return bucket.gradients; });
    refused({"communication hook"}, [] { change({{"partitions", 2}}); });
    shutdown();
  }
  start(whole());
  {
    Training training(momentum);
    remote::place("net", *net(), [](Value arguments) { return arguments; });
    refused({"lamina.remote has placed"}, [] { change({{"partitions", 2}}); });
    shutdown();
  }
}

void checkpoints_go_on() {
  const auto folder = std::filesystem::temp_directory_path() / base::str("changes-", std::getenv("MASTER_PORT"));
  Plain plain(adamw);
  start(whole(4));
  {
    Training training(adamw);
    run(training, {{2, sharded(4)}}, 4);
    auto saving = save_checkpoint(folder, "a", {.asynchronous = true});
    try {
      change(json(whole(2)));  // where it is saved already
    } catch (const UsageError& error) {
      expect(std::string(error.what()).find("a checkpoint is being saved") != std::string::npos, error.what());
    }
    saving.wait();
    shutdown();
  }
  start(whole(2));
  {
    Training training(adamw);
    training.number = 4;
    resume_from_checkpoint(folder);
    refused({"a checkpoint waits to be loaded"}, [] { change({{"partitions", 4}}); });
    std::vector<double> losses = plain.losses;
    losses.resize(4);
    losses.push_back(training.step());
    change({{"partitions", 4}});
    while (losses.size() < kSteps) losses.push_back(training.step());
    agree(losses, plain.losses, "a checkpoint of the one layout in others");
    shutdown();
  }
  if (rank() == 0) std::filesystem::remove_all(folder);
}

// Has the last rank die where the others change, and each of these say what it heard.
int lose_a_rank() {
  std::signal(SIGTERM, SIG_IGN);  // from the launcher, as soon as one is lost
  start(whole(4));
  Training training(adamw);
  training.step();
  barrier();
  if (rank() == 3) std::raise(SIGKILL);
  try {
    change({{"partitions", 1}});
  } catch (const PeerError& error) {
    std::printf("rank %d heard: %s\n", rank(), error.what());
  }
  return 0;
}

}  // namespace

int main(int argc, char**) {
  torch::set_num_threads(1);
  if (argc > 1) return lose_a_rank();
  losses_and_states_are_those_of_one_process();
  gradients_are_clipped_as_before();
  random_numbers_go_on();
  masters_and_the_loss_scale_are_kept_bit_by_bit();
  each_rank_has_its_part_alone_afterwards();
  microbatches_are_shared_out();
  many_changes_take_no_more_descriptors();
  what_cannot_change_is_refused_and_nothing_is_lost();
  jobs_that_cannot_change_are_refused();
  checkpoints_go_on();
  return exit_code();
}
