// SPDX-License-Identifier: Apache-2.0
// A C++ program on two ranks: groups, placements, errors. Each check begins a job of its own.
//
//     lamina run -n 2 -c frontend_pair
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/frontend/current.h"
#include "tests/frontend/expect.h"
#include "tests/frontend/models.h"
#include "tests/model/recorded_calls.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

void wait(const c10::intrusive_ptr<c10d::Work>& work) { work->wait(); }

// torch's own groups, in a process without Python.
void groups() {
  init({{"partitions", 2}});
  for (const auto axis : {Group::kWorld, Group::kPp, Group::kDp}) {
    const auto group = process_group(axis);
    expect(group->getSize() == size_of(axis) && group->getRank() == rank_in(axis), "the group is another");
    std::vector<at::Tensor> sum{torch::full({3}, rank() + 1.0)};
    wait(group->allreduce(sum));
    expect(sum[0][0].item<double>() == (size_of(axis) == 2 ? 3.0 : rank() + 1.0), "allreduce");
    std::vector<at::Tensor> sent{torch::full({2}, 10.0 + rank_in(axis))};
    wait(group->broadcast(sent));
    expect(sent[0][1].item<double>() == 10.0, "broadcast");
    std::vector<at::Tensor> mine{torch::full({1}, 1.0 * rank_in(axis))};
    std::vector<std::vector<at::Tensor>> all{{}};
    for (int i = 0; i < size_of(axis); ++i) all[0].push_back(torch::empty({1}));
    wait(group->allgather(all, mine));
    expect(all[0].back().item<double>() == size_of(axis) - 1, "allgather");
    wait(group->barrier());
  }
  expect(all_gather(Group::kWorld, std::string("rank ") + std::to_string(rank())).at(1) == "rank 1", "all_gather");
  shutdown();
}

struct PlacedImpl : torch::nn::Module {
  Child<Layer> here, there;
  PlacedImpl() {
    here = register_module("here", Layer());
    const Partition on(1);
    there = register_module("there", Layer());
  }
  Tensor forward(const Tensor& x) { return there(here(x)).sum(); }
};
using Placed = torch::nn::ModuleHolder<PlacedImpl>;

std::vector<std::string> names(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  return names;
}

void placement() {
  init({{"partitions", 2}, {"auto_partition", false}, {"default_partition", 0}});
  DistributedModel model(Placed{});
  DistributedOptimizer sgd(torch::optim::SGD(model.parameters(), 0.1));
  expect_error<UsageError>([&] { model.local_parameters(); }, {"first call of a step function"});
  step([&](const Tensor& x) { model.backward(model(x)); })(torch::ones({2, kWidth}));
  const auto part = rank() == 0 ? "here" : "there";
  expect(names(model.local_parameters()) ==
             std::vector<std::string>{std::string(part) + ".linear.weight", std::string(part) + ".linear.bias"},
         "other parameters are local");
  expect(sgd->param_groups()[0].params().size() == 2, "the optimizer has parameters of the other rank");
  expect(model.partition_report().find("1: [there]") != std::string::npos, model.partition_report());
  shutdown();
}

void hooked_calls() {
  init({{"partitions", 2}, {"auto_partition", false}, {"default_partition", 0}});
  DistributedModel model(Placed{});
  const auto recorded = std::make_shared<model::RecordedCalls>();
  frontend::current().session->job().call_hooks().add(recorded, {"here", "here.linear", "there", "there.linear"});
  const auto train = step([&](const Tensor& x) { model.backward(model(x)); });
  const auto evaluate = step([&](const Tensor& x) {
    const torch::NoGradGuard no_grad;
    return model(x);
  });
  const auto ones = torch::ones({2, kWidth});
  const std::string forward =
      rank() == 0 ? "here( here.linear( )here.linear )here" : "~there( there.linear( )there.linear ~)there";
  const std::string backward =
      rank() == 0 ? " here[ here.linear[ ]here.linear ]here" : " ~there[ there.linear[ ]there.linear ~]there";
  for (int i = 0; i < 2; ++i) {  // the second call is predicted
    train(ones);
    if (const auto heard = recorded->take(); heard != forward + backward) expect(false, "hooks heard " + heard);
  }
  evaluate(ones);
  if (const auto heard = recorded->take(); heard != forward) expect(false, "hooks heard " + heard);
  shutdown();
}

void offsets() {
  init({{"partitions", 2}, {"microbatches", 2}, {"auto_partition", false}, {"default_partition", 0}});
  DistributedModel model(Placed{});
  const auto train = step([&](const Tensor& x, const Tensor& ends) { return model(x) + ends.sum(); });
  const auto x = torch::ones({6, kWidth}), ends = torch::tensor({0, 2, 3, 6});
  expect_error<Error>([&] { train(x, ends); }, {"argument 1 of shape [4] looks like offsets", "[step-offsets]"});
  expect(train(x, along(0, ends)).outputs.size() == 2, "it may be said to be values of rows");
  expect(train(x, whole(ends)).outputs.size() == 2, "it may be whole");
  shutdown();
}

struct LeftoverImpl : torch::nn::Module {
  Child<Layer> layer;
  LeftoverImpl() {
    const Partition on(7);  // which there is not
    layer = register_module("layer", Layer());
  }
  Tensor forward(const Tensor& x) { return layer(x).sum(); }
};

void ignored_scopes() {
  init({{"partitions", 2}});
  DistributedModel model(std::make_shared<LeftoverImpl>());
  step([&](const Tensor& x) { model.backward(model(x)); })(torch::ones({2, kWidth}));
  shutdown();
}

struct NormsImpl : torch::nn::Module {
  Child<Layer> a, b;
  NormsImpl() {
    a = register_module("a", Layer());
    b = register_module("b", Layer());
    set_partition(*b, 1);
  }
  Tensor forward(const Tensor& x) { return 100 * b(a(x)).sum(); }
};
using Norms = torch::nn::ModuleHolder<NormsImpl>;

struct RowsImpl : torch::nn::Module {
  Child<Layer> a, b;
  RowsImpl() {
    a = register_module("a", Layer());
    b = register_module("b", Layer());
    set_partition(*b, 1);
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return b(a(x).tanh()); }
};
using Rows = torch::nn::ModuleHolder<RowsImpl>;

void clipping() {
  torch::manual_seed(1);
  Norms plain;
  init({{"partitions", 2}, {"microbatches", 2}});
  torch::manual_seed(1);
  DistributedModel model(Norms{});
  plain(torch::ones({2, kWidth})).backward();
  for (const auto& parameter : plain->parameters()) parameter.mutable_grad().div_(2);  // microbatches are averaged
  const double norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 1.0);
  step([&](const Tensor& x) { model.backward(model(x)); })(torch::ones({2, kWidth}));
  expect(std::abs(model.clip_grad_norm_(1.0).item<double>() - norm) < 1e-3 * norm, "the norm is another");
  for (const auto& [name, parameter] : model.local_parameters()) {
    expect(torch::allclose(parameter.grad(), plain->named_parameters()[name].grad(), 1e-3), name + " is clipped apart");
  }
  shutdown();
}

struct FailingImpl : torch::nn::Module {
  struct ThrowsImpl : torch::nn::Module {
    Tensor forward(const Tensor& x) {
      if (x.size(0) == 1) throw std::invalid_argument("one row is too few");
      return x;
    }
  };
  TORCH_MODULE(Throws);
  Child<Throws> throws;
  Child<Layer> layer;
  FailingImpl() {
    throws = register_module("throws", Throws());
    layer = register_module("layer", Layer());
    set_partition(*throws, 1);
    set_partition(*layer, 1);
  }
  Tensor forward(const Tensor& x) {
    if (x.size(0) == 3) return torch::linear(x, layer->linear->weight);  // of another rank
    return layer(throws(x)).sum();
  }
};
using Failing = torch::nn::ModuleHolder<FailingImpl>;

void errors() {
  expect_error<ConfigError>([] { init({{"partitons", 2}}); }, {"partitons", "partitions"});
  expect_error<UsageError>([] { step([] {})(); }, {"lamina::init()"});
  init({{"partitions", 2}, {"auto_partition", false}, {"default_partition", 0}});
  expect_error<ConfigError>([] { init({{"partitions", 1}}); }, {"partitions: 2 and 1"});
  DistributedModel model(Failing{});
  expect_error<UsageError>([] { DistributedModel another(Failing{}); }, {"already"});
  const auto forward = step([&](const Tensor& x) { return model(x); });
  forward(torch::ones({2, kWidth}));
  const auto fails = [&] { forward(torch::ones({1, kWidth})); };
  expect_error<RemoteError>(fails, {"std::invalid_argument on rank 1", "one row is too few"});
  if (rank() == 0) {
    expect_error<UsageError>([&] { model->layer(torch::ones({2, kWidth})); }, {"layer lives on rank 1", "step"});
  }
  forward(torch::ones({2, kWidth}));  // it goes on
  expect_error<Error>([&] { forward(torch::ones({3, kWidth})); }, {"layer.linear.weight", "rank 1", "lamina::Child"});
  expect_error<Error>([&] { step([&] { barrier(); })(); }, {"inside a step"});
  shutdown();
}

void uneven_batches() {
  init({{"partitions", 2}, {"microbatches", 4}});
  DistributedModel model(Norms{});
  const auto evaluate = step([&](const Tensor& x) { return model(x); });
  const auto rows = [&](int count) { return evaluate(torch::ones({rank() == 0 ? count : 5, kWidth})).outputs.size(); };
  for (const int count : {1, 6, 8, 3}) {
    expect(rows(count) == std::map<int, std::size_t>{{1, 1}, {6, 4}, {8, 4}, {3, 3}}[count], "other microbatches");
  }
  const auto beside = step([&](const Tensor& x, const Tensor&) { return model(x); });
  expect_error<Error>([&] { beside(torch::ones({6, kWidth}), torch::ones({4})); },
                      {"argument 1 of shape [4]", "whole", "[step-uneven]"});
  const auto pictures = step([&](const std::vector<Tensor>& each, const Tensor& x) {
    for (const auto& picture : each) expect(picture.size(0) == 3, "a picture is torn");
    expect(static_cast<std::int64_t>(each.size()) == x.size(0), "another number of pictures");
    return model(x);
  });
  pictures(std::vector<Tensor>(8, torch::ones({3, 2, 2})), torch::ones({8, kWidth}));
  const auto alone =
      step([&](const std::vector<Tensor>& each) { return model(torch::ones({1, kWidth})) + each[0][0][0][0]; });
  expect_error<Error>([&] { alone(std::vector<Tensor>(8, torch::ones({3, 2, 2}))); },
                      {"argument 0", "lamina::along", "[step-list]"});
  shutdown();
}

// Trains as one process does with the whole batch, whether it divides or not.
void uneven_training() {
  torch::manual_seed(1);
  Rows plain;
  const auto x = torch::randn({7, kWidth}, torch::kDouble);
  const auto loss = [](const Tensor& output) { return output.square().mean(); };
  const auto expected = loss(plain->forward(x));
  expected.backward();
  init({{"partitions", 2}, {"microbatches", 4}});
  torch::manual_seed(1);
  DistributedModel model(Rows{});
  const auto train = step([&](const Tensor& x) {
    const auto found = loss(model(x));
    model.backward(found);
    return found;
  });
  const auto found = train(x);
  expect(found.samples == std::vector<std::int64_t>({2, 2, 2, 1}), "other samples");
  expect(found.reduce_mean().allclose(expected), "another loss");
  for (const auto& [name, parameter] : model.local_parameters()) {
    expect(parameter.grad().allclose(plain->named_parameters()[name].grad()), "another gradient of " + name);
  }
  shutdown();
}

void random_numbers() {
  const auto drawn = [] { return step([] { return torch::rand({3}); })().stack(); };
  init({{"partitions", 2}, {"microbatches", 2}, {"seed", 5}});
  drawn();
  const auto steps = rng_step();
  const auto next = drawn();
  shutdown();
  init({{"partitions", 2}, {"microbatches", 2}, {"seed", 5}});
  set_rng_step(steps);
  expect(steps == 1 && drawn().equal(next), "the random numbers are not those of the step after");
  shutdown();
  init({{"partitions", 2}, {"microbatches", 2}});
  expect_error<UsageError>([] { rng_step(); }, {"seed"});
  expect_error<UsageError>([] { set_rng_step(1); }, {"seed"});
  set_rng_seed(5);
  set_rng_step(steps);
  expect(drawn().equal(next), "the random numbers are not those of the seed that was set");
  shutdown();
}

struct NoisyImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x + torch::rand_like(x); }
};
TORCH_MODULE(Noisy);

struct SeedsImpl : torch::nn::Module {
  Child<Noisy> here, there;
  SeedsImpl() {
    here = register_module("here", Noisy());
    there = register_module("there", Noisy());
    set_partition(*there, 1);
  }
  Tensor forward(const Tensor& x) {
    torch::manual_seed(7);
    const auto first = here(x);
    torch::manual_seed(7);
    return torch::stack({first, there(x)});
  }
};

void seeds_by_hand() {
  init({{"partitions", 2}, {"microbatches", 2}});
  DistributedModel model(std::make_shared<SeedsImpl>());
  const auto drawn = step([&](const Tensor& x) { return model(x); })(torch::zeros({4, kWidth})).stack();
  torch::manual_seed(7);
  const auto plain = torch::rand({2, kWidth}).expand_as(drawn);
  expect(drawn.equal(plain), "what modules draw is not what their caller's seed gives");
  shutdown();
}

struct MeanImpl : torch::nn::Module {
  Tensor mean = register_buffer("mean", torch::zeros(kWidth, torch::kDouble));
  Tensor forward(const Tensor& x) {
    const torch::NoGradGuard no_grad;
    mean.mul_(0.5).add_(x.mean(0));
    return x.clone();
  }
};
TORCH_MODULE(Mean);

struct MeansImpl : torch::nn::Module {
  Child<Noisy> there;
  Child<Mean> mean;
  MeansImpl() {
    there = register_module("there", Noisy());
    mean = register_module("mean", Mean());
    set_partition(*there, 1);
  }
  Tensor forward(const Tensor& x) { return mean(there(x)); }
};

// No order of the microbatches gives another mean than one after the other.
void buffers_are_updated_whole() {
  init({{"partitions", 2}, {"microbatches", 2}, {"auto_partition", false}, {"default_partition", 0}});
  DistributedModel model(std::make_shared<MeansImpl>());
  const auto run = step([&](const Tensor& x) { return model(x); });
  auto orders = std::vector{torch::zeros(kWidth, torch::kDouble)};
  for (int i = 0; i < 3; ++i) {
    const auto out = run(torch::zeros({4, kWidth}, torch::kDouble));
    const auto a = out.outputs[0].mean(0), b = out.outputs[1].mean(0);
    std::vector<Tensor> next;
    for (const auto& mean : orders) {
      next.push_back((mean * 0.5 + a) * 0.5 + b);
      next.push_back((mean * 0.5 + b) * 0.5 + a);
    }
    orders = std::move(next);
  }
  const auto state = model.state_dict();
  const auto is_it = [&](const Tensor& mean) { return torch::allclose(mean, state["mean.mean"]); };
  expect(std::ranges::any_of(orders, is_it), "an update of the mean is lost");
  shutdown();
}

void states() {
  init(std::string(R"({"partitions": 2, "microbatches": 2})"));
  DistributedModel model(Norms{});
  DistributedOptimizer sgd(torch::optim::SGD(model.parameters(), 0.1));
  const auto x = torch::ones({2, kWidth});
  const auto train = step([&](const Tensor& x) {
    const auto loss = model(x);
    model.backward(loss);
    return loss;
  });
  const auto first = train(x).reduce_mean();
  auto state = model.state_dict();
  expect(state.size() == 4, "names are missing");
  for (auto& item : state) item.value() = item.value().clone();
  sgd.step();
  expect(!train(x).reduce_mean().equal(first), "nothing was learnt");
  model.load_state_dict(state);
  expect(train(x).reduce_mean().equal(first), "the state was not loaded");
  state.erase("a.linear.bias");
  state.insert("one", x);
  state.insert("two", x);
  expect_error<UsageError>([&] { model.load_state_dict(state); },
                           {"a.linear.bias is missing", "one is nothing of the model's", "two is nothing of the"});
  shutdown();
  expect_error<UsageError>([&] { model.backward(first); }, {"shut down [step-after-shutdown]"});
}

struct DropImpl : torch::nn::Module {
  Child<torch::nn::Dropout> drop;
  DropImpl() {
    drop = register_module("drop", torch::nn::Dropout(0.5));
    set_partition(*drop, 1);
  }
  Tensor forward(const Tensor& x) { return drop(x); }
};

void evaluation() {
  init({{"partitions", 2}, {"microbatches", 2}});
  DistributedModel model(std::make_shared<DropImpl>());
  const auto forward = step([&](const Tensor& x) { return model(x); });
  const auto x = torch::ones({64, 64});
  expect(!forward(x).concat().equal(x), "in training nothing was dropped");
  model->eval();
  const torch::NoGradGuard no_grad;
  expect(forward(x).concat().equal(x), "in evaluation something was dropped");
  shutdown();
}

struct VaryingImpl : torch::nn::Module {
  struct CounterImpl : torch::nn::Module {
    int calls = 0;
    Tensor forward(const Tensor& x) { return x.narrow(0, 0, ++calls % 3 + 1).clone(); }
  };
  TORCH_MODULE(Counter);
  Child<Counter> counter;
  VaryingImpl() {
    counter = register_module("counter", Counter());
    set_partition(*counter, 1);
  }
  Tensor forward(const Tensor& x) { return counter(x).sum(); }
};

void varying() {
  for (const bool told : {false, true}) {
    init({{"partitions", 2}, {"skip_tracing", true}});
    const auto plain = std::make_shared<VaryingImpl>();
    if (told) set_dynamic(*plain->counter);
    DistributedModel model(plain);
    const auto forward = step([&](const Tensor& x) { return model(x); });
    const auto thrice = [&] {
      for (int i = 0; i < 3; ++i) forward(torch::ones({4, 2}));
    };
    if (told) {
      thrice();
    } else {
      expect_error<Error>(thrice, {"counter", "set_dynamic"});
    }
    shutdown();
  }
}

struct WritesImpl : torch::nn::Module {
  struct AdderImpl : torch::nn::Module {
    Tensor forward(Tensor& x) {
      x.add_(1);
      return 2 * x;
    }
  };
  TORCH_MODULE(Adder);
  Child<Adder> adder;
  WritesImpl() {
    adder = register_module("adder", Adder());
    set_partition(*adder, 1);
  }
  std::tuple<Tensor, Tensor> forward(const Tensor& x) {
    Tensor written = x.clone();
    auto result = adder(written);
    return {written, result};
  }
};

void writes() {
  init({{"partitions", 2}});
  DistributedModel model(std::make_shared<WritesImpl>());
  const auto [written, result] = step([&](const Tensor& x) { return model(x); })(torch::ones({2}));
  expect(written.concat().equal(torch::full({2}, 2.0)), "the caller does not see what was written");
  expect(result.concat().equal(torch::full({2}, 4.0)), "the result");
  shutdown();
}

// The first step's error, where the model is traced, is the model's own, and the next step goes on.
void first_step_fails() {
  init({{"partitions", 2}});
  DistributedModel model(Failing{});
  const auto forward = step([&](const Tensor& x) { return model(x); });
  expect_error<RemoteError>([&] { forward(torch::ones({1, kWidth})); }, {"one row is too few"});
  forward(torch::ones({2, kWidth}));
  shutdown();
}

// A step that calls a part of the model, or nothing of it, cuts it as well.
void calls_a_part_first() {
  init({{"partitions", 2}, {"microbatches", 2}});
  DistributedModel model(Norms{});
  step([] {})();
  expect(model.local_parameters().size() == 2, "it was not cut");
  const auto part = step([&](const Tensor& x) { return model->b(x); });
  expect(part(torch::ones({2, kWidth})).concat().sizes() == at::IntArrayRef({2, kWidth}), "the part's result");
  shutdown();
}

// A parameter that a body freezes is frozen for the calls that follow, on whatever rank, and after the step on all of
// them.
void freezing() {
  torch::manual_seed(1);
  Norms plain;
  init({{"partitions", 2}, {"microbatches", 2}});
  torch::manual_seed(1);
  DistributedModel model(Norms{});
  const auto body = [](Norms::ContainedType& net, const Tensor& x, const std::function<void(const Tensor&)>& backward) {
    const auto freeze = [&](bool frozen) {
      for (auto& parameter : net.b->parameters()) parameter.set_requires_grad(!frozen);
    };
    freeze(true);
    backward(net.forward(x));
    freeze(false);
    backward(net.b(x).sum() * 3);
    freeze(true);
  };
  const auto train = step([&](const Tensor& x) { body(*model, x, [&](const Tensor& loss) { model.backward(loss); }); });
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      body(*plain, torch::ones({2, kWidth}), [](const Tensor& loss) { (loss / 2).backward(); });
    }
    train(torch::ones({4, kWidth}));
    for (const auto& [name, parameter] : model.local_parameters()) {
      const auto expected = plain->named_parameters()[name];
      expect(torch::allclose(parameter.grad(), expected.grad(), 1e-4), name + " has another gradient");
      expect(parameter.requires_grad() == expected.requires_grad(), name + " is not as the body left it");
    }
    const double norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 1e9);
    expect(std::abs(model.grad_norm().item<double>() - norm) < 1e-3 * norm, "the norm is another");
  }
  shutdown();
}

std::vector<std::string> names_of(const torch::nn::Module& module) { return module.named_children().keys(); }

// Optimizers that train something else over partitions.
void refusals() {
  init({{"partitions", 2}, {"microbatches", 2}, {"auto_partition", false}, {"default_partition", 0}});
  DistributedModel model(Norms{});
  DistributedOptimizer sgd(torch::optim::SGD(model.parameters(), 0.1));
  expect_error<UsageError>([&] { DistributedOptimizer lbfgs(torch::optim::LBFGS(model.parameters())); },
                           {"LBFGS measures all parameters"});
  expect_error<UsageError>([&] { model(torch::ones({2, kWidth})); }, {"called outside a step", "[step-outside]"});
  const std::vector<std::pair<std::string, std::function<void()>>> updates{
      {"optimizer.step()", [&] { sgd.step(); }},
      {"optimizer.zero_grad()", [&] { sgd.zero_grad(); }},
      {"the use of an optimizer", [&] { sgd->step(); }},
      {"zero_grad()", [&] { model.zero_grad(); }}};
  for (const auto& [name, update] : updates) {
    const auto train = step([&](const Tensor& x) {
      model.backward(model(x));
      update();
    });
    expect_error<Error>([&] { train(torch::ones({2, kWidth})); }, {name + " inside a step function: only the rank"});
  }
  expect_error<UsageError>([&] { set_partition(*model->a, 1); }, {"set_partition() after the model was partitioned"});
  expect_error<UsageError>([&] { set_dynamic(*model->a); }, {"set_dynamic() after the model was partitioned"});
  model.zero_grad();
  expect(model.named_parameters().size() == 4 && sgd.param_groups().size() == 1, "names or groups are missing");
  shutdown();
}

void containers() {
  const ChildList<Layer> two{Layer(), Layer()};
  expect(two->size() == 2 && names_of(*two) == std::vector<std::string>{"0", "1"}, "the list's children");
  Sequential chain{Layer()};
  chain->push_back("last", Layer(2));
  expect(names_of(*chain) == std::vector<std::string>{"0", "last"}, "the chain's names");
  expect((*chain)[1]->parameters().size() == 2 && chain(torch::ones({1, kWidth})).size(1) == 2, "the chain's last");
}

// In the first step, where the model waits for its cut, and later.
void threads_of_a_body() {
  init({{"partitions", 2}});
  DistributedModel model(Norms{});
  const auto in_a_thread = [](const std::function<void()>& call) {
    std::exception_ptr error;
    std::thread([&] {
      try {
        call();
      } catch (...) {
        error = std::current_exception();
      }
    }).join();
    if (error) std::rethrow_exception(error);
  };
  const auto whole = step([&](const Tensor& x) { in_a_thread([&] { model(x); }); });
  const auto part = step([&](const Tensor& x) { in_a_thread([&] { model->a(x); }); });
  const auto x = torch::ones({2, kWidth});
  expect_error<Error>([&] { part(x); }, {"in a thread of its own"});
  for (int i = 0; i < 2; ++i) {
    expect_error<Error>([&] { whole(x); }, {"called outside a step", "in the thread that runs its body"});
    step([&](const Tensor& x) { model.backward(model(x)); })(x);
  }
  shutdown();
}

struct SummedImpl : torch::nn::Module {
  Child<Layer> layer;
  SummedImpl() { layer = register_module("layer", Layer()); }
  Tensor forward(const Tensor& x) { return layer(x).sum(); }
};
using Summed = torch::nn::ModuleHolder<SummedImpl>;

Tensor batch(int replica, int number) {
  torch::manual_seed(10 * replica + number);
  return torch::randn({4, kWidth}, torch::kDouble);
}

// The replica that met the error has its own one, the other one is told of it.
void expect_bad_batch(const std::function<void()>& fail) {
  const auto met = [&] {
    try {
      fail();
    } catch (const std::invalid_argument&) {
      throw Error("of all replicas; replica 1 met it: bad batch");
    }
  };
  expect_error<Error>(met, {"bad batch", "of all replicas; replica 1 met it"});
}

// A step that fails on replica 1 fails on both, and the next one is exact: as the plain loop that leaves it out.
void replicas_fail_together() {
  init({{"ddp", true}, {"microbatches", 2}});
  torch::manual_seed(1);
  Summed plain, module;
  module->to(torch::kDouble);
  plain->to(torch::kDouble);
  for (const auto& named : plain->named_parameters()) {
    const torch::NoGradGuard no_grad;
    module->named_parameters()[named.key()].copy_(named.value());
  }
  DistributedModel model(module);
  torch::optim::SGD theirs(plain->parameters(), 1e-3);
  DistributedOptimizer ours(torch::optim::SGD(model.parameters(), 1e-3));
  const auto train = step([&](const Tensor& x, std::string fails) {
    if (fails == "before") throw std::invalid_argument("bad batch");
    model.backward(model(x));
    if (fails == "after") throw std::invalid_argument("bad batch");
  });
  int number = 0;
  for (const std::string fails : {"", "before", "", "after", "loop", "", "own"}) {
    model.zero_grad();
    plain->zero_grad();
    const auto mine = batch(rank(), ++number);
    const auto fail = [&] { train(mine, rank() == 1 ? fails : ""); };
    if (fails == "before" || fails == "after") {
      expect_bad_batch(fail);
      continue;
    }
    if (fails == "loop") {  // a backward of a plain loop
      const auto loss = model(mine);
      if (rank() == 1) {
        loss.register_hook([](const Tensor&) { throw std::invalid_argument("in a backward"); });
        expect_error<std::invalid_argument>([&] { model.backward(loss); }, {"in a backward"});
      } else {
        expect_error<RemoteError>([&] { model.backward(loss); }, {"in a backward", "replica 1 met it"});
      }
      continue;
    }
    if (fails == "own") {  // torch's own backward, outside of steps
      model(mine).mul(0.5).backward();
    } else {
      fail();
    }
    for (int replica = 0; replica < 2; ++replica) (plain(batch(replica, number)) / 4).backward();
    theirs.step();
    ours.step();
  }
  for (const auto& named : plain->named_parameters()) {
    expect(torch::allclose(model.named_parameters()[named.key()], named.value(), 1e-9, 1e-12),
           named.key() + " is another than the plain loop's");
  }
  shutdown();
}

// Ends with the process, without shutdown().
void left_open() {
  init({{"partitions", 2}});
  DistributedModel model(Norms{});
  step([&](const Tensor& x) { model.backward(model(x)); })(torch::ones({2, kWidth}));
}

struct OtherImpl : torch::nn::Module {
  Child<Layer> layer;
  OtherImpl() { layer = register_module("layer", Layer(rank() == 0 ? kWidth : kWidth + 1)); }
  Tensor forward(const Tensor& x) { return layer(x).sum(); }
};
using Other = torch::nn::ModuleHolder<OtherImpl>;

void different_models() {
  init({{"partitions", 2}});
  DistributedModel model(Other{});
  expect_error<Error>([&] { step([&](const Tensor& x) { return model(x); })(torch::ones({2, kWidth})); },
                      {"rank 1 built another model than rank 0"});
  shutdown();
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  for (const auto& check : {groups,
                            placement,
                            hooked_calls,
                            offsets,
                            ignored_scopes,
                            clipping,
                            states,
                            errors,
                            evaluation,
                            uneven_batches,
                            uneven_training,
                            random_numbers,
                            varying,
                            writes,
                            first_step_fails,
                            calls_a_part_first,
                            freezing,
                            refusals,
                            containers,
                            threads_of_a_body,
                            replicas_fail_together,
                            different_models,
                            seeds_by_hand,
                            buffers_are_updated_whole,
                            left_open})
    check();
  return exit_code();
}
