// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/operators.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <malloc.h>

#include <functional>
#include <limits>
#include <map>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/tensor_parallel/dropout.h"
#include "lamina/tensor_parallel/slices.h"
#include "tests/collective/job_ranks.h"
#include "tests/message_of.h"

namespace lamina::tensor_parallel {
namespace {

using collective::test::in_job;
using collective::test::JobRank;

// The team of all ranks of a job, under this name.
constexpr auto kTeam = "test";

void in_team(int size, const std::function<void(Team&)>& body) {
  in_job(size, [&](JobRank& job) {
    const auto team = std::make_shared<Team>(job.group(), job.session.mailbox(), job.patience());
    note_team(kTeam, team);
    body(*team);
    forget_team(kTeam);
    job.meet();
  });
}

at::Tensor numbers(at::IntArrayRef shape, double from = 0) {
  const auto count = c10::multiply_integers(shape);
  return (at::arange(count, at::kDouble) + from).view(shape);
}

// Which positions of a dimension each member has: even ones, or uneven ones where one may have none.
std::vector<std::int64_t> uneven(int size) {
  std::vector<std::int64_t> sizes;
  for (int member = 0; member < size; ++member) sizes.push_back(size - 1 - member);
  return sizes;
}

at::Tensor own(const at::Tensor& whole, std::int64_t dim, const std::vector<std::int64_t>& sizes, int member) {
  std::int64_t begin = 0;
  for (int before = 0; before < member; ++before) begin += sizes[before];
  return whole.narrow(dim, begin, sizes[member]);
}

TEST(Operators, LayersThatAreGivenTheSameShareACopyUntilOneTakesTheirParts) {
  auto given = numbers({2, 2}).requires_grad_() * 2;
  auto shared = copied(given, kTeam);
  EXPECT_TRUE(copied(given, kTeam).is_same(shared));
  given.add_(1);
  EXPECT_FALSE(copied(given, kTeam).is_same(shared));
  shared = copied(given, kTeam);
  note_taken();
  EXPECT_FALSE(copied(given, kTeam).is_same(shared));
  note_taken();
}

TEST(Operators, GiveWhatOneRankWouldHave) {
  for (const int size : {2, 3}) {
    in_team(size, [size](Team& team) {
      const int rank = team.rank();
      EXPECT_TRUE(at::equal(copy(numbers({2, 3}), kTeam), numbers({2, 3})));
      at::Tensor sum = at::zeros({2, 3}, at::kDouble);
      for (int member = 0; member < size; ++member) sum += numbers({2, 3}, 10. * member);
      EXPECT_TRUE(at::equal(all_reduce(numbers({2, 3}, 10. * rank), kTeam), sum));
      const std::vector<std::int64_t> even(static_cast<std::size_t>(size), 2);
      for (const auto& sizes : {even, uneven(size)}) {
        const auto extent = c10::sum_integers(sizes);
        for (const std::int64_t dim : {0, 1, -1}) {
          const auto whole = numbers(dim == 0 ? at::IntArrayRef{extent, 3} : at::IntArrayRef{3, extent});
          const auto mine = own(whole, dim, sizes, rank);
          const Cut cut{dim, sizes};
          EXPECT_TRUE(at::equal(gather(mine, cut, kTeam), whole)) << dim;
          EXPECT_TRUE(at::equal(all_gather(mine, cut, kTeam), whole)) << dim;
          EXPECT_TRUE(at::equal(scatter(whole, cut, kTeam), mine)) << dim;
          EXPECT_TRUE(at::equal(reduce_scatter(whole * (rank + 1.), cut, kTeam), mine * (size * (size + 1) / 2.)));
        }
        // Rows of a matrix become its columns, and back.
        const auto whole = numbers({extent, extent, 2});
        const auto rows = own(whole, 0, sizes, rank), columns = own(whole, 1, sizes, rank);
        EXPECT_TRUE(at::equal(all_to_all(rows, {1, sizes}, {0, sizes}, kTeam), columns));
        EXPECT_TRUE(at::equal(all_to_all(columns, {0, sizes}, {1, sizes}, kTeam), rows));
      }
      EXPECT_TRUE(at::equal(gather(numbers({1}, rank), {0, {}}, kTeam), numbers({size}))) << "equal parts";
      const auto strided = numbers({4, 2}).t();
      EXPECT_TRUE(at::equal(all_reduce(strided, kTeam), strided * size));
    });
  }
}

// A layer cut over its outputs and one cut over its inputs, with a cut of either kind in between, have the gradients of
// both layers whole.
TEST(Operators, GradientsAreThoseOfTheWhole) {
  using Middle = std::function<at::Tensor(const at::Tensor&, const Cut&)>;
  const std::vector<Middle> middles{
      [](const at::Tensor& x, const Cut&) { return x; },
      [](const at::Tensor& x, const Cut& cut) { return scatter(gather(x, cut, kTeam), cut, kTeam); },
      [](const at::Tensor& x, const Cut& cut) {
        const auto all = all_gather(x, cut, kTeam);
        return reduce_scatter(all / find_team(kTeam)->size(), cut, kTeam);
      },
      [](const at::Tensor& x, const Cut& cut) {
        const Cut rows{0, {}};
        return all_to_all(all_to_all(x, rows, cut, kTeam), cut, rows, kTeam);
      }};
  in_team(2, [&](Team& team) {
    const std::vector<std::int64_t> sizes{3, 2};
    for (const auto& middle : middles) {
      const auto x = numbers({4, 3}).requires_grad_(), up = numbers({5, 3}), down = numbers({2, 5});
      const auto expected = at::matmul(at::tanh(at::matmul(x, up.t()) / 50), down.t());
      const auto weights = numbers(expected.sizes(), 1);
      const auto of_whole = torch::autograd::grad({(expected * weights).sum()}, {x});
      const auto own_up = own(up, 0, sizes, team.rank()).clone().requires_grad_();
      const auto own_down = own(down, 1, sizes, team.rank()).clone().requires_grad_();
      const auto hidden = at::tanh(at::matmul(copy(x, kTeam), own_up.t()) / 50);
      const auto result = all_reduce(at::matmul(middle(hidden, {1, sizes}), own_down.t()), kTeam);
      EXPECT_TRUE(at::allclose(result, expected, 1e-12));
      const auto found = torch::autograd::grad({(result * weights).sum()}, {x, own_up, own_down});
      EXPECT_TRUE(at::allclose(found[0], of_whole[0], 1e-12, 1e-12)) << found[0] << of_whole[0];
      const auto whole_up = up.clone().requires_grad_(), whole_down = down.clone().requires_grad_();
      const auto again = at::matmul(at::tanh(at::matmul(x, whole_up.t()) / 50), whole_down.t());
      const auto layers = torch::autograd::grad({(again * weights).sum()}, {whole_up, whole_down});
      EXPECT_TRUE(at::allclose(found[1], own(layers[0], 0, sizes, team.rank()), 1e-12, 1e-12));
      EXPECT_TRUE(at::allclose(found[2], own(layers[1], 1, sizes, team.rank()), 1e-12, 1e-12));
    }
  });
}

TEST(Operators, TensorsWithoutValuesHaveTheShapesOfTheResults) {
  in_team(2, [](Team&) {
    const auto meta = at::empty({4, 5}, at::TensorOptions(at::kMeta));
    EXPECT_EQ(all_reduce(meta, kTeam).sizes(), (at::IntArrayRef{4, 5}));
    EXPECT_EQ(gather(meta, {0, {}}, kTeam).sizes(), (at::IntArrayRef{8, 5}));
    EXPECT_EQ(all_gather(meta, {-1, {5, 2}}, kTeam).sizes(), (at::IntArrayRef{4, 7}));
    EXPECT_EQ(scatter(meta, {0, {}}, kTeam).sizes(), (at::IntArrayRef{2, 5}));
    EXPECT_EQ(all_to_all(meta, {0, {}}, {1, {}}, kTeam).sizes(), (at::IntArrayRef{2, 10}));
    const auto rank = find_team(kTeam)->rank();
    EXPECT_EQ(reduce_scatter(meta, {1, {3, 2}}, kTeam).sizes(), (at::IntArrayRef{4, rank == 0 ? 3 : 2}));
  });
}

TEST(Operators, OneThatIsAloneTakesItsOwnForThatOfTheOthers) {
  in_team(2, [](Team& team) {
    if (team.rank() != 0) return;
    const Alone alone;
    EXPECT_TRUE(at::equal(all_reduce(numbers({2}), kTeam), numbers({2})));
    EXPECT_TRUE(at::equal(all_gather(numbers({2}), {0, {2, 1}}, kTeam), at::tensor({0., 1., 0.}, at::kDouble)));
    EXPECT_TRUE(at::equal(scatter(numbers({3}), {0, {2, 1}}, kTeam), numbers({2})));
    EXPECT_TRUE(at::equal(reduce_scatter(numbers({3}), {0, {2, 1}}, kTeam), numbers({2})));
    EXPECT_EQ(all_to_all(numbers({4, 2}), {0, {}}, {1, {}}, kTeam).sizes(), (at::IntArrayRef{2, 4}));
  });
}

std::exception_ptr failure_of(const Team& team) {
  return std::make_exception_ptr(base::Error(base::str("bad on ", team.rank())));
}

// After the members' steps have failed.
void goes_on(Team& team) {
  EXPECT_TRUE(at::equal(gather(numbers({1}, team.rank()), {0, {}}, kTeam), numbers({team.size()})));
}

TEST(Operators, MembersWithOtherTensorsAreToldOfBoth) {
  in_team(2, [](Team& team) {
    const auto other = team.rank() == 0 ? numbers({2, 3}) : numbers({3, 2});
    const auto message = message_of<base::DesyncError>([&] { all_reduce(other, kTeam); });
    EXPECT_NE(message.find("shape [2, 3]"), std::string::npos) << message;
    EXPECT_NE(message.find("shape [3, 2]"), std::string::npos) << message;
    team.give_up(failure_of(team));
    goes_on(team);
  });
  in_team(2, [](Team& team) {
    const auto message = message_of<base::DesyncError>(
        [&] { team.rank() == 0 ? all_reduce(numbers({2}), kTeam) : gather(numbers({2}), {0, {}}, kTeam); });
    EXPECT_NE(message.find("all-reduce"), std::string::npos) << message;
    EXPECT_NE(message.find("all-gather"), std::string::npos) << message;
    team.give_up(failure_of(team));
    goes_on(team);
  });
}

TEST(Operators, ACutThatDoesNotFitIsRefusedBeforeAnythingBegins) {
  in_team(2, [](Team& team) {
    EXPECT_THROW(scatter(numbers({3}), {0, {}}, kTeam), base::UsageError);
    EXPECT_THROW(scatter(numbers({3}), {1, {2, 1}}, kTeam), base::UsageError);
    EXPECT_THROW(scatter(numbers({3}), {0, {2, 2}}, kTeam), base::UsageError);
    EXPECT_THROW(gather(numbers({3}), {0, {1, 1}}, kTeam), base::UsageError);
    EXPECT_THROW(gather(numbers({3}), {0, {3}}, kTeam), base::UsageError);
    EXPECT_THROW(all_to_all(numbers({2, 2}), {0, {}}, {0, {}}, kTeam), base::UsageError);
    EXPECT_THROW(all_reduce(numbers({2}), "nobody's"), base::UsageError);
    EXPECT_TRUE(at::equal(all_reduce(numbers({2}), kTeam), numbers({2}) * team.size()));
  });
}

TEST(Operators, WhereOneGivesUpTheOthersStopAndTheNextSumIsRight) {
  in_team(3, [](Team& team) {
    for (int step = 0; step < 3; ++step) {
      const auto failing = step;
      EXPECT_TRUE(at::equal(all_reduce(numbers({2}), kTeam), numbers({2}) * 3));
      if (team.rank() != failing) {
        const auto message = message_of<value::RemoteFailure>([&] {
          all_reduce(numbers({4}), kTeam);
          gather(numbers({2}), {0, {}}, kTeam);
        });
        EXPECT_NE(message.find("bad"), std::string::npos) << message;
      }
      team.give_up(failure_of(team));
      goes_on(team);
    }
  });
}

TEST(Operators, OneWhoseNeighbourAgreesHearsOfThirdOnesThatDoNot) {
  in_team(3, [](Team& team) {
    for (int time = 0; time < 9; ++time) {
      const auto given = numbers({team.rank() == time % 3 ? 3 : 2});
      try {
        all_reduce(given, kTeam);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const base::DesyncError&) {
      } catch (const value::RemoteFailure&) {  // of a member that has looked before this one
      }
      team.give_up(failure_of(team));
      goes_on(team);
    }
  });
}

TEST(Teams, ActTogetherOrFailTogether) {
  in_team(3, [](Team& team) {
    for (int failing = 0; failing < 3; ++failing) {
      team.together([&] { EXPECT_TRUE(at::equal(all_reduce(numbers({2}), kTeam), numbers({2}) * 3)); });
      const auto fail_late = [&] {  // when the others have nothing left to wait for
        all_reduce(numbers({3}), kTeam);
        if (team.rank() == failing) throw base::UsageError("late");
      };
      const auto fail_early = [&] {
        if (team.rank() == failing) throw base::UsageError("early");
        all_reduce(numbers({3}), kTeam);
      };
      for (const auto& [act, word] :
           std::vector<std::pair<std::function<void()>, std::string>>{{fail_late, "late"}, {fail_early, "early"}}) {
        const auto message = team.rank() == failing ? message_of<base::UsageError>([&] { team.together(act); })
                                                    : message_of<value::RemoteFailure>([&] { team.together(act); });
        EXPECT_NE(message.find(word), std::string::npos) << message;
      }
    }
  });
}

std::size_t allocated_bytes() {
  const auto now = ::mallinfo2();
  return now.uordblks + now.hblkhd;
}

TEST(Teams, KeepNothingOfACollectiveThatHasEnded) {
  in_team(2, [](Team& team) {
    const auto compute = [&](int times) {
      for (int i = 0; i < times; ++i) {
        team.note_given({});
        all_reduce(numbers({2}), kTeam);
        all_gather(numbers({1}), {0, {}}, kTeam);
      }
      return allocated_bytes();
    };
    constexpr int kTimes = 500;
    std::size_t least = std::numeric_limits<std::size_t>::max();  // what a thread keeps for itself comes once
    auto before = compute(kTimes);
    for (int i = 0; i < 4; ++i) {
      const auto after = compute(kTimes);
      least = std::min(least, after > before ? after - before : 0);
      before = after;
    }
    EXPECT_LT(least, kTimes * std::size_t{16});
  });
}

TEST(Teams, TellWhatTheyWereGivenApartBeforeTheyComputeTogether) {
  const std::map<CallTrait, std::string> words{{CallTrait::kValues, "other values"},
                                               {CallTrait::kTraining, "a module that trains on one of them"},
                                               {CallTrait::kTrained, "freeze the same on both"},
                                               {CallTrait::kGradients, "another autocast"}};
  in_team(2, [&](Team& team) {
    for (const auto& [what, expected] : words) {
      CallHashes apart{};
      apart[static_cast<std::size_t>(what)] = team.rank();
      team.note_given({});
      team.note_given(apart);
      const auto message = message_of<base::DesyncError>([&] { all_reduce(numbers({2}), kTeam); });
      EXPECT_NE(message.find("ranks 0 and 1 of a TP_GROUP"), std::string::npos) << message;
      EXPECT_NE(message.find(expected), std::string::npos) << message;
      team.give_up(failure_of(team));
      goes_on(team);
    }
  });
}

TEST(Slices, AreTheWholeTogetherHoweverItIsCut) {
  in_team(2, [](Team& team) {
    const auto whole = numbers({7, 6});
    const std::vector<layout::Slicing> cuts{{0, {{7, 1}}, 2}, {1, {{6, 1}}, 2}, {0, {{4, 2}, {3, 1}}, 2},
                                            {1, {{6, 4}}, 2}, {0, {{7, 7}}, 2}, {0, {{7, 1}}, 2, true},
                                            {1, {{6, 1}}, 1}};
    for (const auto& slicing : cuts) {
      const auto own = slice_of(whole, slicing, team.rank(), team.size());
      EXPECT_TRUE(at::equal(whole_of(team, own, slicing), whole)) << slicing.dim << " " << slicing.sections.size();
    }
    const auto sections = slice_of(whole, {1, {{2, 1}, {4, 1}}, 2}, 1, 2);
    EXPECT_TRUE(at::equal(sections, at::cat({whole.narrow(1, 1, 1), whole.narrow(1, 4, 2)}, 1)));
  });
}

}  // namespace
}  // namespace lamina::tensor_parallel
