// SPDX-License-Identifier: Apache-2.0
// The backend between threads, which are as good as processes to it, beside Gloo's.
#include "lamina/collective/backend.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <latch>
#include <numeric>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "tests/message_of.h"
#include "tests/soak.h"

namespace lamina::collective {
namespace {

using Backend = c10d::Backend;
using Tensors = std::vector<at::Tensor>;
using Clock = std::chrono::steady_clock;
constexpr auto kLong = std::chrono::seconds(60);

// Has another member's word on where it runs changed.
class Store : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<std::uint8_t>& word) override {
    const bool moved = elsewhere && key.ends_with("host/1");
    HashStore::set(key, moved ? std::vector<std::uint8_t>{'x', '.'} : word);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    ++waits;
    HashStore::wait(keys, timeout);
  }
  bool elsewhere = false;
  std::atomic<int> waits = 0;
};

struct Member {
  int rank;
  c10::intrusive_ptr<Backend> ours, gloo;
};

// Runs `work` in a thread for each member; their world ranks are 10, 11, ...
void together(int size, const std::function<void(Member& member)>& work,
              std::chrono::milliseconds timeout = std::chrono::seconds(30), bool elsewhere = false) {
  const auto store = c10::make_intrusive<Store>();
  store->elsewhere = elsewhere;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto part = [&](const char* name) { return c10::make_intrusive<c10d::PrefixStore>(name, store); };
      BackendOptions options{.store = part("ours"), .rank = rank, .timeout = timeout, .gloo_host = "127.0.0.1"};
      for (int member = 0; member < size; ++member) options.members.emplace_back(10 + member);
      try {
        Member member{rank, make_backend(options), nullptr};
        options.store = part("gloo");
        member.gloo = make_gloo(options);
        work(member);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "member " << rank << ": " << error.what();
      }
    });
  }
}

// Numbers that a member gives: the same numbers for the same seed, small enough for sums without rounding.
at::Tensor numbers(std::mt19937& random, std::vector<std::int64_t> shape, at::ScalarType dtype) {
  const auto count = c10::multiply_integers(shape);
  std::vector<std::int64_t> drawn(count);
  for (auto& one : drawn) one = static_cast<std::int64_t>(random() % 17);
  return at::tensor(drawn, at::kLong).to(dtype).view(shape);
}

// A copy in a tensor that is not contiguous.
at::Tensor spread(const at::Tensor& tensor) {
  if (tensor.dim() == 0) return tensor;
  auto wide = at::zeros({tensor.numel(), 2}, tensor.options());
  auto one = wide.select(1, 0);
  one.copy_(tensor.flatten());
  return one.view_as(one).as_strided(tensor.sizes(), [&] {
    auto strides = tensor.strides().vec();
    for (auto& stride : strides) stride *= 2;
    return strides;
  }());
}

// One drawn call, for both backends: ours may get what is not contiguous.
struct Drawn {
  std::mt19937 common, own;  // what all members draw alike, and each for itself
  int rank, size;
  at::ScalarType dtype = at::kFloat;
  bool scattered = false;

  std::int64_t below(std::int64_t end) { return static_cast<std::int64_t>(common() % end); }
  // For ours, and for Gloo.
  std::pair<at::Tensor, at::Tensor> tensors(const std::vector<std::int64_t>& shape) {
    auto one = numbers(own, shape, dtype);
    return {scattered ? spread(one) : one.clone(), one.clone()};
  }
  std::pair<Tensors, Tensors> lists(int count, const std::vector<std::int64_t>& shape) {
    std::pair<Tensors, Tensors> lists;
    for (int i = 0; i < count; ++i) {
      auto [one, other] = tensors(shape);
      lists.first.push_back(one);
      lists.second.push_back(other);
    }
    return lists;
  }
};

void expect_same(const at::Tensor& ours, const at::Tensor& gloos, const std::string& what) {
  EXPECT_TRUE(at::equal(ours.contiguous(), gloos)) << what;
}

void all_reduce(Member& member, Drawn& drawn, const std::string& what) {
  constexpr std::array kKinds{c10d::ReduceOp::SUM, c10d::ReduceOp::MIN, c10d::ReduceOp::MAX};
  c10d::AllreduceOptions options;
  options.reduceOp = kKinds[drawn.below(3)];
  options.asyncOp = drawn.below(2) == 0;
  auto [ours, gloos] = drawn.tensors({drawn.below(40), 3});
  Tensors a{ours}, b{gloos};
  member.ours->allreduce(a, options)->wait();
  member.gloo->allreduce(b, options)->wait();
  expect_same(ours, gloos, what);
}

void reduce(Member& member, Drawn& drawn, const std::string& what) {
  c10d::ReduceOptions options;
  options.rootRank = drawn.below(drawn.size);
  auto [ours, gloos] = drawn.tensors({1 + drawn.below(40)});
  Tensors a{ours}, b{gloos};
  const auto before = ours.clone();
  member.ours->reduce(a, options)->wait();
  member.gloo->reduce(b, options)->wait();
  expect_same(ours, drawn.rank == options.rootRank ? gloos : before.contiguous(), what);
}

void broadcast(Member& member, Drawn& drawn, const std::string& what) {
  c10d::BroadcastOptions options;
  options.rootRank = drawn.below(drawn.size);
  auto [ours, gloos] = drawn.tensors({2, drawn.below(40)});
  Tensors a{ours}, b{gloos};
  member.ours->broadcast(a, options)->wait();
  member.gloo->broadcast(b, options)->wait();
  expect_same(ours, gloos, what);
}

void all_gather(Member& member, Drawn& drawn, const std::string& what) {
  const std::vector<std::int64_t> shape{1 + drawn.below(40)};
  auto [ours, gloos] = drawn.tensors(shape);
  auto [all_ours, all_gloos] = drawn.lists(drawn.size, shape);
  Tensors a{ours}, b{gloos};
  std::vector<Tensors> out_a{all_ours}, out_b{all_gloos};
  member.ours->allgather(out_a, a)->wait();
  member.gloo->allgather(out_b, b)->wait();
  for (int i = 0; i < drawn.size; ++i) expect_same(all_ours[i], all_gloos[i], what);
}

void all_gather_single(Member& member, Drawn& drawn, const std::string& what) {
  const auto rows = 1 + drawn.below(40);
  auto [ours, gloos] = drawn.tensors({rows, 2});
  auto [all_ours, all_gloos] = drawn.tensors({rows * drawn.size, 2});
  member.ours->_allgather_base(all_ours, ours)->wait();
  member.gloo->_allgather_base(all_gloos, gloos)->wait();
  expect_same(all_ours, all_gloos, what);
  Tensors outs{all_ours, all_ours.clone()}, ins{ours, ours};
  member.ours->allgather_into_tensor_coalesced(outs, ins)->wait();
  expect_same(outs[1], all_gloos, what);
}

void gather_and_scatter(Member& member, Drawn& drawn, const std::string& what) {
  const int root = static_cast<int>(drawn.below(drawn.size));
  const std::vector<std::int64_t> shape{1 + drawn.below(40)};
  auto [ours, gloos] = drawn.tensors(shape);
  auto [all_ours, all_gloos] = drawn.lists(drawn.size, shape);
  Tensors a{ours}, b{gloos};
  std::vector<Tensors> out_a, out_b;
  if (drawn.rank == root) {
    out_a = {all_ours};
    out_b = {all_gloos};
  }
  c10d::GatherOptions gathers;
  gathers.rootRank = root;
  member.ours->gather(out_a, a, gathers)->wait();
  member.gloo->gather(out_b, b, gathers)->wait();
  for (int i = 0; drawn.rank == root && i < drawn.size; ++i) expect_same(all_ours[i], all_gloos[i], what);
  c10d::ScatterOptions scatters;
  scatters.rootRank = root;
  member.ours->scatter(a, out_a, scatters)->wait();
  member.gloo->scatter(b, out_b, scatters)->wait();
  expect_same(ours, gloos, what);
}

void reduce_scatter(Member& member, Drawn& drawn, const std::string& what) {
  const auto rows = 1 + drawn.below(40);
  auto [ours, gloos] = drawn.tensors({rows, 2});
  auto [all_ours, all_gloos] = drawn.tensors({rows * drawn.size, 2});
  member.ours->_reduce_scatter_base(ours, all_ours)->wait();
  member.gloo->_reduce_scatter_base(gloos, all_gloos)->wait();
  expect_same(ours, gloos, what);
  Tensors outs{ours.clone()};
  std::vector<Tensors> ins{all_ours.chunk(drawn.size)};
  member.ours->reduce_scatter(outs, ins)->wait();
  expect_same(outs[0], gloos, what);
}

void all_to_all_single(Member& member, Drawn& drawn, const std::string& what) {
  std::vector<std::int64_t> sent, received;
  for (int from = 0; from < drawn.size; ++from) {
    for (int to = 0; to < drawn.size; ++to) {
      const auto rows = drawn.below(5);
      if (from == drawn.rank) sent.push_back(rows);
      if (to == drawn.rank) received.push_back(rows);
    }
  }
  const auto sum = [](const auto& rows) { return std::accumulate(rows.begin(), rows.end(), std::int64_t{0}); };
  auto [ours, gloos] = drawn.tensors({sum(sent), 3});
  auto [to_ours, to_gloos] = drawn.tensors({sum(received), 3});
  member.ours->alltoall_base(to_ours, ours, received, sent)->wait();
  auto from = ours.contiguous().split_with_sizes(sent), to = at::zeros_like(to_gloos).split_with_sizes(received);
  member.ours->alltoall(to, from)->wait();
  member.gloo->alltoall_base(to_gloos, gloos, received, sent)->wait();  // which takes the sizes away
  expect_same(to_ours, to_gloos, what);
  expect_same(at::cat(to), to_gloos, what);
}

void send_and_recv(Member& member, Drawn& drawn, const std::string& what) {
  if (drawn.size == 1) return;
  const int next = (drawn.rank + 1) % drawn.size, last = (drawn.rank + drawn.size - 1) % drawn.size;
  auto [ours, gloos] = drawn.tensors({1 + drawn.below(40)});
  auto [from_ours, from_gloos] = drawn.tensors(ours.sizes().vec());
  Tensors a{ours}, b{gloos}, to_a{from_ours}, to_b{from_gloos};
  const auto sends = member.ours->send(a, next, 3), sends_too = member.gloo->send(b, next, 3);
  member.ours->recv(to_a, last, 3)->wait();
  member.gloo->recv(to_b, last, 3)->wait();
  sends->wait();
  sends_too->wait();
  expect_same(from_ours, from_gloos, what);
}

using Operation = void (*)(Member& member, Drawn& drawn, const std::string& what);

const std::vector<std::pair<std::string, Operation>> kOperations{
    {"all_reduce", all_reduce},
    {"reduce", reduce},
    {"broadcast", broadcast},
    {"all_gather", all_gather},
    {"all_gather_single", all_gather_single},
    {"gather_and_scatter", gather_and_scatter},
    {"reduce_scatter", reduce_scatter},
    {"all_to_all_single", all_to_all_single},
    {"send_and_recv", send_and_recv},
};

TEST(Backend, GivesWhatGlooGives) {
  constexpr std::array kDTypes{at::kFloat, at::kDouble, at::kLong, at::kInt, at::kByte, at::kHalf, at::kBFloat16};
  for (const int size : {1, 2, 3, 4}) {
    together(size, [&](Member& member) {
      std::mt19937 common(size), own(100 * size + member.rank);
      for (int number = 0; number < lamina::test::in_a_soak(300, 100); ++number) {
        Drawn drawn{std::mt19937(common()), std::mt19937(own()), member.rank, size};
        drawn.dtype = kDTypes[drawn.below(kDTypes.size())];
        drawn.scattered = drawn.below(2) == 0;
        const auto& [name, operation] = kOperations[drawn.below(std::ssize(kOperations))];
        operation(member, drawn, base::str(name, " number ", number, " of ", size, ", ", drawn.dtype));
      }
    });
  }
}

// The store's wait for the other has ended without it, and begun again.
TEST(Backend, IsMadeThoughAMemberComesLate) {
  const auto store = c10::make_intrusive<Store>();
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const BackendOptions options{
          .store = store, .rank = rank, .members = {base::Rank(10), base::Rank(11)}, .timeout = kLong};
      while (rank == 1 && store->waits < 6) std::this_thread::yield();
      EXPECT_EQ(message_of<std::exception>([&] { make_backend(options)->barrier()->wait(); }), "nothing was thrown");
    });
  }
}

TEST(Backend, IsNamedAndCountsItsCollectives) {
  together(2, [](Member& member) {
    EXPECT_EQ(member.ours->getBackendName(), "lamina");
    member.ours->barrier()->wait();
    member.ours->barrier()->wait();
    EXPECT_EQ(member.ours->getSequenceNumberForGroup(), 2U);
  });
}

TEST(Backend, RunsWhatIsNotAsynchronousInTheCaller) {
  together(2, [](Member& member) {
    c10d::AllreduceOptions options;
    options.asyncOp = false;
    for (int round = 0; round < 100; ++round) {
      Tensors tensors{at::ones({1000})};
      const auto work = member.ours->allreduce(tensors, options);
      ASSERT_TRUE(work->isCompleted());
      ASSERT_TRUE(at::equal(tensors[0], at::full({1000}, 2.0)));
    }
  });
}

// As hooks of DDP do: what follows from one collective is another, which it waits for.
TEST(Backend, RunsWhatTheEndOfACollectiveStarts) {
  together(3, [](Member& member) {
    Tensors first{at::full({10}, 1.0)}, second{at::full({10}, 2.0)};
    const auto work = member.ours->allreduce(first);
    const auto then = work->getFuture()->then(
        [&](c10::ivalue::Future& done) {
          EXPECT_EQ(done.value().toTensorVector()[0][0].item<float>(), 3.0F);
          member.ours->allreduce(second)->getFuture()->waitAndThrow();
          return c10::IValue(second[0].sum());
        },
        c10::TensorType::get());
    then->waitAndThrow();
    EXPECT_EQ(then->value().toTensor().item<float>(), 60.0F);
  });
}

TEST(Backend, WritesToLeavesAndTensorsOfInferenceMode) {
  together(2, [](Member& member) {
    auto leaf = at::ones({3, 2}).t().requires_grad_(true);
    Tensors leaves{leaf};
    member.ours->allreduce(leaves)->wait();
    EXPECT_EQ(leaf.sum().item<float>(), 12.0F);
    at::Tensor inferred;
    {
      const c10::InferenceMode mode;
      inferred = at::ones({3, 2}).t();
    }
    Tensors one{inferred};
    member.ours->allreduce(one)->wait();
    EXPECT_EQ(inferred.sum().item<float>(), 12.0F);
    Tensors conjugate{at::complex(at::ones({2}), at::ones({2})).conj()};
    member.ours->allreduce(conjugate)->wait();
    EXPECT_EQ(at::imag(conjugate[0].resolve_conj()).sum().item<float>(), -4.0F);
  });
}

TEST(Backend, AllocatesTensorsThatAreAsOthers) {
  at::Tensor kept;
  together(2, [&](Member& member) {
    EXPECT_TRUE(member.ours->supportsTensorAlloc(-1));
    constexpr std::int64_t kRows = 700, kCount = kRows * kRows;
    auto tensor = member.ours->allocateTensor(kCount, at::kDouble).fill_(member.rank + 1);
    const void* place = tensor.data_ptr();
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef({kCount}));
    for (auto view :
         {tensor, tensor.view({kRows, kRows}), tensor.view({kRows, kRows}).t(), tensor.narrow(0, 5, 90000)}) {
      Tensors one{view};
      member.ours->allreduce(one)->wait();
      EXPECT_EQ(view.min().item<double>() + view.max().item<double>(), 6);
      tensor.fill_(member.rank + 1);
    }
    auto parts = at::empty({2, kCount}, at::kDouble);
    member.ours->_allgather_base(parts, tensor)->wait();
    EXPECT_EQ(parts[0].min().item<double>() + parts[0].max().item<double>(), 2);
    EXPECT_EQ(parts[1].min().item<double>() + parts[1].max().item<double>(), 4);
    // It may be resized, and what is freed is used again.
    tensor.resize_({kCount + 1});
    EXPECT_NE(tensor.data_ptr(), place);
    EXPECT_EQ(tensor[0].item<double>(), member.rank + 1);
    tensor = member.ours->allocateTensor(3, at::kBool);
    EXPECT_EQ(tensor.data_ptr(), place);
    EXPECT_EQ(tensor.scalar_type(), at::kBool);
    EXPECT_EQ(member.ours->allocateTensor(0).numel(), 0);
    EXPECT_EQ(message_of<base::UsageError>([&] { member.ours->allocateTensor(3, at::kMeta); }),
              "lamina allocates tensors of the CPU, not on meta");
    if (member.rank == 0) kept = member.ours->allocateTensor(1000).fill_(7);
  });
  EXPECT_EQ(kept.add_(1).sum().item<float>(), 8000);
}

TEST(Backend, MakesOneWorkOfCoalescedOperations) {
  together(2, [](Member& member) {
    const int other = 1 - member.rank;
    Tensors out{at::full({5}, static_cast<float>(member.rank))}, in{at::empty({5})}, sum{at::ones({5})},
        several_rows{at::ones({6})};
    member.ours->startCoalescing();
    member.ours->recv(in, other, 0);
    member.ours->send(out, other, 0);
    member.ours->allreduce(sum);
    const auto work = member.ours->endCoalescing();
    work->wait();
    EXPECT_TRUE(work->isCompleted() && work->isSuccess());
    EXPECT_TRUE(at::equal(in[0], at::full({5}, static_cast<float>(other))));
    EXPECT_TRUE(at::equal(sum[0], at::full({5}, 2.0)));
    member.ours->startCoalescing();
    member.ours->send(member.rank == 0 ? out : several_rows, other, 0);
    member.ours->recv(in, other, 0);
    const auto wrong = member.ours->endCoalescing();
    EXPECT_NE(message_of<base::DesyncError>([&] { wrong->wait(); }), "nothing was thrown");
    Tensors several{at::ones({4}), at::full({1}, 3.0)};
    member.ours->allreduce_coalesced(several)->wait();
    EXPECT_EQ(several[0].sum().item<float>() + several[1].sum().item<float>(), 14.0F);
  });
}

TEST(Backend, AddsUpSparseTensorsAsGlooDoes) {
  together(3, [](Member& member) {
    // A position twice, and one that all members have; then one member alone has any.
    const auto indices = at::tensor({member.rank, 4, member.rank}, at::kLong).view({1, 3});
    const auto mine = at::sparse_coo_tensor(indices, at::full({3, 2}, 1.0F / (3.0F + member.rank)), {5, 2});
    for (const auto& given : {mine, member.rank == 1 ? mine : at::zeros({5, 2}).to_sparse(1)}) {
      Tensors ours{given.clone()}, gloos{given.clone()};
      member.ours->allreduce(ours)->wait();
      member.gloo->allreduce(gloos)->wait();
      EXPECT_TRUE(ours[0].is_coalesced());
      EXPECT_TRUE(at::equal(ours[0].to_dense(), gloos[0].to_dense()));
      EXPECT_TRUE(at::equal(ours[0].indices(), gloos[0].coalesce().indices()));
    }
    Tensors other{at::zeros({member.rank + 1, 2}).to_sparse()}, again{mine}, next{at::ones({2})};
    const auto work = member.ours->allreduce(other);
    EXPECT_NE(message_of<base::UsageError>([&] { work->wait(); }).find("different shapes"), std::string::npos);
    c10d::AllreduceOptions largest;
    largest.reduceOp = c10d::ReduceOp::MAX;
    EXPECT_NE(message_of<base::UsageError>([&] { member.ours->allreduce(again, largest); }).find("has SUM"),
              std::string::npos);
    member.ours->allreduce(next)->wait();
    EXPECT_TRUE(at::equal(next[0], at::full({2}, 3.0)));
  });
}

TEST(Backend, RefusesWhatDoesNotFitBeforeItStarts) {
  together(2, [](Member& member) {
    const auto refusal = [&](const auto& call) { return message_of<base::UsageError>([&] { call(); }); };
    if (member.rank == 0) {  // alone: nothing is started, so nobody waits
      Tensors none, two{at::ones({2}), at::ones({2})}, sparse{at::ones({2}).to_sparse()}, bits{at::ones({2})};
      EXPECT_EQ(refusal([&] { member.ours->allreduce(none); }), "lamina:all_reduce takes one tensor, not 0");
      EXPECT_EQ(refusal([&] { member.ours->broadcast(two); }), "lamina:broadcast takes one tensor, not 2");
      EXPECT_EQ(refusal([&] { member.ours->broadcast(sparse); }),
                "lamina:broadcast takes dense tensors of the CPU, not a sparse one: Float on cpu");
      Tensors freed{at::ones({2})}, late{at::ones({6}).narrow(0, 4, 2)};
      freed[0].storage().unsafeGetStorageImpl()->set_nbytes(0);
      late[0].storage().unsafeGetStorageImpl()->set_nbytes(5 * sizeof(float));
      for (auto* tensors : {&freed, &late}) {
        EXPECT_EQ(refusal([&] { member.ours->allreduce(*tensors); }),
                  "lamina:all_reduce takes dense tensors of the CPU, not one whose storage was freed: Float on cpu");
      }
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::ReduceOp::BXOR;
      EXPECT_EQ(refusal([&] { member.ours->allreduce(bits, options); }),
                "lamina:all_reduce: elements of Float have no such reduction");
      c10d::BroadcastOptions from;
      from.rootRank = 2;
      EXPECT_EQ(refusal([&] { member.ours->broadcast(bits, from); }),
                "lamina:broadcast: there is no member 2; expected 0 to 1");
      EXPECT_EQ(refusal([&] { member.ours->send(bits, 0, 0); }), "lamina:send: to this rank itself");
      auto all = at::ones({5}), mine = at::ones({2}), wide = at::ones({4}, at::kDouble);
      EXPECT_EQ(refusal([&] { member.ours->_allgather_base(all, mine); }),
                "lamina:all_gather: a tensor of 5 elements for 2 parts of 2");
      EXPECT_EQ(refusal([&] { member.ours->_reduce_scatter_base(mine, wide); }),
                "lamina:reduce_scatter: tensors of Double and Float");
      std::vector<std::int64_t> rows{1, 1}, even;
      EXPECT_EQ(refusal([&] { member.ours->alltoall_base(all, all, rows, rows); }),
                "lamina:all_to_all: 5 rows cannot be parted over 2 members as the sizes say");
      EXPECT_EQ(refusal([&] { member.ours->alltoall_base(all, all, even, even); }),
                "lamina:all_to_all: 5 rows cannot be parted over 2 members equally");
    }
    Tensors next{at::ones({2})};
    member.ours->allreduce(next)->wait();
    EXPECT_EQ(next[0][0].item<float>(), 2.0F);
  });
}

TEST(Backend, ReceivesFromWhoeverSendsAndSaysFromWhom) {
  constexpr int kRounds = 50;
  std::latch taken(1);
  together(4, [&](Member& member) {
    if (member.rank != 0) {
      for (int round = 0; round < kRounds; ++round) {
        Tensors tensors{at::full({100}, static_cast<float>(kRounds * member.rank + round))};
        member.ours->send(tensors, 0, 0)->wait();
      }
      taken.wait();
      Tensors named{at::full({100}, -1.0F)};
      if (member.rank == 2) member.ours->send(named, 0, 0)->wait();
      return;
    }
    std::array<int, 4> next{};
    std::vector<Tensors> received(std::size_t{3} * kRounds);
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (auto& tensors : received) {
      tensors = {at::empty({100})};
      works.push_back(member.ours->recvAnysource(tensors, 0));
    }
    Tensors last{at::empty({100})};
    const auto then = member.ours->recv(last, 2, 0);  // the one after all those
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i]->wait();
      const int from = works[i]->sourceRank();
      ASSERT_TRUE(from > 0 && from < 4) << from;
      EXPECT_TRUE(at::equal(received[i][0], at::full({100}, static_cast<float>(kRounds * from + next[from]++))));
    }
    taken.count_down();
    then->wait();
    EXPECT_EQ(last[0][0].item<float>(), -1.0F);
    member.ours->setTimeout(std::chrono::milliseconds(300));
    Tensors never{at::empty({1})};
    const auto error = message_of<std::runtime_error>([&] { member.ours->recvAnysource(never, 0)->wait(); });
    EXPECT_TRUE(error.find("one of the others has not come for 0.3 s") != std::string::npos ||
                error.find("all other members have closed") != std::string::npos)
        << error;
  });
}

TEST(Backend, SaysBothCallsWhereTheyDiffer) {
  together(2, [](Member& member) {
    Tensors tensors{at::ones({member.rank == 0 ? 3 : 4})};
    const auto error = message_of<base::DesyncError>([&] { member.ours->allreduce(tensors)->wait(); });
    for (const auto* part : {"rank 10", "rank 11", "all_reduce of 3 float32, sum", "all_reduce of 4 float32, sum"}) {
      EXPECT_NE(error.find(part), std::string::npos) << error;
    }
    member.ours->barrier()->wait();
  });
}

TEST(Backend, StaysInStepWhereCoalescedOperationsDifferOrFail) {
  together(2, [](Member& member) {
    Tensors several(member.rank == 0 ? 3 : 2, at::ones({4}));
    const auto error = message_of<base::DesyncError>([&] { member.ours->allreduce_coalesced(several)->wait(); });
    EXPECT_NE(error.find("2 buffers: 4 float32 and 4 float32"), std::string::npos) << error;
    Tensors unwritable{member.rank == 0 ? at::ones({1}).expand({4}) : at::ones({4}), at::ones({4})};
    if (member.rank == 0) {
      EXPECT_THROW(member.ours->allreduce_coalesced(unwritable)->wait(), c10::Error);
    } else {
      member.ours->allreduce_coalesced(unwritable)->wait();
    }
    for (int round = 1; round < 4; ++round) {
      Tensors next{at::full({4}, static_cast<float>(round))};
      member.ours->allreduce(next)->wait();
      EXPECT_EQ(next[0][0].item<float>(), 2.0F * static_cast<float>(round));
    }
  });
}

TEST(Backend, RunsWhatTheEndOfACollectiveWaitsFor) {
  std::latch attached(1);  // what its end calls, before it may end
  together(2, [&](Member& member) {
    Tensors first{at::ones({10})}, second{at::ones({10})};
    if (member.rank == 1) {
      attached.wait();
      member.ours->allreduce(first)->wait();
      member.ours->allreduce(second)->wait();
      return;
    }
    std::latch queued(1);
    const auto work = member.ours->allreduce(first);
    const auto then = work->getFuture()->then(
        [&](c10::ivalue::Future& /*done*/) {
          queued.wait();
          return c10::IValue(true);
        },
        c10::BoolType::get());
    c10::intrusive_ptr<c10d::Work> later = member.ours->allreduce(second);
    const auto waits = work->getFuture()->then(
        [&](c10::ivalue::Future& /*done*/) { return c10::IValue(later->wait(std::chrono::seconds(20))); },
        c10::BoolType::get());
    attached.count_down();
    queued.count_down();
    then->waitAndThrow();
    waits->waitAndThrow();
    EXPECT_EQ(second[0][0].item<float>(), 2.0F);
  });
}

TEST(Backend, NamesWhoDoesNotComeAndGoesOn) {
  std::atomic<bool> over = false;
  together(3, [&](Member& member) {
    c10d::BarrierOptions options;
    options.timeout = std::chrono::seconds(1);
    member.ours->barrier()->wait();
    if (member.rank == 2) {
      while (!over) std::this_thread::yield();
    }
    const auto error = member.rank == 2
                           ? message_of<base::CancelledError>([&] { member.ours->barrier(options)->wait(); })
                           : message_of<std::runtime_error>([&] { member.ours->barrier(options)->wait(); });
    over = true;
    EXPECT_NE(error.find("rank 12 has not come for 1 s"), std::string::npos) << error;
    Tensors next{at::ones({2})};
    member.ours->allreduce(next)->wait();
    EXPECT_EQ(next[0][0].item<float>(), 3.0F);
  });
}

TEST(Backend, EndsWhatIsAbortedOnAllMembersAndGoesOn) {
  std::latch given_up(1);
  together(2, [&](Member& member) {
    Tensors a{at::ones({2})}, b{at::ones({2})};
    if (member.rank == 0) {
      const auto running = member.ours->allreduce(a), waiting = member.ours->allreduce(b);
      member.ours->abort();
      EXPECT_EQ(message_of<base::CancelledError>([&] { running->wait(); }), "lamina:all_reduce was aborted");
      EXPECT_EQ(message_of<base::CancelledError>([&] { waiting->wait(); }), "lamina:all_reduce was aborted");
      given_up.count_down();
    } else {
      given_up.wait();
      for (auto* tensors : {&a, &b}) {
        const auto error = message_of<base::CancelledError>([&] { member.ours->allreduce(*tensors)->wait(); });
        EXPECT_TRUE(error.starts_with("rank 10 gave up ") && error.ends_with(": lamina:all_reduce was aborted"))
            << error;
      }
    }
    Tensors next{at::ones({2})};
    member.ours->allreduce(next)->wait();
    EXPECT_EQ(next[0][0].item<float>(), 2.0F);
  });
}

TEST(Backend, IsDestroyedInWhatTheEndOfACollectiveCalls) {
  std::latch attached(1), destroyed(1);
  together(2, [&](Member& member) {
    if (member.rank == 1) {
      attached.wait();
      Tensors tensors{at::ones({2})};
      member.ours->allreduce(tensors)->wait();
      EXPECT_NE(message_of<std::runtime_error>([&] {
                  member.ours->allreduce(tensors)->wait();
                  member.ours->allreduce(tensors)->wait();
                }),
                "nothing was thrown");
      destroyed.wait();
      return;
    }
    std::latch all_queued(1);
    Tensors a{at::ones({2})}, b{at::ones({2})};
    const auto work = member.ours->allreduce(a);
    const auto then = work->getFuture()->then(
        [&](c10::ivalue::Future& /*done*/) {
          all_queued.wait();
          member.ours.reset();
          return c10::IValue(true);
        },
        c10::BoolType::get());
    const auto waiting = member.ours->allreduce(b);
    attached.count_down();
    all_queued.count_down();
    then->waitAndThrow();
    EXPECT_EQ(message_of<base::CancelledError>([&] { waiting->wait(); }), "lamina:all_reduce was aborted");
    destroyed.count_down();
  });
}

TEST(Backend, DoesItsPartForTheOthersWhenItIsShutDown) {
  std::latch started(1);
  together(2, [&](Member& member) {
    Tensors tensors{at::ones({300000})}, sent{at::ones({300000})};
    if (member.rank == 0) {
      member.ours->allreduce(tensors);
      member.ours->send(sent, 1, 0);
      started.count_down();
      member.ours->shutdown();
      EXPECT_NE(message_of<base::UsageError>([&] { member.ours->allreduce(tensors); }).find("that was destroyed"),
                std::string::npos);
      member.ours->shutdown();
    } else {
      started.wait();
      member.ours->allreduce(tensors)->wait();
      member.ours->recv(sent, 0, 0)->wait();
      EXPECT_EQ(tensors[0].sum().item<float>(), 600000.0F);
    }
  });
}

TEST(Backend, ClosesAtOnceThoughManyOperationsWait) {
  std::latch closed(1);
  together(2, [&](Member& member) {
    constexpr int kWaiting = 200;
    Tensors tensors{at::ones({2})};
    member.ours->barrier()->wait();
    if (member.rank == 1) {
      closed.wait();
      EXPECT_THROW(member.ours->allreduce(tensors)->wait(), std::runtime_error);
      return;
    }
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < kWaiting; ++i) works.push_back(member.ours->allreduce(tensors));
    const auto begin = Clock::now();
    member.ours.reset();
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(2));
    for (const auto& work : works) EXPECT_TRUE(work->isCompleted() && !work->isSuccess());
    closed.count_down();
  });
}

TEST(Backend, LetsTheTimeOutsOfWhatWaitsCountTogether) {
  std::latch over(1);
  together(2, [&](Member& member) {
    constexpr int kWaiting = 20;
    c10d::AllreduceOptions options;
    options.timeout = std::chrono::seconds(1);
    Tensors tensors{at::ones({2})};
    if (member.rank == 0) {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      const auto begin = Clock::now();
      for (int i = 0; i < kWaiting; ++i) works.push_back(member.ours->allreduce(tensors, options));
      EXPECT_NE(message_of<base::TimeoutError>([&] { works[0]->wait(); }).find("rank 11 has not come for 1 s"),
                std::string::npos);
      for (int i = 1; i < kWaiting; ++i) {
        EXPECT_EQ(message_of<base::TimeoutError>([&] { works[i]->wait(); }),
                  "lamina:all_reduce has waited for 1 s behind one that timed out");
      }
      EXPECT_LT(Clock::now() - begin, std::chrono::seconds(3));
      over.count_down();
    } else {
      over.wait();
      for (int i = 0; i < kWaiting; ++i) {
        EXPECT_THROW(member.ours->allreduce(tensors, options)->wait(), base::CancelledError);
      }
    }
    Tensors next{at::ones({2})};
    member.ours->allreduce(next, options)->wait();
    EXPECT_EQ(next[0][0].item<float>(), 2.0F);
  });
}

// A child's exit status says what it found.
TEST(Backend, IsOfNoUseAndOfNoHarmInAForkedChild) {
  std::latch over(1);
  together(2, [&](Member& member) {
    Tensors tensors{at::ones({2})};
    if (member.rank == 0) {
      const auto work = member.ours->allreduce(tensors);  // in a thread, which waits for the other member
      const pid_t child = ::fork();
      if (child == 0) {
        const std::string refused = " in a child of fork(): its group is its parent's; make one of its own";
        Tensors own{at::ones({2})};
        bool well = message_of<base::UsageError>([&] { member.ours->barrier(); }) == "lamina:barrier" + refused;
        well = well && message_of<base::UsageError>([&] { work->wait(); }) == "lamina:all_reduce" + refused;
        member.ours->shutdown();
        member.ours->abort();
        member.ours.reset();
        ::_exit(well ? 0 : 1);
      }
      int status = -1;
      EXPECT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
      over.count_down();
      work->wait();
    } else {
      over.wait();
      member.ours->allreduce(tensors)->wait();
    }
    EXPECT_EQ(tensors[0][0].item<float>(), 2.0F);
    member.ours->barrier()->wait();
  });
}

TEST(Backend, IsMadeWithinItsTimeOrNamesWhoIsMissingOrLost) {
  BackendOptions options{.store = c10::make_intrusive<Store>(),
                         .rank = 0,
                         .members = {base::Rank(10), base::Rank(11)},
                         .timeout = std::chrono::seconds(1),
                         .gloo_host = "127.0.0.1"};
  for (const auto make : {&make_gloo, &make_backend}) {
    const auto begin = Clock::now();
    const auto error = message_of<base::TimeoutError>([&] { make(options); });
    EXPECT_EQ(error, "rank 11 has not come in time to make the group with rank 10");
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(3));
  }
  options.made_by = base::Deadline::after(kLong);
  options.check_members = [] { throw base::PeerError("rank 11 is lost"); };
  for (const auto make : {&make_gloo, &make_backend}) {
    EXPECT_EQ(message_of<base::PeerError>([&] { make(options); }), "rank 11 is lost");
  }
}

TEST(Backend, IsGloosWhereMembersAreOnSeveralHosts) {
  testing::internal::CaptureStderr();
  together(
      2,
      [](Member& member) {
        EXPECT_EQ(member.ours->getBackendName(), "gloo");
        Tensors tensors{at::ones({2})};
        member.ours->allreduce(tensors)->wait();
        EXPECT_EQ(tensors[0][0].item<float>(), 2.0F);
      },
      std::chrono::seconds(30), /*elsewhere=*/true);
  const auto said = testing::internal::GetCapturedStderr();
  EXPECT_NE(
      said.find("the group of ranks 10, 11 goes over Gloo, not over shared memory: rank 10 and rank 11 are not on "
                "one host"),
      std::string::npos)
      << said;
}

}  // namespace
}  // namespace lamina::collective
