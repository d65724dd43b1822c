// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/proof.h"

#include <ATen/ATen.h>

#include <functional>

#include "tests/collective/job_ranks.h"

namespace lamina::tensor_parallel {
namespace {

using collective::test::in_job;
using collective::test::JobRank;

void in_team(int size, const std::function<void(Team&)>& body) {
  in_job(size, [&](JobRank& job) {
    Team team(job.group(), job.session.mailbox(), job.patience());
    body(team);
    job.meet();
  });
}

Compared compared(Team& team, const at::Tensor& whole, const at::Tensor& own, double floor = 0) {
  const std::vector<Twice> values{{whole, own, floor}};
  return compare(team, values, 1e-4).at(0);
}

at::Tensor numbers(at::IntArrayRef shape) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kDouble) * 0.7 + 1).view(shape);
}

TEST(Proof, TellsWholesPartsTermsAndOthersApart) {
  for (const int size : {2, 3}) {
    in_team(size, [size](Team& team) {
      const auto rank = team.rank();
      const auto whole = numbers({4, size * (size + 1) / 2, 5});
      EXPECT_EQ(compared(team, whole, whole * (1 + 1e-7)).verdict, Verdict::kAlike);
      EXPECT_EQ(compared(team, whole, whole * (1 + 1e-3)).verdict, Verdict::kAnother);
      const auto part = whole.narrow(1, rank * (rank + 1) / 2, rank + 1);  // uneven
      const auto found = compared(team, whole, part);
      EXPECT_EQ(found.verdict, Verdict::kPart);
      EXPECT_EQ(found.dim, 1);
      EXPECT_EQ(found.sizes.back(), size);
      EXPECT_EQ(compared(team, whole, part * 2).verdict, Verdict::kAnother);
      EXPECT_EQ(compared(team, whole, part.flip({1})).verdict, size == 1 ? Verdict::kPart : Verdict::kScattered);
      EXPECT_EQ(compared(team, whole, whole * ((rank + 1.) / (size * (size + 1) / 2))).verdict, Verdict::kTerms);
      EXPECT_EQ(compared(team, whole, rank == 0 ? whole : whole * 2).verdict, Verdict::kAnother) << "on one member";
    });
  }
}

TEST(Proof, KnowsWhatIsNoNumberWhatIsZeroAndWhatIsMissing) {
  in_team(2, [](Team& team) {
    auto masked = numbers({3, 4});
    masked[0][0] = -INFINITY;
    masked[1][1] = NAN;
    EXPECT_EQ(compared(team, masked, masked.clone()).verdict, Verdict::kAlike);
    EXPECT_EQ(compared(team, masked, masked.nan_to_num()).verdict, Verdict::kAnother);
    const auto noise = numbers({7}) * 1e-15;  // a gradient that is zero but for rounding
    EXPECT_EQ(compared(team, noise, noise.flip({0}), 1.).verdict, Verdict::kAlike);
    EXPECT_EQ(compared(team, noise, noise.flip({0})).verdict, Verdict::kAnother);
    EXPECT_EQ(compared(team, noise, noise * (team.rank() + 2.), 1.).verdict, Verdict::kZero);
    const auto uneven = numbers({team.rank() + 2}) * 1e-15;
    EXPECT_EQ(compared(team, uneven, uneven * 2, 1.).verdict, Verdict::kZero);
    EXPECT_EQ(compared(team, at::Tensor(), at::Tensor()).verdict, Verdict::kAlike);
    EXPECT_EQ(compared(team, noise, team.rank() == 0 ? noise : at::Tensor()).verdict, Verdict::kAnother);
    EXPECT_EQ(compared(team, at::arange(3) > 1, at::arange(3) > 1).verdict, Verdict::kAlike);
    EXPECT_TRUE(compare(team, {}, 1e-4).empty());
    const auto range = team.rank() == 0 ? numbers({3, 4}) : at::empty({3, 0}, at::kDouble);
    EXPECT_EQ(compared(team, numbers({3, 8}), range).verdict, Verdict::kAnother) << "empty on one member";
  });
}

}  // namespace
}  // namespace lamina::tensor_parallel
